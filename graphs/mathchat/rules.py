"""What good and bad work look like in this team: rules for the `EvidenceCoach`.

Each rule judges one agent by what can be computed: does the plan's expression come to the reference, did the code print that, is the box
right. Bad work ends at 0 to 3, faithful work on a teammate's mistake near 5 (the teammate is blamed), good work at 8 or more. Where a
coach may not see the reference, the rules judge only whether the agents were faithful to each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from mappa_graph.coach.base import Case, Step
from mappa_graph.coach.evidence import Finding
from mappa_graph.record import Execution

from .arithmetic import evaluate, number, plain
from .grading import boxed, same_number

_READ = 4000
"""Characters at the end of a text in which numbers and expressions are looked for."""
_EXPRESSION = re.compile(r"[(\d][\d.+\-*/%() \t]*")
_NUMBER = re.compile(r"(?<![\w.])-?\d{1,40}(?:\.\d{1,20})?(?![\w])")
_PROSE_WORDS = 20
"""A plan of more words may be right without one expression that says so."""

Value = Fraction | None


def expression_in(text: str) -> Value:
    """What the last arithmetic expression of a text comes to: `plan: 12 + 3 * 4` -> 24. A lone number counts where there is no other."""
    values: list[Fraction] = []
    lone: list[Fraction] = []
    for found in _EXPRESSION.findall(text[-_READ:]):
        found = found.strip(" \t+-*/%.")
        value = evaluate(found)
        if value is not None:
            (lone if number(found) is not None else values).append(value)
    return (values or lone or [None])[-1]  # type: ignore[list-item]


def number_in(text: str) -> Value:
    """The last number of a text."""
    found = _NUMBER.findall(text[-_READ:].replace(",", ""))
    return number(found[-1]) if found else None


def solver_plan(case: Case) -> Finding | None:
    """The solver's plan: present, and its expression comes to the reference."""
    if case.agent != "solver":
        return None
    value = expression_in(case.output)
    prose = len(case.output.split()) > _PROSE_WORDS
    if value is None:
        if prose:
            return Finding("plans in prose, which can't be computed")
        return Finding("gives no expression to compute", delta=-4.0, ceiling=1.0, blame=("solver",))
    right = _is_reference(value, case)
    if right is None:
        return Finding(f"plans an expression that comes to {plain(value)}", delta=1.0)
    if right:
        return Finding(f"plans an expression that comes to the right {plain(value)}", delta=4.0, floor=9.0)
    if prose:
        return Finding(f"the last expression of its plan comes to {plain(value)}, which is not the answer", delta=-1.0)
    return Finding(f"plans an expression that comes to {plain(value)}, which is wrong", delta=-4.0, ceiling=1.5, blame=("solver",))


def executor_code(case: Case) -> Finding | None:
    """A turn of the executor that ran code: it ran, printed, and what it printed is right or follows from the plan."""
    if case.agent != "executor" or not case.executions:
        return None
    last = case.executions[-1]
    before = _steps(case, "executor")
    if last.status != "ok":
        if _no_plan(case):
            return Finding("had no plan to carry out", floor=4.0, ceiling=5.0, blame=("solver",))
        name = last.error.type if last.error else last.status
        again = bool(before) and not _succeeded(before)
        return Finding(f"its code ended with {name}{' once more' if again else ''}", ceiling=0.5 if again else 1.5, blame=("executor",))
    shown = _shown(last)
    if not shown:
        again = bool(before) and not _succeeded(before)
        return Finding(f"its code printed nothing{' once more' if again else ''}", ceiling=0.5 if again else 2.0, blame=("executor",))
    if _succeeded(before):
        return Finding("ran code again though it had its result, instead of reporting it", ceiling=3.0, blame=("executor",))
    verdict = _carried_out(case, number_in(shown), shown)
    if before and verdict.floor is not None and verdict.floor >= 8.0:
        return Finding(f"repaired its code, and it {verdict.reason}", delta=verdict.delta, floor=verdict.floor)
    return Finding(f"its code {verdict.reason}", verdict.delta, verdict.floor, verdict.ceiling, verdict.blame)


def executor_words(case: Case) -> Finding | None:
    """A turn of the executor without code: a report of what its code printed, or nothing done."""
    if case.agent != "executor" or case.executions:
        return None
    before = _steps(case, "executor")
    if not before:
        if _no_plan(case):
            return Finding("had no plan to carry out", floor=3.0, ceiling=4.0, blame=("solver",))
        what = "its code block is malformed, so nothing was run" if "```" in case.output else "wrote no code"
        return Finding(what, delta=-4.0, ceiling=1.0, blame=("executor",))
    shown = _succeeded(before)
    if not shown:
        if _no_plan(case):
            return Finding("says so where there was nothing to compute", floor=4.0, ceiling=5.0, blame=("solver",))
        return Finding("gave up without repairing its code", delta=-4.0, ceiling=1.0, blame=("executor",))
    printed, said = number_in(shown), number_in(case.output)
    if printed is None:
        return None
    if said is None:
        return Finding(f"doesn't report the {plain(printed)} that its code printed", delta=-3.0, ceiling=2.0, blame=("executor",))
    if said != printed:
        return Finding(f"reports {plain(said)}, its code printed {plain(printed)}", delta=-4.0, ceiling=1.0, blame=("executor",))
    if _is_reference(printed, case) is False:
        return Finding(f"faithfully reports {plain(printed)}, which is wrong", floor=5.0, ceiling=6.0, blame=_culprit(case, printed))
    return Finding(f"reports the {plain(printed)} that its code printed", delta=3.0, floor=9.0)


def verifier_answer(case: Case) -> Finding | None:
    """The verifier's box: there, right, and not against what the executor rightly found."""
    if case.agent != "verifier":
        return None
    answer = boxed(case.output)
    if answer is None:
        return Finding("puts no answer in \\boxed{}", delta=-4.0, ceiling=1.0, blame=("verifier",))
    if not answer:
        return Finding("leaves the box empty", delta=-4.0, ceiling=0.5, blame=("verifier",))
    shown = _succeeded(_steps(case, "executor"))
    found = number_in(shown) if shown else None
    given = number(answer)
    right = None if case.reference is None else same_number(answer, case.reference)
    if right is None:
        if given is not None and given == found:
            return Finding("boxes what the executor found", delta=2.0)
        return Finding("boxes an answer that can't be compared by numbers alone")
    if right:
        own = found is not None and not _is_reference(found, case)
        return Finding("boxes the right answer" + (", against a wrong result" if own else ""), delta=4.0, floor=10.0 if own else 9.0)
    if found is None:
        return Finding("boxes a wrong answer, with no result to go on", floor=3.0, ceiling=4.0, blame=("executor",))
    if _is_reference(found, case):
        return Finding(f"overrides the right result {plain(found)}", delta=-5.0, ceiling=0.5, blame=("verifier",))
    if given == found:
        return Finding("boxes the wrong result that it was given", floor=4.0, ceiling=5.0, blame=_culprit(case, found))
    return Finding("boxes a wrong answer that nobody found", delta=-3.0, ceiling=1.5, blame=("verifier",))


RULES: tuple[Callable[[Case], Finding | None], ...] = (solver_plan, executor_code, executor_words, verifier_answer)
"""For `EvidenceCoach(extra=RULES)`."""


def _carried_out(case: Case, printed: Value, shown: str) -> Finding:
    """Of a result that the executor's code showed: is it right, or does it at least follow from the plan?"""
    if case.reference is not None and same_number(shown.strip(), case.reference):
        return Finding("printed the right result", delta=3.0, floor=9.0)
    if printed is None:
        return Finding("printed no number", delta=-1.0)
    right = _is_reference(printed, case)
    planned = _planned(case)
    if right:
        return Finding(f"printed the right {plain(printed)}", delta=3.0, floor=9.0)
    if planned is not None and printed == planned:
        if right is None:
            return Finding("printed what the plan comes to", delta=2.0)
        return Finding(f"faithfully carried out a wrong plan ({plain(printed)})", floor=5.0, ceiling=6.0, blame=("solver",))
    if right is None:
        return Finding(f"printed {plain(printed)}")
    if planned is None:
        return Finding(f"printed {plain(printed)}, which is wrong", delta=-2.0, ceiling=3.0, blame=("executor",))
    return Finding(f"printed {plain(printed)}, the plan comes to {plain(planned)}", delta=-4.0, ceiling=1.5, blame=("executor",))


def _culprit(case: Case, wrong: Fraction) -> tuple[str, ...]:
    """Whose mistake a wrong result is: the solver's where the plan comes to it, the executor's otherwise."""
    return ("solver",) if _planned(case) in (wrong, None) else ("executor",)


def _is_reference(value: Fraction, case: Case) -> bool | None:
    return None if case.reference is None else same_number(plain(value), case.reference)


def _steps(case: Case, agent: str) -> list[Step]:
    return [step for step in case.before if step.agent == agent]


def _planned(case: Case) -> Value:
    steps = _steps(case, "solver")
    return expression_in(steps[-1].output) if steps else None


def _no_plan(case: Case) -> bool:
    """Whether the solver gave the executor nothing: no expression, and too few words to be a plan in prose."""
    steps = _steps(case, "solver")
    return bool(steps) and len(steps[-1].output.split()) <= _PROSE_WORDS and expression_in(steps[-1].output) is None


def _shown(execution: Execution) -> str:
    return execution.stdout.strip() or (execution.result or "").strip()


def _succeeded(steps: list[Step]) -> str:
    """What the last successful run of these steps showed; "" where none showed anything."""
    shown = [_shown(e) for step in steps for e in step.executions if e.status == "ok"]
    return next((text for text in reversed(shown) if text), "")

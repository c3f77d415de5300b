"""The default rules of `EvidenceCoach`: small functions `(case) -> Finding | list of Findings | None`.

Each rule looks at one kind of evidence and says what it means for the score; no rule knows of another, except through the
facts they share (`mappa_graph.coach.facts`). A rule of one's own is such a function too:

    def cites_units(case: Case) -> Finding | None:
        return None if "cm" in case.output else Finding("gives no unit", delta=-1)

    EvidenceCoach(extra=[cites_units])

Points: a rule moves the score by `delta`, and bounds it by `floor` and `ceiling`; ceilings win. The one thing to know: an
agent is only ever faulted for what it did itself. Where an input that a teammate owed is missing, the teammate is blamed and the agent
that ran into it, or reported it, is spared; where the call or the sandbox itself failed, there is no verdict at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .base import Case
from .case import normal_path
from .facts import (
    answer_in,
    blocked,
    failing_agents,
    hindsight,
    is_empty,
    kept,
    last_execution,
    matches,
    missing_outputs,
    own_last_execution,
    owners_of,
    reported,
    same_answer,
    short,
    wrote,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule found. `blame` names agents (or action ids); `void` means that no score can be given, for this reason."""

    reason: str
    delta: float = 0.0
    """Points added to the score."""
    floor: float | None = None
    ceiling: float | None = None
    """Bounds of the score, 0..10; a ceiling wins over a floor."""
    blame: tuple[str, ...] = ()
    rule: str = ""
    """Name of the rule; filled in by the coach where it is empty."""
    void: bool = False


Rule = Callable[[Case], Finding | Sequence[Finding] | None]

_REPEAT_WORDS = 60
_REPEAT_SHARE = 0.35
# --- what the call itself was ----------------------------------------------------------------------------------------------


def failed_call(case: Case) -> Finding | None:
    """The model call failed and said nothing: the infrastructure's doing, so no verdict."""
    if case.error and not case.output and not case.thinking and not case.tool_calls:
        return Finding(f"the call itself failed: {short(case.error)}", void=True)
    return None


def lost_sandbox(case: Case) -> Finding | None:
    """Every execution was lost with its sandbox: not the agent's doing, so no verdict."""
    if case.executions and all(e.status == "lost" for e in case.executions):
        return Finding("the sandbox was lost, so nothing is known of what the code did", void=True)
    return None


def empty_output(case: Case) -> Finding | None:
    """Neither text nor a tool call came out: at most 1."""
    if case.output or case.tool_calls or case.executions or case.error:
        return None
    why = "spent the whole answer thinking" if case.thinking else "said nothing"
    return Finding(f"{why}: no output and no tool call", ceiling=1.0, blame=(case.agent,))


def truncated_output(case: Case) -> Finding | None:
    """The answer ran into the length limit: -3, at most 4."""
    if case.finish_reason == "length":
        return Finding("was cut off at the length limit", delta=-3.0, ceiling=4.0, blame=(case.agent,))
    return None


def repetition(case: Case) -> Finding | None:
    """The output goes round in circles (few distinct runs of four words): -3, at most 4."""
    words = case.output.split()[-2000:]
    if len(words) < _REPEAT_WORDS:
        return None
    runs = len(words) - 3
    distinct = len(set(zip(words, words[1:], words[2:], words[3:], strict=False)))
    if distinct < _REPEAT_SHARE * runs:
        return Finding("repeats itself over and over", delta=-3.0, ceiling=4.0, blame=(case.agent,))
    return None


def unclosed_block(case: Case) -> Finding | None:
    """A code block is opened and never closed: -1."""
    fences = (line.strip() for line in case.output.splitlines())
    if sum(line.startswith("```") and "```" not in line[3:] for line in fences) % 2:
        return Finding("leaves a code block open", delta=-1.0, blame=(case.agent,))
    return None


# --- what its code did -----------------------------------------------------------------------------------------------------


def execution_result(case: Case) -> Finding | None:
    """How the last execution ended: ok +2, error -3 (code that doesn't parse -4), timeout -3, killed -4.

    An error that comes of an input which a teammate owed is that teammate's, and is left to `input_missing`.
    """
    last = last_execution(case.executions)
    if last is None:
        return None
    if last.status == "ok":
        return Finding("its code ran", delta=2.0)
    if last.status == "timeout":
        return Finding(f"its code ran out of time after {last.duration_s:.0f} s", delta=-3.0, ceiling=3.0, blame=(case.agent,))
    if last.status == "killed":
        why = f": {short(last.note)}" if last.note else ""
        return Finding(f"its code was killed{why}", delta=-4.0, ceiling=3.0, blame=(case.agent,))
    if blocked(case):
        return None
    name = last.error.type if last.error else "error"
    message = short(last.error.message if last.error else last.stderr or last.stdout)
    parse = name in ("SyntaxError", "IndentationError", "TabError")
    what = "its code doesn't parse" if parse else "its code failed"
    return Finding(f"{what}: {name}: {message}", delta=-4.0 if parse else -3.0, ceiling=4.0, blame=(case.agent,))


def silent_code(case: Case) -> Finding | None:
    """Code ran and left nothing to see: no output, no value, no file: -2."""
    last = last_execution(case.executions)
    if last is None or last.status != "ok" or last.name != "python":
        return None
    if last.stdout.strip() or last.stderr.strip() or (last.result or "").strip() or case.files_after:
        return None
    return Finding("its code printed nothing and wrote nothing", delta=-2.0, blame=(case.agent,))


def error_repaired(case: Case) -> Finding | None:
    """An error of its own, in this action or in its turn before, was put right: +1."""
    last = last_execution(case.executions)
    if last is None or last.status != "ok":
        return None
    own = [e for e in case.executions if e.status != "lost"]
    failed_here = any(e.status != "ok" for e in own[:-1])
    before = own_last_execution(case)
    if failed_here or (before is not None and before.status != "ok"):
        return Finding("put its own earlier error right", delta=1.0)
    return None


def error_repeated(case: Case) -> Finding | None:
    """The same exception as in its turn before: -1."""
    last, before = last_execution(case.executions), own_last_execution(case)
    if last is None or before is None or last.error is None or before.error is None or blocked(case):
        return None
    if (last.error.type, last.error.message) == (before.error.type, before.error.message):
        return Finding("made the same error again", delta=-1.0, blame=(case.agent,))
    return None


# --- the files it owed and was owed ------------------------------------------------------------------------------------------


def artifact_written(case: Case) -> Finding | None:
    """Declared artifacts that this action wrote: up to +2, by the share of those it owes that are now there."""
    owed = case.card.writes
    written = [path for path in owed if any(matches(c.path, path) and not is_empty(c) for c in kept(case.files_after))]
    if not written:
        return None
    there = len(owed) - len(missing_outputs(case))
    return Finding(f"wrote {', '.join(written)}", delta=2.0 * there / len(owed))


def artifact_missing(case: Case) -> Finding | None:
    """Declared artifacts that aren't there after the action.

    Its own fault, unless an input it needed was missing: at most 2 where it took no step to write them (prose instead of code) or, in
    hindsight, where this was its last turn; at most 4 where it wrote only some of them, at most 3 where it wrote none. Where another
    turn is sure to follow (it called a tool, or hindsight shows one), -2; one written in a later turn is no fault in hindsight.
    """
    missing = missing_outputs(case)
    if not missing or blocked(case):
        return None
    names = ", ".join(missing)
    own_later = [step for step in case.after if step.agent == case.agent]
    if hindsight(case):
        still = [path for path in missing if not any(wrote(step, path) for step in own_later)]
        if not still:
            return None
        if not own_later:
            ran = last_execution(case.executions)
            why = " (no error, and no code that saves it)" if ran is not None and ran.status == "ok" else ""
            return Finding(f"never wrote {', '.join(still)}, which it owes{why}", delta=-3.0, ceiling=2.0, blame=(case.agent,))
        return Finding(f"{', '.join(still)} is not there yet", delta=-2.0)
    if not case.executions and not case.tool_calls:
        return Finding(f"wrote prose and ran no code, and {names} is missing", delta=-3.0, ceiling=2.0, blame=(case.agent,))
    if len(missing) < len(case.card.writes):
        return Finding(f"wrote only part of what it owes; missing: {names}", delta=-2.0, ceiling=4.0, blame=(case.agent,))
    if case.tool_calls:
        return Finding(f"{names} is not there yet", delta=-2.0)
    return Finding(f"ran code and wrote nothing of what it owes: {names}", delta=-2.0, ceiling=3.0, blame=(case.agent,))


def artifact_deleted(case: Case) -> Finding | None:
    """Deleted a file that a teammate wrote and someone still owes or reads: at most 2."""
    shared = {path for card in case.team for path in (*card.reads, *card.writes)}
    for change in case.files_after:
        writer = case.files_before.get(normal_path(change.path), case.agent)
        if change.change == "deleted" and writer != case.agent and any(matches(change.path, path) for path in shared):
            return Finding(f"deleted {change.path}, written by {writer or 'the task'}", delta=-3.0, ceiling=2.0, blame=(case.agent,))
    return None


def input_missing(case: Case) -> Finding | None:
    """An input that a teammate owed is missing, and it stopped this action: the teammate is blamed, the agent gets 3 to 5.

    5 where it said plainly that the file is missing; 4 where its code ran into it.
    """
    stopped = blocked(case)
    if not stopped:
        return None
    owners = tuple(dict.fromkeys(owner for path in stopped for owner in owners_of(case, path)))
    names = ", ".join(stopped)
    if reported(case, stopped):
        return Finding(f"reported that {names} is missing; owed by {', '.join(owners)}", floor=5.0, ceiling=5.0, blame=owners)
    return Finding(f"was stopped by missing {names}, owed by {', '.join(owners)}", floor=3.0, ceiling=4.0, blame=owners)


# --- the answer and the outcome ------------------------------------------------------------------------------------------------


def stated_answer(case: Case) -> Finding | None:
    """The final answer it states against the reference, where the coach may see one and both are plain numbers or the same text.

    Right +3 (+4 where it corrects a wrong one); wrong -3, and at most 1 where it overrides a right answer of a teammate. An answer
    that can't be compared for certain (algebra, units, prose) is left to the outcome and to the environment's own rules.
    """
    if case.reference is None:
        return None
    right = same_answer(answer_in(case.output), case.reference)
    if right is None:
        return None
    earlier: bool | None = None
    for step in reversed(case.before):
        earlier = same_answer(answer_in(step.output), case.reference)
        if earlier is not None:
            break
    if right:
        fixed = earlier is False
        return Finding("corrects the answer to the right one" if fixed else "states the right answer", delta=4.0 if fixed else 3.0)
    if earlier:
        return Finding("overrides a right answer with a wrong one", delta=-4.0, ceiling=1.0, blame=(case.agent,))
    return Finding("states a wrong answer", delta=-3.0, ceiling=4.0, blame=(case.agent,))


def episode_outcome(case: Case) -> Finding | None:
    """Hindsight only: the episode's grade moves the score by -2 (value 0) to +2 (value 1); after a failure at most 6.

    Where the failure shows as an unrepaired error of another agent only, this one loses 1 at the most.
    """
    if case.outcome is None:
        return None
    value = case.outcome.value
    delta = 4.0 * value - 2.0
    if case.outcome.success:
        return Finding("the episode succeeded" if value >= 1 else f"the episode was graded {value:.2f}", delta=max(delta, 0.0))
    culprits = tuple(agent for agent in failing_agents(case) if agent != case.agent)
    faulty = case.agent in failing_agents(case) or bool(missing_outputs(case))
    why = f": {short(case.outcome.reason)}" if case.outcome.reason else ""
    if culprits and not faulty:
        return Finding(f"the episode failed{why}; the error shows at {', '.join(culprits)}", delta=max(delta, -1.0), blame=culprits)
    return Finding(f"the episode failed{why}", delta=min(delta, 0.0), ceiling=6.0)


DEFAULT_RULES: tuple[Rule, ...] = (
    failed_call,
    lost_sandbox,
    empty_output,
    truncated_output,
    repetition,
    unclosed_block,
    execution_result,
    silent_code,
    error_repaired,
    error_repeated,
    artifact_written,
    artifact_missing,
    artifact_deleted,
    input_missing,
    stated_answer,
    episode_outcome,
)

"""Facts about a case that several rules of `EvidenceCoach` share: which files are there, who owes them, what the answer is.

Pure functions, linear in the size of what they read: the texts come from agents, who may send a hundred thousand characters of
anything. Paths are compared by `matches`: equal after normalising, or by glob where the declared name has wildcards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction

from ..record import Execution, FileChange
from .base import Case, Step
from .case import normal_path

_MISSING_WORDS = re.compile(
    r"\b(missing|not found|no such file|does(?: not|n't) exist|(?:can't|cannot|could not|couldn't) find|absent|unavailable"
    r"|not available|not there|(?:was|were) (?:not|never) (?:saved|written|created))\b",
    re.IGNORECASE,
)
_FILE_ERRORS = ("FileNotFoundError", "NoSuchFile", "IsADirectoryError")
_BROKEN_FILE_ERRORS = ("EOFError", "UnpicklingError", "BadZipFile", "EmptyDataError", "JSONDecodeError", "ArrowInvalid")
_TAIL = 20_000
"""Characters at the end of an output in which a final answer is looked for."""


def hindsight(case: Case) -> bool:
    """Whether the case knows what came after the action."""
    return bool(case.after) or case.outcome is not None


def last_execution(executions: Iterable[Execution]) -> Execution | None:
    """The last execution that wasn't lost with its sandbox."""
    last = None
    for execution in executions:
        if execution.status != "lost":
            last = execution
    return last


def own_last_execution(case: Case) -> Execution | None:
    """How the agent's own turn before this one ended."""
    for step in reversed(case.before):
        if step.agent == case.agent:
            return last_execution(step.executions)
    return None


def owners_of(case: Case, path: str) -> tuple[str, ...]:
    """Teammates of the acting agent that owe `path`."""
    return tuple(c.name for c in case.team if c.name != case.agent and any(matches(path, w) or matches(w, path) for w in c.writes))


def missing_outputs(case: Case) -> list[str]:
    """The acting agent's declared artifacts that aren't there (or are empty) after the action."""
    made = {normal_path(c.path): c for c in case.files_after}
    gone = {path for path, change in made.items() if change.change == "deleted" or is_empty(change)}
    there = (set(case.files_before) - _empty_before(case)) | set(made)
    return [path for path in case.card.writes if not any(matches(p, path) for p in there - gone)]


def missing_inputs(case: Case) -> list[str]:
    """Inputs the acting agent reads, that a teammate owes, and that weren't there (or were empty) when it began."""
    there = set(case.files_before) - _empty_before(case)
    made = {normal_path(c.path) for c in kept(case.files_after)}
    return [path for path in case.card.reads if owners_of(case, path) and not any(matches(p, path) for p in there | made)]


def blocked(case: Case) -> list[str]:
    """The missing inputs that stopped this action: its code failed on them, or it reported them and ran no code that succeeded."""
    missing = missing_inputs(case)
    if not missing:
        return []
    last = last_execution(case.executions)
    if last is None or last.status == "ok":
        idle = last is None or not case.card.writes or bool(missing_outputs(case))
        return missing if idle and reported(case, missing) else []
    return [path for path in missing if last.status == "error" and _fails_on(last, path)]


def reported(case: Case, paths: Sequence[str]) -> bool:
    """Whether the output says of one of the paths, in the same line, that it is missing."""
    lines = case.output.splitlines()
    return any(any(_bare(path) in line for path in paths) and bool(_MISSING_WORDS.search(line)) for line in lines)


def failing_agents(case: Case) -> tuple[str, ...]:
    """Agents whose last known execution ended badly; for one that a teammate's missing file stopped, who owes it."""
    blame: dict[str, tuple[str, ...]] = {}
    for agent, executions in (
        *((s.agent, s.executions) for s in case.before),
        (case.agent, case.executions),
        *((s.agent, s.executions) for s in case.after),
    ):
        last = last_execution(executions)
        if last is not None:
            blame[agent] = () if last.status == "ok" else _owed_to(case, agent, last) or (agent,)
    return tuple(dict.fromkeys(name for names in blame.values() for name in names))


def _owed_to(case: Case, agent: str, last: Execution) -> tuple[str, ...]:
    """Who owes the file that an agent's last run did not find; nobody, where it failed otherwise."""
    if last.error is None or last.error.type not in _FILE_ERRORS:
        return ()
    reads = next((c.reads for c in case.team if c.name == agent), ())
    needed = [path for path in reads if _bare(path) in last.error.message]
    return tuple(c.name for c in case.team if c.name != agent and any(matches(p, w) or matches(w, p) for p in needed for w in c.writes))


_BOXED = re.compile(r"\\boxed\s*\{")
_SAID = re.compile(r"answer[ \t*]{0,8}(?:is|:|=)[ \t]{0,8}:?[ \t]{0,8}(\S.{0,79})", re.IGNORECASE)
_NUMBER = re.compile(r"([+-]?\d{1,40})(?:\.(\d{1,40}))?(?:/(\d{1,40}))?")
_FRAC = re.compile(r"([+-]?)\\d?frac\{(\d{1,40})\}\{(\d{1,40})\}")


def answer_in(text: str) -> str | None:
    """The last answer a text states: in `\\boxed{..}`, after `####`, or after "answer is" or "answer:"."""
    text = text[-_TAIL:]
    boxes = list(_BOXED.finditer(text))
    if boxes:
        start = boxes[-1].end()
        depth = 1
        for i in range(start, min(len(text), start + 400)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start:i].strip() or None
        return None
    if "####" in text:
        return (text.rsplit("####", 1)[1].strip().splitlines() or [""])[0].strip() or None
    said = _SAID.findall(text)
    return said[-1].strip() or None if said else None


def same_answer(answer: str | None, reference: str) -> bool | None:
    """Whether two answers agree: True, False (both are plain numbers, and differ), or None (not certain)."""
    if answer is None:
        return None
    a, b = _plain(answer), _plain(answer_in(reference) or reference)
    if a and a == b:
        return True
    x, y = _value(a), _value(b)
    return None if x is None or y is None else x == y


def _plain(text: str) -> str:
    text = text.strip().strip("*$`").strip().rstrip(".").strip("$ ")
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return re.sub(r"\s+", " ", _FRAC.sub(r"\1\2/\3", text))


def _value(text: str) -> Fraction | None:
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    whole, decimals, divisor = found.groups()
    number = Fraction(f"{whole}.{decimals}" if decimals else whole)
    if divisor is None:
        return number
    return number / int(divisor) if int(divisor) else None


def kept(changes: Iterable[FileChange]) -> list[FileChange]:
    return [change for change in changes if change.change != "deleted"]


def is_empty(change: FileChange) -> bool:
    return change.size == 0 and bool(change.sha256)


def _empty_before(case: Case) -> set[str]:
    state: dict[str, bool] = {}
    for step in case.before:
        for execution in step.executions:
            for change in execution.files:
                state[normal_path(change.path)] = is_empty(change)
    return {path for path, empty in state.items() if empty}


def wrote(step: Step, path: str) -> bool:
    return any(matches(c.path, path) and not is_empty(c) for e in step.executions for c in kept(e.files))


def matches(path: str, declared: str) -> bool:
    path, declared = normal_path(path), normal_path(declared)
    if path == declared:
        return True
    return any(ch in declared for ch in "*?[") and fnmatchcase(path, declared)


def _bare(path: str) -> str:
    return normal_path(path).rsplit("/", 1)[-1].replace("*", "")


def _fails_on(execution: Execution, path: str) -> bool:
    error = execution.error
    text = f"{error.message}\n{error.traceback[-2000:]}" if error else execution.stderr[-2000:]
    name = _bare(path)
    if not name or name not in text:
        return False
    kind = error.type if error else text
    return any(k in kind for k in (*_FILE_ERRORS, *_BROKEN_FILE_ERRORS)) or "No such file" in text or bool(_MISSING_WORDS.search(text))


def short(text: str, limit: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"

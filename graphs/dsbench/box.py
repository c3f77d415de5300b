"""The desk: one episode's sandbox session, with the ledger of its files and a look at each file that is written.

Every run of code goes through `Desk.run`, which adds one line to the execution's note: `[workspace]` and JSON that says what the files
that changed hold, and who owes what is missing. The agent is told it, the coach finds it in its case, and a later reader in the trace.
What an agent pickled is opened by the sandbox only (`Box.preview`): the line is the word of hostile data, as JSON on one line, bounded,
and used as a description alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from mappa_graph.agent import Agent
from mappa_graph.errors import MappaError, SandboxError
from mappa_graph.record import Execution, Outcome
from mappa_graph.sandboxes import Ledger, Preview

from .facts import Facts, table
from .state import FileNote

WORKSPACE, GRADE = "[workspace] ", "[grade] "
"""What the lines of an execution's note begin with."""
SUBMISSION = "submission.csv"
SUBMISSION_BYTES = 8 * 1024 * 1024
_LOOKS = 6
"""Files that are looked at after one run of code; those that the team declares come first."""
_COLUMNS, _NAME, _TEXT = 40, 48, 240
_TOLD = ("kind", "id", "targets", "form", "train_rows", "test_rows")
_TABLES = (".pkl", ".pickle", ".joblib", ".csv", ".tsv", ".parquet", ".npy", ".npz")


class Desk:
    """Where a team works.

    Args:
        box: an open sandbox session.
        agents: the team, in the order of the pipeline; what they declare to read and write goes to the ledger.
        facts: of the task.
        given: the task's own files, as they were put into the session.
        grade: grades the text of a submission (None: there is none), where the coach may know the grade as soon as one is written. Agents
            are never told.
        handed_in: the file that is handed in.
        submission_bytes: the largest such file that is read.
        look_s: seconds that the looks after one run may take in all; files that are then left have none. A pickle may take any time.
    """

    def __init__(
        self,
        box: Any,
        agents: Sequence[Agent] = (),
        *,
        facts: Facts | None = None,
        given: Mapping[str, bytes] | None = None,
        grade: Callable[[str | None], Outcome] | None = None,
        handed_in: str = SUBMISSION,
        submission_bytes: int = SUBMISSION_BYTES,
        look_s: float = 10.0,
    ) -> None:
        self.box = box
        self.facts: Facts = facts or {}
        self.ledger = Ledger(agents)
        self.acting = ""
        """The agent whose code runs; set by the graph."""
        self._team = tuple(agents)
        self._runs = 0
        self._grade = grade
        self._handed_in = handed_in
        self._limit = submission_bytes
        self._look_s = look_s
        self._declared = tuple(name for agent in agents for name in (*agent.reads, *agent.writes))
        self._looks: dict[str, dict[str, Any]] = {}
        given = given or {}
        self.ledger.given({name: len(data) for name, data in given.items()})
        for name, data in given.items():
            if name.endswith(".csv"):
                found = table(data)
                shown: dict[str, Any] = {"name": name, "type": "table", "shape": [found["rows"] or "?", len(found["columns"])]}
                shown |= {"columns": _shown_columns(found["columns"]), "head": found["head"]}
                self._looks[name] = shown

    async def run(self, code: str, timeout_s: float | None = None, *, name: str = "python", tool_call_id: str | None = None) -> Execution:
        """Runs code as `Box.run` does, with the `[workspace]` line in the note."""
        execution: Execution = await self.box.run(code, timeout_s, name=name, tool_call_id=tool_call_id)
        self._runs += 1
        self.ledger.record(self.acting, f"{self.acting}/{self._runs}", execution)
        for change in execution.files:
            self._looks.pop(change.path, None)
        changed = [c.path for c in execution.files if c.change != "deleted" and c.path.lower().endswith(_TABLES)]
        changed.sort(key=lambda path: (not self._is_declared(path), path))
        seen = await self._look_at(changed[:_LOOKS])
        concerned = [name for agent in self._team if agent.name == self.acting for name in (*agent.reads, *agent.writes)]
        missing = {name: self.ledger.who_owed(name).reason for name in self.missing(concerned)}
        task = {key: value for key, value in self.facts.items() if key in _TOLD}
        line = WORKSPACE + json.dumps({"task": task, "files": seen, "missing": missing})
        return replace(execution, note=f"{execution.note}\n{line}".strip())

    async def graded(self, execution: Execution) -> Execution:
        """The execution as the coach is to find it: with a `[grade]` line where it wrote a submission and that may be graded now."""
        if self._grade is None or not any(c.path == self._handed_in and c.change != "deleted" for c in execution.files):
            return execution
        text, problem = await self.submission()
        outcome = await asyncio.to_thread(self._grade, text)
        reason = problem or outcome.reason
        shown = {"success": outcome.success, "reason": reason, "value": outcome.value, "metrics": dict(outcome.metrics)}
        return replace(execution, note=f"{execution.note}\n{GRADE}{json.dumps(shown)}".strip())

    async def submission(self) -> tuple[str | None, str]:
        """The submission as text; None and why it can't be read; or None and "" where there is none.

        It is read as bytes with a size limit, and never opened as anything else.
        """
        try:
            data = await self.box.get(self._handed_in, self._limit)
        except SandboxError as error:
            return None, str(error) if self._handed_in in await self.box.files() else ""
        try:
            return data.decode("utf-8-sig"), ""
        except UnicodeDecodeError as error:
            return None, f"{self._handed_in} is not text in UTF-8: {error.reason} at byte {error.start}"

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of some declared names that no file has."""
        present = self.ledger.present
        return [name for name in names if not any(fnmatchcase(path, name) for path in present)]

    def files(self) -> list[FileNote]:
        """The files there are, those of the task first."""
        notes: list[FileNote] = []
        for path in sorted(self.ledger.present):
            last = self.ledger.last(path)
            assert last is not None
            notes.append(FileNote(name=path, size=last.change.size, by=last.agent, shows=in_words(self._looks.get(path, {}))))
        return sorted(notes, key=lambda note: (bool(note["by"]), note["name"]))

    async def _look_at(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        end = time.monotonic() + self._look_s
        seen = []
        for path in paths:
            left = end - time.monotonic()
            if left <= 0:
                break
            seen.append(await self._look(path, left))
        return seen

    async def _look(self, path: str, timeout_s: float) -> dict[str, Any]:
        try:
            preview: Preview = await self.box.preview(path, timeout_s=timeout_s)
        except MappaError as error:  # the sandbox's doing, not the file's: nothing is known of it, and the run stands
            return {"name": path[:200], "unseen": str(error)[:_TEXT]}
        shown: dict[str, Any] = {"name": path[:200]}
        if preview.error:
            shown["error"] = preview.error[:_TEXT]
        else:
            shown["type"] = preview.type[:_TEXT]
            if preview.shape is not None:
                shown["shape"] = list(preview.shape)
            names = [column for column, _ in preview.columns if column]
            if names:
                shown["columns"] = _shown_columns(names)
                special = [name for name in (self.facts.get("id", ""), *self.facts.get("targets", [])) if name]
                shown["holds"] = [name for name in special if name in names]
                shown["dtypes"] = {column: dtype for column, dtype in preview.columns if column in special}
            else:
                shown["head"] = preview.head[:_TEXT]
        self._looks[path] = shown
        return shown

    def _is_declared(self, path: str) -> bool:
        return any(fnmatchcase(path, name) for name in self._declared)


@dataclass(frozen=True)
class DSBenchContext:
    """The graph's runtime context: `graph.ainvoke(x, context=DSBenchContext(desk))`."""

    desk: Desk


def in_words(look: Mapping[str, Any]) -> str:
    """What a file holds, for a prompt: type, shape, columns or the beginning of it."""
    if not look:
        return ""
    if look.get("error"):
        return f"can't be loaded: {look['error']}"
    shape = " x ".join(str(n) for n in look.get("shape") or ())
    parts = [" ".join(part for part in (str(look.get("type", "")).rsplit(".", 1)[-1], shape) if part)]
    if look.get("columns"):
        parts.append("columns: " + ", ".join(map(str, look["columns"])))
    if look.get("head"):
        parts.append(str(look["head"]))
    return "\n".join(parts)


def _shown_columns(names: Sequence[str]) -> list[str]:
    shown = [name[:_NAME] for name in names[:_COLUMNS]]
    return [*shown, f"… {len(names) - _COLUMNS} more"] if len(names) > _COLUMNS else shown

"""LangSmith's runs as spans: from its API (the SDK's `list_runs`), and from exports as JSONL and Parquet.

An action's id is its model run's id, and an episode's its trace's, as in a live record; so verdicts go back as feedback without a
look-up. The API gives runs newest first, not trace by trace, and allows few requests: what has come is put down on disk with the time it
reaches back to, and a killed import asks on from there. The key comes from the environment (`LANGSMITH_API_KEY`), and goes
nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .feedback import OURS
from .importer import SourceTrace
from .limits import patient, scrubbed
from .spans import Notes, seconds
from .spool import Spool
from .window import begin, covers, cursor_of

SELECT = (
    "id", "trace_id", "parent_run_id", "dotted_order", "run_type", "name", "start_time", "end_time", "error", "status", "inputs", "outputs",
    "extra", "tags", "session_id", "feedback_stats", "total_tokens", "prompt_tokens", "completion_tokens",
)  # fmt: skip
_PAGE = 100
_PARSED = ("inputs", "outputs", "extra", "feedback_stats", "tags", "metadata")


def span_of_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """One run as a span. Takes the names of the API, of the bulk export, and of the command line's JSONL."""
    extra = run.get("extra")
    extra = extra if isinstance(extra, dict) else {}
    metadata = extra.get("metadata") or run.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    kind = str(run.get("run_type") or run.get("type") or "chain")
    inputs, outputs = run.get("inputs"), run.get("outputs")
    if kind != "llm":
        inputs = _unwrapped(inputs, "input", kind == "tool")
        outputs = _unwrapped(outputs, "output", kind == "tool")
    id = run.get("id") or run.get("run_id")
    order = str(run.get("dotted_order") or "")
    trace = run.get("trace_id") or (order.split(".", 1)[0].split("Z", 1)[-1] if order else None)
    parent = run.get("parent_run_id") or run.get("parent_id")
    return {
        "id": None if id is None else str(id),
        "trace_id": str(trace or id) if trace or parent is None else None,
        "parent_id": None if parent is None or parent == "" else str(parent),
        "name": run.get("name"),
        "kind": kind,
        "start": run.get("start_time"),
        "end": run.get("end_time"),
        "inputs": inputs,
        "outputs": outputs,
        "error": run.get("error"),
        "metadata": metadata,
        "tags": run.get("tags") or (),
        "params": extra.get("invocation_params") or {},
        "usage": {k: run[k] for k in ("prompt_tokens", "completion_tokens", "total_tokens") if run.get(k)},
        "tool_call_id": extra.get("tool_call_id"),
        "feedback": [feedback_of(f) for f in run.get("feedback") or () if isinstance(f, dict)],
    }


def _unwrapped(value: Any, key: str, tool: bool) -> Any:
    """LangSmith keeps what is no dict under a key of its own."""
    if isinstance(value, dict) and len(value) == 1 and key in value:
        inner = value[key]
        if (tool and key == "output") or not isinstance(inner, dict | str):
            return inner
        if isinstance(inner, str) and not tool and key == "output":
            return inner
    return value


def feedback_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A feedback of LangSmith as `spans.Span.feedback` has it."""
    about = row.get("feedback_source") or row.get("source") or {}
    about = about if isinstance(about, dict) else {"type": about}
    kind = str(about.get("type") or "api")
    marks = about.get("metadata")
    ours = isinstance(marks, dict) and marks.get("by") == OURS
    source = OURS if ours else "model" if kind in ("model", "auto_eval") else "human"
    return {
        "id": None if row.get("id") is None else str(row["id"]), "key": row.get("key"), "score": row.get("score"),
        "value": row.get("value"), "comment": row.get("comment"), "source": source,
    }  # fmt: skip


def parsed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of an export with its JSON columns read."""
    out = dict(row)
    for key in [k for k in _PARSED if row.get(k).__class__ is str]:
        value = out[key]
        if value[:1] in ("{", "["):
            try:
                out[key] = json.loads(value)
            except ValueError:
                continue
    return out


def flat(run: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A run and, where it holds them, its `child_runs`."""
    stack = [run]
    while stack:
        one = stack.pop()
        children = one.get("child_runs")
        if children and isinstance(children, list):
            trace = one.get("trace_id") or one.get("id")
            stack += [{"trace_id": trace, "parent_run_id": one.get("id"), **c} for c in children if isinstance(c, dict)]
        yield one


class LangSmithSource:
    """A LangSmith project, read through the SDK.

    Args:
        project: its name.
        since, until: of the traces' starts.
        filter: in LangSmith's filter language, on the traces' root runs; feedback counts too: `eq(feedback_key, "user_score")`.
        folder: where what has come is put down until it is imported; the run's folder.
        client: a `langsmith.Client`; default: one made from the environment.
    """

    def __init__(
        self,
        project: str,
        folder: Path,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        filter: str | None = None,
        client: Any | None = None,
    ) -> None:
        self.project = project
        self.client = client if client is not None else make_client()
        self._since, self._until, self._filter = since, until, filter
        self.name = f"langsmith:{project}" + (f"?{filter}" if filter else "")
        self._folder = folder
        self.redact: Callable[[Any], Any] | None = None
        """What runs go through before they are put down on disk; set by the importer."""

    def traces(self, cursor: Any, notes: Notes) -> Iterator[SourceTrace]:
        mark = hashlib.sha256(self.name.encode()).hexdigest()[:12]
        path = self._folder / f"import-{mark}.spool"
        if path.exists():
            # A killed import goes on with what it was asked for; what has come since is for the next one.
            for trace in self._read(path, cursor):
                cursor = trace.cursor
                yield trace
            if cursor is not None and covers(cursor, self._since):
                return
        yield from self._read(path, cursor)

    def _read(self, path: Path, cursor: Any) -> Iterator[SourceTrace]:
        spool = Spool(path, self.redact)
        finished = False
        try:
            window = spool.get("window")
            if window is None:
                begin_ = begin(cursor, self._since)
                ends = [self._since, begin_, self._until]
                window = [None if t is None else t.isoformat() for t in ends]
                spool.put("window", window)
            since, start, until = (None if t is None else datetime.fromisoformat(t) for t in window)
            if not spool.get("complete"):
                self._fetch(spool, start, until)
                spool.put("complete", True)
            for trace, runs in spool.traces():
                session = next((str(r["session_id"]) for r in runs if r.get("session_id")), None)
                newest = max((seconds(r.get("start_time")) or 0.0 for r in runs if not r.get("parent_run_id")), default=0.0)
                cursor = cursor_of(cursor, since, newest)
                yield SourceTrace(trace, [span_of_run(r) for r in runs], cursor, session)
            finished = True
        finally:
            spool.close(delete=finished)

    def _fetch(self, spool: Spool, since: datetime | None, until: datetime | None) -> None:
        parts = [f'gte(start_time, "{since.isoformat()}")' if since else "", f'lte(start_time, "{until.isoformat()}")' if until else ""]
        parts = [p for p in [*parts, self._filter or ""] if p]
        trace_filter = None if not parts else parts[0] if len(parts) == 1 else f"and({', '.join(parts)})"

        def page_on() -> bool:
            """Reads pages until the end; called again after a pause, it goes on from the earliest run that was kept."""
            reached = spool.get("cursor")
            options: dict[str, Any] = {"trace_filter": trace_filter} if trace_filter else {}
            if since is not None:
                options["start_time"] = since
            if reached is not None:
                options["filter"] = f'lte(start_time, "{reached}")'
            held: list[Mapping[str, Any]] = []
            with warnings.catch_warnings():
                # The SDK announces another call for 2027; this one is what all its versions of today have.
                warnings.simplefilter("ignore", DeprecationWarning)
                warnings.simplefilter("ignore", _sdk().utils.LangSmithWarning)
                for run in self.client.list_runs(project_name=self.project, select=list(SELECT), **options):
                    held.append(_plain(run))
                    if len(held) >= _PAGE:
                        self._put_down(spool, held)
                        held = []
                self._put_down(spool, held)
            return True

        patient(page_on, f"the runs of LangSmith's project {self.project!r}", progressed=lambda: spool.get("cursor"))

    def _put_down(self, spool: Spool, runs: list[Mapping[str, Any]]) -> None:
        if not runs:
            return
        rated = [str(r["id"]) for r in runs if r.get("feedback_stats")]
        found = self._feedback(rated) if rated else {}
        rows = [
            (str(r["trace_id"]), str(r["id"]), seconds(r["start_time"]) or 0.0, {**r, "feedback": found.get(str(r["id"]), [])})
            for r in runs
        ]
        spool.add(rows, min(str(r["start_time"]) for r in runs))

    def _feedback(self, ids: list[str]) -> dict[str, list[dict[str, Any]]]:
        def ask() -> dict[str, list[dict[str, Any]]]:
            out: dict[str, list[dict[str, Any]]] = {}
            for one in self.client.list_feedback(run_ids=ids):
                out.setdefault(str(one.run_id), []).append(json.loads(one.model_dump_json()))
            return out

        return patient(ask, "LangSmith's feedback")


def make_client() -> Any:
    """A client of the SDK with what the environment says. Raises `ConfigError` without the SDK, or without a key for LangSmith's cloud."""
    import os

    sdk = _sdk()
    keys = ("LANGSMITH_API_KEY", "LANGCHAIN_API_KEY")
    ends = ("LANGSMITH_ENDPOINT", "LANGCHAIN_ENDPOINT", "LANGSMITH_RUNS_ENDPOINTS")
    if not any(os.environ.get(k) for k in (*keys, *ends)):
        raise ConfigError("LANGSMITH_API_KEY is not set", hint="export LANGSMITH_API_KEY=…; keys are taken from the environment alone")
    try:
        return sdk.Client(auto_batch_tracing=False)
    except Exception as error:  # noqa: BLE001  whatever it is, the settings are the user's to mend
        raise ConfigError(
            f"LangSmith's client can't be made: {scrubbed(error)}", hint="see LANGSMITH_ENDPOINT and LANGSMITH_API_KEY"
        ) from None


def _sdk() -> Any:
    try:
        import langsmith
        import langsmith.utils
    except ImportError:
        raise ConfigError("LangSmith's SDK is not installed", hint="pip install 'mappa-graph[exchange]'") from None
    return langsmith


def _plain(run: Any) -> dict[str, Any]:
    """A run of the SDK as JSON data, the fields that are read alone."""
    data: dict[str, Any] = {}
    for key in SELECT:
        value = getattr(run, key, None)
        if value is None:
            continue
        if isinstance(value, datetime):
            value = (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()
        elif key in ("id", "trace_id", "parent_run_id", "session_id"):
            value = str(value)
        data[key] = value
    return data


def rows_to_spans(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The spans in rows of an export."""
    for row in rows:
        for run in flat(parsed(row)):
            yield span_of_run(run)

"""What a report is made of: a run directory, read leniently.

A run may still be going, or may have been killed in the middle of a line, so nothing here insists: what is absent or can't be read
becomes None and, where a reader should know of it, a note on the page. A missing number is never turned into a zero.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, StoreError
from ..record import Episode, EpisodeTrace, Failure
from ..store import TraceStore
from .choose import Pair, choose_failed, choose_pairs
from .flow import Flow, GraphShape, flow_of, shape_from_summary, shape_from_traces


@dataclass(frozen=True)
class Run:
    """A run directory as a report sees it."""

    name: str
    rows: Sequence[Mapping[str, Any]] = ()
    """`metrics.jsonl`, one row an iteration in order; of an iteration written twice (a resumed run), the later row."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    agents: Sequence[str] = ()
    shape: GraphShape = field(default_factory=GraphShape)
    flows: Sequence[tuple[int, Flow]] = ()
    """What passed through the graph in the first and in the last training iteration that the store holds."""
    pairs: Sequence[Pair] = ()
    failed: Sequence[EpisodeTrace] = ()
    failures: Mapping[str, int] = field(default_factory=dict)
    """How many of each `kind:type`."""
    latest_failures: Sequence[Failure] = ()
    episodes: int = 0
    passes: Sequence[Mapping[str, Any]] = ()
    """`coaching.jsonl`: what each later scoring pass did and cost, in order."""
    common: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
    """The first and the last evaluation on the tasks that both have, where they had not the same ones and the store holds them."""
    notes: Sequence[str] = ()

    @property
    def finished(self) -> bool:
        return bool(self.summary)


def number(source: Any, *path: str) -> float | None:
    """The finite number at `path` in nested mappings; None where there is none."""
    for key in path:
        if not isinstance(source, Mapping):
            return None
        source = source.get(key)
    if isinstance(source, bool) or not isinstance(source, int | float) or not math.isfinite(source):
        return None
    return float(source)


def section(source: Any, *path: str) -> Mapping[str, Any]:
    """The mapping at `path`; an empty one where there is none."""
    for key in path:
        source = source.get(key) if isinstance(source, Mapping) else None
    return source if isinstance(source, Mapping) else {}


def read_run(run_dir: Path, store: TraceStore | None = None, *, pairs: int = 6, traces_per_iteration: int = 256) -> Run:
    """Everything that a report shows of `run_dir`.

    Raises `ConfigError` where the directory is missing or holds none of a run's files. `store` overrides `trace.db`.
    """
    known = ("metrics.jsonl", "summary.json", "config.yaml", "trace.db")
    if not run_dir.is_dir():
        raise ConfigError(f"run directory {str(run_dir)!r} does not exist", hint="give the folder that a run wrote, e.g. runs/demo")
    if store is None and not any((run_dir / name).exists() for name in known):
        raise ConfigError(f"{str(run_dir)!r} is not a run directory", hint=f"it holds none of {', '.join(known)}")
    notes: list[str] = []
    rows = _read_rows(run_dir / "metrics.jsonl", notes)
    summary = _read_summary(run_dir / "summary.json", notes)
    config = _read_text(run_dir / "config.yaml", notes)
    passes = tuple(_read_lines(run_dir / "coaching.jsonl", notes))
    base = Run(run_dir.resolve().name, rows, summary, config, agents=_agents(rows, summary), passes=passes)
    if store is not None:
        return _with_traces(base, store, notes, pairs, traces_per_iteration)
    if not (run_dir / "trace.db").exists():
        notes.append("There is no trace.db: the episodes can't be shown.")
        return _with_shape(base, notes, [])
    try:
        with TraceStore(run_dir / "trace.db", read_only=True) as opened:
            return _with_traces(base, opened, notes, pairs, traces_per_iteration)
    except StoreError as error:
        notes.append(f"trace.db can't be read ({error}): the episodes can't be shown.")
        return _with_shape(base, notes, [])


def _with_traces(base: Run, store: TraceStore, notes: list[str], pairs: int, per_iteration: int) -> Run:
    index = list(store.episodes())
    trained = sorted({e.iteration for e in index if e.split == "train" and e.status == "done"})
    flows: list[tuple[int, Flow]] = []
    seen: list[EpisodeTrace] = []
    for iteration in dict.fromkeys((trained[0], trained[-1]) if trained else ()):
        chosen = [e.id for e in index if e.split == "train" and e.iteration == iteration and e.status == "done"][:per_iteration]
        traces = list(store.traces(ids=chosen))
        seen += traces
        flows.append((iteration, flow_of(traces)))
    run = _with_shape(base, notes, seen)
    return Run(
        name=run.name,
        rows=run.rows,
        summary=run.summary,
        config=run.config,
        agents=run.agents or tuple(dict.fromkeys(a.agent for t in seen for a in t.actions)),
        shape=run.shape,
        flows=tuple(flows),
        pairs=choose_pairs(index, store.episode, pairs),
        failed=choose_failed(index, store.episode, 3),
        failures=dict(store.failures()) or run.failures,
        latest_failures=store.failure_list(20),
        episodes=len(index),
        common=_common(index, evaluated(run)),
        passes=run.passes,
        notes=run.notes,
    )


def evaluated(run: Run) -> list[Mapping[str, Any]]:
    """The rows with a held-out evaluation, in order."""
    return [row for row in run.rows if number(row, "heldout", "accuracy") is not None]


def before_after(run: Run) -> tuple[Mapping[str, Any], Mapping[str, Any], bool]:
    """Held-out evaluations before and after training, and whether they are of as many tasks, so that they may be compared.

    From the summary or, while there is none, the first and the last so far: those in between may be of fewer tasks
    (`evaluate.between_tasks`), and are then compared on the tasks that both have, where the store holds them.
    """
    before, after = section(run.summary, "before"), section(run.summary, "after")
    tested = [section(row, "heldout") for row in evaluated(run)]
    if number(before, "accuracy") is None and tested:
        before = tested[0]
    if number(after, "accuracy") is None and len(tested) > 1:
        if run.common is not None:
            return *run.common, True
        after = tested[-1]
    sizes = number(before, "n"), number(after, "n")
    return before, after, None in sizes or sizes[0] == sizes[1]


def _common(index: Sequence[Episode], rows: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    if len(rows) < 2 or number(rows[0], "heldout", "n") == number(rows[-1], "heldout", "n"):
        return None
    first, last = (_by_task(index, row) for row in (rows[0], rows[-1]))
    shared = sorted(first.keys() & last.keys())
    for tasks, row in ((first, rows[0]), (last, rows[-1])):
        if not shared or len(tasks) != number(row, "heldout", "n"):
            return None  # not all of its episodes are here: what they share would be a selection
    return _on(first, shared), _on(last, shared)


def _by_task(index: Sequence[Episode], row: Mapping[str, Any]) -> dict[str, list[Episode]]:
    """An evaluation's episodes by task."""
    iteration = number(row, "iteration")
    mode = str(section(row, "heldout").get("mode"))
    found: dict[str, list[Episode]] = {}
    for e in index:
        if e.split != "train" and e.iteration == iteration and e.split.endswith((f"/{mode}", f"/{mode}@{e.iteration}")):
            found.setdefault(e.task_id, []).append(e)
    return found


def _on(tasks: Mapping[str, Sequence[Episode]], shared: Sequence[str]) -> Mapping[str, Any]:
    """An evaluation on some of its tasks, as `Evaluation.to_dict` has it; an episode that failed counts as wrong."""
    from ..evaluation import wilson

    rates = {task: sum(e.outcome is not None and e.outcome.success for e in tasks[task]) / len(tasks[task]) for task in shared}
    strata: dict[str, list[float]] = {}
    for task, rate in rates.items():
        if tasks[task][0].stratum:
            strata.setdefault(tasks[task][0].stratum, []).append(rate)
    total = sum(rates.values())
    return {
        "accuracy": total / len(shared),
        "n": len(shared),
        "ci95": list(wilson(total, len(shared))),
        "by_stratum": {name: sum(values) / len(values) for name, values in sorted(strata.items())},
    }


def _with_shape(base: Run, notes: list[str], traces: Sequence[EpisodeTrace]) -> Run:
    shape = shape_from_summary(base.summary) or shape_from_traces(traces)
    failures = {str(k): int(v) for k, v in section(base.summary, "failures").items() if number(v) is not None}
    return replace(base, shape=shape, failures=failures, notes=tuple(notes))


def _agents(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    owners = section(summary, "graph", "agent_of_node")
    nodes = summary.get("graph", {}).get("nodes", []) if isinstance(summary.get("graph"), Mapping) else []
    for node in nodes if isinstance(nodes, list) else []:
        if isinstance(owners.get(str(node)), str):
            names.setdefault(owners[str(node)])
    for row in rows:
        names.update(dict.fromkeys(map(str, section(row, "agents"))))
    for key in ("mean_by_agent_first", "mean_by_agent_last"):
        names.update(dict.fromkeys(map(str, section(summary, "coach", key))))
    return tuple(names)


def _read_rows(path: Path, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    rows: dict[int, Mapping[str, Any]] = {}
    for position, row in _numbered_lines(path, notes):
        at = number(row, "iteration")
        if at is None:
            notes.append(f"Line {position} of {path.name} has no iteration and is left out.")
            continue
        rows[int(at)] = row
    return tuple(rows[k] for k in sorted(rows))


def _read_lines(path: Path, notes: list[str]) -> Iterator[Mapping[str, Any]]:
    return (row for _, row in _numbered_lines(path, notes) if isinstance(row, Mapping))


def _numbered_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Any]]:
    lines = _read_text(path, notes).split("\n")
    for position, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield position, json.loads(line)
        except ValueError:
            if position < len(lines):  # a last line without its end is one that is being written
                notes.append(f"Line {position} of {path.name} can't be read and is left out.")


def _read_summary(path: Path, notes: list[str]) -> Mapping[str, Any]:
    text = _read_text(path, notes)
    if not text.strip():
        return {}
    try:
        summary = json.loads(text)
    except ValueError as error:
        notes.append(f"{path.name} can't be read ({error}): the headline comes from metrics.jsonl.")
        return {}
    return summary if isinstance(summary, Mapping) else {}


def _read_text(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        notes.append(f"{path.name} can't be read ({error}).")
        return ""

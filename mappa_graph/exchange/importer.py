"""`Importer`: traces of any source into a run's store, as the records that live runs leave there.

A source yields `SourceTrace`s: plain dict spans of one trace (see `spans`). Here each becomes an `EpisodeTrace` with ids that follow
from the source's, so the same trace is the same episode however often it comes; it is stored, its actions find their tokens by the id
of the model's reply, and its human feedback is kept as labels. One trace is in memory at a time, and a batch of records. A trace
that the run recorded live is left as it is: the live record knows more.
"""

from __future__ import annotations

import gc
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ..agent import Agent
from ..capture.structure import Structure
from ..capture.team import Team
from ..errors import ConfigError, StoreError
from ..record import EpisodeTrace, Outcome
from ..store import TraceStore
from .feedback import rated, write_labels
from .keeper import Found, Keeper
from .ledger import Ledger
from .messages import fields_of
from .names import Names, digest_of, named
from .replay import replay, resumes
from .spans import ImportProblem, Notes, Span, name_of, tree, walk
from .spool import sweep

BATCH = 64
_CALLS_REMEMBERED = 20_000
_TASK = 8_000


@dataclass(slots=True)
class SourceTrace:
    """One trace as a source gives it."""

    id: str
    """Of the episode: the source's own id of the trace."""
    spans: Sequence[Mapping[str, Any]]
    cursor: Any = None
    """Where the source goes on from after this trace: JSON, or a function that gives it; None where it has no such place."""
    session: str | None = None
    """The project or experiment that feedback on the trace goes to."""


class Source(Protocol):
    """Where traces come from."""

    name: str
    """Says what was read, the same each time; progress is kept under it."""

    def traces(self, cursor: Any, notes: Notes) -> Iterator[SourceTrace]:
        """All traces, from the place on that `cursor` says; what can't be read is counted in `notes`."""
        ...


@dataclass
class Imported:
    """What an import did."""

    source: str
    traces: int = 0
    """New ones."""
    updated: int = 0
    """Imported before, and stored again since the source has more of them now, or other things."""
    unscored: int = 0
    """Actions whose verdict was taken away, since what it judged is no longer what they say: they are pending again."""
    known: int = 0
    """Imported before, and left."""
    live: int = 0
    """Recorded live by this run, and left."""
    empty: int = 0
    """Without a model call: not stored."""
    failed: int = 0
    """That could not be read, whatever was tried."""
    actions: int = 0
    executions: int = 0
    exact: int = 0
    """Actions whose tokens a gateway recorded: exact, fit for on-policy training."""
    text_only: int = 0
    """Actions without tokens: for SFT, preferences and coaching."""
    labels: int = 0
    """Actions with human feedback, over all imports into the run."""
    scales: dict[str, str] = field(default_factory=dict)
    """How each feedback key was mapped to 0..10."""
    lost: Counter[str] = field(default_factory=Counter)
    """What the source did not keep, by field."""
    problems: Counter[str] = field(default_factory=Counter)
    """What was mended or left out, by name."""
    examples: dict[str, str] = field(default_factory=dict)
    """One place for each problem."""
    agents: Counter[str] = field(default_factory=Counter)
    """Actions by agent."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Calls that no agent could be found for, by node path and model."""
    seconds: float = 0.0


class Importer:
    """Imports into one run. A context manager.

    Args:
        run: the run's folder; it is made where it is missing.
        agents: as for `CoachCallback`: a list, or a mapping from globs of node paths, for models that carry no mark.
        environment: the name that episodes are stored with, and that a coach is shown.
        split: the split that episodes are stored with.
        redact: any `redact(payload) -> payload`; applied to all that is stored (see `TraceStore`).
        calls: the `trace.db` of a gateway that the app spoke to; calls that imported actions name are copied from it.
        graph: the compiled graph, for exact parents (see `CoachCallback`).
        outcome_key: the feedback key on a whole trace that says whether it was a success.
        scales: `key -> (low, high)`: the range of a feedback key, where its values don't tell.
        label_keys: which human feedback becomes labels; default: all.
        strict: the first problem ends the import with `ImportProblem`.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        agents: Mapping[str, Agent] | Sequence[Agent] | None = None,
        environment: str = "",
        split: str = "train",
        redact: Callable[[Any], Any] | None = None,
        calls: str | Path | None = None,
        graph: Any | None = None,
        outcome_key: str | None = None,
        scales: Mapping[str, tuple[float, float]] | None = None,
        label_keys: Iterable[str] | None = None,
        strict: bool = False,
    ) -> None:
        self.run = Path(run)
        self.strict = strict
        self._team_of = agents
        self._environment = environment
        self._split = split
        self._redact = redact
        self._names = Names(redact)
        self._structure = Structure(graph)
        self._outcome_key = outcome_key
        self._scales = dict(scales or {})
        self._label_keys = None if label_keys is None else frozenset(label_keys)
        self._taken: OrderedDict[tuple[str, int], str] = OrderedDict()
        if self.run.is_file():
            raise ConfigError(f"{run} is a file", hint="give the folder of a run, new or old: --into runs/mine")
        self._calls = None if calls is None else TraceStore(calls, read_only=True)
        self.store = TraceStore(self.run / "trace.db", redact=redact)
        self.ledger = Ledger(self.run)
        self._keeper = Keeper(self.store, self.ledger, self._names, self._calls)

    def __enter__(self) -> Importer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.ledger.close()
        self.store.close()
        if self._calls is not None:
            self._calls.close()

    def take(self, source: Source, *, progress: Callable[[Imported], Any] | None = None, again: bool = False) -> Imported:
        """Imports all of a source that is not in yet, and writes the labels.

        `again` reads it from its beginning, for feedback that came since. Raises `ImportProblem` where it is strict, `ConfigError` for a
        source that can't be reached. Whatever ends it: what was stored stays, and the same call goes on from there.
        """
        with _seldom_collecting():
            return self._take(source, progress, again)

    def _take(self, source: Source, progress: Callable[[Imported], Any] | None, again: bool) -> Imported:
        began = time.perf_counter()
        done = Imported(source.name)
        team = Team(self._team_of, ())
        notes = Notes(self.strict)
        cursor = None if again else self.ledger.cursor(source.name)
        batch: list[Found] = []
        seen: dict[str, str] = {}
        last: Any = None
        if hasattr(source, "known"):
            source.known = lambda id: (known := self.ledger.known(self._names.id(id))) is not None and known.done
        if hasattr(source, "redact"):
            source.redact = self._redact
        sweep(self.run)
        try:
            for given in source.traces(cursor, notes):
                self._one(given, team, notes, done, batch, seen, source.name)
                if len(batch) >= BATCH:
                    self._keeper.keep(batch, source.name, _place(given.cursor), done, notes)
                    seen.clear()
                    done.seconds = time.perf_counter() - began
                    if progress is not None:
                        progress(done)
                elif not batch and given.cursor is not None and (done.known + done.live + done.empty) % 512 == 0:
                    self.ledger.put_cursor(source.name, _place(given.cursor))
                    if progress is not None:
                        progress(done)
                last = given.cursor if given.cursor is not None else last
            self._keeper.keep(batch, source.name, _place(last), done, notes)
        finally:
            done.agents.update(team.acted)
            done.unknown.update(team.unknown)
            done.lost = Counter({k: v for k, v in done.lost.items() if v})
            done.problems.update(notes.counts)
            done.examples.update(notes.examples)
            done.seconds = time.perf_counter() - began
        done.labels, done.scales = write_labels(self.run / "labels.jsonl", self.ledger, self._scales, self._label_keys, self._redact)
        return done

    # -- one trace

    def _one(
        self, given: SourceTrace, team: Team, notes: Notes, done: Imported, batch: list[Found], seen: dict[str, str], source: str
    ) -> None:
        try:
            given.id = self._names.id(given.id)
            given.session = None if given.session is None else self._names.id(given.session)
            given.spans = self._names.spans(given.spans)
            digest = digest_of(given.spans)
            if seen.get(given.id) == digest:
                notes.add("trace that came twice", given.id)
                return
            known = self.ledger.known(given.id)
            if known is not None and known.done and known.digest == digest:
                done.known += 1
                return
            if known is None and self.store.episode(given.id) is not None:
                done.live += 1
                return
            root = tree(given.spans, notes)
            if root is None:
                done.empty += 1
                return
            interrupted = None
            if resumes(root):
                if any(f.trace.episode.status == "interrupted" for f in batch):
                    self._keeper.keep(batch, source, None, done, notes)  # what it resumes may be among these
                interrupted = self._interrupted(root)
            trace = named(self._record(given, root, team, done, interrupted), notes)
            found = self._names.rated(rated(root, trace, notes))
        except (ImportProblem, StoreError):
            raise
        except Exception as error:  # noqa: BLE001  one trace that can't be read must not end the import of a million
            done.failed += 1
            notes.add(f"trace that can't be read: {type(error).__name__}", f"{given.id}: {error}")
            return
        if not trace.actions:
            done.empty += 1
            return
        seen[given.id] = digest
        batch.append(Found(given, trace, found, digest, known is not None and known.done, known is not None))
        if known is not None and trace.episode.status == "interrupted":
            self._keeper.keep(batch, source, None, done, notes)  # so that what resumes it is known to have to come again

    def _interrupted(self, root: Span) -> EpisodeTrace | None:
        """The episode that a resumed run goes on with."""
        for trace in self.store.traces(ids=self.ledger.interrupted(self._names.thread(root.metadata["thread_id"]) or "")):
            if trace.episode.status == "interrupted" or any(a.id in _ids(root) for a in trace.actions):
                return trace
        return None

    def _record(self, given: SourceTrace, root: Span, team: Team, done: Imported, interrupted: EpisodeTrace | None) -> EpisodeTrace:
        if interrupted is not None:
            if any(a.id in _ids(root) for a in interrupted.actions):
                return interrupted  # it went on with this trace before
            return replay(root, team, self._structure, lambda *_: False, done.lost, interrupted)

        def taken(id: str, index: int) -> bool:
            # A reply that another trace had already comes from a cache: the policy did not act here.
            owner = self._taken.setdefault((id, index), given.id)
            if len(self._taken) > _CALLS_REMEMBERED:
                self._taken.popitem(last=False)
            return owner != given.id

        trace = replay(root, team, self._structure, taken, done.lost)
        thread = trace.episode.thread_id or _thread(root)
        episode = replace(
            trace.episode,
            id=given.id,
            environment=self._environment,
            split=self._split,
            task=task_text(root.inputs),
            thread_id=None if thread is None else name_of(thread),
            outcome=self._outcome(root),
        )
        return replace(trace, episode=episode)

    def _outcome(self, root: Span) -> Outcome | None:
        if self._outcome_key is None:
            return None
        from .feedback import as_number

        for span in walk(root):
            for one in span.feedback:
                value = as_number(one)
                if one.get("key") == self._outcome_key and value is not None:
                    low, high = self._scales.get(self._outcome_key, (0.0, 1.0))
                    share = min(1.0, max(0.0, (value - low) / (high - low)))
                    return Outcome(share >= 0.5, str(one.get("comment") or f"{self._outcome_key} {value:g}"), share)
        return None


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Each trace makes thousands of short-lived containers; looking for cycles among them every 700 costs a fifth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def import_traces(
    source: Source, into: str | Path, *, progress: Callable[[Imported], Any] | None = None, again: bool = False, **options: Any
) -> Imported:
    """Imports a source into the run's folder `into`; `options` are those of `Importer`."""
    with Importer(into, **options) as importer:
        return importer.take(source, progress=progress, again=again)


class SpanSource:
    """A source made of spans in memory or from a generator, those of one trace one after another."""

    def __init__(self, spans: Iterable[Mapping[str, Any]], name: str = "spans") -> None:
        self.name = name
        self._spans = spans

    def traces(self, cursor: Any, notes: Notes) -> Iterator[SourceTrace]:
        held: list[Mapping[str, Any]] = []
        for span in self._spans:
            if held and span.get("trace_id") != held[0].get("trace_id"):
                yield SourceTrace(str(held[0].get("trace_id")), held)
                held = []
            held.append(span)
        if held:
            yield SourceTrace(str(held[0].get("trace_id")), held)


def task_text(inputs: Any) -> str:
    """What a run was asked, as text: the first thing a user said in its input, else the input itself."""
    value = inputs
    if isinstance(inputs, Mapping):
        for key in ("messages", "input", "question", "query", "task", "prompt"):
            if inputs.get(key):
                value = inputs[key]
                break
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) and value[0] and not isinstance(value[0][0], str):
        value = value[0]
    if isinstance(value, list):
        found = [fields_of(v, spoken=True) for v in value]
        asked = next((f for f in found if f is not None and f[1] == "user"), None)
        if asked is not None:
            value = asked[0].get("content")
    elif (message := fields_of(value, spoken=not isinstance(value, str))) is not None:
        value = message[0].get("content")
    if not isinstance(value, str):
        value = "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return value if len(value) <= _TASK else value[:_TASK] + "…"


def _place(cursor: Any) -> Any:
    return cursor() if callable(cursor) else cursor


def _ids(root: Span) -> set[str]:
    return {s.id for s in walk(root)}


def _thread(root: Span) -> str | None:
    for key in ("thread_id", "session_id", "conversation_id"):
        value = root.metadata.get(key)
        if value:
            return str(value)
    return None

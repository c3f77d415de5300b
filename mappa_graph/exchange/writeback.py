"""Verdicts back to where the traces live: LangSmith feedback on the model's run, MLflow assessments on its span.

Each has an id that follows from the action and the key, and what was sent is noted with its digest; so a second call sends only what is new
or has changed, and a killed one goes on. A verdict without a score is not sent. What is written carries the mark `by: mappa-graph`, by
which an import knows not to take it for a person's.
"""

from __future__ import annotations

import hashlib
import logging
import re
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError
from ..record import Action, EpisodeTrace, Verdict
from ..store import TraceStore
from .feedback import OURS
from .ledger import Ledger
from .limits import Missing, patient, status_of

_NAMESPACE = uuid.UUID("6d617070-6167-5261-8068-666565646261")
_COMMENT = 4000
_MLFLOW_SPAN = re.compile(r"(tr-.+):([0-9a-f]{16})\Z")


@dataclass
class WrittenBack:
    """What was written back."""

    target: str
    written: int = 0
    changed: int = 0
    """Of these, verdicts that had been written with another score or reason."""
    unchanged: int = 0
    unscored: int = 0
    """Verdicts without a score."""
    foreign: int = 0
    """Verdicts on actions that are not of this target."""
    failed: Counter[str] = field(default_factory=Counter)
    """Refused by the target, by cause."""


class Target(Protocol):
    """Where verdicts go."""

    name: str

    def place(self, trace: EpisodeTrace, action: Action, session: str | None) -> Any:
        """Where the action is over there, or None if it is not of this target."""
        ...

    def write(self, place: Any, key: str, verdict: Verdict, comment: str, remote: str | None) -> str | None:
        """Writes, or changes what `remote` names; returns the id over there."""
        ...


class LangSmithTarget:
    """Feedback on runs, by the SDK; one request a verdict.

    Args:
        client: a `langsmith.Client`; default: one made from the environment.
        project: of runs that this run recorded live, and whose project is not known from an import.
    """

    name = "langsmith"

    def __init__(self, *, client: Any | None = None, project: str | None = None) -> None:
        from .langsmith import make_client

        self.client = client if client is not None else make_client()
        self._session: str | None = None
        if project is not None:
            self._session = str(patient(lambda: self.client.read_project(project_name=project), f"LangSmith's project {project!r}").id)

    def place(self, trace: EpisodeTrace, action: Action, session: str | None) -> Any:
        try:
            run = uuid.UUID(action.id.split(":", 1)[0])
        except ValueError:
            return None
        return run, session or self._session

    def write(self, place: Any, key: str, verdict: Verdict, comment: str, remote: str | None) -> str | None:
        run, session = place
        id = uuid.uuid5(_NAMESPACE, f"{run}/{key}")

        def send() -> None:
            about = {"by": OURS, "coach": verdict.coach, "scale": "0..10", "blame": list(verdict.blame)}
            if remote is None:
                with _quiet():
                    try:
                        self.client.create_feedback(
                            run,
                            key,
                            score=verdict.score,
                            comment=comment,
                            feedback_id=id,
                            session_id=session,
                            source_info=about,
                            feedback_source_type="model",
                            stop_after_attempt=1,
                        )
                        return
                    except Exception as error:
                        if status_of(error) != 409:
                            raise
            self.client.update_feedback(id, score=verdict.score, comment=comment)

        patient(send, "writing feedback to LangSmith")
        return str(id)


@contextmanager
def _quiet() -> Iterator[None]:
    """The SDK warns of what it will ask for one day, and logs each refusal with its traceback, also those that are asked again."""

    def wanted(record: logging.LogRecord) -> bool:
        return record.msg != "Error creating feedback"

    logger = logging.getLogger("langsmith.client")
    logger.addFilter(wanted)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeFilter(wanted)


class MlflowTarget:
    """Assessments on spans, by MLflow's SDK.

    Args:
        uri: of the tracking store; default: what the environment says.
    """

    name = "mlflow"

    def __init__(self, *, uri: str | None = None) -> None:
        from .mlflow import make_client

        make_client(uri)
        self._uri = uri

    def place(self, trace: EpisodeTrace, action: Action, session: str | None) -> Any:
        match = _MLFLOW_SPAN.match(action.id)
        return None if match is None else (match.group(1), match.group(2))

    def write(self, place: Any, key: str, verdict: Verdict, comment: str, remote: str | None) -> str | None:
        import mlflow
        from mlflow.entities import AssessmentSource, Feedback

        trace_id, span_id = place
        source = AssessmentSource(source_type="LLM_JUDGE", source_id=verdict.coach or OURS)
        metadata = {"by": OURS, "scale": "0..10", "action": f"{trace_id}:{span_id}"}

        def find() -> str | None:
            # After a kill between the request and the note of it, the assessment is there already.
            info = mlflow.get_trace(trace_id).info
            return next(
                (
                    a.assessment_id
                    for a in info.assessments
                    if a.name == key and a.span_id == span_id and (a.metadata or {}).get("by") == OURS
                ),
                None,
            )

        def send() -> str | None:
            known = remote or find()
            if known is not None:
                judged = Feedback(
                    name=key, value=verdict.score, rationale=comment, source=source, metadata=metadata, trace_id=trace_id, span_id=span_id
                )
                mlflow.update_assessment(trace_id=trace_id, assessment_id=known, assessment=judged)
                return known
            made = mlflow.log_feedback(
                trace_id=trace_id, span_id=span_id, name=key, value=verdict.score, rationale=comment, source=source, metadata=metadata
            )
            return str(made.assessment_id)

        with _tracking(self._uri):
            return patient(send, "writing an assessment to MLflow")


@contextmanager
def _tracking(uri: str | None) -> Iterator[None]:
    """MLflow's functions speak to the process's one tracking store: the app's own setting comes back."""
    import mlflow

    before = mlflow.get_tracking_uri()
    if uri is None or uri == before:
        yield
        return
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)


def write_back(
    run: str | Path,
    target: Target,
    *,
    key: str = "mappa_score",
    split: str | None = None,
    progress: Callable[[WrittenBack], Any] | None = None,
) -> WrittenBack:
    """Writes the verdicts of a run's actions to a target under `key`; `split` None means all.

    Raises `ConfigError` for a run without a store, and for a target that refuses us; a verdict that is refused by itself (its run was
    deleted) is counted in `failed`.
    """
    folder = Path(run)
    path = folder if folder.is_file() else folder / "trace.db"
    if not path.is_file():
        raise ConfigError(f"{run} holds no recorded run (no trace.db)", hint="give a run's folder, e.g. runs/production")
    done = WrittenBack(target.name)
    with TraceStore(path, read_only=True) as store, Ledger(path.parent) as ledger:
        for trace, action, verdict in _verdicts(store, split):
            if verdict.score is None:
                done.unscored += 1
                continue
            known = ledger.known(trace.episode.id)
            place = target.place(trace, action, None if known is None else known.session)
            if place is None:
                done.foreign += 1
                continue
            comment = comment_of(verdict)
            digest = hashlib.sha256(f"{verdict.score}\0{comment}\0{verdict.coach}".encode("utf-8", "replace")).hexdigest()[:16]
            before = ledger.written(target.name, action.id, key)
            if before is not None and before[0] == digest:
                done.unchanged += 1
                continue
            try:
                remote = target.write(place, key, verdict, comment, None if before is None else before[1])
            except Missing:
                done.failed["the run is not there any more"] += 1
                continue
            ledger.note_written(target.name, action.id, key, digest, remote)
            done.written += 1
            done.changed += before is not None
            if progress is not None and done.written % 50 == 0:
                progress(done)
    return done


def comment_of(verdict: Verdict) -> str:
    """A verdict's reason, blame and better action as one text."""
    parts = [verdict.reason]
    if verdict.blame:
        parts.append(f"blame: {', '.join(verdict.blame)}")
    if verdict.better_action:
        parts.append(f"better: {verdict.better_action}")
    text = "\n".join(p for p in parts if p)
    return text if len(text) <= _COMMENT else text[: _COMMENT - 1] + "…"


def _verdicts(store: TraceStore, split: str | None) -> Iterator[tuple[EpisodeTrace, Action, Verdict]]:
    for trace in store.traces(split=split):
        for action in trace.actions:
            verdict = trace.verdicts.get(action.id)
            if verdict is not None:
                yield trace, action, verdict

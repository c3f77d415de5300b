"""MLflow's trace store as spans: any tracking URI, a server's or an sqlite file's, read through the SDK.

An episode's id is MLflow's trace id and an action's is `trace:span`, so that assessments find their way back. MLflow writes what a model
said as OpenAI chat JSON, without the message's id; `generations.fill` finds it again in the node around it. Traces come oldest
first, and an import goes on from the latest one it saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from ..errors import ConfigError
from .feedback import OURS
from .importer import SourceTrace
from .limits import patient, scrubbed
from .spans import Notes
from .window import begin, cursor_of

_PAGE = 50


class MlflowSource:
    """The traces of MLflow experiments.

    Args:
        experiment: a name or id.
        uri: of the tracking store; default: what the environment says (`MLFLOW_TRACKING_URI`).
        filter: in MLflow's search language.
    """

    def __init__(
        self,
        experiment: str,
        *,
        uri: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        filter: str | None = None,
    ) -> None:
        self.client = make_client(uri)
        found = self._experiment(experiment)
        if found is None:
            raise ConfigError(f"MLflow has no experiment {experiment!r} at {self._where(uri)}", hint="give its name or id: mlflow:NAME")
        self.experiment_id = str(found.experiment_id)
        self._since, self._until, self._filter = since, until, filter
        self.name = f"mlflow:{experiment}" + (f"?{filter}" if filter else "")

    def _experiment(self, name: str) -> Any:
        try:
            found = self.client.get_experiment_by_name(name)
            return found if found is not None or not name.isdigit() else self.client.get_experiment(name)
        except Exception as error:  # noqa: BLE001  whatever it is, the address is the user's to mend
            raise ConfigError(f"MLflow can't be asked: {scrubbed(error)}", hint="see --uri and MLFLOW_TRACKING_URI") from None

    @staticmethod
    def _where(uri: str | None) -> str:
        # A URI may hold a password.
        return "the tracking store" if uri is None or "@" in uri else uri

    def traces(self, cursor: Any, notes: Notes) -> Iterator[SourceTrace]:
        start = begin(cursor, self._since)
        parts = [self._filter] if self._filter else []
        parts += [f"timestamp_ms >= {int(start.timestamp() * 1000)}"] if start else []
        parts += [f"timestamp_ms <= {int(self._until.timestamp() * 1000)}"] if self._until else []
        token: str | None = None
        while True:

            def page(token: str | None = token) -> Any:
                return self.client.search_traces(
                    locations=[self.experiment_id],
                    filter_string=" AND ".join(parts) or None,
                    max_results=_PAGE,
                    order_by=["timestamp_ms ASC"],
                    page_token=token,
                )

            found = patient(page, "MLflow's traces")
            for trace in found:
                cursor = cursor_of(cursor, self._since, trace.info.timestamp_ms / 1000)
                yield SourceTrace(trace.info.trace_id, spans_of(trace, notes), cursor, self.experiment_id)
            token = found.token
            if not token:
                return


def spans_of(trace: Any, notes: Notes) -> list[dict[str, Any]]:
    """An `mlflow.entities.Trace` as spans, its assessments on the spans they are about."""
    info = trace.info
    trace_id = info.trace_id
    feedback: dict[str | None, list[dict[str, Any]]] = {}
    for one in info.assessments or ():
        read = assessment(one)
        if read is not None:
            feedback.setdefault(getattr(one, "span_id", None), []).append(read)
    session = (info.trace_metadata or {}).get("mlflow.trace.session")
    out = []
    for span in trace.data.spans:
        attributes = span.attributes
        metadata = attributes.get("metadata")
        metadata = dict(metadata) if isinstance(metadata, Mapping) else {}
        root = span.parent_id is None
        if root and session:
            metadata.setdefault("thread_id", session)
        on = feedback.pop(span.span_id, []) + (feedback.pop(None, []) if root else [])
        params = attributes.get("invocation_params")
        params = dict(params) if isinstance(params, Mapping) else {}
        if not params.get("model") and attributes.get("mlflow.llm.model"):
            params["model"] = attributes["mlflow.llm.model"]
        out.append(
            {
                "id": f"{trace_id}:{span.span_id}",
                "trace_id": trace_id,
                "parent_id": None if root else f"{trace_id}:{span.parent_id}",
                "name": span.name,
                "kind": str(span.span_type or "chain"),
                "start": span.start_time_ns / 1e9,
                "end": None if span.end_time_ns is None else span.end_time_ns / 1e9,
                "inputs": span.inputs,
                "outputs": span.outputs,
                "error": _error(span),
                "metadata": metadata,
                "params": params,
                "usage": attributes.get("mlflow.chat.tokenUsage") or {},
                "tool_call_id": attributes.get("tool_call_id"),
                "feedback": on,
            }
        )
    for span_id in feedback:
        notes.add("feedback on a span that is not there", f"{trace_id}:{span_id}")
    if not out:
        notes.add("trace without spans", trace_id)
    return out


def assessment(one: Any) -> dict[str, Any] | None:
    """An assessment as feedback; None for one that was replaced, or that is an expectation and no judgement."""
    feedback = getattr(one, "feedback", None)
    if feedback is None or getattr(one, "valid", True) is False:
        return None
    kind = str(getattr(getattr(one, "source", None), "source_type", "HUMAN")).upper()
    ours = (getattr(one, "metadata", None) or {}).get("by") == OURS
    value = feedback.value
    number = value if isinstance(value, bool | int | float) else None
    return {
        "id": one.assessment_id, "key": one.name, "score": number, "value": None if number is not None else value,
        "comment": one.rationale, "source": OURS if ours else "human" if kind == "HUMAN" else "code" if kind == "CODE" else "model",
    }  # fmt: skip


def _error(span: Any) -> str | None:
    if "ERROR" not in str(getattr(span.status.status_code, "value", span.status.status_code)):
        return None
    for event in span.events or ():
        if event.name == "exception":
            about = event.attributes or {}
            text = f"{about.get('exception.type') or 'Error'}: {about.get('exception.message') or ''}"
            stack = str(about.get("exception.stacktrace") or "")
            return f"{text}\n{stack}" if "Traceback (most recent call last):" in stack else text
    return str(span.status.description or "Error")


def make_client(uri: str | None = None) -> Any:
    """An MLflow client. Raises `ConfigError` without MLflow."""
    try:
        import mlflow
    except ImportError:
        raise ConfigError("MLflow is not installed", hint="pip install 'mappa-graph[mlflow]'") from None
    return mlflow.MlflowClient(tracking_uri=uri)

"""`Tap`: the synchronous handler. It copies what an event carries, appends it to a queue, and does nothing else.

LangChain awaits every handler, so what is done here is done in the app's time: no I/O, no waiting, and no lock either (appends
and dictionary writes are atomic; the worst that two threads can do is to copy a message twice). The structure of a run is worked
out by whoever takes the events off the queue. An event that can't be copied is counted in `failures` and the app goes on.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import time
from typing import Any
from uuid import UUID

from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent
from langgraph.types import Command, Send

from .snapshot import Interner, Message, copied, frozen

log = logging.getLogger(__name__)

GIVEN_BY_LANGCHAIN = ("lc_run-", "run-")
"""How the ids start that LangChain gives to messages whose server gave none."""


@dataclass(slots=True)
class ChainStart:
    name: str
    tags: list[str]
    metadata: dict[str, Any]
    input: Any
    input_object: Any
    """The live input of a node that was pushed: `Send.arg` itself."""
    node: bool
    resume: bool = False


@dataclass(slots=True)
class ChainEnd:
    output: Any
    object_type: str = ""


@dataclass(slots=True)
class LlmStart:
    metadata: dict[str, Any]
    model: str
    n: int
    messages: list[Message]


@dataclass(slots=True)
class Generation:
    message: Message | None
    text: str
    response_id: str | None
    model: str
    finish_reason: str | None


@dataclass(slots=True)
class LlmStream:
    """A reply began to stream; its first chunk carried an id of the server's."""

    id: str


@dataclass(slots=True)
class LlmEnd:
    generations: list[Generation]


@dataclass(slots=True)
class ToolStart:
    name: str
    inputs: Any
    tool_call_id: str | None
    metadata: dict[str, Any]


@dataclass(slots=True)
class ToolEnd:
    output: Any


@dataclass(slots=True)
class ToolText:
    """Live output of a tool, sent with `dispatch_custom_event("stdout" | "stderr", text)`."""

    stream: str
    text: str


@dataclass(slots=True)
class Failed:
    """`on_chain_error`, `on_llm_error` or `on_tool_error`."""

    error: BaseException
    update: Any = None
    response_id: str | None = None


@dataclass(slots=True)
class Interrupted:
    pass


class Root:
    """A run that no known run encloses, and what its events share."""

    __slots__ = ("__weakref__", "id", "interner", "over", "recording", "runs")

    def __init__(self, id: UUID) -> None:
        self.id = id
        self.interner = Interner()
        self.runs: list[UUID] = []
        self.recording: Any = None
        self.over = False
        """These two are the worker's: the recording that the events go to, and whether there is none any more."""


@dataclass(slots=True)
class Event:
    seq: int
    at: float
    root: Root
    run_id: UUID
    parent_id: UUID | None
    what: Any


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def run(self: Tap, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  a recorder never breaks the app: counted, shown, and the app goes on
            self._fail(method.__name__, error)

    return run


class Tap(GraphCallbackHandler):
    """Puts an `Event` on `events` for each callback event and calls `wake()` when the queue was idle."""

    run_inline = True
    raise_error = False
    ignore_retriever = True

    def __init__(self, wake: Callable[[], None]) -> None:
        self.failures: Counter[str] = Counter()
        self.events: deque[Any] = deque()
        self._wake = wake
        self._seq = itertools.count()
        self._streams: set[UUID] = set()
        """Model runs whose first chunk has come."""
        self._runs: dict[UUID | None, tuple[Root, str, bool]] = {}
        """Run id -> (root, checkpoint namespace, is a node attempt)."""

    def _fail(self, where: str, error: BaseException) -> None:
        self.failures[type(error).__name__] += 1
        if self.failures[type(error).__name__] == 1:
            log.warning("recording failed in %s, the app goes on: %s: %s", where, type(error).__name__, error)

    def _put(self, root: Root, run_id: UUID, parent_id: UUID | None, what: Any) -> None:
        self.events.append(Event(next(self._seq), time(), root, run_id, parent_id, what))
        self._wake()

    def _root(self, run_id: UUID, parent_id: UUID | None) -> Root:
        known = self._runs.get(parent_id)
        root = Root(run_id) if known is None else known[0]
        root.runs.append(run_id)
        return root

    def release(self, root: Root) -> None:
        """Forgets a root's runs."""
        for run_id in root.runs:
            self._streams.discard(run_id)
            known = self._runs.get(run_id)
            if known is not None and known[0] is root:
                self._runs.pop(run_id, None)

    @_guarded
    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        metadata = {} if metadata is None else metadata.copy()
        ns = metadata.get("langgraph_checkpoint_ns", "")
        known = self._runs.get(parent_run_id)
        if known is None:
            root, node = Root(run_id), False
        else:
            root, outer = known[0], known[1]
            node = bool(ns) and ns != outer and not outer.startswith(ns + "|")
            ns = ns or outer
        root.runs.append(run_id)
        self._runs[run_id] = (root, ns, node)
        resume = known is None and (inputs is None or (isinstance(inputs, Command) and inputs.resume is not None))
        what = ChainStart(
            kwargs.get("name") or (serialized or {}).get("name") or "chain",
            tags or [],
            metadata,
            frozen(inputs, root.interner) if node or known is None else None,
            inputs if node else None,
            node,
            resume,
        )
        self._put(root, run_id, parent_run_id, what)

    @_guarded
    def on_chain_end(self, outputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        known = self._runs.get(run_id)
        if known is None:
            return
        root, _, node = known
        routes = isinstance(outputs, str | Send) or (isinstance(outputs, list) and outputs and isinstance(outputs[0], str | Send))
        self._put(root, run_id, parent_run_id, ChainEnd(frozen(outputs, root.interner) if node or routes else None))

    @_guarded
    def on_chain_error(self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        self._error(error, run_id, parent_run_id)

    @_guarded
    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        root = self._root(run_id, parent_run_id)
        self._start_model(root, run_id, parent_run_id, metadata, kwargs, root.interner.messages(messages[0]))

    @_guarded
    def on_llm_start(
        self,
        serialized: dict[str, Any],
        prompts: list[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        from langchain_core.messages import HumanMessage

        root = self._root(run_id, parent_run_id)
        prompt = root.interner.messages([HumanMessage(content=prompts[0])])
        self._start_model(root, run_id, parent_run_id, metadata, kwargs, prompt)

    def _start_model(
        self, root: Root, run_id: UUID, parent: UUID | None, metadata: dict[str, Any] | None, kwargs: dict[str, Any], prompt: list[Message]
    ) -> None:
        self._runs[run_id] = (root, "", False)
        params = kwargs.get("invocation_params") or {}
        metadata = {} if metadata is None else metadata.copy()
        model = params.get("model") or params.get("model_name") or metadata.get("ls_model_name") or ""
        n = params.get("n")
        self._put(root, run_id, parent, LlmStart(metadata, str(model), n if isinstance(n, int) else 1, prompt))

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, run_id: UUID, **kwargs: Any) -> None:
        # Once a token: the first chunk says it all. LangChain drops its id in some of the ways to stream.
        if run_id not in self._streams:
            self._first_token(chunk, run_id)

    @_guarded
    def _first_token(self, chunk: Any, run_id: UUID) -> None:
        self._streams.add(run_id)
        known = self._runs.get(run_id)
        id = getattr(getattr(chunk, "message", None), "id", None)
        if known is not None and id is not None and not id.startswith(GIVEN_BY_LANGCHAIN):
            self._put(known[0], run_id, None, LlmStream(id))

    @_guarded
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        known = self._runs.get(run_id)
        if known is None:
            return
        root = known[0]
        whole = response.llm_output or {}
        self._streams.discard(run_id)
        made = []
        for generation in response.generations[0]:
            live: BaseMessage | None = getattr(generation, "message", None)
            metadata = {} if live is None else live.response_metadata
            info = generation.generation_info or {}
            made.append(
                Generation(
                    None if live is None else root.interner.message(live),
                    generation.text,
                    metadata.get("id") or whole.get("id"),
                    str(metadata.get("model_name") or whole.get("model_name") or ""),
                    metadata.get("finish_reason") or info.get("finish_reason"),
                )
            )
        self._put(root, run_id, parent_run_id, LlmEnd(made))

    @_guarded
    def on_llm_error(self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        # What the client could not parse still has the reply's body beside the error, and with it the id of the call.
        response = kwargs.get("response")
        response_id = None
        self._streams.discard(run_id)
        if isinstance(response, LLMResult) and response.generations and response.generations[0]:
            message = getattr(response.generations[0][0], "message", None)
            body = getattr(message, "response_metadata", {}).get("body")
            response_id = body.get("id") if isinstance(body, dict) else None
        self._error(error, run_id, parent_run_id, response_id)

    @_guarded
    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        inputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        root = self._root(run_id, parent_run_id)
        known = self._runs.get(parent_run_id)
        metadata = {} if metadata is None else metadata.copy()
        self._runs[run_id] = (root, metadata.get("langgraph_checkpoint_ns", "") if known is None else known[1], False)
        name = (serialized or {}).get("name") or kwargs.get("name") or "tool"
        given = frozen(inputs, root.interner) if inputs is not None else input_str
        self._put(root, run_id, parent_run_id, ToolStart(name, given, kwargs.get("tool_call_id"), metadata))

    @_guarded
    def on_tool_end(self, output: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        known = self._runs.get(run_id)
        if known is not None:
            self._put(known[0], run_id, parent_run_id, ToolEnd(frozen(output, known[0].interner)))

    @_guarded
    def on_tool_error(self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        self._error(error, run_id, parent_run_id)

    @_guarded
    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        known = self._runs.get(run_id)
        if known is not None and name in ("stdout", "stderr") and isinstance(data, str):
            self._put(known[0], run_id, None, ToolText(name, copied(data)))

    @_guarded
    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        known = self._runs.get(event.run_id)
        if known is not None and event.run_id is not None and not event.checkpoint_ns:
            self._put(known[0], event.run_id, None, Interrupted())

    def _error(self, error: BaseException, run_id: UUID, parent_id: UUID | None, response_id: str | None = None) -> None:
        known = self._runs.get(run_id)
        if known is None:
            return
        command = error.args[0] if error.args and isinstance(error.args[0], Command) else None
        update = None if command is None else frozen(command, known[0].interner)
        self._put(known[0], run_id, parent_id, Failed(error, update, response_id))


def is_control_flow(error: BaseException) -> bool:
    """Whether LangGraph raised it to steer the graph: an interrupt, or a command to the parent graph."""
    from langgraph.errors import GraphBubbleUp

    return isinstance(error, GraphBubbleUp)


def names(goto: Sequence[Any]) -> list[str]:
    """Node names among the targets of a command or router."""
    return [g for g in goto if isinstance(g, str)]

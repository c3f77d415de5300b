"""What an engine is: versions of policies that complete chats, and give back the exact tokens they sampled.

The gateway owns names, aliases and the record; an engine owns weights. It is told the policy and the version of each request,
never "the current one", so a swap can't change a call that is running. One thing to know: an engine's tokens are the truth. A
`Completion` without `prompt_ids` or `completion_ids` is served, and is never trained on; nothing downstream tokenises anything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from ..errors import EngineError
from ..record import FinishReason


class RequestRefused(EngineError):
    """A request that gets an HTTP error, in OpenAI's shape; the engine itself is well.

    Args:
        message: what is wrong, with the value and the way out.
        status: HTTP status.
        code, param, type: as in OpenAI's error objects.
        body: a whole error body to pass on as it is (an upstream's), instead of the above.
        headers: headers to pass on (`retry-after`).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        type: str = "invalid_request_error",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": type, "param": param, "code": code}
        self.body = body
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Request:
    """A completion that was asked for, of one version of one policy."""

    policy: str
    version: int
    messages: Sequence[Mapping[str, Any]]
    """OpenAI chat messages; empty where `prompt` is given."""
    tools: Sequence[Mapping[str, Any]] = ()
    n: int = 1
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = no limit."""
    max_tokens: int | None = None
    """None = what is left of the context, up to the engine's own cap."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None
    """How many alternatives per token the client asked for; None = it asked for no log-probs."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The rest of the request body (`tool_choice`, `response_format`, …), as it came."""
    prompt: Any = None
    """The prompt of a plain completion (`/v1/completions`): a text, token ids, or a list of either. None = a chat."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One of the `n` completions of a request."""

    index: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """Sampled ids, end-of-sequence included where it was sampled."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each completion id under `softmax(logits / temperature)` (`softmax(logits)` at temperature 0)."""
    text: str
    finish_reason: FinishReason
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """In OpenAI's shape: `{id, type, function: {name, arguments}}`, arguments a JSON string."""
    content_logprobs: Any = None
    """OpenAI's `logprobs.content` (of a plain completion: its `logprobs` object), where the client asked for it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the reply's message, passed through (`reasoning`, `refusal`)."""
    usage: Mapping[str, Any] | None = None
    """The engine's own count for the whole request, on the first completion; None = count the ids."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one streamed completion. Concatenated over an `index`, the pieces equal its `Completion`."""

    index: int
    delta: Mapping[str, Any] = field(default_factory=dict)
    """OpenAI's delta: `content`, `tool_calls`, …"""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    """On the first chunk of an index."""
    finish_reason: FinishReason | None = None
    """On the last chunk of an index."""
    content_logprobs: Any = None
    whole: bool = True
    """On the last chunk of an index: False where tokens are known to be missing; the call is then kept without any."""
    usage: Mapping[str, Any] | None = None
    """The engine's own count for the whole request, on a chunk of its own at the end; None = count the ids."""


class Passed(Protocol):
    """A reply of another server that is passed on as it is."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""

    async def read(self) -> bytes:
        """The whole body."""


@runtime_checkable
class Engine(Protocol):
    """Serves versions of policies. All methods may be called from any event loop; failures are `EngineError`s.

    Chats are what every engine serves. One that serves more has `endpoints`, a set of paths: with `/completions` in it, requests may
    have a `prompt`; with `/responses`, the engine has `respond(policy, version, body)`, an async context manager of a `Passed`.
    """

    name: ClassVar[str]

    async def start(self) -> None:
        """Loads the first weights. Version 0 of every policy is served on return."""

    async def stop(self) -> None:
        """Ends what runs and frees everything. A second stop does nothing."""

    def models(self) -> Mapping[str, Sequence[int]]:
        """The versions that are loaded, by policy."""

    async def load(self, policy: str, version: int, weights: Path) -> None:
        """Loads a version beside those that serve, from a folder of safetensors."""

    async def unload(self, policy: str, version: int) -> None:
        """Forgets a version; calls that run on it end on it."""

    async def complete(self, request: Request) -> Sequence[Completion]:
        """The `n` completions. Cancelling the awaiting task stops the work. Raises `RequestRefused` for what the client must mend."""

    def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """The same, in pieces as they come. Closing the iterator stops the work."""

    async def score(
        self, policy: str, version: int, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        """Natural log-probability of each completion id after the prompt, under `softmax(logits / temperature)`."""


@dataclass(frozen=True, slots=True)
class Canary:
    """What the trainer says that the new weights must answer: the check of a publish.

    `logprobs` are the trainer's for `completion_ids` after `prompt_ids` at `temperature`; the engine's may differ by `tolerance`
    nats at most, at each token.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    temperature: float = 1.0
    tolerance: float = 0.02

"""`UpstreamEngine`: an OpenAI-compatible server (vLLM, for one) as engine, by its address.

Requests go on with `return_token_ids` and `logprobs` set; replies and streams come back piece by piece, errors with the upstream's
status and body. Versions are LoRA adapters that the server loads by name (`solver@v3`). The one thing to know: log-probs are taken
as the server reports them, so a vLLM that trains at a temperature other than 1 must run with `--logprobs-mode processed_logprobs`.
An upstream that returns no token ids is served, and nothing of it can be trained on.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from ..codec import decode, encode
from ..errors import ConfigError, EngineError
from . import replies
from .engine import Chunk, Completion, Passed, Request, RequestRefused
from .events import Merger, end_of, events, place, tokens
from .http import HttpClient, HttpError, HttpTimeout, Reply

_KEPT_HEADERS = ("retry-after", "x-request-id")


class UpstreamEngine:
    """Policies served by another process.

    Args:
        base_url: the server's address, `/v1` included.
        models: policy -> the model name that the server knows its first weights by.
        api_key: sent as bearer token.
        timeout_s: longest wait for the answer's head, and then for each piece of it.
        connect_timeout_s: bound on reaching the server.
        max_connections: connections held at most; further requests wait for one.

    It belongs to the event loop that it was started on (the gateway's). `start` raises `EngineError` where the server can't be
    reached or does not serve the names.
    """

    name: ClassVar[str] = "upstream"
    endpoints: ClassVar[frozenset[str]] = frozenset({"/completions", "/responses"})
    """What it passes on beside chats; a server without one of them is said to be so (404)."""

    def __init__(
        self,
        base_url: str,
        models: Mapping[str, str],
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 10.0,
        max_connections: int = 1024,
    ) -> None:
        if not models:
            raise ConfigError("the upstream engine has no models", hint='give at least one: UpstreamEngine(url, {"solver": "served-name"})')
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url is {base_url!r}", hint="give an address like http://127.0.0.1:8000/v1")
        self.base_url = base_url.rstrip("/")
        self.served: dict[str, str] = dict(models)
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {api_key}"} if api_key else {})}
        self._limits: dict[str, Any] = {
            "timeout_s": timeout_s, "connect_timeout_s": connect_timeout_s, "max_connections": max_connections,
        }  # fmt: skip
        self._lock = threading.Lock()
        self._names: dict[str, dict[int, str]] = {policy: {0: name} for policy, name in models.items()}
        self._client: HttpClient | None = None

    async def start(self) -> None:
        if self._client is not None:
            return
        self._client = HttpClient(self.base_url, self._headers, **self._limits)
        try:
            listed = decode((await self._send("GET", "/models")).body)
            there = {model["id"] for model in listed["data"]}
        except (RequestRefused, ValueError, KeyError, TypeError) as error:
            await self.stop()
            raise EngineError(f"{self.base_url} does not list its models: {error}", hint="is it an OpenAI-compatible server?") from error
        except EngineError:
            await self.stop()
            raise
        missing = sorted(set(self.served.values()) - there)
        if missing:
            await self.stop()
            raise EngineError(f"{self.base_url} does not serve {', '.join(missing)}", hint=f"it serves: {', '.join(sorted(there))}")

    async def stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def models(self) -> Mapping[str, Sequence[int]]:
        with self._lock:
            return {policy: sorted(names) for policy, names in self._names.items()}

    async def load(self, policy: str, version: int, weights: Path) -> None:
        """Has the server load a PEFT LoRA folder (vLLM's `load_lora_adapter`; the server must see the same path)."""
        if policy not in self._names:
            raise EngineError(f"the upstream engine has no policy {policy!r}", hint=f"it has: {', '.join(self._names)}")
        name = f"{policy}@v{version}"
        await self._admin("/load_lora_adapter", {"lora_name": name, "lora_path": _adapter(weights)}, f"load {name}")
        with self._lock:
            self._names[policy][version] = name

    async def unload(self, policy: str, version: int) -> None:
        with self._lock:
            name = self._names.get(policy, {}).pop(version, None)
        # The first weights are the server's own, and stay.
        if name is not None and name != self.served[policy]:
            await self._admin("/unload_lora_adapter", {"lora_name": name}, f"unload {name}")

    async def complete(self, request: Request) -> Sequence[Completion]:
        response = await self._send("POST", _path(request), encode(self._body(request, stream=False)))
        if request.prompt is None and request.top_logprobs is None and (plain := replies.completions(response.body)) is not None:
            return plain
        try:
            data = decode(response.body)
            prompt_ids, usage = data.get("prompt_token_ids"), data.get("usage") or None
            made = [_completion(choice, prompt_ids, request, None if i else usage) for i, choice in enumerate(data["choices"])]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise EngineError(f"{self.base_url} sent a reply that is no chat completion: {type(error).__name__}: {error}") from error
        if not any(c.prompt_ids for c in made):
            made = [replace(c, completion_ids=(), logprobs=()) for c in made]
        return made

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        client = self._running()
        body = encode(self._body(request, stream=True))
        merger = Merger(request)
        ends: list[Chunk] = []
        try:
            async with client.stream("POST", _path(request), body) as response:
                if response.status != 200:
                    raise self._refused(_path(request), Reply(response.status, response.headers, await response.read()))
                async for together in events(response):
                    for chunk in merger.chunks(together):
                        if chunk.finish_reason is None:
                            yield chunk
                        else:
                            ends.append(chunk)
                    if merger.error is not None:
                        raise EngineError(f"{self.base_url} failed in a stream: {merger.error}")
                response.over()
            # The last chunks wait for the server's own count, which comes right behind: only tokens that are all there are kept.
            counted = merger.usage
            whole = merger.prompt_ids is not None and (counted is None or counted.get("completion_tokens") == merger.tokens)
            for chunk in ends:
                yield chunk if whole else replace(chunk, whole=False)
            if counted is not None:
                yield Chunk(0, usage=counted)
        except HttpError as error:
            raise self._unreachable(error) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.base_url} sent a stream that is no chat completion: {type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def respond(self, policy: str, version: int, body: Mapping[str, Any]) -> AsyncIterator[Passed]:
        """The server's own reply to `POST /responses`, of any status but an error's. Raises `RequestRefused`."""
        try:
            async with self._running().stream("POST", "/responses", encode({**body, "model": self._served(policy, version)})) as reply:
                if reply.status >= 400:
                    raise self._refused("/responses", Reply(reply.status, reply.headers, await reply.read()))
                yield reply
        except HttpError as error:
            raise self._unreachable(error) from error

    async def score(
        self, policy: str, version: int, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        """Through vLLM's `prompt_logprobs`, which are those of temperature 1: another temperature is refused."""
        if temperature != 1.0:
            raise EngineError(
                f"an upstream server scores at temperature 1 only, not {temperature:g}", hint="make the canary at temperature 1"
            )
        name = self._served(policy, version)
        ids = [*prompt_ids, *completion_ids]
        body = {"model": name, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        data = decode((await self._send("POST", "/completions", encode(body))).body)
        try:
            rows = data["choices"][0].get("prompt_logprobs") or data["prompt_logprobs"]
            return [float(rows[i][str(ids[i])]["logprob"]) for i in range(len(prompt_ids), len(ids))]
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{self.base_url} gave no prompt_logprobs", hint="a canary needs a vLLM server") from error

    # -- inside

    def _running(self) -> HttpClient:
        if self._client is None:
            raise EngineError("the upstream engine is not running", hint="await engine.start() first")
        return self._client

    def _served(self, policy: str, version: int) -> str:
        """The name that the server knows a version by."""
        name = self._names.get(policy, {}).get(version)
        if name is None:
            raise EngineError(f"{policy}@v{version} is not loaded at {self.base_url}")
        return name

    def _body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            **request.extra,
            "model": self._served(request.policy, request.version),
            "n": request.n,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "logprobs": True,
            "return_token_ids": True,
        }
        optional = {
            "tools": request.tools, "top_k": request.top_k, "max_tokens": request.max_tokens, "stop": request.stop, "seed": request.seed,
        }  # fmt: skip
        if request.prompt is None:
            body["messages"] = request.messages
            optional["top_logprobs"] = request.top_logprobs
        else:
            body.update(prompt=request.prompt, logprobs=request.top_logprobs or 0)
        body.update({key: value for key, value in optional.items() if value or (key == "seed" and value is not None)})
        if stream:
            body.update(stream=True, stream_options={"include_usage": True})
        return body

    async def _send(self, method: str, path: str, body: bytes = b"") -> Reply:
        try:
            reply = await self._running().request(method, path, body)
        except HttpError as error:
            raise self._unreachable(error) from error
        if reply.status != 200:
            raise self._refused(path, reply)
        return reply

    def _refused(self, path: str, reply: Reply) -> RequestRefused:
        kept = {name: reply.headers[name] for name in _KEPT_HEADERS if name in reply.headers}
        if reply.status == 404 and path in self.endpoints and b'"error"' not in reply.body:
            told = f"{self.base_url} has no {path}; chats go to /v1/chat/completions"
            return RequestRefused(told, status=404, code="not_found", headers=kept)
        return RequestRefused(f"the upstream answered {reply.status}", status=reply.status, body=reply.body, headers=kept)

    async def _admin(self, path: str, body: Mapping[str, Any], doing: str) -> None:
        try:
            await self._send("POST", path, encode(body))
        except RequestRefused as error:
            told = (error.body or b"").decode("utf-8", "replace")[:500]
            hint = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" if error.status == 404 else None
            raise EngineError(f"{self.base_url} can't {doing}: status {error.status}: {told}", hint=hint) from error

    def _unreachable(self, error: HttpError) -> EngineError:
        if isinstance(error, HttpTimeout):
            return EngineError(f"{self.base_url} did not answer in time: {error}")
        return EngineError(f"{self.base_url} can't be reached: {error}", hint="is the server up?")


def _adapter(weights: Path) -> str:
    if not (weights / "adapter_config.json").is_file():
        raise EngineError(f"{weights} is not a LoRA adapter folder", hint="an upstream server loads adapters by path")
    return str(weights.absolute())


def _path(request: Request) -> str:
    return "/chat/completions" if request.prompt is None else "/completions"


def _completion(
    choice: Mapping[str, Any], prompt_ids: Sequence[int] | None, request: Request, usage: Mapping[str, Any] | None
) -> Completion:
    if request.prompt is None:
        message = dict(choice["message"])
        message.pop("role", None)
    else:
        message = {"content": choice["text"], **{key: choice[key] for key in ("stop_reason", "prompt_logprobs") if key in choice}}
    ids, logprobs, entries = tokens(choice, request)
    return Completion(
        index=place(choice),
        prompt_ids=tuple(prompt_ids or choice.get("prompt_token_ids") or ()),
        completion_ids=tuple(ids),
        logprobs=tuple(logprobs),
        text=message.pop("content", None) or "",
        tool_calls=tuple(message.pop("tool_calls", None) or ()),
        finish_reason=end_of(choice) or "stop",
        content_logprobs=entries if request.top_logprobs is not None else None,
        extra=message,
        usage=usage,
    )

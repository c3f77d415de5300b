"""`/v1/responses`, for engines that have it: passed on in both directions, and kept.

The upstream owns the format and its state: a reply's id is the upstream's, since `previous_response_id` refers to it, and it is the
call's id. Bodies and events go through unchanged. The one thing to know: tokens are kept only where the upstream returns
`token_ids`, `prompt_token_ids` and a log-prob for each; any other response is a call without tokens, which is never trained on.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope

from ..codec import decode
from ..errors import EngineError
from ..record import Call, FinishReason
from .app import Endpoint, Reply, read, text, watched
from .engine import Passed, RequestRefused

_ENDS = ("response.completed", "response.incomplete", "response.failed")
_REASONS: dict[str, FinishReason] = {"completed": "stop", "incomplete": "length", "failed": "error", "cancelled": "abort"}
_FIELDS = ("temperature", "top_p", "max_output_tokens", "instructions", "tools", "tool_choice", "previous_response_id")


class Responses(Endpoint):
    async def answer(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        service = self.service
        raw = await read(scope, receive, service.max_body_bytes)
        try:
            body = decode(raw)
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"the request body is not JSON: {error}") from error
        if not isinstance(body, dict) or not isinstance(body.get("model"), str):
            raise RequestRefused("the request body must be an object with a model", param="model")
        if service.versions.held:
            await service.versions.open(body["model"])
        policy, version = service.versions.resolve(body["model"], text(scope, b"x-mappa-episode") or "")
        begun = _Begun(body, policy, version, text(scope, b"x-mappa-agent"), text(scope, b"x-mappa-episode"), time.time())
        with service.versions.lease(policy, version):
            with watched(receive):
                respond = service.engine.respond(policy, version, body)  # type: ignore[attr-defined]
                async with respond as passed:
                    if body.get("stream"):
                        await self._stream(passed, begun, reply)
                        return
                    answered = await passed.read()
                await service.keep_call(begun.call(_object(answered)))
            await reply.whole(passed.status, answered)

    async def _stream(self, passed: Passed, begun: _Begun, reply: Reply) -> None:
        """Events as they come; the one that ends the response goes out once the call is kept."""
        rest = b""
        kept = False
        last: Mapping[str, Any] = {}
        try:
            async for piece in passed.pieces():
                *blocks, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
                for block in blocks:
                    data = b"\n".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
                    # Deltas, which are most of the events, are not even parsed.
                    if b'"response"' in data:
                        event = _object(data)
                        last = event.get("response") or last
                        if event.get("type") in _ENDS:
                            await self.service.keep_call(begun.call(last))
                            kept = True
                    await reply.piece(block + b"\n\n")
            if not kept:
                raise EngineError("the upstream's stream broke off before its end")
        finally:
            if not kept:
                await asyncio.shield(self.service.keep_call(begun.call({**last, "status": "cancelled"})))
        await reply.end(rest)


class _Begun:
    """A request on its way, until it is a call."""

    def __init__(self, body: Mapping[str, Any], policy: str, version: int, agent: str | None, episode: str | None, started: float) -> None:
        self._body = body
        self._policy = policy
        self._version = version
        self._headers = agent, episode
        self._started = started

    def call(self, response: Mapping[str, Any]) -> Call:
        ids, prompt_ids, logprobs = _tokens(response)
        items = [item for item in response.get("output") or () if isinstance(item, dict)]
        agent, episode = self._headers
        asked = self._body.get("input")
        return Call(
            id=str(response.get("id") or f"resp_{uuid.uuid4().hex}"),
            policy=self._policy,
            version=self._version,
            prompt_ids=prompt_ids,
            completion_ids=ids,
            logprobs=logprobs,
            finish_reason=_REASONS.get(str(response.get("status")), "stop"),
            text="".join(part.get("text") or "" for part in _parts(items)),
            sampling={"endpoint": "/responses", **{name: self._body[name] for name in _FIELDS if self._body.get(name) is not None}},
            messages=({"role": "user", "content": asked},)
            if isinstance(asked, str)
            else tuple(m for m in asked or () if isinstance(m, dict)),
            tool_calls=tuple(_tool_call(item) for item in items if item.get("type") == "function_call"),
            agent=agent,
            episode=episode,
            started=self._started,
            ended=time.time(),
        )


def _object(data: bytes) -> dict[str, Any]:
    try:
        made = decode(data)
    except ValueError as error:
        raise EngineError(f"the upstream sent a response that is not JSON: {error}") from error
    if not isinstance(made, dict):
        raise EngineError(f"the upstream sent a JSON {type(made).__name__} for a response")
    return made


def _parts(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for item in items for part in item.get("content") or () if isinstance(part, dict) and part.get("type") == "output_text"]


def _tokens(response: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Completion ids, prompt ids and log-probs; all empty where one is missing or they don't match."""
    ids, prompt_ids = response.get("token_ids"), response.get("prompt_token_ids")
    items = [item for item in response.get("output") or () if isinstance(item, dict)]
    logprobs = [entry.get("logprob") for part in _parts(items) for entry in part.get("logprobs") or ()]
    if not ids or not prompt_ids or len(ids) != len(logprobs) or None in logprobs:
        return (), (), ()
    return tuple(ids), tuple(prompt_ids), tuple(map(float, logprobs))


def _tool_call(item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": item.get("name") or "", "arguments": item.get("arguments") or ""},
    }

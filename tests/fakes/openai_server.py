"""A small OpenAI-compatible server over real HTTP that answers as the gateway does.

Every reply carries a response id of its own; a streamed reply has the same id in the first chunk's `delta`; `model` echoes
`name@v0`. `reply(body)` decides what is said: a text, a message dict (`content`, `tool_calls`), a list of them (one a choice), or an
`(status, error body)` pair. `calls` keeps what each response id was given and what it said.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Reply = str | dict[str, Any] | list[Any] | tuple[int, dict[str, Any]]


def tool_call(name: str, arguments: dict[str, Any], id: str = "call_1") -> dict[str, Any]:
    """One entry of a message's `tool_calls`, as OpenAI writes it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


class OpenAIServer:
    """`with OpenAIServer(reply) as server: ChatOpenAI(model="solver", base_url=server.url, api_key="x")`."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply], *, delay_s: float = 0.0, delta_id: bool = True) -> None:
        self.reply = reply
        self.delay_s = delay_s
        self.delta_id = delta_id
        self.calls: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count(1)
        app = Starlette(routes=[Route("/v1/chat/completions", self._completions, methods=["POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> OpenAIServer:
        self._thread.start()
        while not self._server.started:
            threading.Event().wait(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        said = self.reply(body)
        if isinstance(said, tuple):
            return JSONResponse(said[1], said[0])
        id = f"call-{next(self._numbers)}"
        messages = [self._message(one) for one in (said if isinstance(said, list) else [said])]
        self.calls[id] = {"body": body, "said": messages}
        base = {"id": id, "created": 1, "model": f"{body['model']}@v0"}
        if body.get("stream"):
            return StreamingResponse(self._stream(base, messages), media_type="text/event-stream")
        choices = [{"index": i, "message": m, "finish_reason": _finish(m), "logprobs": None} for i, m in enumerate(messages)]
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return JSONResponse(base | {"object": "chat.completion", "choices": choices, "usage": usage})

    async def _stream(self, base: dict[str, Any], messages: list[dict[str, Any]]) -> AsyncIterator[str]:
        base = base | {"object": "chat.completion.chunk"}
        for index, message in enumerate(messages):
            first: dict[str, Any] = {"role": "assistant", "content": ""} | ({"id": base["id"]} if self.delta_id else {})
            content = message["content"] or ""
            deltas = [first, {"content": content[:2]}, {"content": content[2:]}]
            deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls") or [])]
            for delta in deltas:
                yield _sse(base | {"choices": [{"index": index, "delta": delta, "finish_reason": None}]})
            yield _sse(base | {"choices": [{"index": index, "delta": {}, "finish_reason": _finish(message)}]})
        yield "data: [DONE]\n\n"

    @staticmethod
    def _message(said: str | dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": None} | ({"content": said} if isinstance(said, str) else said)


def _finish(message: dict[str, Any]) -> str:
    return message.get("finish_reason") or ("tool_calls" if message.get("tool_calls") else "stop")


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"

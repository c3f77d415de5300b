"""A chat-completions server over real HTTP that judges as it is told to, and misbehaves as it is told to.

    with CoachServer([error(500), verdict(7)]) as server:
        coach = LLMCoach(server.model())

Each request takes the next item of the script (the last one is repeated); a function in it is called with the request's body.
`requests` keeps every body.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass(frozen=True)
class Act:
    """One reply: a text with a finish reason, or a failure."""

    text: str = ""
    finish_reason: str = "stop"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    stall_s: float = 0.0
    how: str = "json"
    """json, html (a page under status 200), cut (the connection breaks in the middle), null (no choices), refusal."""
    prompt_tokens: int = 100
    completion_tokens: int = 20
    usage: bool = True


Scripted = Act | Callable[[dict[str, Any]], Act]


def verdict(score: Any = 7, reason: str = "the printed total is what the task asks for", **more: Any) -> Act:
    return Act(json.dumps({"reason": reason, "score": score, "blame": [], "better_action": None, **more}))


def error(status: int, **headers: str) -> Act:
    return Act(status=status, headers={name.replace("_", "-"): value for name, value in headers.items()})


class CoachServer:
    """Serves a script of replies; as a context manager."""

    def __init__(self, script: Sequence[Scripted]) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._at_once = 0
        app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> CoachServer:
        self._thread.start()
        while not self._server.started:
            threading.Event().wait(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=10)

    def model(self, **settings: Any) -> ChatOpenAI:
        return ChatOpenAI(model="judge", base_url=self.url, api_key=SecretStr("sk-secret-17"), max_retries=0, **settings)

    def said_to(self, number: int) -> str:
        """The user message of a request."""
        return str(self.requests[number]["messages"][-1]["content"])

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        act = self.script[min(len(self.requests), len(self.script) - 1)]
        self.requests.append(body)
        if callable(act):
            act = act(body)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if act.stall_s:
                await asyncio.sleep(act.stall_s)
        finally:
            self._at_once -= 1
        if act.status != 200:
            said = f"scripted failure of a request with {request.headers.get('authorization')}"
            return JSONResponse({"error": {"message": said, "code": "x"}}, act.status, dict(act.headers))
        if act.how == "html":
            return HTMLResponse("<html><body>502 Bad Gateway</body></html>")
        if act.how == "cut":
            return StreamingResponse(_broken(), media_type="application/json", headers={"content-length": "5000"})
        return JSONResponse(_completion(body, act), headers=dict(act.headers))


def _completion(body: Mapping[str, Any], act: Act) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": act.text}
    if act.how == "refusal":
        message = {"role": "assistant", "content": None, "refusal": act.text}
    out: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": body.get("model", ""),
        "choices": None if act.how == "null" else [{"index": 0, "message": message, "finish_reason": act.finish_reason}],
    }
    if act.usage:
        total = act.prompt_tokens + act.completion_tokens
        out["usage"] = {"prompt_tokens": act.prompt_tokens, "completion_tokens": act.completion_tokens, "total_tokens": total}
    return out


async def _broken() -> AsyncIterator[bytes]:
    yield b'{"id": "chatcmpl-1", "choi'
    raise ConnectionResetError("scripted break")

"""A server in vLLM's shape that answers at once: ids and log-probs where they are asked for, streamed or not. A bare ASGI app.

`python tests/fakes/upstream.py PORT [PROMPT_TOKENS COMPLETION_TOKENS]` serves it from a process of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import uvicorn


class Upstream:
    """What it does wrong is set on it: `drop_ids` leaves token ids out, `lose` skips the ids of one streamed token,
    `lacks` names paths that are not there."""

    def __init__(self, prompt_tokens: int = 16, completion_tokens: int = 4, names: tuple[str, ...] = ("served",)) -> None:
        self.prompt_ids = list(range(prompt_tokens))
        self.ids = list(range(1000, 1000 + completion_tokens))
        self.names = list(names)
        self.bodies: list[dict[str, Any]] = []
        self.drop_ids = False
        self.lose = False
        self.error: tuple[int, bytes] | None = None
        self.break_off = False
        self.lacks: tuple[str, ...] = ()
        self.responses_have_ids = True
        self._ready: dict[tuple[bool, bool], bytes] = {}
        self._chunks: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        if path.endswith("/models"):
            await self._whole(send, 200, json.dumps({"data": [{"id": name} for name in self.names]}).encode())
            return
        body = json.loads(raw)
        self.bodies.append(body)
        del self.bodies[:-100]
        if self.error is not None:
            await self._whole(send, *self.error)
        elif path.endswith("/load_lora_adapter"):
            self.names.append(body["lora_name"])
            await self._whole(send, 200, b"Success")
        elif path.endswith("/unload_lora_adapter"):
            self.names.remove(body["lora_name"])
            await self._whole(send, 200, b"Success")
        elif path.endswith(self.lacks or "-"):
            await self._whole(send, 404, b'{"detail": "Not Found"}')
        elif path.endswith("/responses"):
            await self._respond(send, body)
        elif path.endswith("/v1/completions") and "prompt_logprobs" not in body:
            await self._complete_text(send, body)
        elif path.endswith("/v1/completions"):
            rows = [None, *({str(id): {"logprob": -0.25}} for id in body["prompt"][1:])]
            await self._whole(send, 200, json.dumps({"choices": [{"prompt_logprobs": rows}]}).encode())
        elif body.get("stream"):
            await self._stream(send, body)
        else:
            key = (bool(body.get("return_token_ids")) and not self.drop_ids, bool(body.get("logprobs")))
            if key not in self._ready:
                self._ready[key] = self._reply(*key)
            await self._whole(send, 200, self._ready[key])

    def _logprobs(self, ids: list[int]) -> dict[str, Any]:
        return {"content": [{"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []} for _ in ids]}

    def _reply(self, ids: bool, logprobs: bool) -> bytes:
        message = {"role": "assistant", "content": "x" * len(self.ids), "reasoning": "because", "tool_calls": []}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop", "stop_reason": None}
        choice["logprobs"] = self._logprobs(self.ids) if logprobs else None
        count = {"prompt_tokens": len(self.prompt_ids), "completion_tokens": len(self.ids)}
        reply = {"id": "chatcmpl-up", "object": "chat.completion", "created": 1, "model": "served", "choices": [choice], "usage": count}
        if ids:
            choice["token_ids"] = self.ids
            reply["prompt_token_ids"] = self.prompt_ids
        return json.dumps(reply).encode()

    def _events(self) -> list[bytes]:
        head = {"id": "chatcmpl-up", "object": "chat.completion.chunk", "created": 1, "model": "served"}
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        made: list[dict[str, Any]] = [{**head, "choices": [first], "prompt_token_ids": self.prompt_ids}]
        for i, id in enumerate(self.ids):
            last = i == len(self.ids) - 1
            choice = {"index": 0, "delta": {"content": "x"}, "logprobs": self._logprobs([id]), "finish_reason": "stop" if last else None}
            if not self.drop_ids and not (self.lose and i == 1):
                choice["token_ids"] = [id]
            made.append({**head, "choices": [choice]})
        count = {"prompt_tokens": len(self.prompt_ids), "completion_tokens": len(self.ids)}
        made.append({**head, "choices": [], "usage": count})
        return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in made]

    async def _complete_text(self, send: Any, body: dict[str, Any]) -> None:
        """Plain completions in vLLM's shape: a choice a prompt, prompt ids on the choice."""
        head = {"id": "cmpl-up", "object": "text_completion", "created": 1, "model": "served"}
        prompts = body["prompt"] if isinstance(body["prompt"], list) and isinstance(body["prompt"][0], str) else [body["prompt"]]
        count = {"prompt_tokens": len(self.prompt_ids) * len(prompts), "completion_tokens": len(self.ids) * len(prompts)}

        def choice(index: int, ids: list[int], prompt: bool, finish: str | None) -> dict[str, Any]:
            logprobs = {
                "text_offset": [0] * len(ids),
                "token_logprobs": [-0.5] * len(ids),
                "tokens": ["x"] * len(ids),
                "top_logprobs": None,
            }
            made = {"index": index, "text": "x" * len(ids), "logprobs": logprobs, "finish_reason": finish, "token_ids": ids}
            return {**made, "prompt_token_ids": [index, *self.prompt_ids] if prompt else None}

        if not body.get("stream"):
            choices = [choice(i, self.ids, True, "stop") for i in range(len(prompts))]
            await self._whole(send, 200, json.dumps({**head, "choices": choices, "usage": count}).encode())
            return
        events = [
            {**head, "choices": [choice(i, [id], k == 0, "stop" if k == len(self.ids) - 1 else None)]}
            for k, id in enumerate(self.ids)
            for i in range(len(prompts))
        ]
        await self._events_out(send, [*events, {**head, "choices": [], "usage": count}])

    async def _respond(self, send: Any, body: dict[str, Any]) -> None:
        logprobs = [{"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []} for _ in self.ids]
        content = [{"type": "output_text", "text": "x" * len(self.ids), "annotations": [], "logprobs": logprobs}]
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
        made: dict[str, Any] = {
            "id": "resp_up", "object": "response", "created_at": 1, "model": body["model"], "status": "completed", "output": [message],
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        }  # fmt: skip
        if self.responses_have_ids:
            made |= {"token_ids": self.ids, "prompt_token_ids": self.prompt_ids}
        if not body.get("stream"):
            await self._whole(send, 200, json.dumps(made).encode())
            return
        begun = {**made, "status": "in_progress", "output": []}
        place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        events: list[dict[str, Any]] = [{"type": "response.created", "response": begun, "sequence_number": 0}]
        for i, _ in enumerate(self.ids):
            events.append({"type": "response.output_text.delta", "delta": "x", "sequence_number": i + 1, "logprobs": [], **place})
        if not self.break_off:
            events.append({"type": "response.completed", "response": made, "sequence_number": 9})
        await self._events_out(send, events, named=True)

    async def _events_out(self, send: Any, events: list[dict[str, Any]], *, named: bool = False) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for event in events:
            head = f"event: {event['type']}\n" if named else ""
            await send({"type": "http.response.body", "body": f"{head}data: {json.dumps(event)}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"" if named else b"data: [DONE]\n\n"})

    async def _stream(self, send: Any, body: dict[str, Any]) -> None:
        if not self._chunks or self.drop_ids or self.lose:
            self._chunks = self._events()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for chunk in self._chunks[: 2 if self.break_off else None]:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if not self.break_off:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _whole(self, send: Any, status: int, body: bytes) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"retry-after", b"3")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    port, *sizes = map(int, sys.argv[1:])
    uvicorn.run(Upstream(*sizes), port=port, log_level="warning", access_log=False, lifespan="off")

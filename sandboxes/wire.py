"""The Jupyter message format over zmq, from the client's side, with the other end taken to be hostile.

Only what a cell run needs: the shell channel (requests and replies) and iopub (output). Messages that are too large are refused by the
socket, messages that are badly signed, not JSON or not of the expected form are dropped and counted; nothing from a kernel is ever
unpickled.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import zmq
import zmq.asyncio

MESSAGE_BYTES = 32 * 1024 * 1024
_DELIMITER = b"<IDS|MSG>"


@dataclass(frozen=True, slots=True)
class Message:
    """A message from a kernel: its type, the id of the request it answers, and what it holds."""

    kind: str
    parent: str
    content: Mapping[str, Any]


def pack(key: bytes, kind: str, content: Mapping[str, Any], session: str) -> tuple[str, list[bytes]]:
    """A signed message as `(id, frames)`."""
    identifier = uuid.uuid4().hex
    header = {
        "msg_id": identifier,
        "msg_type": kind,
        "username": "",
        "session": session,
        "date": datetime.now(UTC).isoformat(),
        "version": "5.3",
    }
    parts = [json.dumps(part).encode() for part in (header, {}, {}, content)]
    return identifier, [_DELIMITER, sign(key, parts), *parts]


def sign(key: bytes, parts: list[bytes]) -> bytes:
    """The hex HMAC-SHA256 of a message's four parts."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()


def unpack(key: bytes, frames: list[bytes]) -> Message | None:
    """The message in `frames`, or None if it isn't one, or isn't signed with `key`."""
    try:
        start = frames.index(_DELIMITER)
        signature, parts = frames[start + 1], frames[start + 2 : start + 6]
        if len(parts) != 4 or not hmac.compare_digest(signature, sign(key, parts)):
            return None
        header, parent, content = (json.loads(parts[i]) for i in (0, 1, 3))
        kind, parent_id = header["msg_type"], parent.get("msg_id", "")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None
    if not isinstance(kind, str) or not isinstance(parent_id, str) or not isinstance(content, dict):
        return None
    return Message(kind, parent_id, content)


@dataclass
class Channels:
    """The two channels of one kernel. Belongs to the event loop that opened it."""

    key: bytes
    shell: zmq.asyncio.Socket
    iopub: zmq.asyncio.Socket
    session: str = field(default_factory=lambda: uuid.uuid4().hex)
    dropped: int = 0

    @classmethod
    def open(cls, context: zmq.asyncio.Context, address: str, key: bytes, ports: Mapping[str, int]) -> Channels:
        """Connect to `ipc://<address>-<port>`; `ports` holds shell_port and iopub_port."""
        shell, iopub = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        for socket in (shell, iopub):
            socket.linger = 0
            socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
            socket.setsockopt(zmq.RCVHWM, 200)
        iopub.setsockopt(zmq.SUBSCRIBE, b"")
        iopub.connect(f"ipc://{address}-{ports['iopub_port']}")
        shell.connect(f"ipc://{address}-{ports['shell_port']}")
        return cls(key, shell, iopub)

    def close(self) -> None:
        self.shell.close(0)
        self.iopub.close(0)

    async def handshake(self) -> None:
        """Return once a request's output arrives here: the kernel serves, both sockets are connected and the subscription holds."""
        while True:
            try:
                async with asyncio.timeout(0.5):
                    await self.execute("", lambda _: None, silent=True)
                return
            except TimeoutError:
                continue

    async def execute(self, code: str, output: Callable[[Message], None], *, silent: bool = False) -> Mapping[str, Any]:
        """Run `code`, hand every message of its output to `output`, and return the reply's content once the kernel is idle again."""
        content = {"code": code, "silent": silent, "store_history": not silent, "allow_stdin": False, "stop_on_error": True}
        identifier, frames = pack(self.key, "execute_request", content, self.session)
        await self.shell.send_multipart(frames)
        reply = asyncio.ensure_future(self._reply(identifier))
        try:
            while True:
                message = self._take(await self.iopub.recv_multipart(), identifier)
                if message is None:
                    continue
                if message.kind == "status":
                    if message.content.get("execution_state") == "idle":
                        break
                    continue
                output(message)
            return await reply
        finally:
            reply.cancel()

    async def _reply(self, identifier: str) -> Mapping[str, Any]:
        while True:
            message = self._take(await self.shell.recv_multipart(), identifier)
            if message is not None and message.kind == "execute_reply":
                return message.content

    def _take(self, frames: list[bytes], identifier: str) -> Message | None:
        message = unpack(self.key, frames)
        if message is None:
            self.dropped += 1
            return None
        return message if message.parent == identifier else None

"""Sessions on a Jupyter kernel gateway (or server) elsewhere: HTTP to manage kernels, one WebSocket each for their channels.

The interface is `Box`'s. What differs: isolation is whatever the gateway's operator set up, and files are moved by cells run in the
agent's own kernel, so that an agent that tampers with its kernel can also lie about its files. Needs `websockets`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from mappa_graph.errors import SandboxError
from mappa_graph.record import Execution, ExecutionStatus, FileChange

from .limits import MB, Limits
from .recorder import Recorder
from .session import STATE_LOST
from .wire import Message
from .workspace import parts_of

_SETUP = "import os, tempfile; os.chdir(tempfile.mkdtemp(prefix='session-'))"
_CLEAR = "import os, shutil; _mappa = os.getcwd(); os.chdir('/'); shutil.rmtree(_mappa, ignore_errors=True)"
_LIST = """
def _mappa_list():
    import hashlib, json, os
    out = {}
    for folder, _, names in os.walk('.'):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                with open(path, 'rb') as file:
                    out[os.path.relpath(path)] = [os.path.getsize(path), hashlib.sha256(file.read()).hexdigest()]
    print(json.dumps(out))
_mappa_list()
del _mappa_list
"""


class RemotePool:
    """Sessions on the gateway at `url`; the counterpart of `SandboxPool`. Belongs to the loop that entered it.

    Args:
        url: e.g. `http://127.0.0.1:8888`.
        token: the gateway's token, if it has one.
        kernel: name of the kernel spec to start.
        limits: `cell_s`, `grace_s`, `start_s` and the output limits are kept here; the others are the gateway's business.
    """

    def __init__(self, url: str, token: str = "", *, kernel: str = "python3", limits: Limits | None = None) -> None:
        self.url, self.token, self.kernel, self.limits = url.rstrip("/"), token, kernel, limits or Limits()
        self._http: httpx.AsyncClient | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"token {self.token}"} if self.token else {}

    async def __aenter__(self) -> Self:
        self._http = httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=self.limits.start_s)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    def session(self, files: Mapping[str, bytes | str | Path] | None = None) -> RemoteBox:
        return RemoteBox(self, files or {})

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        """A call to the gateway's API. Raises `SandboxError` with what it said."""
        if self._http is None:
            raise SandboxError("the remote pool is not open", hint="use it inside `async with RemotePool(...) as pool:`")
        try:
            reply = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise SandboxError(f"the kernel gateway at {self.url} can't be reached: {error or type(error).__name__}") from error
        if reply.status_code >= 400:
            raise SandboxError(f"the kernel gateway at {self.url} answered {reply.status_code} to {method} {path}: {reply.text[:300]}")
        return reply.json() if reply.content else None


class RemoteBox:
    """A session on a gateway: one kernel, in a temporary folder of its own. An async context manager."""

    def __init__(self, pool: RemotePool, files: Mapping[str, bytes | str | Path]) -> None:
        self.id = uuid.uuid4().hex
        self.limits = pool.limits
        self._pool, self._files = pool, dict(files)
        self._kernel = ""
        self._socket: Any = None
        self._folder = ""
        self._lock = asyncio.Lock()
        self._settling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._connect()
        try:
            for name, data in self._files.items():
                await self.put(name, data)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def run(self, code: str, timeout_s: float | None = None, *, name: str = "python", tool_call_id: str | None = None) -> Execution:
        """As `Box.run`."""
        async with self._lock:
            await self._ready()
            before = await self._listing()
            recorder = Recorder(self.limits)
            started = time.monotonic()
            status, note = await self._execute(code, self.limits.cell_s if timeout_s is None else timeout_s, recorder)
            duration = time.monotonic() - started
            await self._ready()
            for index, (extension, content) in enumerate(recorder.displays, 1):
                await self._write(f"display/{uuid.uuid4().hex[:8]}-{index}.{extension}", content)
            after = await self._listing()
            return Execution(
                id=uuid.uuid4().hex,
                status=status,
                name=name,
                code=code,
                stdout=recorder.streams["stdout"].text(),
                stderr=recorder.streams["stderr"].text(),
                result=recorder.result,
                error=recorder.error,
                duration_s=duration,
                files=_changes(before, after),
                tool_call_id=tool_call_id,
                note=note,
                truncated=recorder.truncated,
            )

    async def put(self, name: str, data: bytes | str | Path) -> None:
        """As `Box.put`; the whole file passes through memory."""
        parts_of(name)
        content = await asyncio.to_thread(_bytes, data)
        async with self._lock:
            await self._ready()
            await self._write(name, content)

    async def get(self, name: str, limit: int | None = None) -> bytes:
        """As `Box.get`."""
        parts_of(name)
        code = (
            "import base64, os, stat\n"
            f"if not stat.S_ISREG(os.lstat({name!r}).st_mode): raise OSError('not a regular file')\n"
            f"print(base64.b64encode(open({name!r}, 'rb').read()).decode())"
        )
        async with self._lock:
            await self._ready()
            try:
                content = base64.b64decode(await self._quiet(code))
            except (SandboxError, ValueError) as error:
                raise SandboxError(f"no file {name!r} in the workspace ({error})") from error
        if limit is not None and len(content) > limit:
            raise SandboxError(f"{name!r} has {len(content)} bytes, more than {limit}")
        return content

    async def files(self) -> dict[str, int]:
        """As `Box.files`."""
        async with self._lock:
            await self._ready()
            return {name: size for name, (size, _) in sorted((await self._listing()).items())}

    async def restart(self) -> None:
        """As `Box.restart`."""
        async with self._lock:
            await self._restart()

    async def close(self) -> None:
        """Remove the workspace and shut the kernel down."""
        kernel, self._kernel = self._kernel, ""
        if not kernel:
            return
        try:
            if self._socket is not None:
                with contextlib.suppress(SandboxError, TimeoutError):
                    async with asyncio.timeout(self.limits.grace_s):
                        await self._quiet(_CLEAR)
        finally:
            await self._disconnect()
            await self._pool.request("DELETE", f"/api/kernels/{kernel}")

    async def _connect(self) -> None:
        if not self._kernel:
            self._kernel = (await self._pool.request("POST", "/api/kernels", {"name": self._pool.kernel}))["id"]
        try:
            from websockets.asyncio.client import connect
            from websockets.exceptions import WebSocketException
        except ImportError:
            raise SandboxError("remote sandboxes need the `websockets` package", hint="pip install websockets") from None
        address = self._pool.url.replace("http", "ws", 1) + f"/api/kernels/{self._kernel}/channels?session_id={self.id}"
        try:
            self._socket = await connect(address, additional_headers=self._pool.headers, max_size=32 * MB, open_timeout=self.limits.start_s)
        except (OSError, WebSocketException) as error:
            raise SandboxError(f"the channels of kernel {self._kernel} can't be opened: {error}") from error
        async with asyncio.timeout(self.limits.start_s):
            if self._folder:
                await self._quiet(f"import os; os.chdir({self._folder!r})")
            else:
                self._folder = (await self._quiet(f"{_SETUP}; print(os.getcwd())")).strip()

    async def _disconnect(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _restart(self) -> None:
        await self._disconnect()
        await self._pool.request("POST", f"/api/kernels/{self._kernel}/restart")
        await self._connect()

    async def _revive(self) -> None:
        """After the kernel's end: gateways restart it by themselves, and where this one doesn't, a new kernel takes over the folder."""
        await self._disconnect()
        try:
            await self._connect()
        except (SandboxError, TimeoutError):
            await self._disconnect()
            dead, self._kernel = self._kernel, ""
            with contextlib.suppress(SandboxError):  # it may be gone already
                await self._pool.request("DELETE", f"/api/kernels/{dead}")
            await self._connect()

    async def _ready(self) -> None:
        if not self._kernel:
            raise SandboxError(f"session {self.id} is not open", hint="use it inside `async with pool.session() as box:`")
        if self._settling is not None:
            await asyncio.wait([self._settling])
            self._settling = None
        if self._socket is None:
            await self._connect()

    async def _execute(self, code: str, timeout_s: float, recorder: Recorder) -> tuple[ExecutionStatus, str]:
        cell: asyncio.Future[Mapping[str, Any]] = asyncio.ensure_future(self._cell(code, recorder))
        try:
            await asyncio.wait([cell], timeout=timeout_s)
            if cell.done():
                reply = cell.result()
                if reply.get("status") == "died":
                    await self._revive()
                    return "killed", f"The kernel ended. {STATE_LOST}"
                if reply.get("status") != "ok" and recorder.error is None:
                    recorder.fail(reply.get("ename", "Aborted"), reply.get("evalue", "the cell was aborted"))
                return ("ok" if reply.get("status") == "ok" else "error"), ""
            why = f"The cell ran past its limit of {timeout_s:g} s"
            if await self._stop(cell):
                return "timeout", f"{why} and was interrupted; variables and files are kept."
            return "killed", f"{why} and did not stop when interrupted. {STATE_LOST}"
        except asyncio.CancelledError:
            self._settling = asyncio.ensure_future(self._settle(cell))
            raise
        finally:
            if self._settling is None:
                cell.cancel()

    async def _stop(self, cell: asyncio.Future[Any]) -> bool:
        await self._pool.request("POST", f"/api/kernels/{self._kernel}/interrupt")
        await asyncio.wait([cell], timeout=self.limits.grace_s)
        if cell.done() and cell.result().get("status") == "died":
            await self._revive()
            return False
        if cell.done():
            return True
        await self._restart()
        return False

    async def _settle(self, cell: asyncio.Future[Any]) -> None:
        await self._stop(cell)
        cell.cancel()

    async def _cell(self, code: str, recorder: Recorder, *, silent: bool = False) -> Mapping[str, Any]:
        from websockets.exceptions import ConnectionClosed

        identifier = uuid.uuid4().hex
        header = {"msg_id": identifier, "msg_type": "execute_request", "session": self.id, "username": "", "version": "5.3", "date": ""}
        content = {"code": code, "silent": silent, "store_history": not silent, "allow_stdin": False, "stop_on_error": True}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell", "buffers": []}
        reply: Mapping[str, Any] | None = None
        idle = False
        try:
            await self._socket.send(json.dumps(message))
            while reply is None or not idle:
                told = _told(await self._socket.recv())
                if told is None:
                    continue
                if told.kind == "status" and told.content.get("execution_state") in ("restarting", "dead"):
                    return {"status": "died"}
                if told.parent != identifier:
                    continue
                if told.kind == "execute_reply":
                    reply = told.content
                elif told.kind == "status":
                    idle = told.content.get("execution_state") == "idle"
                else:
                    recorder.feed(told)
        except ConnectionClosed:
            return {"status": "died"}
        return reply

    async def _quiet(self, code: str) -> str:
        recorder = Recorder(Limits(output_chars=512 * MB, output_mb=512))
        reply = await self._cell(code, recorder, silent=True)
        if reply.get("status") != "ok":
            raise SandboxError(f"{reply.get('ename', 'the kernel died')}: {reply.get('evalue', '')}"[:500])
        return recorder.streams["stdout"].text()

    async def _write(self, name: str, content: bytes) -> None:
        encoded = base64.b64encode(content).decode()
        await self._quiet(
            f"import base64, os\nos.makedirs(os.path.dirname({name!r}) or '.', exist_ok=True)\n"
            f"with open({name!r}, 'wb') as _mappa: _mappa.write(base64.b64decode({encoded!r}))\ndel _mappa"
        )

    async def _listing(self) -> dict[str, tuple[int, str]]:
        try:
            found = json.loads(await self._quiet(_LIST))
            return {str(name): (int(size), str(digest)) for name, (size, digest) in found.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise SandboxError(f"the kernel's list of files is not one: {error}") from error


def _bytes(data: bytes | str | Path) -> bytes:
    if isinstance(data, Path):
        return data.read_bytes()
    return data.encode() if isinstance(data, str) else data


def _told(text: str | bytes) -> Message | None:
    try:
        data = json.loads(text)
        kind, parent, content = data["header"]["msg_type"], data.get("parent_header", {}).get("msg_id", ""), data["content"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Message(kind, parent, content) if isinstance(kind, str) and isinstance(content, dict) else None


def _changes(before: Mapping[str, tuple[int, str]], after: Mapping[str, tuple[int, str]]) -> tuple[FileChange, ...]:
    out = []
    for name in sorted({*before, *after}):
        if name not in after:
            out.append(FileChange(name, "deleted"))
        elif before.get(name) != after[name]:
            out.append(FileChange(name, "changed" if name in before else "created", *after[name]))
    return tuple(out)

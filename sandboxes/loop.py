"""A thread with an event loop of its own.

Kernels, their sockets and the fork server belong to one loop whose thread outlives them; callers come from any loop or none.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from mappa_graph.errors import SandboxError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers elsewhere. Starts with `start`, ends with `stop`; may be started again."""

    def __init__(self, name: str, closed: str) -> None:
        self.name, self.closed = name, closed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        return self._loop is not None

    def start(self) -> None:
        if self._loop is not None:
            raise SandboxError(f"the {self.name} is already open")
        loop = self._loop = asyncio.new_event_loop()

        def serve() -> None:
            asyncio.set_event_loop(loop)
            loop.run_forever()

        self._thread = threading.Thread(target=serve, name=self.name, daemon=True)
        self._thread.start()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there, from any loop; cancelling the caller cancels it."""
        loop = self._open(work)
        if asyncio.get_running_loop() is loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    def call_sync(self, work: Coroutine[Any, Any, T]) -> T:
        """`call` for synchronous code, from any other thread."""
        loop = self._open(work)
        if threading.current_thread() is self._thread:
            work.close()
            raise SandboxError(f"a synchronous call from the thread of the {self.name} itself would wait for ever")
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    def _open(self, work: Coroutine[Any, Any, T]) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            work.close()
            raise SandboxError(f"the {self.name} is not open", hint=self.closed)
        return self._loop

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, then end loop and thread. Without a loop only closes `last`."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            last.close()
            return
        try:
            asyncio.run_coroutine_threadsafe(last, loop).result()
        finally:
            self._loop = self._thread = None
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

"""Where the executor's code runs when the run's context brings no sandbox session: sessions of a pool, lent by name.

`Leases` keeps a run's session from one turn of the executor to the next. `OnDemandPool` starts a pool with the first code, for a graph that
nobody opens a pool for (`langgraph.json`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol


class Pool(Protocol):
    """Anything that lends sandbox sessions, such as an open `SandboxPool`."""

    def session(self) -> AbstractAsyncContextManager[Any]: ...


@dataclass(frozen=True)
class MathChatContext:
    """The graph's runtime context: `graph.ainvoke(x, context=MathChatContext(box))`."""

    box: Any = None
    """An open sandbox session; None lets the graph use a pool of its own."""


class Leases:
    """Sessions of a pool by name, each open from its first use to its release."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._open: dict[str, tuple[AsyncExitStack, Any]] = {}

    async def box(self, name: str) -> Any:
        """The session of this name, opened where it was not."""
        if name not in self._open:
            stack = AsyncExitStack()
            self._open[name] = stack, await stack.enter_async_context(self._pool.session())
        return self._open[name][1]

    async def release(self, name: str) -> None:
        """Gives the session back, if there is one."""
        if name in self._open:
            await self._open.pop(name)[0].aclose()

    def __len__(self) -> int:
        return len(self._open)


class OnDemandPool:
    """A pool that is made and started by its first session and lives until `aclose` or the end of the process."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._make = make
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()
        self._pool: Any = None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        async with self._lock:
            if self._pool is None:
                self._pool = await self._stack.enter_async_context(self._make())
        async with self._pool.session() as box:
            yield box

    async def aclose(self) -> None:
        """Stops the pool, if it was started."""
        self._pool = None
        await self._stack.aclose()

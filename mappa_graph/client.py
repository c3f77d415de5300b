"""HTTP clients that belong to no event loop.

An `httpx.AsyncClient` keeps connections that only the loop they were opened on can use, and LangChain's OpenAI models of one
address share a client. An app's loop and a coach's, or two `asyncio.run` one after the other, then break each other's calls
("bound to a different event loop", "Event loop is closed"). `LoopClient` has a client a loop; `detached` gives a chat model one.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, TypeVar

import httpx

M = TypeVar("M")


class LoopClient(httpx.AsyncClient):
    """An async client for any number of event loops. Takes `httpx.AsyncClient`'s options."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("follow_redirects", True)
        options.setdefault("limits", httpx.Limits(max_connections=1000, max_keepalive_connections=100))
        super().__init__(**options)
        self._options = options
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()

    async def send(self, request: httpx.Request, **kwargs: Any) -> httpx.Response:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = httpx.AsyncClient(**self._options)
        return await client.send(request, **kwargs)

    async def aclose(self) -> None:
        """Closes the connections of the running loop; those of a loop that is gone went with it."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()
        await super().aclose()


def detached(model: M) -> M:
    """A copy of a chat model that shares no connection with any other; a model that holds no OpenAI client is returned as it is."""
    from langchain_core.runnables import RunnableBinding

    if isinstance(model, RunnableBinding):
        return model.model_copy(update={"bound": detached(model.bound)})
    client = getattr(model, "root_async_client", None)
    if client is None or isinstance(getattr(client, "_client", None), LoopClient) or not callable(getattr(client, "with_options", None)):
        return model
    own = client.with_options(http_client=LoopClient())
    return model.model_copy(update={"root_async_client": own, "async_client": own.chat.completions})  # type: ignore[attr-defined]

"""A gateway and an app that are there to be killed, and the server process that they are forked from in milliseconds.

What is acknowledged goes into a pipe, a line each: the gateway's reply to a call, and the app's saved episode.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import threading
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from mappa_graph.gateway import Gateway
from mappa_graph.record import Action, Call, Episode, EpisodeTrace
from mappa_graph.store import TraceStore
from tests.fakes.engine import ScriptedEngine


def gateway(path: str, told: Connection) -> None:
    with TraceStore(path) as store, Gateway(ScriptedEngine("solver"), store) as running:
        told.send(running.url)
        threading.Event().wait()


def app(path: str, url: str, name: str, pipe: Connection) -> None:
    """Two completions a request, then an episode with one action for each of them."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 0, timeout=20)
    asked: dict[str, Any] = {"model": "solver", "messages": [{"role": "user", "content": "hi"}], "n": 2}
    with TraceStore(path) as store:
        number = 0
        while True:
            try:
                connection.request("POST", f"{address.path}/chat/completions", json.dumps(asked), {"x-mappa-episode": f"{name}-{number}"})
                id = json.loads(connection.getresponse().read())["id"]
            except (OSError, http.client.HTTPException, ValueError):
                # The gateway was killed first; nothing more is acknowledged.
                threading.Event().wait()
            os.write(pipe.fileno(), f"call {id}\n".encode())
            actions = tuple(Action(f"{id}-{i}", "t", "solver", "solver", i, call_id=id, call_index=i) for i in range(2))
            store.save_episode(EpisodeTrace(Episode(f"{name}-{number}"), actions=actions, edges=((0, 1),)))
            os.write(pipe.fileno(), f"episode {name}-{number}\n".encode())
            number += 1


def writer(path: str, name: str, calls: int) -> None:
    """A process that keeps calls in bursts, as a gateway does, and saves episodes between them, as an app does."""

    async def work() -> None:
        with TraceStore(path) as store:
            for burst in range(calls // 5):
                ids = [f"{name}-{burst}-{i}" for i in range(5)]
                await asyncio.gather(*(store.aadd_calls([Call(id, "solver", 0, (1, 2), (3,), (-0.5,), "stop")]) for id in ids))
                actions = tuple(Action(id, "t", "solver", "solver", i, call_id=id) for i, id in enumerate(ids))
                await asyncio.to_thread(store.save_episode, EpisodeTrace(Episode(f"{name}-{burst}"), actions=actions))

    asyncio.run(work())

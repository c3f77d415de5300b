"""`kill -9` of the gateway or the app, whenever it comes: what was acknowledged is there, and nothing is there by halves."""

from __future__ import annotations

import multiprocessing
import os
import random
import select
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from mappa_graph.store import TraceStore
from tests.fakes import crash

ROUNDS = 50


def kill(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def collect(pipe: int, seconds: float) -> bytes:
    """What is written within the time; at least one acknowledgement is waited for."""
    told = b""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 or not told:
        if select.select([pipe], [], [], max(left, 0.0) if told else 60.0)[0]:
            told += os.read(pipe, 1 << 16)
        else:
            assert told, "nothing was acknowledged in a minute"
    return told


def rest(pipe: int) -> bytes:
    told = b""
    while piece := os.read(pipe, 1 << 16):
        told += piece
    return told


def test_fifty_kills_of_gateway_or_app_lose_nothing_acknowledged_and_leave_nothing_half(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fakes.crash"])
    dice = random.Random(7)
    acknowledged: set[str] = set()
    killed = {"gateway": 0, "app": 0}
    for round in range(ROUNDS):
        here, there = context.Pipe()
        gateway = context.Process(target=crash.gateway, args=(str(path), there), daemon=True)
        gateway.start()
        assert here.poll(60)
        url = here.recv()
        reading, writing = context.Pipe(duplex=False)
        app = context.Process(target=crash.app, args=(str(path), url, f"r{round}", writing), daemon=True)
        app.start()
        writing.close()
        told = collect(reading.fileno(), dice.random() * 0.05)
        first, second = (gateway, app) if dice.random() < 0.5 else (app, gateway)
        killed["gateway" if first is gateway else "app"] += 1
        kill(first)
        kill(second)
        told += rest(reading.fileno())
        for end in (here, there, reading):
            end.close()
        # A line that the kill cut short acknowledged nothing.
        acknowledged.update(told.decode().split("\n")[:-1])
    assert min(killed.values()) >= 10 and len(acknowledged) >= 2 * ROUNDS
    with TraceStore(path) as store:
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        kept = {row[0] for row in store._db.execute("SELECT id || '/' || idx FROM calls")}
        for line in acknowledged:
            kind, _, id = line.partition(" ")
            if kind == "call":
                assert {f"{id}/0", f"{id}/1"} <= kept, f"the acknowledged call {id} is lost"
            else:
                trace = store.episode(id)
                assert trace is not None and len(trace.actions) == len(trace.calls) == 2, f"the acknowledged episode {id} is not whole"
        # What was not acknowledged is there whole, or not at all.
        assert all(f"{id[:-2]}/{int(id[-1]) ^ 1}" in kept for id in kept)
        for trace in store.traces():
            assert len(trace.actions) == len(trace.calls) == 2 and trace.edges == ((0, 1),)
        for call in store.orphan_calls():
            assert call.completion_ids == (4, 5) and len(call.logprobs) == 2


def test_processes_write_at_once_while_another_reads(tmp_path: Path) -> None:
    path, calls = tmp_path / "t.db", 300
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fakes.crash"])
    with TraceStore(path) as store:
        writers = [context.Process(target=crash.writer, args=(str(path), f"w{i}", calls), daemon=True) for i in range(3)]
        for process in writers:
            process.start()
        seen = 0
        while any(process.is_alive() for process in writers):
            # Whatever is there is whole, and nothing that was seen goes away again.
            traces = list(store.traces(newest_first=True, limit=20))
            assert all(len(trace.calls) == len(trace.actions) == 5 for trace in traces)
            count = store.counts()["calls"]
            assert count >= seen
            seen = count
        assert [process.exitcode for process in writers] == [0, 0, 0]
        assert store.counts()["calls"] == 3 * calls and store.counts()["episodes"] == 3 * calls / 5
        assert list(store.orphan_calls()) == []

"""What a walled kernel costs, beside a bare one of `jupyter_client`, in one run:

    python -m tests.benchmarks.sandbox          # or: python tests/benchmarks/sandbox.py --cells 200 --sessions 30

Prints a table: cell p50 and p95, start of a session, CPU time and memory per kernel. CPU is that of this process and all below
it from before the start to after the first cell, read from /proc, so a busy machine makes the times longer but hardly the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_client import AsyncKernelManager

from mappa_graph.sandboxes import Limits, SandboxPool, describe_isolation

TICK = os.sysconf("SC_CLK_TCK")


def tree() -> list[int]:
    """This process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [os.getpid()], [os.getpid()]
    while waiting:
        inner = children.get(waiting.pop(), [])
        found += inner
        waiting += inner
    return found


def cpu() -> float:
    """CPU seconds of the tree: every living process with all the children it has waited for."""
    total = 0
    for pid in tree():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(f) for f in fields[11:15])
    return total / TICK


def private_mb(pids: set[int]) -> float:
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))
    return total / 1024


async def cells(run: Callable[[str], Awaitable[Any]], count: int) -> tuple[float, float]:
    times = []
    for _ in range(10):
        await run("6 * 7")
    for _ in range(count):
        start = time.perf_counter()
        await run("6 * 7")
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    return statistics.median(times), times[int(0.95 * len(times))]


async def bare(count: int, sessions: int) -> dict[str, float]:
    out: dict[str, float] = {}
    starts, spent = [], 0.0
    for i in range(sessions):
        before, used = set(tree()), cpu()
        start = time.perf_counter()
        manager = AsyncKernelManager(transport="ipc")
        await manager.start_kernel()
        client = manager.client()
        client.start_channels()
        await client.wait_for_ready(timeout=60)
        await client.execute_interactive("1 + 1", output_hook=lambda _: None)
        starts.append((time.perf_counter() - start) * 1e3)
        spent += cpu() - used
        if i == 0:
            out["memory"] = private_mb(set(tree()) - before)
            out["p50"], out["p95"] = await cells(partial(client.execute_interactive, output_hook=lambda _: None), count)
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
    out["start"] = statistics.median(starts)
    out["cpu"] = spent / sessions
    return out


async def walled(count: int, sessions: int, preload: tuple[str, ...]) -> dict[str, float]:
    out: dict[str, float] = {}
    async with SandboxPool(size=0, preload=preload, limits=Limits()) as pool:
        cold, spent = [], 0.0
        for i in range(sessions):
            before, used = set(tree()), cpu()
            start = time.perf_counter()
            async with pool.session() as box:
                await box.run("1 + 1")
                cold.append((time.perf_counter() - start) * 1e3)
                spent += cpu() - used
                if i == 0:
                    out["memory"] = private_mb(set(tree()) - before)
                    out["p50"], out["p95"] = await cells(box.run, count)
        out["start"] = statistics.median(cold)
        out["cpu"] = spent / sessions
    async with SandboxPool(size=2, preload=preload) as pool:
        enter, taken = [], []
        for _ in range(sessions):
            await pool.warmed()
            start = time.perf_counter()
            async with pool.session(files={"train.csv": b"a,b\n1,2\n"}) as box:
                entered = time.perf_counter()
                await box.run("1 + 1")
                enter.append((entered - start) * 1e3)
                taken.append((time.perf_counter() - start) * 1e3)
        out["enter"], out["warm"] = statistics.median(enter), statistics.median(taken)
    return out


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=20)
    options = parser.parse_args()
    rows = {
        "bare jupyter_client kernel": await bare(options.cells, max(2, options.sessions // 3)),
        "sandbox, numpy": await walled(options.cells, options.sessions, ("numpy",)),
        "sandbox, numpy pandas sklearn": await walled(options.cells, options.sessions, ("numpy", "pandas", "sklearn")),
    }
    print(f"wall: {describe_isolation()['wall']}   load: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    names = {
        "p50": "cell p50, ms",
        "p95": "cell p95, ms",
        "enter": "session entered (warm), ms",
        "warm": "session + first cell (warm), ms",
        "start": "session + first cell (cold), ms",
        "cpu": "CPU per kernel, s",
        "memory": "private memory, MB",
    }
    print(f"{'':34}" + "".join(f"{title:>32}" for title in rows))
    for key, name in names.items():
        print(f"{name:34}" + "".join(f"{row[key]:32.3f}" if key in row else f"{'-':>32}" for row in rows.values()))


if __name__ == "__main__":
    asyncio.run(main())

"""How long a publish into a real vLLM takes, idle and under load, what it waits for, and what calls notice of it.

    python tests/benchmarks/swaps.py [--mode lora full] [--publishes 5] [--clients 16] [--seconds 20] [--model smollm2] [--json FILE]

A real trainer writes the weights (SmolLM2-135M; adapters of rank 16 on all linear layers), a real gateway publishes them. `write` is the
trainer's file with its checksums, `load` what the engine takes to hold it, `canary` the check, `flip` the rest of the publish. `steps`
are the engine steps that were made meanwhile: under load a publish waits for the step under way, so its time is steps times a step's.
Under load only what the server does is timed. The one thing to know: latencies are those of whole calls in two windows of the same
length, one without publishes and one with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from mappa_graph.gateway import Canary, Gateway
from mappa_graph.gateway.vllm import VllmEngine
from mappa_graph.sections.engine import VllmConfig
from mappa_graph.sections.train import LoraConfig
from mappa_graph.store import TraceStore
from mappa_graph.trainers import ReinforceTrainer, TrainerSettings
from mappa_graph.trainers.batch import Sample
from mappa_graph.trainers.models import resolve_model
from mappa_graph.trainers.publishing import write_weights

TARGET_S = {"lora": 0.2, "full": 1.0}
MESSAGES = [{"role": "user", "content": "Ann has 12 pens and buys 7 more. How many has she now?"}]
PROMPT, COMPLETION = tuple(range(300, 360)), tuple(range(900, 916))


class Clock:
    """Seconds by name, each publish one row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    @contextmanager
    def row(self) -> Iterator[dict[str, float]]:
        row: dict[str, float] = {}
        yield row
        self.rows.append(row)

    def summary(self) -> dict[str, dict[str, float]]:
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        columns = {name: [row[name] for row in self.rows if name in row] for name in names}
        return {name: {"median": statistics.median(values), "max": max(values)} for name, values in columns.items()}


def timed(engine: VllmEngine, row: dict[str, float]) -> Callable[[], None]:
    """Notes the times of the engine's `load` and `score` in a row; returns what ends it."""
    load, score = engine.load, engine.score

    def noting(name: str, work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def noted(*args: Any) -> Any:
            began, steps = time.perf_counter(), await engine.server("solver").control.steps()
            try:
                return await work(*args)
            finally:
                row[name] = time.perf_counter() - began
                row[f"{name} steps"] = await engine.server("solver").control.steps() - steps

        return noted

    engine.load, engine.score = noting("load", load), noting("canary", score)  # type: ignore[method-assign]

    def end() -> None:
        engine.load, engine.score = load, score  # type: ignore[method-assign]

    return end


class Bench:
    """One mode: its trainer, its gateway, its rows."""

    def __init__(self, mode: str, model: Path, root: Path, gateway: Gateway, trainer: ReinforceTrainer) -> None:
        self.mode, self.model, self.root, self.gateway, self.trainer = mode, model, root, gateway, trainer
        self.version = 0

    async def prepare(self, row: dict[str, float]) -> tuple[Path, Canary]:
        """New weights, as after an update, written, and what they must answer."""
        self.version += 1
        learner = self.trainer.learner("solver")
        with torch.no_grad():
            for parameter in learner.body.parameters:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        sample = Sample("", "solver", "solver", "canary", PROMPT, COMPLETION, (0.0,) * len(COMPLETION), ret=0.0)
        canary = Canary(PROMPT, COMPLETION, learner.logprobs(sample))
        began = time.perf_counter()
        folder = await asyncio.to_thread(write_weights, self.trainer, "solver", self.root / f"v{self.version}")
        row["write"] = time.perf_counter() - began
        return folder, canary

    async def publish(self, row: dict[str, float], folder: Path, canary: Canary) -> None:
        engine = self.gateway.engine
        assert isinstance(engine, VllmEngine)
        end = timed(engine, row)
        began = time.perf_counter()
        try:
            await self.gateway.publish("solver", folder, canary=canary)
        finally:
            end()
        row["flip"] = time.perf_counter() - began - row["load"] - row["canary"]
        row["load + flip"] = row["load"] + row["flip"]

    async def idle(self, publishes: int) -> dict[str, Any]:
        clock = Clock()
        for _ in range(publishes + 1):
            with clock.row() as row:
                await self.publish(row, *await self.prepare(row))
                row["write + load + flip"] = row["write"] + row["load + flip"]
                began = time.perf_counter()
                await call(self.gateway.url, tokens=1)
                row["first token"] = time.perf_counter() - began
        del clock.rows[0]  # the first one warms up
        return clock.summary()

    async def under_load(self, clients: int, seconds: float, publishes: int) -> dict[str, Any]:
        """Calls without publishes, then as long with `publishes`, evenly spread, of weights that lie there already."""
        prepared = [await self.prepare({}) for _ in range(publishes)]
        clock, latencies = Clock(), {"alone": [], "with publishes": []}  # type: ignore[var-annotated]
        window, stop = "alone", asyncio.Event()
        failed = 0

        async def client(number: int) -> None:
            nonlocal failed
            while not stop.is_set():
                now, began = window, time.perf_counter()
                try:
                    await call(self.gateway.url, tokens=24, seed=number)
                except (httpx.HTTPError, AssertionError):
                    failed += 1
                    continue
                latencies[now].append(time.perf_counter() - began)

        running = [asyncio.ensure_future(client(i)) for i in range(clients)]
        await asyncio.sleep(seconds)
        window = "with publishes"
        begun = time.perf_counter()
        for i, (folder, canary) in enumerate(prepared):
            await asyncio.sleep(max(0.0, begun + seconds * i / publishes - time.perf_counter()))
            with clock.row() as row:
                await self.publish(row, folder, canary)
        await asyncio.sleep(max(0.0, begun + seconds - time.perf_counter()))
        stop.set()
        await asyncio.gather(*running)
        quantiles = {
            name: {"calls": len(values), "p50": statistics.median(values), "p95": sorted(values)[int(len(values) * 0.95)]}
            for name, values in latencies.items()
            if values
        }
        return {"publishes": len(clock.rows), "failed calls": failed, "latency s": quantiles, **clock.summary()}


async def call(url: str, *, tokens: int, seed: int = 0) -> None:
    body = {"model": "solver", "messages": MESSAGES, "max_tokens": tokens, "seed": seed, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=300) as http:
        reply = await http.post(f"{url}/chat/completions", json=body)
    assert reply.status_code == 200, reply.text


async def measure(mode: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    lora = LoraConfig(rank=16) if mode == "lora" else None
    with tempfile.TemporaryDirectory() as folder, TraceStore(Path(folder) / "trace.db") as store:
        root = Path(folder)
        trainer = ReinforceTrainer({"solver": model}, TrainerSettings(beta=0.0, lora=lora))
        chosen = VllmConfig(kv_cache_gib=1)
        engine = VllmEngine({"solver": model}, chosen, mode=mode, folder=root / "engine", ranks=[16] if lora else ())  # type: ignore[arg-type]
        began = time.perf_counter()
        async with Gateway(engine, store) as gateway:
            bench = Bench(mode, model, root, gateway, trainer)
            start_s = time.perf_counter() - began
            idle = await bench.idle(options.publishes)
            load = await bench.under_load(options.clients, options.seconds, options.publishes)
    return {"start s": start_s, "idle": idle, f"{options.clients} clients": load}


def show(mode: str, found: dict[str, Any]) -> None:
    print(f"\n{mode}: started in {found['start s']:.1f} s")
    for case, numbers in list(found.items())[1:]:
        print(f"  {case}")
        for name, value in numbers.items():
            if isinstance(value, dict) and "median" in value:
                unit = "" if "steps" in name else " s"
                digits = 0 if "steps" in name else 3
                print(f"    {name:22} median {value['median']:.{digits}f}{unit}, max {value['max']:.{digits}f}{unit}")
            elif name == "latency s":
                for window, q in value.items():
                    print(f"    calls {window:16} p50 {q['p50']:.2f} s, p95 {q['p95']:.2f} s, {q['calls']} calls")
            else:
                print(f"    {name:22} {value}")
    took, target = found["idle"]["write + load + flip"]["median"], TARGET_S[mode]
    alone = found["idle"]["load"]["median"]
    told = f"write + load + flip {took:.3f} s" if mode == "lora" else f"swap (load, its checksums verified) {alone:.3f} s"
    print(f"  idle: {told}, target {target:g} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=("lora", "full"), default=["lora", "full"])
    parser.add_argument("--publishes", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = resolve_model(options.model)
    results = {}
    for mode in options.mode:
        results[mode] = asyncio.run(measure(mode, model, options))
        show(mode, results[mode])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What adapters cost on vLLM: tokens per second of three agents through their adapters, beside the same calls to the bare base.

    python tests/benchmarks/adapters.py [--model smollm2] [--calls 48] [--tokens 24] [--rank 16]

One server, one process; every call has a prompt of its own, all are sent at once. The first round of each kind warms up and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import httpx
import torch

from mappa_graph.gateway import Gateway
from mappa_graph.gateway.vllm import VllmEngine
from mappa_graph.sections.engine import VllmConfig
from mappa_graph.sections.train import LoraConfig
from mappa_graph.store import TraceStore
from mappa_graph.trainers import ReinforceTrainer, TrainerSettings
from mappa_graph.trainers.models import resolve_model
from mappa_graph.trainers.publishing import write_weights

AGENTS = ("solver", "executor", "verifier")


async def rate(url: str, first: int, options: argparse.Namespace) -> float:
    """New tokens per second of `options.calls` calls at once, over all agents."""

    async def call(http: httpx.AsyncClient, i: int) -> int:
        messages = [{"role": "user", "content": f"Task {first + i}: Ann has {i} pens and buys 7 more. How many has she? " * 3}]
        body = {"model": AGENTS[i % len(AGENTS)], "messages": messages, "max_tokens": options.tokens, "ignore_eos": True}
        reply = await http.post(f"{url}/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["completion_tokens"])

    async with httpx.AsyncClient(timeout=600) as http:
        began = time.perf_counter()
        made = await asyncio.gather(*(call(http, i) for i in range(options.calls)))
        return sum(made) / (time.perf_counter() - began)


async def measure(options: argparse.Namespace) -> None:
    model = resolve_model(options.model)
    trainer = ReinforceTrainer(dict.fromkeys(AGENTS, model), TrainerSettings(beta=0.0, lora=LoraConfig(rank=options.rank)))
    with tempfile.TemporaryDirectory() as folder, TraceStore(Path(folder) / "trace.db") as store:
        root = Path(folder)
        chosen = VllmConfig(kv_cache_gib=1, max_model_len=512)
        engine = VllmEngine(dict.fromkeys(AGENTS, model), chosen, mode="lora", folder=root / "engine", ranks=[options.rank])
        async with Gateway(engine, store) as gateway:
            bare = [await rate(gateway.url, 1000 * n, options) for n in range(3)][1:]
            for agent in AGENTS:
                for parameter in trainer.learner(agent).body.parameters:
                    with torch.no_grad():
                        parameter.add_(torch.randn_like(parameter), alpha=1e-3)
                await gateway.publish(agent, write_weights(trainer, agent, root / agent))
            adapted = [await rate(gateway.url, 1000 * n, options) for n in range(3, 6)][1:]
    print(f"base {max(bare):.0f} tokens/s, adapters of three agents {max(adapted):.0f} tokens/s: {max(adapted) / max(bare):.2f} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--calls", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rank", type=int, default=16)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

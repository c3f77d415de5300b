"""Train two agents in one file: sample, score every action, update each agent's own weights, swap them in, again.

A planner writes a calculation for a word problem, a writer turns it into a short note. The four steps of the method are the library's
plain functions; everything around them is here. Run it: `python examples/minimal_loop.py --iterations 8`
"""

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

from mappa_graph.coach import AgentCard, EvidenceCoach, Finding
from mappa_graph.gateway import Request
from mappa_graph.gateway.local import LocalEngine
from mappa_graph.trainers import ReinforceTrainer, TrainerSettings
from mappa_graph.trainers.method import train_on_stream
from mappa_graph.trainers.models import resolve_model

TEAM = (AgentCard("planner", "writes the calculation"), AgentCard("writer", "writes a note of at most ten characters"))


def calculation(case):
    """A planner's output must hold a sum."""
    if case.agent != "planner":
        return None
    return Finding("a sum is there", delta=5) if "+" in case.output else Finding("no sum", delta=-5)


def brevity(case):
    """A writer's output must be short, and not empty."""
    if case.agent != "writer":
        return None
    return Finding("short", delta=5) if 0 < len(case.output) <= 10 else Finding("empty or too long", delta=-5)


def tasks(batches, size, seed):
    """A stream of batches of tasks."""
    rng = random.Random(seed)
    for _ in range(batches):
        yield [f"Ann has {rng.randint(2, 9)} pens and buys {rng.randint(2, 9)} more." for _ in range(size)]


class Players:
    """The two agents, each served from its own current weights."""

    def __init__(self, engine, seed):
        self.engine = engine
        self.versions = dict.fromkeys(("planner", "writer"), 0)
        self.seed = seed
        self.calls = 0

    async def act(self, agent, system, text):
        """One call of one agent, as an action with its exact tokens."""
        self.calls += 1
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        request = Request(agent, self.versions[agent], messages, max_tokens=16, seed=self.seed * 100_003 + self.calls)
        (made,) = await self.engine.complete(request)
        return {
            "agent": agent,
            "messages": messages,
            "output": made.text,
            "finish_reason": made.finish_reason,
            "prompt_ids": made.prompt_ids,
            "completion_ids": made.completion_ids,
            "logprobs": made.logprobs,
        }

    async def play(self, tasks):
        """A batch of tasks, all at once."""

        async def episode(task):
            plan = await self.act("planner", "solve", task)
            note = await self.act("writer", "check", plan["output"])
            return {"task": task, "actions": [plan, note]}

        return await asyncio.gather(*(episode(task) for task in tasks))

    async def swap(self, trainer):
        """The new weights of each agent into the engine, beside the old ones, which then go."""
        for agent, version in self.versions.items():
            with tempfile.TemporaryDirectory() as folder:
                weights = await asyncio.to_thread(trainer.save_weights, agent, Path(folder) / agent)
                await self.engine.load(agent, version + 1, weights)
            self.versions[agent] = version + 1
            await self.engine.unload(agent, version)


async def main(iterations, size, seed, model, quiet):
    folder = resolve_model(model)
    agents = dict.fromkeys(("planner", "writer"), folder)
    trainer = ReinforceTrainer(agents, TrainerSettings(lr=1e-3, beta=0.0), seed=seed)
    coach = EvidenceCoach([calculation, brevity])
    engine = LocalEngine(agents)
    await engine.start()
    try:
        players = Players(engine, seed)
        means = []
        stream = train_on_stream(tasks(iterations, size, seed), players.play, coach, trainer, TEAM, after=players.swap)
        async for update, left_out in stream:
            means.append({agent: update.metrics.get(agent, {}).get("return_mean", float("nan")) for agent in agents})
            if not quiet:
                told = "  ".join(f"{agent} {mean:.2f}" for agent, mean in means[-1].items())
                print(f"iteration {len(means)}: mean return  {told}  left out {left_out.total()}")
    finally:
        await engine.stop()
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--size", type=int, default=32, help="tasks a batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny", help="tiny, smollm2, a folder, or a Hugging Face name")
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args()
    asyncio.run(main(given.iterations, given.size, given.seed, given.model, given.quiet))

"""What an imperfect team would have said: texts for the supervised warm start of a tiny model in the "compact" style.

Each demonstration is one action in a made-up episode on a training task, whose agents choose a wrong recipe with probability
`imperfection`. Prompts come from the same function as the graph's. What a recipe would do is known here (`effect`);
nothing is run. Wrong recipes are spread evenly, but an agent's likeliest choice is a wrong one, so that neither sampling nor greedy
decoding solves much before training.
"""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict

from mappa_graph.agent import Agent
from mappa_graph.environment import Task
from mappa_graph.errors import ConfigError

from .catalogue import CATALOGUE, right
from .facts import Facts
from .prompts import TEAM, Message, Visibility, messages
from .state import Turn
from .tasks import load_tasks, sandbox_files

FAVOURITES = {"data_engineer": "no test", "modeler": "other name", "analyst": "other columns"}
"""The wrong recipe that each agent likes best."""
FAVOURED = 0.6
"""Its share of an agent's wrong choices."""


class Demonstration(TypedDict):
    agent: str
    messages: list[Message]
    completion: str
    recipe: str
    right: bool
    task_id: str


def demonstrations(
    n: int, seed: int = 0, imperfection: float = 0.7, *, visibility: Visibility = "full", turns: int = 4
) -> list[Demonstration]:
    """`n` demonstrations, all agents mixed, a fixed function of the arguments.

    `imperfection` is the share (0..1) of wrong choices. Raises `ConfigError` for values out of range.
    """
    if not 0.0 <= imperfection <= 1.0:
        raise ConfigError(f"imperfection is {imperfection}", hint="give a share from 0 to 1")
    rng = random.Random(f"dsbench/demonstrations/{seed}")
    worlds = [(task.id, world_of(task)) for task in load_tasks(split="train")]
    made: list[Demonstration] = []
    while len(made) < n:
        task_id, world = rng.choice(worlds)
        made += _episode(task_id, replace(world, there=set(world.there)), rng, imperfection, visibility, turns)
    return made[:n]


@dataclass
class World:
    """What decides how a recipe ends: the task, and what was done so far."""

    facts: Facts
    values: Literal["text", "whole", "real"]
    """What the targets' training values are."""
    there: set[str] = field(default_factory=lambda: {"train.csv", "test.csv"})
    model: str = ""
    """The recipe that made model.pkl."""


def world_of(task: Task) -> World:
    """A training task before anyone acts."""
    facts = Facts(kind=str(task.data["kind"]), form=str(task.data["form"]), targets=list(task.data["targets"]))
    rows = csv.DictReader(io.StringIO(sandbox_files(task)["train.csv"].decode()))
    try:
        numbers = [float(row[target]) for row in rows for target in facts["targets"]]
    except ValueError:
        return World(facts, "text")
    return World(facts, "whole" if all(number.is_integer() for number in numbers) else "real")


def _episode(
    task_id: str, world: World, rng: random.Random, imperfection: float, visibility: Visibility, most: int
) -> Iterator[Demonstration]:
    facts = world.facts
    for agent in TEAM:
        turns: list[Turn] = []
        missing = [name for name in agent.reads if name not in world.there]
        for turn in range(most):
            best = right(agent.name, facts)
            recipe = best if rng.random() >= imperfection else _wrong(agent.name, best, rng)
            prompt = messages(agent, "", facts, (), (), turns, prompts="compact", visibility=visibility, missing=missing, most_turns=most)
            text = f"use {recipe}"
            yield Demonstration(
                agent=agent.name, messages=prompt, completion=text, recipe=recipe, right=recipe == best, task_id=task_id
            )  # fmt: skip
            error, written = effect(agent, recipe, world)
            world.there |= set(written)
            world.model = recipe if "model.pkl" in written else world.model
            owed = [name for name in agent.writes if name not in world.there]
            seen = f"error: {error}" if error else f"no {' '.join(owed)}" if owed else "ok"
            over = not error and not owed
            turns.append(Turn(text=text, observation=seen, status="error" if error else "ok", over=over or turn + 1 == most))
            if over:
                break


def _wrong(agent: str, best: str, rng: random.Random) -> str:
    if rng.random() < FAVOURED:
        return FAVOURITES[agent]
    return rng.choice([name for name in CATALOGUE[agent] if name not in (best, FAVOURITES[agent])])


def effect(agent: Agent, recipe: str, world: World) -> tuple[str, Sequence[str]]:
    """`(error's type, artifacts written)` of a recipe, as the sandbox has it; "" = no error."""
    if any(name not in world.there for name in agent.reads):
        return "FileNotFoundError", ()
    if agent.name == "data_engineer":
        return "", {"no test": agent.writes[:2], "other names": (), "look": ()}.get(recipe, agent.writes)
    if agent.name == "modeler":
        if recipe == "crash":
            return "KeyError", ()
        unfit = {"classifier": "real", "other name": "real", "regressor": "text"}.get(recipe)
        if unfit == world.values:
            return "ValueError", ()
        return "", agent.writes if recipe in ("classifier", "regressor") else ()
    if recipe == "scores" and world.model == "regressor":
        return "AttributeError", ()
    return "", () if recipe == "look" else agent.writes


def statistics(made: Sequence[Demonstration]) -> Mapping[str, Mapping[str, float]]:
    """How often each agent chose what, for a log: `{agent: {recipe: share}}`."""
    counts: dict[str, dict[str, float]] = {}
    for one in made:
        recipes = counts.setdefault(one["agent"], {})
        recipes[one["recipe"]] = recipes.get(one["recipe"], 0) + 1
    return {agent: {name: count / sum(recipes.values()) for name, count in recipes.items()} for agent, recipes in counts.items()}

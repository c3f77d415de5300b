"""Which tasks an iteration trains on: a function of the seed and the iteration's number, so that a continued run draws what it would have.

Tasks come in epochs: every task of the pool once, in an order of the epoch's own, cut into iterations. `stratified` deals the places of
an iteration out to the strata in turn, so that any iteration holds as many tasks of each (give or take one), and each stratum goes
through epochs of its own. A curriculum only widens the pool, easy tasks first; once it is whole, nothing of it is left.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence

from mappa_graph.environment import Task
from mappa_graph.errors import ConfigError
from mappa_graph.sections.loop import LoopConfig

PLAIN = LoopConfig()


def tasks_of(tasks: Sequence[Task], n: int, iteration: int, seed: int, loop: LoopConfig = PLAIN) -> list[Task]:
    """The `n` tasks of an iteration (counted from 1). A task comes twice only where the pool, or its stratum, is smaller than its share."""
    pool, since = _pool(tasks, n, iteration, seed, loop)
    key = str(seed) if len(pool) == len(tasks) else f"{seed}/{len(pool)}"
    first = (iteration - since) * n
    if loop.sampling == "shuffled":
        return [_nth(pool, first + k, key) for k in range(n)]
    strata = _strata(pool)
    names = sorted(strata, key=natural)
    chosen = []
    for place in range(first, first + n):
        turn, which = divmod(place, len(names))
        chosen.append(_nth(strata[names[which]], turn, f"{key}/{names[which]}"))
    return chosen


def check_sampling(loop: LoopConfig, tasks: Sequence[Task]) -> None:
    """Raises `ConfigError` if the order that is asked for can't take effect on these tasks."""
    strata = _strata(tasks)
    if loop.sampling == "stratified" and len(strata) < 2:
        raise ConfigError(
            f"loop.sampling 'stratified' can't take effect: all training tasks have the stratum {next(iter(strata), '')!r}",
            hint="give tasks a stratum, Task(id, prompt, stratum='regression'), or set loop.sampling to shuffled",
        )
    if loop.curriculum == "difficulty" and len(set(difficulties(tasks))) < 2:
        raise ConfigError(
            "loop.curriculum 'difficulty' can't take effect: all training tasks are equally difficult",
            hint="give tasks a difficulty, Task(id, prompt, data={'difficulty': 3}), or strata whose order is that of difficulty",
        )


def difficulties(tasks: Sequence[Task]) -> list[float]:
    """How difficult each task is: `data["difficulty"]` or, where no task has one, the place of its stratum in their natural order.

    Raises `ConfigError` where only some tasks have a difficulty, or one that is no finite number.
    """
    given = ["difficulty" in task.data for task in tasks]
    if not any(given):
        place = {name: float(k) for k, name in enumerate(sorted(_strata(tasks), key=natural))}
        return [place[task.stratum] for task in tasks]
    found = []
    for task in tasks:
        value = task.data.get("difficulty")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                f"task {task.id!r} has the difficulty {value!r}, which loop.curriculum can't order",
                hint="give every training task a number: Task(id, prompt, data={'difficulty': 3})",
            )
        found.append(float(value))
    return found


def natural(name: str) -> tuple[int, float, str]:
    """Sorts numbers as numbers, and before words."""
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def _pool(tasks: Sequence[Task], n: int, iteration: int, seed: int, loop: LoopConfig) -> tuple[Sequence[Task], int]:
    """The tasks that an iteration draws from, and the first iteration that drew from the same."""
    steps = loop.curriculum_iterations
    if steps is None or loop.curriculum == "none":
        return tasks, 1

    def size(at: int) -> int:
        return min(len(tasks), max(n, math.ceil(len(tasks) * min(at, steps) / steps)))

    now = size(iteration)
    since = next(at for at in range(1, iteration + 1) if size(at) == now)
    if now == len(tasks):
        return tasks, since
    lots = list(range(len(tasks)))
    random.Random(f"{seed}/lots").shuffle(lots)  # so that a cut between equally difficult tasks favours none
    hard = difficulties(tasks)
    easy = sorted(range(len(tasks)), key=lambda i: (hard[i], lots[i]))[:now]
    return [tasks[i] for i in sorted(easy)], since


def _nth(pool: Sequence[Task], position: int, key: str) -> Task:
    """The task at a position of endless epochs over the pool."""
    epoch, offset = divmod(position, len(pool))
    return pool[_order(len(pool), f"{key}/{epoch}")[offset]]


@functools.lru_cache(maxsize=64)
def _order(size: int, seed: str) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return tuple(order)


def _strata(tasks: Sequence[Task]) -> Mapping[str, list[Task]]:
    found: dict[str, list[Task]] = {}
    for task in tasks:
        found.setdefault(task.stratum, []).append(task)
    return found

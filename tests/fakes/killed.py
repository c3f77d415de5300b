"""A tiny training run in a process that kills itself at a moment of a stage: while it rolls out, coaches, trains, saves, or publishes."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mappa_graph.trainers.checkpoint as checkpoint
import mappa_graph.trainers.loop as loop
from mappa_graph.gateway import Gateway
from mappa_graph.gateway.local import LocalEngine
from mappa_graph.record import Verdict
from mappa_graph.store import TraceStore
from mappa_graph.trainers import run as running
from mappa_graph.trainers.learner import Learner
from tests.fakes.team import settings, team

ITERATIONS = 8
STAGES: dict[str, tuple[tuple[Any, str], ...]] = {
    "rollout": ((LocalEngine, "complete"), (TraceStore, "save_episode")),
    "coach": ((TraceStore, "add_verdict"),),
    "train": ((Learner, "_step"), (Learner, "score")),
    "checkpoint": ((Path, "rename"), (checkpoint, "_fingerprint"), (loop, "prune"), (loop, "write_metrics")),
    "publish": ((Gateway, "publish"), (LocalEngine, "load"), (LocalEngine, "unload")),
}


class ByText:
    """Scores what was said by the letters in it: the same for the same text, on any day."""

    name = "by text"

    async def score(self, case: Any) -> Verdict:
        STAGE_HOOKS.get("coach", lambda: None)()
        return Verdict(float(sum(case.output.encode()) % 11))


STAGE_HOOKS: dict[str, Callable[[], None]] = {}


def train(run: Path, model: Path, iterations: int = ITERATIONS) -> dict[str, Any]:
    torch.set_num_threads(1)
    chosen = settings(
        run,
        model,
        coach={"kind": "evidence", "when": "completed"},
        rollout={"tasks": 2, "samples": 2},
        train={"iterations": iterations},
        evaluate={"tasks": 1},
        checkpoint={"keep_last": 2},
    )
    return running.train(team(), chosen, coach=ByText())


def train_until(run: str, model: str, stage: str, occurrence: int, delay_s: float) -> None:
    """Trains, and dies by SIGKILL `delay_s` after the stage was entered for the `occurrence`-th time since the start."""
    left = occurrence

    def reached() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            if delay_s == 0.0:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    STAGE_HOOKS[stage] = reached
    for owner, name in STAGES[stage]:
        if stage != "coach":
            setattr(owner, name, _watched(getattr(owner, name), reached))
    train(Path(run), Path(model))


def _watched(function: Callable[..., Any], reached: Callable[[], None]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        reached()
        return function(*args, **kwargs)

    return watched


def moments(count: int, seed: int) -> list[tuple[str, int, float]]:
    """`count` moments, every stage as often as the others, in a random order."""
    rng = random.Random(seed)
    stages = [list(STAGES)[i % len(STAGES)] for i in range(count)]
    rng.shuffle(stages)
    return [(stage, rng.randint(1, 6), rng.choice((0.0, rng.uniform(0.0, 0.05)))) for stage in stages]

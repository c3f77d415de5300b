"""New weights from the trainer into the running gateway, each publish checked by a canary."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .loop import Run


async def publish(run: Run, version: int) -> None:
    """New weights of every trained policy into the running gateway, as version = iteration, then a checkpoint of all of it."""
    if run.config.train.control == "no_training":
        return
    for policy in run.policies:
        weights = await asyncio.to_thread(run.trainer.save_weights, policy, run.folder / "weights" / policy / f"v{version}")
        await run.gateway.publish(policy, weights, version=version, canary=run.trainer.canary(policy))
        _drop_old_weights(run.folder / "weights" / policy, keep=version)


def _drop_old_weights(folder: Path, *, keep: int) -> None:
    for old in folder.glob("v*"):
        if old.name[1:].isdigit() and int(old.name[1:]) < keep - 1:
            shutil.rmtree(old, ignore_errors=True)

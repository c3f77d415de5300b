"""New weights from the trainer into the running gateway, each publish checked by a canary.

What is written fits the engine: an adapter or whole weights as they are trained, or, where the engine swaps whole weights in place,
an adapter merged into its base. The one thing to know: for an engine that reads them in another process their checksums are written
too, and last, so that it can tell whether it read what the trainer wrote.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mappa_graph.errors import TrainerError
from mappa_graph.gateway.vllm.manifest import write_manifest

if TYPE_CHECKING:
    from .loop import Run
    from .trainer import ReinforceTrainer


async def publish(run: Run, version: int) -> None:
    """New weights of every trained policy into the running gateway, as version = iteration, then a checkpoint of all of it."""
    if run.config.train.control == "no_training":
        return
    engine = run.gateway.engine
    merged, checked = bool(getattr(engine, "swaps_in_place", False)), engine.name == "vllm"
    for policy in run.policies:
        _connect(run, policy)
        place = run.folder / "weights" / policy / f"v{version}"
        weights = await run.on_thread(write_weights, run.trainer, policy, place, merged=merged, checked=checked)
        canary = await run.on_thread(run.trainer.canary, policy)
        await run.gateway.publish(policy, weights, version=version, canary=canary)
        _drop_old_weights(run.folder / "weights" / policy, keep=version)


async def check_engine(run: Run) -> None:
    """Before anything is sampled: the engine must give the trainer's log-probs for the first weights of every policy.

    Raises `EngineError` where they differ by more than what dtypes explain: other weights, another tokenizer's ids, a wrong scaling.
    An engine that only passes an upstream's replies on may not be able to score; the first batch's mismatch then says the same, later.
    """
    if run.config.train.control == "no_training" or run.config.engine.kind == "upstream":
        return
    for policy in run.policies:
        canary = await run.on_thread(run.trainer.canary, policy, probe=True)
        assert canary is not None
        await run.gateway.verify(policy, canary)


def write_weights(trainer: ReinforceTrainer, policy: str, folder: Path, *, merged: bool = False, checked: bool = True) -> Path:
    """Writes a policy's present weights.

    Args:
        merged: an adapter is merged into its base: an ordinary model folder instead of a PEFT one.
        checked: their checksums are written too.
    """
    # What a run needs after a power cut is in its checkpoints.
    (trainer.save_merged if merged else trainer.save_weights)(policy, folder, durable=False)
    if checked and trainer.ranks.rank == 0:
        write_manifest(folder)
    return folder


def _connect(run: Run, policy: str) -> None:
    """With transfer `nccl` or `ipc`: has the engine take the weights from the trainer's GPU."""
    options = run.config.engine.vllm
    if options is None or options.transfer == "shared":
        return
    from mappa_graph.gateway.vllm.engine import VllmEngine
    from mappa_graph.gateway.vllm.transfer import TrainerSender

    engine, trainer = run.gateway.engine, run.trainer
    assert isinstance(engine, VllmEngine)
    if trainer.ranks.count > 1:
        raise TrainerError(
            f"engine.vllm.transfer {options.transfer!r} sends from one training process, and {trainer.ranks.count} train together",
            hint="set engine.vllm.transfer to 'shared'",
        )
    kind = options.transfer
    engine.send_from(policy, lambda: TrainerSender(kind, lambda: trainer.learner(policy).body.model))


def _drop_old_weights(folder: Path, *, keep: int) -> None:
    """All but the version that serves and the one before it: an engine that goes back, or starts again, reads them."""
    for old in folder.glob("v*"):
        if old.name[1:].isdigit() and int(old.name[1:]) < keep - 1:
            shutil.rmtree(old, ignore_errors=True)

"""A program for `accelerate launch`: reads `FOLDER/job.pt`, trains each of its cases, and leaves what came out of them as `FOLDER/out.pt`.

A case has models, settings, batches of samples, and whether the trainer is put away and loaded again after the first batch.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from mappa_graph.trainers import Sample, TrainerSettings
from mappa_graph.trainers.launch import join, make_trainer, serves
from mappa_graph.trainers.sharding import gathered


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    job = torch.load(folder / "job.pt", weights_only=True)
    if job.get("fault") and join() == job["fault"]["rank"]:
        spoil(job["fault"]["kind"])
    out = []
    for number, case in enumerate(job["cases"]):
        if not serves():
            out.append(train(case, folder / f"case{number}", job.get("timeout_s", 120.0)))
            torch.save(out, folder / "out.pt")


def train(case: dict[str, Any], folder: Path, timeout_s: float) -> dict[str, Any]:
    def make() -> Any:
        return make_trainer(case["models"], TrainerSettings(**case["settings"]), seed=3, timeout_s=timeout_s)

    trainer = make()
    updates = []
    for number, batch in enumerate(case["batches"]):
        updates.append(trainer.update([Sample(**fields) for fields in batch]))
        if case.get("resumed") and number == 0:
            folder.mkdir()
            trainer.save(folder)
            for parameter in (p for learner in trainer.learners.values() for p in learner.parameters):
                parameter.data.zero_()
            trainer.load(folder)
    for policy in trainer.learners:
        trainer.save_weights(policy, folder / "weights" / policy)
    canaries = {policy: trainer.canary(policy) for policy in trainer.learners}
    shard = next(iter(trainer.learners.values())).parameters[0]
    out = {
        "ranks": trainer.ranks.count,
        "sharded": hasattr(shard, "full_tensor"),
        "held": sum(
            (p.to_local() if hasattr(p, "to_local") else p).numel() for w in trainer.learners.values() for p in w.model.parameters()
        ),
        "metrics": [{"policies": dict(u.policies), "tokens": u.tokens, "without": u.without_return} for u in updates],
        "canaries": {policy: list(c.logprobs) for policy, c in canaries.items() if c is not None},
    }
    if not out["sharded"]:
        out["weights"] = {p: [gathered(x) for x in w.parameters] for p, w in trainer.learners.items()}
    trainer.close()
    return out


def process(folder: Path, rank: int, count: int, port: int) -> None:
    """One rank without a launcher, as the target of a process; leaves the error that ended it as `FOLDER/RANK.error`."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        main(folder)
    except Exception as error:
        (folder / f"{rank}.error").write_text(str(error))
        raise


def spoil(kind: str) -> None:
    """What goes wrong in this rank, in the midst of its second update."""
    from mappa_graph.trainers import trainer

    update, calls = trainer.ReinforceTrainer.update, []

    def failing(self: Any, samples: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and kind == "raise":
            raise MemoryError("no room for the second update")
        if len(calls) == 2 and kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(calls) == 2 and kind == "hang":
            signal.pause()
        return update(self, samples)

    trainer.ReinforceTrainer.update = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

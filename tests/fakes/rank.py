"""One process of several that train together, as the target of a process.

Reads `FOLDER/job.pt` (model folder, settings, every rank's samples), makes two updates, and writes weights and metrics as `FOLDER/RANK.pt`.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from mappa_graph.trainers import Ranks, ReinforceTrainer, Sample, TrainerSettings


def main(rank: int, count: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
    job = torch.load(folder / "job.pt", weights_only=True)
    trainer = ReinforceTrainer(job["models"], TrainerSettings(**job["settings"]), ranks=Ranks())
    updates = [trainer.update([Sample(**fields) for fields in batch[rank]]) for batch in job["batches"]]
    weights = {policy: [p.detach() for p in learner.parameters] for policy, learner in trainer.learners.items()}
    metrics = [{"agents": dict(u.metrics), "policies": dict(u.policies), "tokens": u.tokens} for u in updates]
    torch.save({"weights": weights, "metrics": metrics}, folder / f"{rank}.pt")
    dist.destroy_process_group()

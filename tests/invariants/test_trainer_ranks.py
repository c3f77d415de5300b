"""One process = two = four (gloo), with ranks that hold fewer samples, other agents, or none at all."""

import multiprocessing
from dataclasses import asdict

import pytest
import torch

from mappa_graph.trainers import ReinforceTrainer, TrainerSettings
from tests.fakes import rank
from tests.fakes.batches import random_samples
from tests.fakes.tinymodel import make_tiny_model

SETTINGS = {"beta": 0.1, "lr": 1e-3, "normalise": "stratum", "micro_batch_tokens": 60, "grad_clip": 1e9}
AGENTS = {"planner": "planner", "solver": "shared", "checker": "shared"}


def shares(samples, count):
    """Uneven shares: the last of four ranks has nothing, the first no sample of the planner's."""
    busy = max(1, count - 1) if count > 2 else count
    out = [[] for _ in range(count)]
    for i, sample in enumerate(samples):
        rank = i % busy
        out[rank if sample.policy != "planner" or rank else busy - 1].append(asdict(sample))
    return out


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_make_the_update_of_one(tmp_path, count):
    base = make_tiny_model(tmp_path / "base", seed=2)
    models = {"planner": str(base), "shared": str(base)}
    batches = [random_samples(seed, agents=AGENTS, count=30) for seed in (1, 2)]
    one = ReinforceTrainer(models, TrainerSettings(**SETTINGS))
    expected = [one.update(batch) for batch in batches]

    job = {"models": models, "settings": SETTINGS, "batches": [shares(batch, count) for batch in batches]}
    torch.save(job, tmp_path / "job.pt")
    context = multiprocessing.get_context("forkserver")  # which imports torch once for all of them
    context.set_forkserver_preload(["tests.fakes.rank"])
    processes = [context.Process(target=rank.main, args=(number, count, tmp_path)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
        assert process.exitcode == 0

    results = [torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in range(count)]
    for policy, learner in one.learners.items():
        for i, parameter in enumerate(learner.parameters):
            # Adam makes a step of lr out of a gradient of any size, so where it is nearly zero a step may differ by a part of lr.
            torch.testing.assert_close(results[0]["weights"][policy][i], parameter.detach(), rtol=0, atol=1e-4)
            for other in results[1:]:
                assert torch.equal(other["weights"][policy][i], results[0]["weights"][policy][i])
    for number, update in enumerate(expected):
        for result in results:
            got = result["metrics"][number]
            assert got["tokens"] == update.tokens and got["agents"].keys() == update.metrics.keys()
            for key in ("loss", "grad_norm", "kl", "entropy", "advantage_std", "return_mean", "ratio_max", "mismatch_kl", "actions"):
                for policy, metrics in update.policies.items():
                    assert got["policies"][policy][key] == pytest.approx(metrics[key], rel=1e-3, abs=1e-5), (policy, key)

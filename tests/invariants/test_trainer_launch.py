"""Several processes by real `accelerate launch`: one = two = four, sharded = whole, and a failing rank ends them all with its reason."""

import multiprocessing
import os
import re
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mappa_graph.errors import ConfigError, TrainerError
from mappa_graph.trainers import ReinforceTrainer, TrainerSettings
from mappa_graph.trainers import launch as launch_module
from tests.fakes import launched
from tests.fakes.batches import random_samples
from tests.fakes.tinymodel import make_tiny_model

AGENTS = {"planner": "planner", "solver": "shared", "checker": "shared"}
SETTINGS = {"beta": 0.1, "lr": 1e-3, "micro_batch_tokens": 60, "grad_clip": 1e9, "optimizer_batches": 2}
CASES = {
    "whole": {"settings": SETTINGS, "resumed": True},
    "lora": {"settings": {**SETTINGS, "lora": {"rank": 4, "policies": {"shared": {"rank": 2, "targets": ["q_proj"]}}}}, "resumed": True},
    "bfloat16": {"settings": {**SETTINGS, "optimizer_batches": 1, "lora": {"rank": 4}, "dtype": "bfloat16"}},
}
KEYS = ("loss", "grad_norm", "kl", "entropy", "advantage_std", "return_mean", "ratio_max", "mismatch_kl", "actions", "steps")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model", seed=2)


@pytest.fixture(scope="module")
def batches():
    """The second has one sample of the planner's: fewer than there are ranks."""
    second = random_samples(2, agents=AGENTS, count=20)
    planner = [s for s in second if s.policy == "planner" and s.ret is not None][:1]
    return [random_samples(1, agents=AGENTS, count=30), [*planner, *(s for s in second if s.policy != "planner")]]


@pytest.fixture(scope="module")
def alone(base, batches):
    """What one process makes of each case, never interrupted, the samples in another order."""
    out = {}
    for name, case in CASES.items():
        trainer = ReinforceTrainer(models(base), TrainerSettings(**case["settings"]), seed=3)
        updates = [trainer.update(batch[::-1]) for batch in batches]
        weights = {p: dict(zip(w.body.names, (x.detach() for x in w.parameters), strict=True)) for p, w in trainer.learners.items()}
        out[name] = updates, weights, {p: trainer.canary(p) for p in trainer.learners}
    return out


def models(base):
    return {"planner": str(base), "shared": str(base)}


def job(base, batches, **more):
    plain = [[asdict(s) for s in batch] for batch in batches]
    return {"cases": [{"models": models(base), "batches": plain, **case} for case in CASES.values()], **more}


@pytest.mark.parametrize(
    ("count", "flags"),
    [(2, ["--multi_gpu"]), (4, ["--multi_gpu"]), (2, ["--use_fsdp", "--fsdp_version", "2"])],
    ids=["two", "four", "fsdp2"],
)
def test_several_processes_make_the_updates_of_one(tmp_path, base, batches, alone, count, flags):
    torch.save(job(base, batches), tmp_path / "job.pt")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *flags, "--num_processes", str(count)]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = subprocess.run(
        [*command, "-m", "tests.fakes.launched", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = dict(zip(CASES, torch.load(tmp_path / "out.pt", weights_only=True), strict=True))
    for number, (name, result) in enumerate(results.items()):
        updates, weights, canaries = alone[name]
        half = name == "bfloat16"  # which rounds sums by how they are split over micro-batches
        close = {"rel": 0.1, "abs": 1e-2} if half else {"rel": 1e-3, "abs": 1e-5}
        assert result["ranks"] == count and result["sharded"] is ("--use_fsdp" in flags)
        for policy, expected in weights.items():
            written = load_folder(tmp_path / f"case{number}" / "weights" / policy)
            for key, value in expected.items():
                # Adam makes a step of lr out of a gradient of any size: where it is nearly zero a step may differ by a part of lr.
                apart = (written[key] - value).abs()
                assert apart.mean() < (0.2 * SETTINGS["lr"] if half else 1e-7), (name, policy, key)
                assert apart.max() < (4 * SETTINGS["lr"] if half else 2e-5), (name, policy, key)
            assert result["canaries"][policy] == pytest.approx(canaries[policy].logprobs, abs=0.1 if half else 1e-4)
        for got, update in zip(result["metrics"], updates, strict=True):
            assert got["tokens"] == update.tokens and got["without"] == update.without_return
            for policy, metrics in update.policies.items():
                for key in KEYS:
                    assert got["policies"][policy][key] == pytest.approx(metrics[key], **close), (
                        name,
                        policy,
                        key,
                    )
        if CASES[name].get("resumed"):  # what they saved after the first batch is continued by one process
            trainer = ReinforceTrainer(models(base), TrainerSettings(**CASES[name]["settings"]), seed=99)
            trainer.load(tmp_path / f"case{number}")
            trainer.update(batches[1])
            for policy, learner in trainer.learners.items():
                for key, parameter in zip(learner.body.names, learner.parameters, strict=True):
                    assert (parameter.detach() - weights[policy][key]).abs().max() < 2e-5, (name, policy, key)
    if "--use_fsdp" in flags:  # each rank holds its half of everything, a row of padding here and there aside
        whole = ReinforceTrainer(models(base), TrainerSettings(**SETTINGS))
        total = sum(p.numel() for learner in whole.learners.values() for p in learner.model.parameters())
        assert results["whole"]["held"] <= 0.52 * total


def load_folder(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


@pytest.mark.parametrize(
    ("kind", "rank", "says"),
    [("raise", 1, "no room for the second update"), ("kill", 1, "onnection (closed|reset)"), ("hang", 1, "imed out"), ("kill", 0, "")],
)
def test_a_rank_that_fails_dies_or_hangs_ends_them_all_with_its_reason(tmp_path, base, batches, kind, rank, says):
    torch.save({**job(base, batches), "fault": {"kind": kind, "rank": rank}, "timeout_s": 5.0}, tmp_path / "job.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")  # which imports torch once for all of them
    context.set_forkserver_preload(["tests.fakes.launched"])
    processes = [context.Process(target=launched.process, args=(tmp_path, n, 2, port)) for n in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes if kind != "hang" else processes[:1]:
            process.join(timeout=120)
            assert process.exitcode not in (0, None)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if rank != 0:
        assert (
            re.search(says, (tmp_path / "0.error").read_text()) and "while all ranks were to update" in (tmp_path / "0.error").read_text()
        )
    else:
        assert "rank 1 failed" in (tmp_path / "1.error").read_text()


@pytest.fixture
def environment(monkeypatch):
    """Settings of a launcher, as if this process were its first."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    launch_module.launched.cache_clear()
    yield monkeypatch.setenv
    launch_module.launched.cache_clear()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "fp16"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "only FSDP2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, "layer by layer"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "gradient_checkpointing"),
    ],
)
def test_what_a_launch_asks_for_and_cannot_have_is_said(environment, variables, says):
    for name, value in variables.items():
        environment(name, value)
    with pytest.raises(ConfigError, match=says):
        launch_module.join()


def test_what_a_launch_says_of_shards_is_heeded(environment):
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}.items():
        environment(name, value)
    environment("FSDP_TRANSFORMER_CLS_TO_WRAP", "LlamaDecoderLayer")
    found = launch_module.launched()
    assert found.count == 2 and found.sharding == {"reshard_after_forward": False, "cpu_offload": False, "layers": ("LlamaDecoderLayer",)}


def test_the_launchs_mixed_precision_becomes_the_trainers(environment, monkeypatch, base):
    environment("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(launch_module, "join", lambda: 0)
    monkeypatch.setattr(launch_module, "LeadTrainer", lambda plan: plan)
    plan = launch_module.make_trainer(models(base), TrainerSettings(lora={"rank": 2}))
    assert plan.settings["dtype"] == "bfloat16" and TrainerSettings(**plan.settings).lora.rank == 2 and plan.sharding is None
    monkeypatch.setattr(launch_module, "join", lambda: 1)
    monkeypatch.setattr(launch_module.dist, "get_rank", lambda: 1)
    with pytest.raises(TrainerError, match="rank 1 has no trainer of its own"):
        launch_module.make_trainer(models(base))


def test_one_process_needs_none_of_it(base):
    assert not launch_module.serves()
    with launch_module.make_trainer({"a": base}, TrainerSettings(beta=0.0)) as trainer:
        assert type(trainer) is ReinforceTrainer
    with pytest.raises(TrainerError, match="no policies"):
        launch_module.make_trainer({})

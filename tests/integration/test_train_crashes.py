"""Killed at any moment, a run goes on with the same command, and ends as if nothing had happened."""

import json
import logging
import multiprocessing
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mappa_graph import TraceStore
from mappa_graph.trainers.checkpoint import load_latest, trained_weights
from tests.fakes import killed
from tests.fakes.tinymodel import make_tiny_model

KILLS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), scale=0.05)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> Path:
    """The run that nothing happened to."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    threads = torch.get_num_threads()
    try:
        killed.train(run, model)
    finally:
        torch.set_num_threads(threads)
    return run


def assert_ended_like(run: Path, whole: Path) -> None:
    for policy, folder in trained_weights(whole).items():
        mine, theirs = load_file(trained_weights(run)[policy] / "model.safetensors"), load_file(folder / "model.safetensors")
        for name, tensor in theirs.items():
            assert tensor.sub(mine[name]).abs().max() < 2e-4, (policy, name)  # a step is 1e-2
    rows, expected = ([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (run, whole))
    assert [r["iteration"] for r in rows] == list(range(killed.ITERATIONS + 1))
    assert [r.get("tokens") for r in rows] == [r.get("tokens") for r in expected]
    assert [r["rollout"] and r["rollout"]["episodes"] for r in rows] == [r["rollout"] and r["rollout"]["episodes"] for r in expected]
    folder, extra = load_latest(run / "checkpoints")  # type: ignore[misc]
    state = torch.load(folder / "trainer.pt", weights_only=True)
    assert extra["iteration"] == state["updates"] == killed.ITERATIONS  # no update twice, none skipped
    with TraceStore(run / "trace.db", read_only=True) as mine, TraceStore(whole / "trace.db", read_only=True) as theirs:
        one, other = (sorted((e.iteration, e.task_id, e.sample) for e in s.episodes(split="train")) for s in (mine, theirs))
        assert one == other and len(set(one)) == len(one)
        calls, expected_calls = ({c.completion_ids for t in s.traces(split="train") for c in t.calls.values()} for s in (mine, theirs))
        assert calls == expected_calls
    assert not list((run / "checkpoints").glob(".*")), "half a checkpoint was left behind"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_at_thirty_random_moments_ends_as_if_it_had_not_been(model, whole, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fakes.killed"])
    done, runs = 0, 0
    pending = killed.moments(KILLS, seed=0)
    while pending:
        run = tmp_path / f"r{runs}"
        runs += 1
        while pending:
            moment = pending[0]
            process = context.Process(target=killed.train_until, args=(str(run), str(model), *moment))
            process.start()
            process.join(180)
            assert process.exitcode in (0, -signal.SIGKILL), f"{moment}: exit code {process.exitcode}"
            if process.exitcode == 0:
                break  # it ended before the moment came: the next run is killed there
            pending.pop(0)
            done += 1
        if not pending:
            process = context.Process(target=killed.train, args=(run, model))
            process.start()
            process.join(180)
            assert process.exitcode == 0
        assert_ended_like(run, whole)
    assert done == KILLS


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_is_gone_on_from(model, whole, tmp_path, caplog):
    run = tmp_path / "r"
    killed.train(run, model, iterations=4)
    newest, _ = load_latest(run / "checkpoints")  # type: ignore[misc]
    victim = next(newest.rglob("model.safetensors"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 0xFF
    victim.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        killed.train(run, model)
    assert "damaged" in caplog.text and newest.name in caplog.text
    assert_ended_like(run, whole)

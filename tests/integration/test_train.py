"""The loop, end to end and in small: what it leaves behind, what it counts, and how it goes on after a stop."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from mappa_graph import TraceStore
from mappa_graph.errors import CoachError, ConfigError, EpisodeError
from mappa_graph.record import Verdict
from mappa_graph.trainers import train
from mappa_graph.trainers.checkpoint import trained_weights
from tests.fakes.team import build_graph, settings, team
from tests.fakes.tinymodel import make_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), scale=0.05)


@pytest.fixture(scope="module")
def done(model, tmp_path_factory):
    """One finished run of three iterations, and its summary."""
    run = tmp_path_factory.mktemp("runs") / "done"
    return run, train(team(), settings(run, model, train={"iterations": 3}))


def weights(run: Path) -> dict:
    return {p: load_file(folder / "model.safetensors") for p, folder in trained_weights(run).items()}


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys() and mine
    for policy in mine:
        for name, tensor in mine[policy].items():
            assert tensor.sub(theirs[policy][name]).abs().max() < 2e-4, (policy, name)  # a step is 1e-2; threads add in any order


def test_a_run_leaves_everything_that_it_promises(done):
    run, summary = done
    assert {p.name for p in run.iterdir()} >= {"config.yaml", "trace.db", "metrics.jsonl", "checkpoints", "summary.json", "report.html"}
    assert json.loads((run / "summary.json").read_text()) == json.loads(json.dumps(summary))
    for key in ("environment", "engine", "model", "seed", "iterations", "episodes", "actions", "best", "failures", "versions"):
        assert key in summary
    assert summary["before"].keys() >= {"accuracy", "n", "ci95"} and summary["after"].keys() >= {"accuracy", "n", "ci95"}
    assert summary["coach"].keys() >= {"scored", "unscored", "mean_by_agent_first", "mean_by_agent_last"}
    assert summary["wall_s"].keys() >= {"total", "rollout", "coach", "train", "publish", "evaluate"}
    assert (summary["iterations"], summary["episodes"], summary["actions"]) == (3, 18, 36)
    assert summary["versions"] == {"drafter": 3, "editor": 3}
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["iterations"] == 3
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    assert "<html" in (run / "report.html").read_text()[:200].lower()


def test_what_is_trained_is_what_the_engine_sampled(done):
    run, summary = done
    assert summary["tokens"]["retokenised"] == 0
    with TraceStore(run / "trace.db", read_only=True) as store:
        traces = list(store.traces(split="train"))
        assert sum(len(c.completion_ids) for t in traces for c in t.calls.values()) >= summary["tokens"]["trained"] > 0


def test_each_iteration_acts_with_the_weights_of_the_one_before(done):
    run, _ = done
    with TraceStore(run / "trace.db", read_only=True) as store:
        for iteration in (1, 2, 3):
            versions = {c.version for t in store.traces(split="train", iteration=iteration) for c in t.calls.values()}
            assert versions == {iteration - 1}


def test_training_moves_each_agents_own_weights(done, model):
    run, _ = done
    first, last = load_file(model / "model.safetensors"), weights(run)
    moved = {p: max(float(last[p][n].sub(first[n]).abs().max()) for n in first) for p in last}
    assert all(m > 1e-2 for m in moved.values())
    assert any(float(last["drafter"][n].sub(last["editor"][n]).abs().max()) > 1e-2 for n in first)


def test_a_run_that_was_stopped_between_iterations_ends_as_if_it_had_not(done, model, tmp_path):
    train(team(), settings(tmp_path / "r", model, train={"iterations": 1}))
    train(team(), settings(tmp_path / "r", model, train={"iterations": 3}))
    assert_same_weights(tmp_path / "r", done[0])


@pytest.mark.parametrize("moment", range(3))
def test_a_killed_run_continues_and_ends_as_if_it_had_not_been(done, model, tmp_path, moment):
    run = tmp_path / "r"
    command = [sys.executable, "-m", "tests.fakes.team", str(run), str(model), json.dumps({"train": {"iterations": 3}})]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wanted = random.Random(moment).randrange(4, 20)  # so many training episodes are stored when it is killed
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and stored(run) < wanted:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    summary = train(team(), settings(run, model, train={"iterations": 3}))
    assert summary["iterations"] == 3 and summary["episodes"] == 18
    assert_same_weights(run, done[0])
    with TraceStore(run / "trace.db", read_only=True) as store:
        assert sum(1 for _ in store.episodes(split="train")) == 18


def stored(run: Path) -> int:
    if not (run / "trace.db").exists():
        return 0
    try:
        with TraceStore(run / "trace.db", read_only=True) as store:
            return sum(1 for _ in store.episodes(split="train"))
    except Exception:
        return 0  # not made yet


def test_a_finished_run_is_summed_up_again_and_trains_nothing(done, model):
    run, summary = done
    before = weights(run)
    again = train(team(), settings(run, model, train={"iterations": 3}))
    assert again["tokens"] == summary["tokens"] and again["episodes"] == summary["episodes"]
    assert all(before[p][n].equal(t) for p, w in weights(run).items() for n, t in w.items())


def test_other_settings_in_the_same_folder_are_refused(done, model):
    with pytest.raises(ConfigError, match=r"other settings: train\.lr"):
        train(team(), settings(done[0], model, train={"iterations": 3, "lr": 0.5}))


def test_settings_of_an_attempt_that_made_nothing_do_not_stand_in_the_way(model, tmp_path):
    with pytest.raises(ConfigError, match="no model folder"):
        train(team(), settings(tmp_path / "run", tmp_path / "nowhere" / "at all", train={"iterations": 0}))
    assert train(team(), settings(tmp_path / "run", model, train={"iterations": 0}))["iterations"] == 0


class Silent:
    """A coach that has no verdict on anything."""

    name = "silent"

    async def score(self, case):
        return Verdict(None, error="silence")


def test_a_coach_without_verdicts_stops_the_run_and_keeps_the_episodes(model, tmp_path):
    with pytest.raises(CoachError, match="no verdict on 12 of 12 actions"):
        train(team(), settings(tmp_path / "r", model, coach={"kind": "evidence", "when": "completed"}), coach=Silent())
    with TraceStore(tmp_path / "r" / "trace.db", read_only=True) as store:
        assert sum(1 for _ in store.episodes(split="train")) == 6
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["iterations"] == 0


def test_a_failing_graph_is_counted_and_too_many_stop_the_run(model, tmp_path):
    def broken(models):
        def fail(state):
            raise RuntimeError("the database is gone")

        from langgraph.graph import START, StateGraph

        from tests.fakes.team import State

        return StateGraph(State).add_node("draft", fail).add_edge(START, "draft").compile()

    with pytest.raises(EpisodeError, match=r"100% of the episodes failed.*\n.*the database is gone"):
        train(team(build_graph=broken), settings(tmp_path / "r", model))
    with TraceStore(tmp_path / "r" / "trace.db", read_only=True) as store:
        assert store.failures() == {"episode:RuntimeError": 9}


def test_single_failures_are_left_out_and_the_run_goes_on(model, tmp_path):
    def flaky(task, state):
        if task.id.endswith("3"):
            raise ValueError("no grade for this one")
        return 0.5 + 0.01 * (len(state["draft"]) % 5)

    summary = train(team(grade=flaky), settings(tmp_path / "r", model, rollout={"tasks": 12, "samples": 1, "max_failed_share": 0.6}))
    assert summary["iterations"] == 2
    assert set(summary["failures"]) == {"episode:EpisodeError"} and summary["failures"]["episode:EpisodeError"] > 0


def test_a_frozen_agent_keeps_its_weights_and_is_scored(model, tmp_path):
    from mappa_graph import Agent

    frozen = team(agents=[Agent("drafter"), Agent("editor", trainable=False)])
    summary = train(frozen, settings(tmp_path / "r", model))
    assert summary["versions"] == {"drafter": 2, "editor": 0}
    assert summary["coach"]["mean_by_agent_last"]["editor"] is not None
    assert set(trained_weights(tmp_path / "r")) == {"drafter"}


def test_no_training_is_a_control_that_changes_nothing(model, tmp_path):
    summary = train(team(), settings(tmp_path / "r", model, train={"control": "no_training"}))
    assert summary["versions"] == {"drafter": 0, "editor": 0} and summary["iterations"] == 2


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mappa_graph.cli", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--set", "train.itterations=3"], "did you mean 'iterations'"),
        (["train", "--config", "nothere.yaml"], "there is no config"),
        (["train", "--set", "model=./nothere"], "nothere"),
        (["evaluate", "--tasks", "nothere.json"], "nothere.json"),
        (["train", "--set", "environment.name=mathchess"], "there is no environment 'mathchess'"),
        (["train", "--set", "environment.options.colour=red"], "colour"),
        (["traces", "list", "nothere"], "holds no recorded run"),
        (["report", "nothere"], "holds no recorded run"),
    ],
)
def test_a_users_mistake_gets_a_message_and_no_traceback(tmp_path, arguments, said):
    finished = command(*arguments, cwd=tmp_path)
    assert finished.returncode == 1
    assert said in " ".join(finished.stderr.split()) and "Traceback" not in finished.stderr


def config_file(tmp_path: Path, model: Path, **changes) -> Path:
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({**settings(tmp_path / "r", model, **changes), "environment": {"name": "tests.fakes.team:team"}})
    )
    return tmp_path / "config.yaml"


def test_a_port_in_use_is_named(model, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finished = command("train", "-c", str(config_file(tmp_path, model, gateway={"port": port})), cwd=tmp_path)
    assert finished.returncode == 1 and str(port) in finished.stderr and "Traceback" not in finished.stderr


def test_a_full_disk_is_said_and_what_was_recorded_stays_readable(model, tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("can't mount a small file system here")
    try:
        path = config_file(tmp_path, model, train={"iterations": 30})
        finished = command("train", "-c", str(path), cwd=ROOT)
        assert finished.returncode == 1
        assert "Traceback" not in finished.stderr and any(w in finished.stderr.lower() for w in ("full", "space"))
        listed = command("traces", "list", str(tmp_path / "r"), cwd=ROOT)
        assert listed.returncode == 0, listed.stderr
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_ctrl_c_ends_with_a_message_and_the_same_command_continues(model, tmp_path):
    path = config_file(tmp_path, model, train={"iterations": 5000})
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "mappa_graph.cli", "train", "-c", str(path)], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and stored(tmp_path / "r") < 8:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command continues" in errors and "Traceback" not in errors
    finished = command("train", "-c", str(path), "--set", "train.iterations=4", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["iterations"] >= 4


def test_graphs_of_a_config_may_live_in_a_users_own_module(model, tmp_path):
    assert build_graph  # the same function that the config names
    finished = command("rollout", "-c", str(config_file(tmp_path, model)), "--limit", "2", "-q", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "t" in finished.stdout

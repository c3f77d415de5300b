"""The loop's options, each in a run of seconds from beginning to end: what it changes, what it leaves behind, how it goes on."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mappa_graph import Outcome, Task, TraceStore
from mappa_graph.errors import ConfigError, EpisodeError
from mappa_graph.trainers import ReinforceTrainer, TrainerSettings, train
from mappa_graph.trainers.checkpoint import trained_weights
from tests.fakes.team import grade, settings, team
from tests.fakes.tinymodel import make_tiny_model

ROOT = Path(__file__).parents[2]
PIPELINE = {"train": {"iterations": 3}, "loop": {"pipeline": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), scale=0.05)


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    """A run of three iterations without any option."""
    run = tmp_path_factory.mktemp("runs") / "plain"
    train(team(), settings(run, model, train={"iterations": 3}))
    return run


@pytest.fixture(scope="module")
def ahead(model, tmp_path_factory):
    """A pipelined run of three iterations."""
    run = tmp_path_factory.mktemp("runs") / "ahead"
    train(team(), settings(run, model, **PIPELINE))
    return run


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tokens(run: Path) -> dict[str, list[tuple[int, ...]]]:
    with TraceStore(run / "trace.db", read_only=True) as store:
        return {t.episode.id: [t.calls[a.id].completion_ids for a in t.actions] for t in store.traces(split="train")}


def assert_same_run(one: Path, other: Path) -> None:
    """The same tokens were sampled in every episode, and the weights came out the same."""
    assert tokens(one) == tokens(other)
    mine, theirs = trained_weights(one), trained_weights(other)
    assert mine.keys() == theirs.keys() and mine
    for policy in mine:
        ours, others = load_file(mine[policy] / "model.safetensors"), load_file(theirs[policy] / "model.safetensors")
        for name, tensor in ours.items():
            off = tensor.sub(others[name]).abs()
            # A step is 1e-2. Threads add in any order, and Adam makes much of it where a gradient is almost zero.
            assert off.max() < 1e-3 and off.mean() < 1e-6, (policy, name)


def versions(run: Path, iteration: int) -> set[int]:
    with TraceStore(run / "trace.db", read_only=True) as store:
        return {c.version for t in store.traces(split="train", iteration=iteration) for c in t.calls.values()}


def test_in_a_pipeline_each_iteration_acts_with_weights_one_version_behind(ahead):
    assert [versions(ahead, k) for k in (1, 2, 3)] == [{0}, {0}, {1}]
    made = rows(ahead)
    assert [made[k]["agents"]["drafter"]["staleness_max"] for k in (1, 2, 3)] == [0, 1, 1]
    assert all(row["tokens"]["trained"] > 0 and row["tokens"]["retokenised"] == 0 for row in made[1:])


def test_older_weights_are_corrected_by_the_importance_weight(ahead):
    first, _, third = (row["agents"]["drafter"] for row in rows(ahead)[1:])
    assert first["mismatch_abs"] < 1e-4 and first["weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert third["mismatch_abs"] > 1e-3 and third["weight_mean"] != pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("moment", range(2))
def test_a_killed_pipeline_continues_and_ends_as_if_it_had_not_been(ahead, model, tmp_path, moment):
    run = tmp_path / "r"
    command = [sys.executable, "-m", "tests.fakes.team", str(run), str(model), json.dumps(PIPELINE)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wanted = random.Random(moment).randrange(4, 18)  # so many training episodes are stored when it is killed
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and stored(run) < wanted:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    summary = train(team(), settings(run, model, **PIPELINE))
    assert summary["iterations"] == 3 and summary["episodes"] == 18
    assert_same_run(run, ahead)
    assert [row["agents"]["editor"]["staleness_max"] for row in rows(run)[1:]] == [0, 1, 1]


def stored(run: Path) -> int:
    if not (run / "trace.db").exists():
        return 0
    try:
        with TraceStore(run / "trace.db", read_only=True) as store:
            return sum(1 for _ in store.episodes(split="train"))
    except Exception:
        return 0  # not made yet


def test_rollouts_that_fail_ahead_do_not_cost_the_update_beside_them(model, tmp_path):
    graded = []

    def breaks(task, state):
        graded.append(task.id)
        if len(graded) > 9:  # 3 held-out episodes, and 6 of the first iteration
            raise RuntimeError("the grader is gone")
        return grade(task, state)

    with pytest.raises(EpisodeError, match=r"iteration 2: 100% of the episodes failed"):
        train(team(grade=breaks), settings(tmp_path / "r", model, **PIPELINE))
    assert [row["iteration"] for row in rows(tmp_path / "r")] == [0, 1]
    assert (tmp_path / "r" / "checkpoints" / "step-00000001").is_dir()


def test_stratified_tasks_are_balanced_and_easy_ones_come_first(model, tmp_path):
    tasks = [Task(f"t{i}", f"{i}: ", stratum="few" if i < 8 else "many", data={"difficulty": i % 4}) for i in range(40)]
    loop = {"sampling": "stratified", "curriculum": "difficulty", "curriculum_iterations": 3}
    changes = {"rollout": {"tasks": 4, "samples": 1}, "train": {"iterations": 3}, "loop": loop}
    train(team(tasks=tasks), settings(tmp_path / "r", model, **changes))
    hard = {task.id: task.data["difficulty"] for task in tasks}
    with TraceStore(tmp_path / "r" / "trace.db", read_only=True) as store:
        drawn = [list(store.episodes(split="train", iteration=k)) for k in (1, 2, 3)]
    assert [Counter(e.stratum for e in each) for each in drawn] == [{"few": 2, "many": 2}] * 3
    assert max(hard[e.task_id] for e in drawn[0]) <= 1


def test_an_order_that_cant_take_effect_ends_before_any_work(model, tmp_path):
    tasks = [Task(f"t{i}", f"{i}: ") for i in range(40)]
    with pytest.raises(ConfigError, match="stratified' can't take effect"):
        train(team(tasks=tasks), settings(tmp_path / "r", model, loop={"sampling": "stratified"}))
    assert not (tmp_path / "r").exists()


def test_a_task_that_comes_twice_in_an_iteration_is_sampled_anew(model, tmp_path):
    few = {"train": [Task("a", "1"), Task("b", "2")], "heldout": [Task("c", "3")]}
    summary = train(team(tasks=few), settings(tmp_path / "r", model, train={"iterations": 1}))
    assert summary["episodes"] == 6 and stored(tmp_path / "r") == 6
    with TraceStore(tmp_path / "r" / "trace.db", read_only=True) as store:
        assert sorted(Counter(e.task_id for e in store.episodes(split="train")).values()) == [2, 4]


def test_several_samples_a_task_give_pass_at_k_and_majority_everywhere(model, tmp_path):
    def vote(task, state):
        answer = state["draft"][:1]
        return Outcome(answer < "n", answer=answer, score=0.5, metrics={"length": float(len(state["note"]))})

    changes = {"train": {"iterations": 3}, "evaluate": {"samples": 3, "pass_at": [1, 2, 3], "best_by": "pass@3", "every": 1}}
    summary = train(team(grade=vote), settings(tmp_path / "r", model, **changes))
    for row in rows(tmp_path / "r"):
        held = row["heldout"]
        assert held["samples"] == 3 and held["pass_at"]["1"]["value"] == pytest.approx(held["accuracy"], abs=1e-4)
        assert held["pass_at"]["1"]["value"] <= held["pass_at"]["2"]["value"] <= held["pass_at"]["3"]["value"]
        assert held["majority"]["ci95"][0] <= held["majority"]["value"] <= held["majority"]["ci95"][1]
        assert held["metrics"]["length"] >= 0 and len(held["metrics_ci95"]["length"]) == 2
    assert summary["after"]["pass_at"].keys() == {"1", "2", "3"} and summary["best"]["by"] == "pass@3"
    assert "Of several samples" in (tmp_path / "r" / "report.html").read_text()


def falling(*values):
    """An environment's metric that takes these values, one an evaluation."""
    left = list(values)
    return lambda traces: {"fair_rmse": left.pop(0), "classification/fair_rmse": 1.0, "episodes": float(len(traces))}


def test_the_best_checkpoint_is_chosen_by_the_environments_metric_and_kept(model, tmp_path):
    changes = {
        "train": {"iterations": 4},
        "evaluate": {"best_by": "fair_rmse", "best_is": "min", "every": 1},
        "checkpoint": {"every": 3, "keep_last": 1},
    }
    summary = train(team(metrics=falling(9.0, 7.0, 3.0, 5.0, 4.0)), settings(tmp_path / "r", model, **changes))
    assert summary["best"] == {"iteration": 2, "accuracy": 0.0, "by": "fair_rmse", "is": "min", "value": 3.0}
    assert sorted(p.name for p in (tmp_path / "r" / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    assert set(trained_weights(tmp_path / "r", "best")) == {"drafter", "editor"}
    assert [row["heldout"]["metrics"]["fair_rmse"] for row in rows(tmp_path / "r")] == [9.0, 7.0, 3.0, 5.0, 4.0]
    page = (tmp_path / "r" / "report.html").read_text()
    assert "best fair_rmse" in page and "chooses the best checkpoint" in page


def test_a_metric_that_no_evaluation_has_is_named_before_anything_is_trained(model, tmp_path):
    made = settings(tmp_path / "r", model, evaluate={"best_by": "fair_f1"})
    with pytest.raises(ConfigError, match=r"best_by 'fair_f1' is not what(.|\n)*accuracy, score, fair_rmse, classification/fair_rmse"):
        train(team(metrics=falling(1.0)), made)
    assert stored(tmp_path / "r") == 0


def test_a_run_that_gets_no_better_ends_early_and_goes_on_when_it_is_told_to(model, plain, tmp_path):
    early = {"train": {"iterations": 3}, "evaluate": {"every": 1}, "loop": {"early_stop": {"patience": 2}}}
    summary = train(team(), settings(tmp_path / "r", model, **early))
    assert summary["iterations"] == 2 and summary["stopped"]["by"] == "early_stop"
    again = train(team(), settings(tmp_path / "r", model, **early))
    assert again["iterations"] == 2 and again["tokens"] == summary["tokens"]
    assert "The run ended early" in (tmp_path / "r" / "report.html").read_text()
    whole = train(team(), settings(tmp_path / "r", model, **{**early, "loop": {}}))  # the same without early_stop
    assert whole["iterations"] == 3 and whole["stopped"] is None
    assert_same_run(tmp_path / "r", plain)


def test_an_alarm_can_end_a_run_with_a_checkpoint_and_its_name(model, plain, tmp_path):
    alarms = {"kl_explosion": {"threshold": 1e-6, "action": "stop"}, "entropy_collapse": {"action": "off"}}
    changes = {"train": {"iterations": 3}, "evaluate": {"tasks": 3, "every": 1, "between_tasks": 1}, "loop": {"alarms": alarms}}
    summary = train(team(), settings(tmp_path / "r", model, **changes))
    assert summary["iterations"] == 2, "in the first update the weights are still the first ones"
    assert summary["stopped"]["by"] == "kl_explosion" and "alarm kl_explosion" in summary["stopped"]["message"]
    assert {(a["name"], a["agent"], a["iteration"]) for a in summary["alarms"]} == {
        ("kl_explosion", "drafter", 2), ("kl_explosion", "editor", 2),
    }  # fmt: skip
    last = rows(tmp_path / "r")[-1]
    assert last["stop"] == summary["stopped"] and {a["name"] for a in last["alarms"]} == {"kl_explosion"}
    assert last["heldout"]["n"] == 3, "a run that ends is evaluated in full"
    assert (tmp_path / "r" / "checkpoints" / "step-00000002").is_dir()
    page = (tmp_path / "r" / "report.html").read_text()
    assert "alarm kl_explosion" in page and "The run ended early" in page
    again = train(team(), settings(tmp_path / "r", model, **changes))
    assert again["iterations"] == 2 and again["stopped"] == summary["stopped"]
    alarms["kl_explosion"]["action"] = "warn"
    whole = train(team(), settings(tmp_path / "r", model, **changes))
    assert whole["iterations"] == 3 and len(whole["alarms"]) == 2
    assert_same_run(tmp_path / "r", plain)


def test_agents_can_be_frozen_by_choice_and_their_actions_are_counted(model, tmp_path):
    summary = train(team(), settings(tmp_path / "r", model, train={"iterations": 3}, loop={"frozen": ["editor"]}))
    assert summary["versions"] == {"drafter": 3, "editor": 0} and summary["frozen"] == ["editor"]
    assert summary["left_out"]["untrainable"] == 18 and set(trained_weights(tmp_path / "r")) == {"drafter"}
    assert summary["coach"]["mean_by_agent_last"]["editor"] is not None


@pytest.mark.parametrize(
    ("frozen", "said"), [(["writer"], "'writer', which is no agent or policy"), (["drafter", "editor"], "no agent is left to train")]
)
def test_freezing_that_cant_be_meant_is_refused(model, tmp_path, frozen, said):
    with pytest.raises(ConfigError, match=said):
        train(team(), settings(tmp_path / "r", model, loop={"frozen": frozen}))


def test_the_learning_rate_of_each_iteration_is_the_schedules(model, tmp_path):
    schedule = {"schedule": "cosine", "warmup_steps": 1, "lr": 1e-2, "iterations": 4}
    train(team(), settings(tmp_path / "r", model, train=schedule))
    expected = TrainerSettings(lr=1e-2, schedule="cosine", warmup_steps=1, total_steps=4)
    assert [row["agents"]["drafter"]["lr"] for row in rows(tmp_path / "r")[1:]] == [expected.lr_at(k) for k in range(4)]
    assert "Learning rate" in (tmp_path / "r" / "report.html").read_text()


def test_a_warm_up_longer_than_the_run_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match=r"train\.warmup_steps 2 is not less than the run's 2 optimizer steps"):
        train(team(), settings(tmp_path / "r", model, train={"warmup_steps": 2}))


def test_a_tracker_gets_every_row_of_a_run_that_was_continued(model, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for iterations in (1, 3):
        changes = {"train": {"iterations": iterations}, "loop": {"trackers": ["tensorboard"]}}
        summary = train(team(), settings(tmp_path / "r", model, **changes))
        assert summary["trackers"]["tensorboard"]["failures"] == 0
    events = EventAccumulator(str(tmp_path / "r" / "trackers" / "tensorboard")).Reload()
    expected = [(row["iteration"], pytest.approx(row["agents"]["editor"]["kl"], rel=1e-5)) for row in rows(tmp_path / "r")[1:]]
    assert [(e.step, e.value) for e in events.Scalars("agents/editor/kl")] == expected


def test_a_tracker_that_fails_does_not_end_a_run(model, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme://nowhere")
    summary = train(team(), settings(tmp_path / "r", model, train={"iterations": 3}, loop={"trackers": ["mlflow"]}))
    assert summary["iterations"] == 3
    assert summary["trackers"]["mlflow"]["rows"] == 0 and summary["trackers"]["mlflow"]["failures"] == 5
    assert "nowhere" in summary["trackers"]["mlflow"]["first_failure"]


def fingerprint(run: Path) -> dict[str, str]:
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(run.rglob("*")) if p.is_file()}


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "mappa_graph.cli", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


def test_a_refused_update_is_kept_and_replayed_without_a_change_to_the_run(model, tmp_path):
    # The first of two steps takes the weights out of all bounds, so that the second is refused.
    summary = train(team(), settings(tmp_path / "r", model, train={"iterations": 1, "lr": 1e30, "optimizer_batches": 2}))
    assert summary["refused"] == {"drafter": 1, "editor": 1}
    assert "NaN" not in (tmp_path / "r" / "metrics.jsonl").read_text()
    assert "a step was refused" in (tmp_path / "r" / "report.html").read_text()
    before = fingerprint(tmp_path / "r")
    shown = command("replay", str(tmp_path / "r"), cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    said = " ".join(shown.stdout.split())
    assert "iteration 1: 12 samples, weights of checkpoint 0" in said and "now: loss nan" in said
    assert "an earlier step of the same update took the largest from 1 to 1e+30" in said
    assert fingerprint(tmp_path / "r") == before


def test_settings_that_only_watch_may_change_and_those_that_train_may_not(model, plain):
    watching = {"trackers": ["tensorboard"], "keep_refused": 5, "alarms": {"mismatch": {"threshold": 2.0}}, "early_stop": {"patience": 9}}
    train(team(), settings(plain, model, train={"iterations": 3}, evaluate={"every": 1}, loop=watching))
    for key, value in (("pipeline", True), ("sampling", "stratified"), ("frozen", ["editor"])):
        with pytest.raises(ConfigError, match=rf"other settings: loop\.{key}"):
            train(team(), settings(plain, model, train={"iterations": 3}, loop={key: value}))


def test_all_that_computes_with_the_trainer_runs_on_one_thread(model, tmp_path, monkeypatch):
    """The C library keeps a thread's freed memory for that thread: on several of them an update's would be held several times."""
    seen = Counter()
    for name in ("update", "canary", "save", "save_weights"):
        original = getattr(ReinforceTrainer, name)

        def noting(self, *args, original=original, name=name, **options):
            seen[name, threading.current_thread().name] += 1
            return original(self, *args, **options)

        monkeypatch.setattr(ReinforceTrainer, name, noting)
    train(team(), settings(tmp_path / "run", model, **PIPELINE))
    assert {name for name, _ in seen} == {"update", "canary", "save", "save_weights"}
    assert len({thread for _, thread in seen}) == 1, seen

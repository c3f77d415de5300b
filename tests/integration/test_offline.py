"""Training from recorded traces: what is learned, what is refused and why, and runs that a deployment takes over."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mappa_graph import Agent, Environment, Task
from mappa_graph.errors import ConfigError, TrainerError
from mappa_graph.gateway import Gateway
from mappa_graph.gateway.deployment import Deployment, read_canary
from mappa_graph.gateway.local import LocalEngine
from mappa_graph.record import EpisodeTrace
from mappa_graph.store import TraceStore
from mappa_graph.trainers import ReinforceTrainer, samples_from_trace
from mappa_graph.trainers.checkpoint import load_latest, trained_weights
from mappa_graph.trainers.offline import run as offline_run
from mappa_graph.trainers.offline import supervised, train_offline
from mappa_graph.trainers.settings import TrainerSettings
from tests.fakes.tinymodel import make_tiny_model
from tests.fakes.writing import text_only, write_run

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return write_run(tmp_path_factory.mktemp("traces"), model)


def drafters_text_only(trace: EpisodeTrace) -> EpisodeTrace:
    return text_only(trace, ("drafter",))


def weights_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    import torch

    a, b = weights_of(one), weights_of(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


async def served(run: Path, model: Path, folder: Path, *, merged: bool = True) -> None:
    """Publishes all that a run trained, each checked by its canary."""
    with TraceStore(folder / "trace.db") as store:
        found = trained_weights(run, "best", merged=merged)
        async with Gateway(LocalEngine(dict.fromkeys(found, model)), store) as gateway:
            deployment = Deployment(gateway, folder, dict.fromkeys(found, model))
            for policy, weights in found.items():
                assert (await deployment.publish(policy, weights, share=0.5)).verified
                assert (await deployment.promote(policy)).version == 1


# -- reinforce


async def test_reinforce_makes_the_loops_own_update_and_leaves_a_run_that_a_deployment_takes(
    traces: Path, model: Path, tmp_path: Path
) -> None:
    settings = {"epochs": 3, "optimizer_batches": 2, "lr": 1e-4, "heldout": 0.0, "seed": 5}
    summary = train_offline(traces, tmp_path / "run", settings, models=str(model))
    samples = []
    with TraceStore(traces / "trace.db", read_only=True) as store:
        for trace in store.traces():
            samples += samples_from_trace(trace, gamma=0.5)[0]
    chosen = TrainerSettings(epochs=3, optimizer_batches=2, lr=1e-4, beta=0.01)
    trainer = ReinforceTrainer({"drafter": model, "editor": model}, chosen, seed=5)
    update = trainer.update(samples)
    found = trained_weights(tmp_path / "run")
    for policy in ("drafter", "editor"):
        assert same(found[policy], trainer.save_weights(policy, tmp_path / policy))
        assert summary["policies"][policy]["rows"] == {"train": 24, "heldout": 0}
        assert summary["policies"][policy]["weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert summary["policies"][policy]["ratio_max"] == pytest.approx(update.policies[policy]["ratio_max"])
        assert summary["policies"][policy]["after"]["train"] < summary["policies"][policy]["before"]["train"]
    assert summary["tokens"] == {"trained": update.tokens, "retokenised": 0}
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["policies"]["drafter"]["steps"] == 6
    assert load_latest(tmp_path / "run" / "checkpoints")[1]["kind"] == "offline"  # type: ignore[index]
    trainer.load(load_latest(tmp_path / "run" / "checkpoints")[0])  # type: ignore[index]
    await served(tmp_path / "run", model, tmp_path / "live")


async def test_reinforce_trains_adapters_too(traces: Path, model: Path, tmp_path: Path) -> None:
    settings = {"lora": {"rank": 4, "alpha": 8.0}, "lr": 1e-3, "heldout": 0.0}
    summary = train_offline(traces, tmp_path / "run", settings, models=str(model), agents=["editor"])
    assert summary["policies"]["editor"]["after"]["train"] < summary["policies"]["editor"]["before"]["train"]
    assert (trained_weights(tmp_path / "run", merged=False)["editor"] / "adapter_model.safetensors").is_file()
    await served(tmp_path / "run", model, tmp_path / "live", merged=False)
    assert not same(trained_weights(tmp_path / "run")["editor"], model)


def test_held_out_tasks_are_not_trained_on_and_are_the_same_for_every_method(traces: Path, model: Path, tmp_path: Path) -> None:
    summary = train_offline(traces, tmp_path / "rl", {"heldout": 0.4, "lr": 1e-3}, models=str(model))
    rows = {side: [json.loads(line) for line in path.read_text().splitlines()]
            for side, path in (("train", tmp_path / "rl/data/rl.jsonl"), ("heldout", tmp_path / "rl/data/rl-heldout.jsonl"))}  # fmt: skip
    tasks = {side: {row["task_id"] for row in found} for side, found in rows.items()}
    assert tasks["train"] and tasks["heldout"] and not tasks["train"] & tasks["heldout"]
    assert summary["policies"]["editor"]["rows"] == {side: len(found) // 2 for side, found in rows.items()}
    assert summary["policies"]["editor"]["estimate"]["actions"] == len(rows["heldout"]) // 2
    card = json.loads(next((tmp_path / "rl/data").glob("*.card.json")).read_text())
    assert card["rows"] == {side: len(found) for side, found in rows.items()}


def test_what_other_weights_wrote_is_weighed_by_how_likely_the_first_weights_were_to_write_it(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    far = write_run(tmp_path / "far", model, written_by=other)
    near = write_run(tmp_path / "near", model)
    summary = train_offline(far, tmp_path / "run", {"heldout": 0.0, "lr": 1e-3, "importance_cap": 1.5}, models=str(model))
    expected = {}
    with TraceStore(far / "trace.db", read_only=True) as theirs, TraceStore(near / "trace.db", read_only=True) as ours:
        for a, b in zip(theirs.traces(), ours.traces(), strict=True):
            for action in a.actions:
                pairs = zip(b.calls[action.id].logprobs, a.calls[action.id].logprobs, strict=True)
                expected.setdefault(action.agent, []).extend(min(math.exp(first - wrote), 1.5) for first, wrote in pairs)
    for agent, weights in expected.items():
        assert summary["policies"][agent]["weight_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-3)
    assert any("written by other weights" in text for text in summary["warnings"])


def test_actions_without_tokens_are_refused_with_their_number_and_the_reason(model: Path, tmp_path: Path) -> None:
    mixed = write_run(tmp_path / "mixed", model, change=drafters_text_only)
    summary = train_offline(mixed, tmp_path / "run", {"heldout": 0.0, "lr": 1e-3}, models=str(model))
    assert set(summary["policies"]) == {"editor"} and set(summary["skipped"]) == {"drafter"}
    assert summary["text_only"] == {"drafter": 24} and summary["left_out"]["no tokens: text only"] == 24
    assert any("24 of 24 actions have no tokens" in text for text in summary["warnings"])
    assert set(trained_weights(tmp_path / "run")) == {"editor"}
    with pytest.raises(ConfigError, match="'drafter' can't be trained"):
        train_offline(mixed, tmp_path / "both", {"heldout": 0.0}, models=str(model), agents=["drafter", "editor"])
    with pytest.raises(ConfigError, match=r"text only are drafter 24(.|\n)*--retokenise"):
        train_offline(mixed, tmp_path / "one", {"heldout": 0.0}, models=str(model), agents=["drafter"])
    assert not (tmp_path / "one" / "checkpoints").exists()


def test_retokenising_is_asked_for_counted_and_said_and_gives_the_weight_1(model: Path, tmp_path: Path) -> None:
    mixed = write_run(tmp_path / "mixed", model, change=drafters_text_only)
    exact = write_run(tmp_path / "exact", model)
    settings = {"heldout": 0.0, "lr": 1e-3}
    summary = train_offline(mixed, tmp_path / "run", {**settings, "retokenise": True}, models=str(model))
    plain = train_offline(exact, tmp_path / "plain", settings, models=str(model))
    assert [summary["policies"][a]["retokenised"] for a in ("drafter", "editor")] == [24, 0]
    assert summary["policies"]["drafter"]["weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert any("24 of 24 actions were tokenised anew" in text for text in summary["warnings"])
    # The texts were this model's own, so the ids made from them are those that it wrote.
    assert summary["tokens"]["trained"] == plain["tokens"]["trained"]
    assert summary["tokens"]["retokenised"] == plain["policies"]["drafter"]["tokens"]


def test_actions_without_log_probs_of_who_wrote_them_get_the_weight_1_and_are_counted(model: Path, tmp_path: Path) -> None:
    def blind(trace: EpisodeTrace) -> EpisodeTrace:
        if not trace.episode.id.endswith("-0"):
            return trace
        lost = {id: replace(call, logprobs=(math.nan,) * len(call.logprobs)) for id, call in trace.calls.items()}
        return replace(trace, calls=lost)

    run = write_run(tmp_path / "blind", model, change=blind)
    summary = train_offline(run, tmp_path / "run", {"heldout": 0.0, "lr": 1e-3}, models=str(model))
    assert [one["unweighted"] for one in summary["policies"].values()] == [8, 8]
    assert all(one["weight_mean"] == pytest.approx(1.0, abs=1e-4) for one in summary["policies"].values())
    assert any("8 of 24 actions have no log-probs" in text for text in summary["warnings"])


def test_tokens_of_another_tokenizer_are_refused_whether_all_or_some_are(model: Path, tmp_path: Path) -> None:
    def foreign(trace: EpisodeTrace) -> EpisodeTrace:
        if trace.episode.id != "e3-1":
            return trace
        return replace(
            trace, calls={id: replace(c, completion_ids=tuple(i - 1 for i in c.completion_ids)) for id, c in trace.calls.items()}
        )

    some = write_run(tmp_path / "some", model, change=foreign)
    with pytest.raises(ConfigError, match=r"1 of 24 actions of agent 'drafter' \(the first: e3-1-drafter\)(.|\n)*another tokenizer"):
        train_offline(some, tmp_path / "run", {"heldout": 0.0}, models=str(model))
    other = make_tiny_model(tmp_path / "other", words=["note", "take"])
    beyond = write_run(tmp_path / "beyond", other)
    with pytest.raises(ConfigError, match="another tokenizer"):
        train_offline(beyond, tmp_path / "run2", {"heldout": 0.0}, models=str(model))


def test_a_reinforce_run_that_was_ended_before_its_checkpoint_starts_over_to_the_same_weights(
    traces: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"epochs": 2, "lr": 1e-3}
    kept = offline_run.save_checkpoint

    def die(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(offline_run, "save_checkpoint", die)
    with pytest.raises(KeyboardInterrupt):
        train_offline(traces, tmp_path / "run", settings, models=str(model))
    assert not (tmp_path / "run" / "summary.json").exists()
    next((tmp_path / "run" / "data").glob("*.card.json")).unlink()  # as if it had ended before that
    monkeypatch.setattr(offline_run, "save_checkpoint", kept)
    train_offline(traces, tmp_path / "run", settings, models=str(model))
    train_offline(traces, tmp_path / "whole", settings, models=str(model))
    for policy, folder in trained_weights(tmp_path / "run").items():
        assert same(folder, trained_weights(tmp_path / "whole")[policy])


def test_a_complete_run_trains_nothing_again_and_other_settings_are_refused(
    traces: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train_offline(traces, tmp_path / "run", {"lr": 1e-3}, models=str(model))
    monkeypatch.setattr(offline_run._Training, "run", lambda self: pytest.fail("trained again"))
    assert train_offline(traces, tmp_path / "run", {"lr": 1e-3}, models=str(model)) == first
    with pytest.raises(ConfigError, match="with other settings: lr"):
        train_offline(traces, tmp_path / "run", {"lr": 1e-2}, models=str(model))
    with pytest.raises(ConfigError, match="with other settings: agents"):
        train_offline(traces, tmp_path / "run", {"lr": 1e-3}, models=str(model), agents=["editor"])


def test_settings_alone_do_not_stand_in_the_way_and_with_a_part_that_was_made_they_do(traces: Path, model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError):
        train_offline(traces, run, {"lr": 1e-3}, models=str(tmp_path / "nowhere" / "at all"))
    train_offline(traces, run, {"method": "sft", "lr": 1e-3}, models=str(model), agents=["editor"])
    for name in ("checkpoints", "summary.json"):  # as a kill would leave it between two policies
        place = run / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    (run / "parts" / "drafter").mkdir(parents=True, exist_ok=True)
    with pytest.raises(ConfigError, match="with other settings: lr"):
        train_offline(traces, run, {"method": "sft", "lr": 1e-2}, models=str(model), agents=["editor"])


def test_a_training_that_diverges_is_said_and_leaves_no_checkpoint(traces: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="lower the learning rate"):
        train_offline(traces, tmp_path / "run", {"lr": 1e30, "epochs": 3}, models=str(model))
    assert load_latest(tmp_path / "run" / "checkpoints") is None


# -- texts


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("sft", {"min_score": 9.0}),
        ("dpo", {"pairs_per_state": 1}),
        ("kto", {"min_margin": 4.0}),
        ("sft", {"lora": {"rank": 4, "alpha": 8.0}}),
    ],
)
async def test_text_alone_trains_by_trl_and_leaves_a_run_that_a_deployment_takes(
    method: str, more: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "texts", model, change=text_only, tasks=6)
    settings = {"method": method, "lr": 5e-3, "epochs": 2, "heldout": 0.3, **more}
    summary = train_offline(run, tmp_path / "run", settings, models=str(model), agents=["editor"])
    one = summary["policies"]["editor"]
    assert one["after"]["train"] < one["before"]["train"]
    assert one["before"]["heldout"] is not None and one["rows"]["heldout"] > 0
    assert summary["text_only"]["editor"] > 0
    folder = trained_weights(tmp_path / "run", merged=False)["editor"]
    assert read_canary(folder) is not None
    assert (folder / "adapter_model.safetensors").exists() == ("lora" in more)
    await served(tmp_path / "run", model, tmp_path / "live", merged=False)
    assert not same(trained_weights(tmp_path / "run")["editor"], model)  # an adapter comes merged
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows and all(row["policy"] == "editor" for row in rows) and any(math.isfinite(row.get("loss", math.nan)) for row in rows)


def test_sft_takes_the_best_scored_actions_only(traces: Path, model: Path, tmp_path: Path) -> None:
    import datasets

    summary = train_offline(traces, tmp_path / "run", {"method": "sft", "heldout": 0.0, "lr": 1e-3}, models=str(model), agents=["drafter"])
    rows = datasets.load_from_disk(str(tmp_path / "run/data/drafter/sft"))
    assert {row["score"] for row in rows} == {9.0} and len(rows) == 8
    assert summary["policies"]["drafter"]["rows"]["train"] == 8 and summary["left_out"]["score"] == 16
    assert summary["policies"]["drafter"]["before"]["heldout"] is None


def test_an_interrupted_text_run_goes_on_with_the_next_policy(
    traces: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[str] = []
    fit: Callable[..., Any] = supervised.fit

    def dies_at_the_editor(policy: str, *args: Any) -> Any:
        fitted.append(policy)
        if policy == "editor" and fitted.count("editor") == 1:
            raise KeyboardInterrupt
        return fit(policy, *args)

    monkeypatch.setattr(supervised, "fit", dies_at_the_editor)
    settings = {"method": "sft", "lr": 1e-3, "heldout": 0.0}
    with pytest.raises(KeyboardInterrupt):
        train_offline(traces, tmp_path / "run", settings, models=str(model))
    summary = train_offline(traces, tmp_path / "run", settings, models=str(model))
    assert fitted == ["drafter", "editor", "editor"] and set(summary["policies"]) == {"drafter", "editor"}
    assert set(trained_weights(tmp_path / "run")) == {"drafter", "editor"} and not (tmp_path / "run" / "parts").exists()


def test_a_killed_run_is_completed_by_the_same_command(traces: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "mappa_graph.cli", "train", "--from", str(traces), "--run", str(tmp_path / "run"), "--method", "sft",
               "--model", str(model), "--set", "lr=1e-3", "--set", "epochs=30"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "run" / "parts" / "drafter" / "done.json").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    assert not (tmp_path / "run" / "summary.json").exists()
    fitted: list[str] = []
    fit: Callable[..., Any] = supervised.fit
    monkeypatch.setattr(supervised, "fit", lambda policy, *args: (fitted.append(policy), fit(policy, *args))[1])
    summary = train_offline(traces, tmp_path / "run", {"method": "sft", "lr": 1e-3, "epochs": 30}, models=str(model))
    assert fitted == ["editor"] and set(summary["policies"]) == set(trained_weights(tmp_path / "run")) == {"drafter", "editor"}


def test_rows_longer_than_the_context_are_left_out_and_counted_and_none_is_cut(model: Path, tmp_path: Path) -> None:
    def long(trace: EpisodeTrace) -> EpisodeTrace:
        grown = [replace(a, output=a.output + "x" * 2000) if trace.episode.id == "e0-2" else a for a in trace.actions]
        return text_only(replace(trace, actions=tuple(grown)))

    run = write_run(tmp_path / "long", model, change=long, tasks=4)
    summary = train_offline(run, tmp_path / "run", {"method": "sft", "heldout": 0.0}, models=str(model), agents=["editor"])
    assert summary["left_out"]["longer than the context"] == 1 and summary["policies"]["editor"]["rows"]["train"] == 3


# -- what can't be trained


def test_bad_input_is_said_with_the_way_out(traces: Path, model: Path, tmp_path: Path) -> None:
    def go(source: Path = traces, settings: dict[str, Any] | None = None, models: Any = str(model), run: str = "run", **more: Any) -> None:
        train_offline(source, tmp_path / run, settings, models=models, **more)

    def unscored(trace: EpisodeTrace) -> EpisodeTrace:
        return replace(trace, verdicts={})

    def renamed(trace: EpisodeTrace) -> EpisodeTrace:
        calls = {id: replace(c, policy=f"p{trace.episode.sample}{trace.episode.id[-1]}") for id, c in trace.calls.items()}
        return replace(trace, calls=calls)

    def frozen(trace: EpisodeTrace) -> EpisodeTrace:
        return replace(trace, actions=tuple(replace(a, trainable=a.agent != "editor") for a in trace.actions))

    small: dict[str, Any] = {"tasks": 2}
    cases: list[tuple[str, Callable[[], None]]] = [
        ("holds no recorded run", lambda: go(tmp_path / "nowhere")),
        ("there is no agent 'boss'(.|\n)*drafter, editor", lambda: go(agents=["boss"])),
        ("holds no action of split 'test'", lambda: go(settings={"split": "test"}, run="a")),
        ("none of the 12 actions of drafter, editor has", lambda: go(write_run(tmp_path / "u", model, change=unscored, **small), run="b")),
        ("acted with weights of several names", lambda: go(write_run(tmp_path / "r", model, change=renamed, **small), run="c")),
        ("agent 'editor' is frozen", lambda: go(write_run(tmp_path / "frozen", model, change=frozen, **small), run="d", agents=["editor"])),
        ("nothing to export as sft", lambda: go(settings={"method": "sft", "min_score": 9.5}, run="e", agents=["editor"])),
        ("nothing to export as rl", lambda: go(settings={"since": "2030-01-01"}, run="f")),
        ("no policy has anything to train on", lambda: go(settings={"method": "sft", "min_score": 9.5}, run="g")),
        ("no model is given for policy 'editor'", lambda: go(models={"drafter": str(model)}, run="h")),
        ("there is no policy 'boss' to train", lambda: go(models=dict.fromkeys(["drafter", "editor", "boss"], str(model)), run="i")),
        ("there is no model folder", lambda: go(models=str(tmp_path / "none" / "x" / "y"), run="j")),
        ("epoch: unknown setting", lambda: go(settings={"epoch": 3})),
        ("gamma: no effect with method 'sft'", lambda: go(settings={"method": "sft", "gamma": 0.5})),
        ("batch: no effect with method 'reinforce'", lambda: go(settings={"batch": 4})),
        ("beta: no effect with method 'reinforce'", lambda: go(settings={"beta": 0.1})),
        ("batch 1 is too small", lambda: go(settings={"method": "kto", "batch": 1})),
        ("retokenise: no effect with method 'kto'", lambda: go(settings={"method": "kto", "retokenise": True})),
        ("gamma has no effect with credit 'own'", lambda: go(settings={"credit": "own", "gamma": 0.5})),
        ("lr: Input should be greater than 0", lambda: go(settings={"lr": 0})),
        ("holds the traces", lambda: train_offline(traces, traces, models=str(model))),
        ("holds another run", lambda: train_offline(traces, write_run(tmp_path / "o", model, tasks=1), models=str(model))),
    ]  # fmt: skip
    for said, act in cases:
        with pytest.raises(ConfigError, match=said):
            act()
    bare = make_tiny_model(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    for settings in ({"method": "sft"}, {"retokenise": True}):
        with pytest.raises(ConfigError, match="no chat template"):
            go(settings=settings, models=str(bare), run=f"bare-{len(settings)}-{next(iter(settings))}")


def test_a_training_can_start_from_a_training_run_and_from_what_a_deployment_serves(traces: Path, model: Path, tmp_path: Path) -> None:
    first = train_offline(traces, tmp_path / "first", {"lr": 1e-3}, models=str(model))
    again = train_offline(traces, tmp_path / "again", {"lr": 1e-3}, models=str(tmp_path / "first"), agents=["editor"])
    assert again["model"] == {"editor": str(trained_weights(tmp_path / "first")["editor"])}
    assert set(first["policies"]) == {"drafter", "editor"}
    only = train_offline(traces, tmp_path / "only", {"lr": 1e-3}, models=str(model), agents=["editor"])
    assert not same(trained_weights(tmp_path / "only")["editor"], trained_weights(tmp_path / "again")["editor"])
    assert set(only["policies"]) == {"editor"}
    with pytest.raises(ConfigError, match="trained no policy 'drafter'"):
        train_offline(traces, tmp_path / "none", {"lr": 1e-3}, models=str(tmp_path / "only"))
    live = tmp_path / "live"
    live.mkdir()

    def serving(version: int, of: int) -> None:
        release = {"policy": "editor", "version": 2, "weights": str(model), "of": of}
        (live / "deployment.json").write_text(json.dumps({"releases": [release], "current": {"editor": version}, "trials": {}}))

    serving(2, of=2)
    took = train_offline(traces, tmp_path / "live-run", {"lr": 1e-3}, models=str(live), agents=["editor"])
    assert took["model"] == {"editor": str(model.resolve())}
    with pytest.raises(ConfigError, match="has no policy 'drafter'"):
        train_offline(traces, tmp_path / "w", {"lr": 1e-3}, models=str(live), agents=["drafter"])
    for version, of in ((0, 2), (2, 0)):
        serving(version, of)
        with pytest.raises(ConfigError, match="doesn't say where they lie"):
            train_offline(traces, tmp_path / f"v{version}{of}", {"lr": 1e-3}, models=str(live), agents=["editor"])
    (live / "deployment.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        train_offline(traces, tmp_path / "x", {"lr": 1e-3}, models=str(live), agents=["editor"])


def test_an_environment_says_whose_weights_agents_share_and_who_is_frozen(traces: Path, model: Path, tmp_path: Path) -> None:
    def team(**editor: Any) -> Environment:
        agents = [Agent("drafter", policy="team"), Agent("editor", **editor)]
        return Environment("notes", agents, build_graph=lambda models: None, tasks=[Task("t", "p")], grade=lambda task, state: True)

    settings = {"lr": 1e-3, "heldout": 0.0}
    shared = train_offline(traces, tmp_path / "shared", settings, models=str(model), environment=team(policy="team"))
    assert shared["policies"]["team"]["agents"] == ["drafter", "editor"] and shared["policies"]["team"]["rows"]["train"] == 48
    assert set(trained_weights(tmp_path / "shared")) == {"team"}
    alone = train_offline(traces, tmp_path / "alone", settings, models=str(model), environment=team(trainable=False))
    assert alone["policies"]["team"]["agents"] == ["drafter"]
    with pytest.raises(ConfigError, match="agent 'editor' is frozen"):
        train_offline(traces, tmp_path / "x", settings, models=str(model), environment=team(trainable=False), agents=["editor"])


def test_train_from_on_the_command_line(traces: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mappa_graph.cli import main

    def run(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as done:
            main(["train", *words])
        out = capsys.readouterr()
        assert done.value.code == code, out.out + out.err
        return " ".join((out.out + out.err).split())

    source = ("--from", str(traces), "--run", str(tmp_path / "run"))
    said = run(*source, "--model", str(model), "--set", "lr=1e-3", "--set", "heldout=0.3", "--seed", "3", "--quiet")
    assert "reinforce from traces" in said and "mappa-graph publish" in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["seed"] == 3
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as done:
        main(["weights", str(tmp_path / "run"), "--out", str(out)])
    assert done.value.code == 0 and sorted(p.name for p in out.iterdir()) == ["drafter", "editor"]
    new = ("--from", str(traces), "--run", str(tmp_path / "new"))
    for words, why in (
        (("--method", "sft"), "--method: no effect without --from"),
        (("--from", str(traces)), "needs a folder of its own"),
        (new, "which weights to start from"),
        ((*new, "--model", "a", "--model", "b"), "for all policies, and not the only one"),
        ((*new, "--model", str(model), "--set", "epochs"), "is not of the form"),
        ((*new, "--model", str(model), "--method", "sft", "--set", "method=kto"), "method is given twice"),
        ((*new, "--model", str(model), "--set", "lora.rnk=3"), "lora.rnk: unknown setting"),
    ):  # fmt: skip
        assert why in run(*words, code=1)


@pytest.mark.parametrize("policy", ["/tmp/victim", "..", "a/../../b", "x" * 300])
def test_a_policy_named_like_a_path_is_refused_before_anything_is_written(tmp_path: Path, policy: str) -> None:
    from mappa_graph.agent import check_name
    from mappa_graph.trainers import ReinforceTrainer

    with pytest.raises(ConfigError, match="not a valid name"):
        check_name("policy", policy)
    with pytest.raises(ConfigError, match="not a valid name"):
        ReinforceTrainer({policy: tmp_path})

"""One update: exact against a slow float64 implementation, safe at the edges, and every reward on its own tokens."""

import json
import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from mappa_graph.errors import TrainerError
from mappa_graph.trainers import ReinforceTrainer, Sample, TrainerSettings
from mappa_graph.trainers import learner as learner_module
from mappa_graph.trainers import sharding as sharding_module
from tests.fakes.batches import random_samples, slow_gradients, slow_logprobs
from tests.fakes.tinymodel import make_tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model", seed=1)


def weights(trainer, policy):
    return {n: p.detach().clone() for n, p in trainer.learner(policy).model.named_parameters()}


def same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


def captured_gradients(trainer):
    """Gradients by policy as the optimizer's step took them."""
    seen = {}
    for policy, learner in trainer.learners.items():

        def hook(optimizer, args, kwargs, policy=policy, learner=learner):
            seen[policy] = {n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None}

        learner.optimizer.register_step_post_hook(hook)
    return seen


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("budget", [16384, 30])
def test_loss_and_gradient_equal_the_slow_float64_implementation(base, tmp_path, tree, beta, budget):
    agents = {"planner": "planner", "solver": "shared", "checker": "shared"}
    settings = TrainerSettings(beta=beta, lr=3e-3, tree=tree, micro_batch_tokens=budget, grad_clip=1e9)
    trainer = ReinforceTrainer({"planner": base, "shared": base}, settings)
    assert all(learner.tree is tree for learner in trainer.learners.values())
    trainer.update(random_samples(7, agents=agents))  # away from the reference, so that there is KL
    folders = {p: trainer.save_weights(p, tmp_path / p) for p in trainer.learners}
    samples = random_samples(8, agents=agents)
    seen = captured_gradients(trainer)
    update = trainer.update(samples)

    slow, losses = slow_gradients(folders, dict.fromkeys(folders, base), samples, beta=beta)
    for policy, expected in slow.items():
        assert update.policies[policy]["loss"] == pytest.approx(losses[policy], abs=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(seen[policy][name].double(), gradient, rtol=2e-3, atol=2e-6, msg=f"{policy} {name}")
    kept = [s for s in samples if s.ret is not None]
    assert update.tokens == sum(len(s.completion_ids) for s in kept) and update.actions == len(kept)
    assert update.without_return == len(samples) - len(kept)


def test_the_optimizer_step_is_adamw_on_the_clipped_gradient(base):
    settings = TrainerSettings(beta=0.0, lr=1e-2, grad_clip=0.05)
    trainer = ReinforceTrainer({"a": base}, settings)
    before, seen = weights(trainer, "a"), captured_gradients(trainer)
    update = trainer.update(random_samples(3, agents={"a": "a"}))
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in seen["a"].values()))
    assert norm == pytest.approx(0.05, rel=1e-4) and update.policies["a"]["grad_norm"] > 0.05
    for name, old in before.items():
        g = seen["a"][name].double()
        expected = old.double() - 1e-2 * g / (g.abs() + 1e-8)  # the first step of Adam, bias-corrected
        torch.testing.assert_close(trainer.learner("a").model.get_parameter(name).double(), expected, rtol=1e-4, atol=1e-6)


def test_each_reward_reaches_exactly_its_own_tokens(base, monkeypatch):
    """Two agents, several turns, lengths of 1 to 5, shared prefixes: every completion token is one of a kind, so a shift would show."""
    rows = [  # agent, prompt, completion, return
        ("a", (10, 11), (100, 101, 102), 0.1),
        ("a", (10, 11, 100, 101, 102, 12), (110,), 0.2),
        ("a", (10, 11, 100, 101, 102, 12, 110, 13), (120, 121), 0.3),
        ("b", (10,), (130, 131, 132, 133, 134), 0.4),
        ("b", (10, 130, 131, 132, 133, 134), (140, 141), 0.5),
        ("b", (20, 21, 22), (150,), 0.6),
        ("b", (20, 21, 22), (160, 161), 0.7),
    ]
    samples = [Sample(a, a, "e", str(i), p, c, tuple(-0.01 * t for t in c), ret=g) for i, (a, p, c, g) in enumerate(rows)]
    expected = {t: (g, -0.01 * t) for _, _, c, g in rows for t in c}
    flat = [g for _, _, c, g in rows for _ in c]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((g - mean) ** 2 for g in flat) / len(flat))
    plain = AutoModelForCausalLM.from_pretrained(base)
    own = {t: v.item() for s in samples for t, v in zip(s.completion_ids, slow_logprobs(plain, s), strict=True)}
    for settings in (TrainerSettings(beta=0.0), TrainerSettings(beta=0.0, tree=False), TrainerSettings(beta=0.0, micro_batch_tokens=12)):
        trainer = ReinforceTrainer({"a": base, "b": base}, settings)
        targets, found = [], {}
        forward, loss = sharding_module.pack_logprobs, learner_module.policy_loss

        def noting_forward(model, pack, forward=forward, targets=targets):
            targets.append(pack.target.tolist())
            return forward(model, pack)

        def noting_loss(logprobs, old, engine, advantages, loss=loss, targets=targets, found=found, **rest):
            columns = (advantages.tolist(), engine.tolist(), logprobs.tolist())
            for token, advantage, engine_logprob, logprob in zip(targets[-1], *columns, strict=True):
                assert token not in found
                found[token] = (advantage, engine_logprob, logprob)
            return loss(logprobs, old, engine, advantages, **rest)

        monkeypatch.setattr(sharding_module, "pack_logprobs", noting_forward)
        monkeypatch.setattr(learner_module, "policy_loss", noting_loss)
        trainer.update(samples)
        monkeypatch.undo()
        assert set(found) == set(expected)
        for token, (g, engine_logprob) in expected.items():
            assert found[token][0] == pytest.approx((g - mean) / std, abs=1e-5)
            assert found[token][1] == pytest.approx(engine_logprob, abs=1e-6)
            assert found[token][2] == pytest.approx(own[token], abs=1e-4)


def test_equal_scores_without_kl_move_nothing_even_with_momentum(base):
    trainer = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.0, lr=1e-2))
    samples = random_samples(5, agents={"a": "a"})
    assert trainer.update(samples).policies["a"]["steps"] == 1
    before = weights(trainer, "a")
    update = trainer.update([replace(s, ret=0.3) for s in samples])
    assert same(before, weights(trainer, "a"))
    assert update.policies["a"]["grad_norm"] == 0.0 and update.policies["a"]["steps"] == 0 and not update.refused


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_one_action_of_one_token_is_a_batch(base, beta):
    trainer = ReinforceTrainer({"a": base}, TrainerSettings(beta=beta, lr=1e-2))
    before = weights(trainer, "a")
    update = trainer.update([Sample("a", "a", "e", "1", (5,), (6,), (-2.0,), ret=0.9)])
    assert same(before, weights(trainer, "a")) and update.tokens == 1  # its advantage over itself is zero
    assert all(math.isfinite(v) for v in update.metrics["a"].values())


def test_a_policy_without_samples_keeps_its_weights(base):
    trainer = ReinforceTrainer({"a": base, "b": base}, TrainerSettings(beta=0.01, lr=1e-2))
    before = weights(trainer, "b")
    update = trainer.update(random_samples(5, agents={"a": "a"}))
    assert same(before, weights(trainer, "b")) and "b" not in update.policies and update.policies["a"]["steps"] == 1
    empty = trainer.update([])
    assert empty.tokens == 0 and empty.metrics == {} and trainer.canary("b") is None


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_policy_whose_numbers_are_not_finite_is_refused_and_harms_nobody(base, beta):
    agents = {"a": "a", "b": "b"}
    samples = random_samples(11, agents=agents, count=20)
    # Log-probs that no KL can be had from are known before the statistics are made, and take no part in them.
    settings = TrainerSettings(beta=beta, lr=1e-2, normalise="batch" if beta else "agent")
    trainer = ReinforceTrainer({"a": base, "b": base}, settings)
    with torch.no_grad():
        trainer.learner("a").model.lm_head.weight[3, 3] = math.nan
    before = weights(trainer, "a")
    update = trainer.update(samples)
    assert "finite" in update.refused["a"] and set(update.refused) == {"a"}
    assert update.metrics["a"]["refused"] == 1.0
    after = weights(trainer, "a")
    assert all(torch.equal(torch.nan_to_num(before[n]), torch.nan_to_num(after[n])) for n in before)
    assert not trainer.learner("a").optimizer.state

    alone = ReinforceTrainer({"b": base}, settings)
    alone.update([s for s in samples if s.policy == "b"])
    for name, value in weights(alone, "b").items():
        torch.testing.assert_close(value, weights(trainer, "b")[name], rtol=0, atol=0)


def test_a_gradient_that_is_not_finite_is_refused(base):
    trainer = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.0, lr=1e-2))
    trainer.learner("a").parameters[0].register_hook(lambda g: g * math.inf)
    before = weights(trainer, "a")
    update = trainer.update(random_samples(11, agents={"a": "a"}))
    assert "gradient norm" in update.refused["a"] and same(before, weights(trainer, "a"))
    assert update.policies["a"]["refused"] == 1.0 and trainer.canary("a") is None


def test_later_epochs_and_optimizer_batches_are_clipped_against_the_first_weights(base):
    settings = TrainerSettings(beta=0.01, lr=2e-2, epochs=2, optimizer_batches=3)
    trainer = ReinforceTrainer({"a": base}, settings)
    update = trainer.update(random_samples(2, agents={"a": "a"}, count=24))
    metrics = update.policies["a"]
    assert metrics["steps"] == 6 and metrics["clip_share"] > 0.0 and metrics["ratio_max"] > 1.2
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)  # of the policy that sampled, which is the reference still


def test_normalise_by_agent_and_stratum_center_each_group(base):
    samples = random_samples(4, agents={"a": "p", "b": "p"}, count=30, without_return=0.0)
    trainer = ReinforceTrainer({"p": base}, TrainerSettings(beta=0.0, normalise="agent"))
    update = trainer.update(samples)
    for agent in "ab":
        assert update.metrics[agent]["advantage_mean"] == pytest.approx(0.0, abs=1e-6)
        assert update.metrics[agent]["advantage_std"] == pytest.approx(1.0, abs=1e-5)
    batch = ReinforceTrainer({"p": base}, TrainerSettings(beta=0.0)).update(samples)
    assert abs(batch.metrics["a"]["advantage_mean"]) > 1e-3
    assert batch.policies["p"]["advantage_mean"] == pytest.approx(0.0, abs=1e-6)


def test_metrics_are_what_they_say(base):
    samples = [
        Sample("a", "a", "e", "1", (5, 6), (7, 8), (-1.0, -2.0), ret=0.2),
        Sample("a", "a", "e", "2", (5, 6), (9,), (-3.0,), ret=0.8),
    ]
    trainer = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.01))
    slow = [v.item() for s in samples for v in slow_logprobs(AutoModelForCausalLM.from_pretrained(base), s)]
    metrics = trainer.update(samples).metrics["a"]
    assert (metrics["tokens"], metrics["actions"], metrics["length_mean"]) == (3.0, 2.0, 1.5)
    assert metrics["return_mean"] == pytest.approx(0.5)
    engine = [-1.0, -2.0, -3.0]
    assert metrics["mismatch_kl"] == pytest.approx(sum(e - v for e, v in zip(engine, slow, strict=True)) / 3, abs=1e-4)
    assert metrics["weight_mean"] == pytest.approx(sum(min(math.exp(v - e), 2) for e, v in zip(engine, slow, strict=True)) / 3, abs=1e-4)
    assert (metrics["ratio_mean"], metrics["ratio_max"], metrics["clip_share"], metrics["kl"]) == (1.0, 1.0, 0.0, 0.0)
    # Two sequences of inputs, 5 6 7 and 5 6: three positions, and the second is a prefix of the first.
    assert (metrics["computed_tokens"], metrics["shared_tokens"]) == (3.0, 2.0)
    json.dumps(metrics)


def test_samples_that_cannot_be_trained_on_are_named(base):
    trainer = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.0))
    with pytest.raises(TrainerError, match=r"not in training: ghost"):
        trainer.update([Sample("x", "ghost", "e", "1", (1,), (2,), (-1.0,), ret=0.1)])
    with pytest.raises(TrainerError, match=r"token id beyond the 259"):
        trainer.update([Sample("a", "a", "e", "1", (1,), (259,), (-1.0,), ret=0.1)])
    with pytest.raises(TrainerError, match=r"token id beyond the 259"):
        trainer.update([Sample("a", "a", "e", "1", (1, -1), (2,), (-1.0,), ret=0.1)])
    with pytest.raises(TrainerError, match="2 log-probs for 1"):
        Sample("a", "a", "e", "1", (1,), (2,), (-1.0, -1.0), ret=0.1)
    with pytest.raises(TrainerError, match="return 7"):
        Sample("a", "a", "e", "1", (1,), (2,), (-1.0,), ret=7.0)
    with pytest.raises(TrainerError, match=r"config\.json"):
        ReinforceTrainer({"a": base / "nowhere"}, TrainerSettings())
    with pytest.raises(TrainerError, match="no policies"):
        ReinforceTrainer({}, TrainerSettings())


def test_policies_from_one_folder_share_one_reference_and_beta_zero_needs_none(base, tmp_path):
    other = make_tiny_model(tmp_path / "other", seed=9)
    trainer = ReinforceTrainer({"a": base, "b": base, "c": other}, TrainerSettings(beta=0.1))
    assert trainer.learner("a").reference is trainer.learner("b").reference is not trainer.learner("c").reference
    assert trainer.learner("a").reference is not None
    assert not any(p.requires_grad for p in trainer.learner("a").reference.parameters())
    assert ReinforceTrainer({"a": base}, TrainerSettings(beta=0.0)).learner("a").reference is None


def test_saved_weights_are_an_ordinary_model_folder_and_the_canary_answers_for_them(base, tmp_path):
    trainer = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.0, lr=1e-2))
    trainer.update(random_samples(5, agents={"a": "a"}))
    folder = trainer.save_weights("a", tmp_path / "deep" / "v1")
    again = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in weights(trainer, "a").items():
        assert torch.equal(again.get_parameter(name).detach(), value)
    assert AutoTokenizer.from_pretrained(folder).chat_template == AutoTokenizer.from_pretrained(base).chat_template
    canary = trainer.canary("a")
    sample = Sample("a", "a", "e", "1", tuple(canary.prompt_ids), tuple(canary.completion_ids), tuple(canary.logprobs))
    assert canary.temperature == 1.0 and len(canary.logprobs) == len(canary.completion_ids) >= 1
    assert [v.item() for v in slow_logprobs(again, sample)] == pytest.approx(list(canary.logprobs), abs=1e-4)
    first = [v.item() for v in slow_logprobs(AutoModelForCausalLM.from_pretrained(base), sample)]
    assert max(abs(a - b) for a, b in zip(first, canary.logprobs, strict=True)) > canary.tolerance


def test_a_failed_write_leaves_the_old_folder_and_nothing_else(base, tmp_path, monkeypatch):
    trainer = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.0))
    folder = trainer.save_weights("a", tmp_path / "v1")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mappa_graph.trainers.weights.shutil.copyfile", full)
    with pytest.raises(TrainerError, match="No space left"):
        trainer.save_weights("a", tmp_path / "v1")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before and [p.name for p in tmp_path.iterdir()] == ["v1"]


def test_bfloat16_arithmetic_is_close_and_keeps_float32_weights(base):
    samples = random_samples(5, agents={"a": "a"})
    exact = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.1))
    half = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.1, dtype="bfloat16"))
    assert half.update(samples).policies["a"]["grad_norm"] == pytest.approx(exact.update(samples).policies["a"]["grad_norm"], rel=0.1)
    assert all(p.dtype == torch.float32 for p in half.learner("a").parameters)


def test_gradient_checkpointing_changes_memory_only(base):
    samples = random_samples(5, agents={"a": "a"})
    updates = []
    for checkpointing in (False, True):
        trainer = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.1, lr=1e-2, gradient_checkpointing=checkpointing))
        seen = captured_gradients(trainer)
        trainer.update(samples)
        updates.append(seen["a"])
    for name, gradient in updates[0].items():
        torch.testing.assert_close(updates[1][name], gradient, rtol=1e-5, atol=1e-7)


def test_learning_rates_follow_the_schedule():
    warm = TrainerSettings(lr=1.0, warmup_steps=4)
    assert [warm.lr_at(s) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = TrainerSettings(lr=1.0, warmup_steps=2, schedule="linear", total_steps=12, lr_floor=0.0)
    assert [linear.lr_at(s) for s in (0, 1, 2, 7, 12, 99)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0, 0.0])
    cosine = TrainerSettings(lr=1.0, schedule="cosine", total_steps=10, lr_floor=0.1)
    assert [cosine.lr_at(s) for s in (0, 5, 10, 11)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"lr": 0.0}, "lr"),
        ({"betta": 0.1}, "betta"),
        ({"schedule": "cosine"}, "total_steps"),
        ({"schedule": "linear", "total_steps": 3, "warmup_steps": 3}, "warmup_steps 3"),
        ({"std_floor": 0.0}, "std_floor"),
        ({"clip": 1.0}, "clip"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"beta": math.nan}, "beta"),
    ],
)
def test_bad_settings_are_named(bad, says):
    with pytest.raises(ValidationError, match=says):
        TrainerSettings(**bad)

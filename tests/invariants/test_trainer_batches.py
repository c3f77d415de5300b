"""What an update must not depend on: micro-batches, the order of episodes, company, layout, and having been interrupted."""

import random

import pytest
import torch

from mappa_graph.errors import TrainerError
from mappa_graph.trainers import ReinforceTrainer, TrainerSettings, load_latest, save_checkpoint
from tests.fakes.batches import random_samples
from tests.fakes.tinymodel import make_tiny_model

AGENTS = {"planner": "planner", "solver": "shared", "checker": "shared"}
POLICIES = ("planner", "shared")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model", seed=2)


def gradients(base, samples, settings, policies=POLICIES):
    """Loss and gradient of each policy's first step, and the metrics of its update."""
    trainer = ReinforceTrainer(dict.fromkeys(policies, base), settings)
    assert all(learner.tree is settings.tree for learner in trainer.learners.values())
    with torch.no_grad():  # away from the reference, so that there is KL
        for learner in trainer.learners.values():
            learner.model.lm_head.weight.mul_(1.1)
    seen = {}
    for policy, learner in trainer.learners.items():

        def hook(optimizer, args, kwargs, policy=policy, learner=learner):
            seen.setdefault(policy, torch.cat([p.grad.flatten() for p in learner.parameters]).double())

        learner.optimizer.register_step_pre_hook(hook)
    update = trainer.update(samples)
    return seen, update


def assert_same(one, other):
    (seen, update), (expected, expected_update) = one, other
    assert seen.keys() == expected.keys()
    for policy in seen:
        torch.testing.assert_close(seen[policy], expected[policy], rtol=1e-4, atol=2e-6)
        for key in ("loss", "kl", "entropy", "advantage_std", "return_mean", "tokens", "mismatch_kl", "weight_mean"):
            assert update.policies[policy][key] == pytest.approx(expected_update.policies[policy][key], abs=2e-5), key


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("budget", [1, 40, 200])
@pytest.mark.parametrize("tree", [True, False])
def test_any_budget_and_layout_of_micro_batches(base, budget, tree, batches):
    samples = random_samples(1, agents=AGENTS, count=30)
    common = {"beta": 0.1, "lr": 1e-3, "optimizer_batches": batches}
    whole = gradients(base, samples, TrainerSettings(**common))
    assert_same(gradients(base, samples, TrainerSettings(**common, micro_batch_tokens=budget, tree=tree)), whole)


@pytest.mark.parametrize("batches", [1, 2])
def test_any_order_of_episodes(base, batches):
    samples = random_samples(2, agents=AGENTS, count=30)
    settings = TrainerSettings(beta=0.1, lr=1e-3, optimizer_batches=batches)
    shuffled = random.Random(0).sample(samples, len(samples))
    assert_same(gradients(base, shuffled, settings), gradients(base, samples, settings))


def test_policies_together_are_policies_one_at_a_time(base):
    samples = random_samples(3, agents=AGENTS, count=30)
    settings = TrainerSettings(beta=0.1, lr=1e-3, normalise="agent")  # else their statistics are shared on purpose
    together, update = gradients(base, samples, settings)
    for policy in POLICIES:
        alone, own = gradients(base, [s for s in samples if s.policy == policy], settings, [policy])
        torch.testing.assert_close(together[policy], alone[policy], rtol=0, atol=0)
        assert update.policies[policy] == own.policies[policy]


def test_splitting_a_batch_over_optimizer_steps_uses_every_sample_once(base):
    samples = random_samples(4, agents=AGENTS, count=31)
    one = ReinforceTrainer(dict.fromkeys(POLICIES, base), TrainerSettings(beta=0.0)).update(samples)
    many = ReinforceTrainer(dict.fromkeys(POLICIES, base), TrainerSettings(beta=0.0, optimizer_batches=4)).update(samples)
    assert (many.tokens, many.actions) == (one.tokens, one.actions)
    assert many.policies["shared"]["advantage_mean"] == pytest.approx(one.policies["shared"]["advantage_mean"], abs=1e-5)


def test_resumed_equals_uninterrupted(base, tmp_path):
    settings = TrainerSettings(beta=0.05, lr=5e-3, optimizer_batches=2, warmup_steps=3, schedule="cosine", total_steps=10)
    batches = [random_samples(seed, agents=AGENTS, count=20) for seed in range(5)]

    def make():
        return ReinforceTrainer(dict.fromkeys(POLICIES, base), settings, seed=3)

    straight = make()
    for batch in batches:
        straight.update(batch)

    trainer = make()
    for number, batch in enumerate(batches):
        trainer.update(batch)
        save_checkpoint(tmp_path, number, trainer, {})
        folder, extra = load_latest(tmp_path)
        assert extra["step"] == number
        trainer = ReinforceTrainer(dict.fromkeys(POLICIES, base), settings, seed=99)
        trainer.load(folder)
    assert trainer.canary("planner") == straight.canary("planner") is not None
    for policy in POLICIES:
        resumed, expected = trainer.learner(policy), straight.learner(policy)
        assert resumed.steps == expected.steps == 10
        for a, b in zip(resumed.parameters, expected.parameters, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(resumed.parameters, expected.parameters, strict=True):
            for key, value in expected.optimizer.state[b].items():
                assert torch.equal(resumed.optimizer.state[a][key], value)


def test_a_checkpoint_of_other_policies_is_refused(base, tmp_path):
    trainer = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.0))
    folder = save_checkpoint(tmp_path, 1, trainer, {})
    with pytest.raises(TrainerError, match=r"holds policies \['a'\], the trainer \['b'\]"):
        ReinforceTrainer({"b": base}, TrainerSettings(beta=0.0)).load(folder)
    (folder / "trainer.pt").unlink()
    with pytest.raises(TrainerError, match="can't be read"):
        trainer.load(folder)

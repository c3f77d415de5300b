"""Adapters on one base: version 0 is the base, off is the reference, and nothing else differs from training whole weights."""

import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from mappa_graph.config import load_config, make_config
from mappa_graph.errors import EngineError, TrainerError
from mappa_graph.gateway import Gateway
from mappa_graph.gateway.local import LocalEngine
from mappa_graph.trainers import ReinforceTrainer, TrainerSettings, load_latest, save_checkpoint, trained_weights
from mappa_graph.trainers.lora import merge
from mappa_graph.trainers.sharding import compute
from tests.fakes.batches import random_samples, slow_gradients
from tests.fakes.tinymodel import make_tiny_model

AGENTS = {"planner": "train", "solver": "a", "checker": "a", "editor": "ab"}
POLICIES = ("train", "a", "ab")
LORA = {"rank": 4, "alpha": 8.0, "policies": {"ab": {"rank": 2, "targets": ["q_proj", "down_proj"]}}}
"""Names that a careless switch would mix up, and one policy with a rank and targets of its own."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model", seed=4)


def make(base, policies=POLICIES, *, seed=0, lora=LORA, **settings):
    chosen = {**lora, "policies": {p: s for p, s in lora.get("policies", {}).items() if p in policies}}
    return ReinforceTrainer(dict.fromkeys(policies, base), TrainerSettings(lora=chosen, **{"lr": 1e-2, **settings}), seed=seed)


def samples_of(seed, count=30):
    return random_samples(seed, agents=AGENTS, count=count)


def first_gradients(trainer, samples):
    seen = {}
    for policy, learner in trainer.learners.items():

        def hook(optimizer, args, kwargs, policy=policy, learner=learner):
            seen.setdefault(policy, {n: p.grad.clone() for n, p in zip(learner.body.names, learner.parameters, strict=True)})

        learner.optimizer.register_step_pre_hook(hook)
    return seen, trainer.update(samples)


def adapters(trainer):
    return {p: [x.detach().clone() for x in learner.parameters] for p, learner in trainer.learners.items()}


def test_all_policies_share_one_frozen_base_and_begin_as_it(base):
    trainer = make(base)
    assert len({id(learner.model) for learner in trainer.learners.values()}) == 1
    owned = [p for learner in trainer.learners.values() for p in learner.parameters]
    assert len({id(p) for p in owned}) == len(owned) and len(trainer.learner("ab").parameters) == 2 * 2 * 2
    trained = {id(p) for p in owned}
    assert all(p.requires_grad is (id(p) in trained) for p in trainer.learner("a").model.parameters())
    plain = ReinforceTrainer({"x": base}, TrainerSettings(beta=0.0)).learner("x")
    sample = samples_of(0)[0]
    assert all(learner.logprobs(sample) == plain.logprobs(sample) for learner in trainer.learners.values())


def test_with_its_adapter_off_a_trained_policy_is_its_reference_bit_for_bit(base):
    trainer = make(base, beta=0.1)
    plain = ReinforceTrainer({"x": base}, TrainerSettings(beta=0.0)).learner("x")
    for seed in (1, 2):
        trainer.update(samples_of(seed))
    for policy in POLICIES:
        learner = trainer.learner(policy)
        (pack,) = learner._packs([s for s in samples_of(3) if s.policy == policy])
        with torch.no_grad():
            off, _ = compute(learner.body.reference(), pack)
            on, _ = compute(learner.body.policy(), pack)
            first, _ = compute(plain.body.policy(), pack)
        assert torch.equal(off, first) and (on - off).abs().max() > 1e-3
    update = trainer.update(samples_of(3))
    assert all(update.policies[p]["kl"] != 0.0 for p in POLICIES)


def stir(trainer, seed=7):
    """Gives every B values of its own, as if much had been learned."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for learner in trainer.learners.values():
            for name, parameter in zip(learner.body.names, learner.parameters, strict=True):
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
    return {p: dict(zip(w.body.names, adapters(trainer)[p], strict=True)) for p, w in trainer.learners.items()}


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_gradients_are_those_of_the_padded_path_and_of_a_slow_float64_implementation(base, tmp_path, beta):
    changed = ({}, {"tree": False}, {"micro_batch_tokens": 40}, {"gradient_checkpointing": True})
    trainers = [make(base, beta=beta, grad_clip=1e9, **settings) for settings in changed]
    values, *_ = [stir(trainer) for trainer in trainers]
    assert [trainer.learner("ab").tree for trainer in trainers] == [True, False, True, True]
    merged = {p: trainers[0].save_merged(p, tmp_path / p) for p in POLICIES}
    samples = samples_of(5)
    (expected, update), *others = [first_gradients(trainer, samples) for trainer in trainers]
    for seen, other in others:
        for policy in POLICIES:
            for name, gradient in expected[policy].items():
                torch.testing.assert_close(seen[policy][name], gradient, rtol=1e-4, atol=5e-6, msg=f"{policy} {name}")
            assert other.policies[policy]["loss"] == pytest.approx(update.policies[policy]["loss"], abs=1e-5)

    slow, losses = slow_gradients(merged, dict.fromkeys(POLICIES, base), samples, beta=beta)
    for policy in POLICIES:
        assert update.policies[policy]["loss"] == pytest.approx(losses[policy], abs=1e-5)
        config = trainers[0].learner(policy).body.config
        for name, gradient in expected[policy].items():
            whole = slow[policy][name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] + ".weight"]  # of W = base + scale B A
            if "lora_A" in name:
                chain = values[policy][name.replace("lora_A", "lora_B")].double().T @ whole
            else:
                chain = whole @ values[policy][name.replace("lora_B", "lora_A")].double().T
            expected_gradient = config.lora_alpha / config.r * chain
            torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2e-3, atol=1e-5, msg=f"{policy} {name}")


def test_an_update_moves_the_adapters_of_those_who_acted_and_nothing_else(base):
    trainer = make(base, beta=0.1)
    trainer.update(samples_of(1))
    frozen = {n: p.detach().clone() for n, p in trainer.learner("a").model.named_parameters() if "lora_" not in n}
    before = adapters(trainer)
    seen, update = first_gradients(trainer, [s for s in samples_of(2) if s.policy == "a"])
    after = adapters(trainer)
    assert set(seen) == {"a"} == set(update.policies)
    assert not any(torch.equal(x, y) for x, y in zip(before["a"], after["a"], strict=True))
    assert all(torch.equal(x, y) for p in ("train", "ab") for x, y in zip(before[p], after[p], strict=True))
    assert all(torch.equal(frozen[n], p) for n, p in trainer.learner("a").model.named_parameters() if n in frozen)


def test_policies_together_are_policies_one_at_a_time(base):
    """Exactly, where each has statistics of its own. With `normalise: batch` the mean and std are shared on purpose, and given the same
    returns around the same mean and std the same holds: an update knows of the others by two numbers only."""
    together = make(base, beta=0.1, normalise="agent")
    batches = [samples_of(seed) for seed in (1, 2, 3)]
    for batch in batches:
        together.update(batch)
    for policy in POLICIES:
        alone = make(base, [policy], beta=0.1, normalise="agent")
        for batch in batches:
            alone.update([s for s in batch if s.policy == policy])
        assert all(torch.equal(x, y) for x, y in zip(adapters(alone)[policy], adapters(together)[policy], strict=True))

    shared = [replace(s, ret=round(0.2 + 0.6 * (n % 2), 1)) for n, s in enumerate(samples_of(1)) if s.policy == "a"]
    twice = [*shared, *(replace(s, policy="train", agent="planner") for s in shared)]  # the same mean and std as without company
    both, one = make(base, beta=0.0), make(base, ["a"], beta=0.0)
    both.update(twice)
    one.update(shared)
    for x, y in zip(adapters(both)["a"], adapters(one)["a"], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


def test_resumed_equals_uninterrupted(base, tmp_path):
    settings = {"beta": 0.05, "optimizer_batches": 2, "warmup_steps": 3, "schedule": "cosine", "total_steps": 10}
    batches = [samples_of(seed) for seed in range(4)]
    straight = make(base, seed=3, **settings)
    for batch in batches:
        straight.update(batch)
    trainer = make(base, seed=3, **settings)
    for number, batch in enumerate(batches):
        trainer.update(batch)
        save_checkpoint(tmp_path, number, trainer, {})
        trainer = make(base, seed=99, **settings)
        trainer.load(load_latest(tmp_path)[0])
    for policy in POLICIES:
        resumed, expected = trainer.learner(policy), straight.learner(policy)
        assert resumed.steps == expected.steps == 8 and trainer.canary(policy) == straight.canary(policy) is not None
        for a, b in zip(resumed.parameters, expected.parameters, strict=True):
            assert torch.equal(a, b)
            assert all(torch.equal(resumed.optimizer.state[a][k], v) for k, v in expected.optimizer.state[b].items())


def test_what_is_written_is_an_ordinary_peft_folder_and_merges_to_an_ordinary_model(base, tmp_path):
    trainer = make(base)
    values = stir(trainer)
    sample = samples_of(1)[0]
    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    for policy in POLICIES:
        folder = trainer.save_weights(policy, tmp_path / policy / "v1")
        assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(base) and config["inference_mode"] and config["peft_type"] == "LORA"
        assert {n: t.tolist() for n, t in load_file(folder / "adapter_model.safetensors").items()} == {
            n: t.tolist() for n, t in values[policy].items()
        }
        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        merged = AutoModelForCausalLM.from_pretrained(trainer.save_merged(policy, tmp_path / policy / "merged"))
        again = AutoModelForCausalLM.from_pretrained(merge(folder, tmp_path / policy / "again"))
        with torch.no_grad():
            one, two, three = (m(ids).logits[0, len(sample.prompt_ids) - 1 : -1] for m in (peft, merged, again))
        torch.testing.assert_close(one, two, rtol=0, atol=1e-4)
        assert torch.equal(two, three)
        own = torch.tensor(trainer.learner(policy).logprobs(replace(sample, temperature=1.0)))
        theirs = one.log_softmax(-1).gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-4)
        assert AutoTokenizer.from_pretrained(tmp_path / policy / "merged").chat_template is not None


async def test_the_local_engine_answers_as_the_trainer_says(base, tmp_path):
    trainer = make(base, beta=0.1)
    async with Gateway(LocalEngine(dict.fromkeys(POLICIES, base)), None) as gateway:
        for version in (1, 2):
            trainer.update(samples_of(version))
            for policy in POLICIES:
                folder = trainer.save_weights(policy, tmp_path / policy / f"v{version}")
                canary = replace(trainer.canary(policy), tolerance=1e-4)
                assert await gateway.publish(policy, folder, version=version, canary=canary) == version
        with pytest.raises(EngineError, match="canary"):
            await gateway.publish("a", tmp_path / "train" / "v2", version=3, canary=replace(trainer.canary("a"), tolerance=1e-4))


def test_trained_weights_of_a_run_are_merged_models_or_adapters(base, tmp_path):
    trainer = make(base)
    for step in (1, 2):
        stir(trainer, seed=step)
        save_checkpoint(tmp_path / "checkpoints", step, trainer, {})
    plain = trained_weights(tmp_path, merged=False)
    assert all((folder / "adapter_config.json").is_file() for folder in plain.values()) and set(plain) == set(POLICIES)
    whole = trained_weights(tmp_path)
    assert all((folder / "config.json").is_file() for folder in whole.values()) and set(whole) == set(POLICIES)
    assert trained_weights(tmp_path) == whole and trained_weights(tmp_path, "1") != whole
    sample = samples_of(1)[0]
    opened = ReinforceTrainer({"x": whole["a"]}, TrainerSettings(beta=0.0)).learner("x").logprobs(sample)
    assert opened == pytest.approx(trainer.learner("a").logprobs(sample), abs=1e-4)


def test_bfloat16_keeps_the_base_in_it_and_the_adapters_in_float32(base):
    exact, half = make(base, beta=0.1), make(base, beta=0.1, dtype="bfloat16")
    samples = samples_of(1)
    a, b = exact.update(samples), half.update(samples)
    for policy in POLICIES:
        assert b.policies[policy]["grad_norm"] == pytest.approx(a.policies[policy]["grad_norm"], rel=0.15)
        assert all(p.dtype == torch.float32 for p in half.learner(policy).parameters)
    assert half.learner("a").model.get_input_embeddings().weight.dtype == torch.bfloat16


def test_learning_rates_where_none_is_given(base, tmp_path):
    configs = {
        lr: make_config({"train": train}) for lr, train in ((1e-6, {}), (1e-4, {"lora": {"rank": 4}}), (3e-5, {"lora": {}, "lr": 3e-5}))
    }
    for lr, config in configs.items():
        assert config.train.lr == lr and config.same_training(config) == []
        (tmp_path / "config.yaml").write_text(config.dump())
        assert load_config(tmp_path / "config.yaml") == config
    assert configs[1e-4].same_training(make_config({"train": {"lora": {"rank": 4}, "lr": 1e-4}})) == []
    assert "train.lr" in configs[1e-4].same_training(make_config({"train": {"lora": {"rank": 4}, "lr": 1e-3}}))
    assert TrainerSettings().lr == 1e-6 and TrainerSettings(lora={}).lr == 1e-4 and TrainerSettings(lora={}, lr=3e-5).lr == 3e-5
    trainer = ReinforceTrainer({"a": base}, TrainerSettings(lora={"rank": 2}, beta=0.0))
    assert trainer.update([s for s in samples_of(1) if s.policy == "a"]).policies["a"]["lr"] == 1e-4


def test_what_cannot_be_done_is_said(base, tmp_path):
    with pytest.raises(TrainerError, match=r"policies names ghost\n  in training are: a"):
        ReinforceTrainer({"a": base}, TrainerSettings(lora={"policies": {"ghost": {"rank": 2}}}))
    with pytest.raises(TrainerError, match=r"'qproj' is no linear layer.*\n  it has: .*q_proj"):
        make(base, lora={"targets": ["qproj"]})
    with pytest.raises(TrainerError, match="no linear layer"):
        make(base, lora={"targets": ["embed_tokens"]})
    tied = make_tiny_model(tmp_path / "tied")
    model = AutoModelForCausalLM.from_pretrained(tied, tie_word_embeddings=True)
    model.save_pretrained(tied)
    with pytest.raises(TrainerError, match="shares its weight with the embedding"):
        make(tied, lora={"targets": ["lm_head"]})

    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(TrainerError, match="no linear layers for an adapter"):  # they are of a kind of their own
        make(tmp_path / "gpt2", ["a"], lora={})

    adapter = make(base, ["a"])
    whole = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.0))
    with pytest.raises(TrainerError, match="is of full training, the trainer's is lora"):
        adapter.load(save_checkpoint(tmp_path / "full", 1, whole, {}))
    folder = save_checkpoint(tmp_path / "lora", 1, adapter, {})
    with pytest.raises(TrainerError, match="is of lora training, the trainer's is full"):
        whole.load(folder)
    with pytest.raises(TrainerError, match=r"don't fit: .*lora_A.weight is of shape"):
        make(base, ["a"], lora={"rank": 8}).load(folder)
    with pytest.raises(TrainerError, match="base model of the adapter"):
        merge(folder / "policies" / "a", tmp_path / "merged", base=tmp_path / "nowhere")


def test_an_adapted_head_is_trained_too(base):
    trainer = make(base, ["a"], lora={"rank": 2, "targets": ["lm_head", "v_proj"]}, beta=0.1)
    update = trainer.update([s for s in samples_of(1) if s.policy == "a"])
    assert update.policies["a"]["steps"] == 1
    names = [n for n, p in zip(trainer.learner("a").body.names, trainer.learner("a").parameters, strict=True) if "lora_B" in n and p.any()]
    assert any("lm_head" in n for n in names) and any("v_proj" in n for n in names)

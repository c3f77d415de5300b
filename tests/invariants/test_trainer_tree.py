"""Tree = padded: sharing prefixes changes the cost of an update, never its numbers, on every architecture that can take rows."""

import logging
import random

import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mappa_graph.trainers import ReinforceTrainer, Sample, TrainerSettings, flex, packing
from mappa_graph.trainers.attention import NAME
from mappa_graph.trainers.learner import prepare
from mappa_graph.trainers.logprobs import pack_logprobs
from mappa_graph.trainers.packing import padded_packs, tree_packs
from mappa_graph.trainers.weights import load_model
from tests.fakes.batches import random_samples

COMMON = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
GEMMA = {**COMMON, "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=8)),
    "mistral, sliding window": lambda: MistralForCausalLM(MistralConfig(**COMMON, sliding_window=6)),
    "gemma2, soft caps and sliding window": lambda: Gemma2ForCausalLM(
        Gemma2Config(**GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=4.0, query_pre_attn_scalar=8)
    ),
    "gemma3, sliding window": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA, query_pre_attn_scalar=8)),
}


def gradients_and_logprobs(model, packs, samples):
    model.zero_grad()
    out = [torch.empty(0)] * len(samples)
    for pack in packs:
        logprobs, entropy = pack_logprobs(model, pack)
        (logprobs * torch.cos(pack.target.float())).sum().backward()  # a weight that follows the token, whatever the layout
        for i, part, spread in zip(
            pack.samples, logprobs.detach().split(list(pack.lengths)), entropy.split(list(pack.lengths)), strict=True
        ):
            out[i] = torch.stack([part, spread])
    return {n: p.grad.clone() for n, p in model.named_parameters()}, torch.cat(out, 1)


@pytest.mark.parametrize("pairs", [1, packing.BLOCK_PAIRS])
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_entropies_and_gradients_are_those_of_padded_rows(name, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "BLOCK_PAIRS", pairs)
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model", torch.float32, "cpu")
    samples = random_samples(3, agents={"a": "a"}, count=24)
    padded_grads, padded = gradients_and_logprobs(model, padded_packs(samples, 400), samples)
    assert prepare(model, name), f"{name} should take rows"
    for budget in (100_000, 60, 1):
        packs = tree_packs(samples, budget)
        grads, rows = gradients_and_logprobs(model, packs, samples)
        torch.testing.assert_close(rows, padded, rtol=1e-4, atol=2e-4)
        for parameter, expected in padded_grads.items():
            torch.testing.assert_close(grads[parameter], expected, rtol=1e-3, atol=3e-4, msg=f"{name} {parameter}")


@pytest.mark.parametrize("name", MODELS)
def test_one_call_with_a_block_mask_gives_the_logprobs_of_padded_rows(name, tmp_path):
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model", torch.float32, "cpu")
    samples = random_samples(4, agents={"a": "a"}, count=16)
    with torch.no_grad():  # FlexAttention has no backward on a CPU
        padded = logprobs_of(model, padded_packs(samples, 400), len(samples))
        model.set_attn_implementation(flex.NAME)
        for budget in (100_000, 60):
            torch.testing.assert_close(logprobs_of(model, tree_packs(samples, budget), len(samples)), padded, rtol=1e-4, atol=2e-4)


def logprobs_of(model, packs, count):
    out = [torch.empty(0)] * count
    for pack in packs:
        for i, part in zip(pack.samples, pack_logprobs(model, pack)[0].split(list(pack.lengths)), strict=True):
            out[i] = part
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("seed", range(6))
def test_a_token_sees_its_own_path_and_nothing_else(seed, window):
    samples = random_samples(seed, agents={"a": "a"}, count=20)
    (pack,) = tree_packs(samples, 100_000)
    index = torch.arange(pack.tokens)
    seen = flex.sees(pack.rows, window)(None, None, index[:, None], index[None, :])
    expected = torch.zeros(pack.tokens, pack.tokens, dtype=torch.bool)
    for group in pack.rows.groups:
        for queries, keys, offset in zip(group.queries.tolist(), group.keys.tolist(), group.offset.tolist(), strict=True):
            for n, query in enumerate(queries):
                if n and query == 0:
                    break  # padding
                path = keys[: offset + n + 1]
                expected[query, path if window is None else path[-window:]] = True
    assert seen.equal(expected)


@pytest.mark.parametrize("seed", range(12))
def test_layouts_lay_out_every_token_once_and_every_path_whole(seed):
    rng = random.Random(seed)
    samples = random_samples(seed, agents={"a": "a"}, count=rng.randint(1, 40), prompt=rng.choice([1, 12, 60]))
    budget = rng.choice([1, 20, 100, 10_000])
    seen = []
    for pack in tree_packs(samples, budget):
        sequences = {samples[i].prompt_ids + samples[i].completion_ids[:-1] for i in pack.samples}
        prefixes = {s[:n] for s in sequences for n in range(1, len(s) + 1)}
        assert pack.tokens == pack.input_ids.numel() == len(prefixes)  # one position per node of the trie
        assert pack.tokens + pack.shared == sum(len(samples[i].prompt_ids) + len(samples[i].completion_ids) - 1 for i in pack.samples)
        assert pack.tokens <= max(budget, max(map(len, sequences)))
        seen += pack.samples
        at = 0
        ids, places = pack.input_ids[0].tolist(), pack.position_ids[0].tolist()
        path_of = {}
        outputs = [int(q) for group in pack.rows.groups for q in group.queries.flatten()]
        place = range(pack.tokens) if pack.rows.place is None else pack.rows.place.tolist()
        assert [outputs[p] for p in place] == list(range(pack.tokens))  # each token's output is its own
        for group in pack.rows.groups:
            for run, index in ((group.query_run, group.queries), (group.key_run, group.keys)):
                assert run is None or index.flatten().tolist() == list(range(run.start, run.stop))
            for queries, keys, offset in zip(group.queries.tolist(), group.keys.tolist(), group.offset.tolist(), strict=True):
                for n, node in enumerate(keys):
                    if n == len(keys) or places[node] != n:
                        break
                    path_of.setdefault(tuple(ids[k] for k in keys[: n + 1]), node)
                    assert path_of[tuple(ids[k] for k in keys[: n + 1])] == node
                assert places[queries[0]] == offset
        assert set(path_of) == prefixes
        for i, length in zip(pack.samples, pack.lengths, strict=True):
            sequence = samples[i].prompt_ids + samples[i].completion_ids[:-1]
            assert pack.target[at : at + length].tolist() == list(samples[i].completion_ids)
            expected = [path_of[sequence[: len(samples[i].prompt_ids) + t]] for t in range(length)]
            assert pack.source[at : at + length].tolist() == expected
            assert pack.temperature[at : at + length].tolist() == pytest.approx([samples[i].temperature or 1.0] * length)
            at += length
    assert sorted(seen) == list(range(len(samples)))


def test_a_shared_prompt_costs_its_tokens_once():
    prompt = tuple(range(100))
    samples = [Sample("a", "a", "e", str(i), prompt, (150 + i, 160, 170), (-1.0,) * 3, ret=0.5) for i in range(8)]
    (pack,) = tree_packs(samples, 10_000)
    assert (pack.tokens, pack.shared) == (100 + 8 * 2, 7 * 100)
    drifting = [Sample("a", "a", "e", str(i), (200 + i, *prompt[1:]), (7, 8), (-1.0,) * 2, ret=0.5) for i in range(4)]
    (pack,) = tree_packs(drifting, 10_000)
    assert (pack.tokens, pack.shared) == (4 * 101, 0)


def test_turns_of_one_conversation_are_one_row():
    samples, context = [], (1, 2, 3)
    for turn in range(4):
        completion = (10 + turn, 20 + turn)
        samples.append(Sample("a", "a", "e", str(turn), context, completion, (-1.0,) * 2, ret=0.5))
        context = (*context, *completion, 30 + turn)
    (pack,) = tree_packs(samples, 10_000)
    assert pack.tokens == len(context) - 2 and len(pack.rows.groups) == 1 and len(pack.rows.groups[0].queries) == 1


def test_micro_batches_are_split_evenly():
    samples = [Sample("a", "a", "e", str(i), (i, *range(9)), (7, 8), (-1.0,) * 2, ret=0.5) for i in range(100)]
    sizes = [pack.tokens for pack in tree_packs(samples, 500)]
    assert len(sizes) == 3 and max(sizes) - min(sizes) <= 2 * 11


def test_micro_batches_cost_the_same_where_rows_differ_in_length():
    long = [Sample("a", "a", "e", f"l{i}", (100 + i, *range(99)), (7, 8), (-1.0,) * 2, ret=0.5) for i in range(20)]
    short = [Sample("a", "a", "e", f"s{i}", (i, *range(9)), (7, 8), (-1.0,) * 2, ret=0.5) for i in range(90)]

    def spread(by: float) -> float:
        costs = []
        for pack in tree_packs([*long, *short], 1_500, pair_cost=by):
            whole = [len(x.prompt_ids) + 1 for x in ((long + short)[i] for i in pack.samples)]
            costs.append(sum(n + 0.1 * n * (n + 1) / 2 for n in whole))
        return max(costs) / min(costs)

    assert spread(0.1) < 1.3 < 3 < spread(0.0)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_model_that_cannot_take_rows_says_so_and_is_trained_on_padded_rows(tmp_path, caplog, beta):
    torch.manual_seed(0)
    config = FalconConfig(vocab_size=250, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True, initializer_range=0.2)
    FalconForCausalLM(config).save_pretrained(tmp_path / "falcon")
    samples = random_samples(3, agents={"a": "a"})
    with caplog.at_level(logging.WARNING):
        trainer = ReinforceTrainer({"a": tmp_path / "falcon"}, TrainerSettings(beta=beta, lr=1e-3))
    assert "trained on padded rows" in caplog.text and not trainer.learner("a").tree
    assert trainer.learner("a").model.config._attn_implementation != NAME
    update = trainer.update(samples)
    assert update.policies["a"]["steps"] == 1 and update.policies["a"]["shared_tokens"] == 0.0

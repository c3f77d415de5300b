"""Attention with shared prefixes taken out of the rows, against a dense mask over all pairs of tokens."""

import random

import pytest
import torch

from mappa_graph.trainers import ReinforceTrainer, Sample, TrainerSettings, packing
from mappa_graph.trainers.attention import rows_attention
from mappa_graph.trainers.packing import tree_packs
from tests.fakes.batches import random_samples
from tests.fakes.tinymodel import make_tiny_model

HEADS, KV_HEADS, WIDTH = 6, 2, 8


def dense(q, k, v, rows, scale):
    """`[1, T, H, D]`, by the rule that token q sees token k just if `k <= q < ends[k]`."""
    tokens = q.shape[2]
    at = torch.arange(tokens)
    seen = (at[None, :] <= at[:, None]) & (at[:, None] < rows.ends[None, :])
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    weights = (q @ k.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pairs", [1, 12, 60])
def test_outputs_and_gradients_are_those_of_a_dense_mask(seed, pairs, monkeypatch):
    monkeypatch.setattr(packing, "BLOCK_PAIRS", pairs)
    monkeypatch.setattr(packing, "GROUP_SLACK", random.Random(seed).choice([0, 16384]))
    samples = random_samples(seed, agents={"a": "a"}, count=random.Random(seed).choice([7, 24]))
    (pack,) = tree_packs(samples, 1 << 20)
    assert pack.rows.split is not None or pairs > 1
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, n, pack.tokens, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    )
    weight = torch.randn(1, pack.tokens, HEADS, WIDTH, dtype=torch.float64, generator=generator)
    results = []
    for attend in (lambda: rows_attention(None, q, k, v, None, rows=pack.rows, scaling=0.3)[0], lambda: dense(q, k, v, pack.rows, 0.3)):
        out = attend()
        results.append((out, *torch.autograd.grad((out * weight).sum(), (q, k, v))))
    for mine, true in zip(*results, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-10)


def test_each_pair_of_a_token_and_one_that_it_sees_is_in_exactly_one_call(monkeypatch):
    monkeypatch.setattr(packing, "BLOCK_PAIRS", 6)
    (pack,) = tree_packs(random_samples(3, agents={"a": "a"}, count=24), 1 << 20)
    split, ends = pack.rows.split, pack.rows.ends
    assert split.blocks
    calls = torch.zeros(pack.tokens, pack.tokens, dtype=torch.long)
    for start, end, last in split.blocks:
        calls[end:last, start:end] += 1
    filled = torch.zeros(sum(g.queries.numel() for g in split.groups), dtype=torch.long) - 1
    filled[split.place if split.place is not None else slice(None)] = torch.arange(pack.tokens)
    at = 0
    for group in split.groups:
        n, wide = group.queries.shape
        mask = group.mask(None)
        seen = torch.ones(n, wide, group.keys.shape[1], dtype=torch.bool).tril() if mask is None else mask[:, 0]
        for row in range(n):
            for column in range(wide):
                token = int(filled[at + row * wide + column])
                if token >= 0:
                    keys = group.keys[row][seen[row, column]]
                    calls[token].index_add_(0, keys, torch.ones_like(keys))
        at += n * wide
    place = torch.arange(pack.tokens)
    assert torch.equal(calls, ((place[None, :] <= place[:, None]) & (place[:, None] < ends[None, :])).long())


def test_half_precision_is_as_good_as_that_of_rows_without_blocks(monkeypatch):
    samples = random_samples(1, agents={"a": "a"}, count=16)
    outs = {}
    for name, pairs in (("rows", 1 << 40), ("split", 1)):
        monkeypatch.setattr(packing, "BLOCK_PAIRS", pairs)
        (pack,) = tree_packs(samples, 1 << 20)
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, n, pack.tokens, WIDTH, generator=generator).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS))
        outs[name] = rows_attention(None, q, k, v, None, rows=pack.rows)[0]
        exact = dense(*(x.double() for x in (q, k, v)), pack.rows, WIDTH**-0.5)
    assert outs["split"].dtype == torch.bfloat16
    errors = {name: float((out.double() - exact).abs().max()) for name, out in outs.items()}
    assert errors["split"] <= 1.5 * errors["rows"] + 1e-3, errors


def test_autocast_which_leaves_queries_and_keys_in_full_precision_and_values_of_another_width(monkeypatch):
    samples = random_samples(2, agents={"a": "a"}, count=16)
    packs = {}
    for name, pairs in (("rows", 1 << 40), ("split", 1)):
        monkeypatch.setattr(packing, "BLOCK_PAIRS", pairs)
        (packs[name],) = tree_packs(samples, 1 << 20)
    tokens = packs["split"].tokens
    q, k, v = (torch.randn(1, n, tokens, WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS))
    out = rows_attention(None, q, k, v.bfloat16(), None, rows=packs["split"].rows)[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.double(), dense(q.double(), k.double(), v.double(), packs["split"].rows, WIDTH**-0.5), rtol=0.05, atol=0.05
    )
    narrow = torch.randn(1, KV_HEADS, tokens, WIDTH // 2)
    split, rows = (rows_attention(None, q, k, narrow, None, rows=packs[name].rows)[0] for name in ("split", "rows"))
    torch.testing.assert_close(split, rows)


def test_a_trainer_in_half_precision_takes_a_step_on_long_shared_prefixes(tmp_path):
    model = make_tiny_model(tmp_path / "model", 0, max_positions=512)
    prompt = tuple(5 + i % 200 for i in range(300))
    samples = [Sample("a", "a", "e", str(i), prompt, tuple(range(9 + i, 21 + i)), (-5.0,) * 12, ret=i / 8) for i in range(8)]
    (pack,) = tree_packs(samples, 1 << 20)
    assert pack.rows.split is not None
    norms = {}
    for dtype in ("float32", "bfloat16"):
        trainer = ReinforceTrainer({"a": model}, TrainerSettings(beta=0.0, lr=1e-4, dtype=dtype))
        assert trainer.learner("a").tree
        norms[dtype] = trainer.update(samples).policies["a"]["grad_norm"]
    assert norms["bfloat16"] == pytest.approx(norms["float32"], rel=0.1)

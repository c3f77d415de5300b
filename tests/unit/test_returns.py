"""Returns and advantages against hand-worked numbers and a slow implementation of its own."""

import itertools
import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from mappa_graph.errors import ConfigError, TrainerError
from mappa_graph.trainers import discounted_returns, token_advantages


def slow_returns(scores, edges, gamma):
    """All-pairs shortest paths by relaxation, then the formula as it is written."""
    n = len(scores)
    far = math.inf
    d = [[0 if a == b else far for b in range(n)] for a in range(n)]
    for a, b in edges:
        d[a][b] = min(d[a][b], 1)
    for k in range(n):
        for a in range(n):
            for b in range(n):
                d[a][b] = min(d[a][b], d[a][k] + d[k][b])
    out = []
    for a in range(n):
        if scores[a] is None:
            out.append(None)
            continue
        top = bottom = 0.0
        for b in range(n):
            if scores[b] is not None and d[a][b] < far:
                weight = 1.0 if d[a][b] == 0 else gamma ** d[a][b]
                top += weight * scores[b] / 10
                bottom += weight
        out.append(top / bottom)
    return out


def slow_advantages(returns, kl, beta, std_floor, groups=None):
    groups = groups or ["all"] * len(returns)
    raw = []
    for value, ks in zip(returns, kl, strict=True):
        raw.append(None if value is None else [value - beta * sum(ks[t:]) for t in range(len(ks))])
    out = []
    for i, own in enumerate(raw):
        if own is None:
            out.append(None)
            continue
        pool = [a for j, row in enumerate(raw) if row is not None and groups[j] == groups[i] for a in row]
        mean = sum(pool) / len(pool)
        std = (sum((a - mean) ** 2 for a in pool) / len(pool)) ** 0.5
        out.append([(a - mean) / max(std, std_floor) for a in own])
    return out


def test_a_chain_worked_by_hand():
    # G0 = (0.2 + 0.5*1.0 + 0.25*0.6) / 1.75, G1 = (1.0 + 0.5*0.6) / 1.5, G2 = 0.6
    assert discounted_returns([2, 10, 6], [(0, 1), (1, 2)], 0.5) == pytest.approx([0.85 / 1.75, 1.3 / 1.5, 0.6], abs=1e-15)


def test_a_fork_and_join_counts_the_join_once_at_its_shortest_distance():
    # 0 -> 1 -> 3, 0 -> 2 -> 3, 0 -> 3: the join is one action away from the root, not two, and once.
    got = discounted_returns([0, 4, 8, 10], [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)], 0.5)
    assert got == pytest.approx([(0.5 * 0.4 + 0.5 * 0.8 + 0.5 * 1.0) / 2.5, (0.4 + 0.5) / 1.5, (0.8 + 0.5) / 1.5, 1.0], abs=1e-15)


def test_parallel_branches_give_each_other_nothing():
    got = discounted_returns([5, 0, 10], [(0, 1), (0, 2)], 1.0)
    assert got == pytest.approx([0.5, 0.0, 1.0], abs=1e-15)


def test_an_action_without_verdict_gives_no_credit_gets_none_and_still_counts_as_a_step():
    # The last action is two actions later than the first although the one between has no score.
    got = discounted_returns([0, None, 10], [(0, 1), (1, 2)], 0.5)
    assert got == [pytest.approx(0.25 / 1.25, abs=1e-15), None, 1.0]


def test_gamma_zero_is_each_actions_own_score():
    assert discounted_returns([1, 7, None], [(0, 1), (1, 2)], 0.0) == [0.1, 0.7, None]


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.9, 1.0])
def test_equal_scores_give_exactly_that_score_wherever_an_action_stands(gamma):
    for score in (0.1, 3.3, 7.0, 9.99):
        edges = [(a, b) for a, b in itertools.combinations(range(7), 2) if (a + b) % 3]
        assert discounted_returns([score] * 7, edges, gamma) == [score / 10] * 7


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_agree_with_the_slow_implementation(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 12)
    names = list(range(n))
    rng.shuffle(names)  # edges need not run from low positions to high ones
    edges = [(names[a], names[b]) for a, b in itertools.combinations(range(n), 2) if rng.random() < 0.3]
    edges += edges[:2]  # named twice: no more weight
    scores = [None if rng.random() < 0.2 else rng.uniform(0, 10) for _ in range(n)]
    gamma = rng.choice([0.0, 0.25, 0.9, 1.0])
    for mine, slow in zip(discounted_returns(scores, edges, gamma), slow_returns(scores, edges, gamma), strict=True):
        assert mine == (None if slow is None else pytest.approx(slow, abs=1e-14))


def test_bad_input_is_named():
    with pytest.raises(TrainerError, match=r"score 11 of action 1"):
        discounted_returns([1, 11], [], 0.5)
    with pytest.raises(TrainerError, match="nan"):
        discounted_returns([math.nan], [], 0.5)
    with pytest.raises(TrainerError, match=r"edge \(0, 2\)"):
        discounted_returns([1, 2], [(0, 2)], 0.5)
    with pytest.raises(TrainerError, match="cycle"):
        discounted_returns([1, 2], [(0, 1), (1, 0)], 0.5)
    with pytest.raises(TrainerError, match="cycle"):
        discounted_returns([1], [(0, 0)], 0.5)
    with pytest.raises(ConfigError, match=r"gamma is 1\.5"):
        discounted_returns([1], [], 1.5)


def test_returns_need_no_torch():
    code = "import sys; from mappa_graph.trainers import discounted_returns as d; d([1, 2], [(0, 1)], .5); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_advantages_worked_by_hand():
    # Raw: G=1 with beta 0.1 and k = [1, 2] -> [1 - 0.3, 1 - 0.2] = [0.7, 0.8]; G=0, k = [-1] -> [0.1].
    # mean = 1.6/3, variance = (0.49 + 0.64 + 0.01)/3 - mean^2
    got = token_advantages([1.0, 0.0], [[1.0, 2.0], [-1.0]], 0.1, 0.05)
    mean = 1.6 / 3
    std = math.sqrt(1.14 / 3 - mean**2)
    assert got[0] == pytest.approx([(0.7 - mean) / std, (0.8 - mean) / std], abs=1e-12)
    assert got[1] == pytest.approx([(0.1 - mean) / std], abs=1e-12)


def test_statistics_weigh_tokens_not_actions():
    got = token_advantages([1.0, 0.0], [[0.0] * 3, [0.0]], 0.0, 1e-6)
    mean, std = 0.75, math.sqrt(0.75 * 0.25)
    assert got[0] == pytest.approx([0.25 / std] * 3) and got[1] == pytest.approx([-mean / std])


def test_equal_returns_without_kl_give_exactly_zero():
    got = token_advantages([0.1] * 7, [[0.3] * (n + 1) for n in range(7)], 0.0, 0.05)
    assert all(a == 0.0 for row in got for a in row)


def test_the_floor_keeps_noise_small_and_one_token_is_fine():
    got = token_advantages([0.7, 0.7], [[0.01], [-0.01]], 0.1, 0.05)
    assert got[0] == pytest.approx([-0.001 / 0.05]) and got[1] == pytest.approx([0.001 / 0.05])
    assert token_advantages([0.7], [[5.0]], 0.1, 0.05) == [[0.0]]
    assert token_advantages([], [], 0.1, 0.05) == []
    assert token_advantages([None], [[1.0]], 0.1, 0.05) == [None]


def test_missing_returns_take_no_part():
    with_none = token_advantages([0.2, None, 0.9], [[0.1], [99.0, 99.0], [0.2]], 0.5, 0.05)
    without = token_advantages([0.2, 0.9], [[0.1], [0.2]], 0.5, 0.05)
    assert with_none == [without[0], None, without[1]]


@pytest.mark.parametrize("seed", range(10))
def test_random_batches_agree_with_the_slow_implementation(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 9)
    returns = [None if rng.random() < 0.2 else rng.random() for _ in range(n)]
    kl = [[rng.gauss(0, 0.5) for _ in range(rng.randint(1, 6))] for _ in range(n)]
    groups = [rng.choice("ab") for _ in range(n)]
    for normalise, used in (("batch", None), ("agent", groups)):
        mine = token_advantages(returns, kl, 0.07, 0.05, normalise=normalise, groups=groups)
        slow = slow_advantages(returns, kl, 0.07, 0.05, used)
        for a, b in zip(mine, slow, strict=True):
            assert a == (None if b is None else pytest.approx(b, abs=1e-12))


def test_every_kind_of_sequence_comes_back_as_it_came():
    kl = [torch.tensor([0.1, 0.2], dtype=torch.float32), np.array([0.3]), [0.4], torch.tensor([0.5], dtype=torch.float64)]
    got = token_advantages([0.1, 0.4, 0.6, 0.9], kl, 0.1, 0.05)
    assert got[0].dtype == torch.float32 and got[3].dtype == torch.float64
    assert isinstance(got[1], np.ndarray) and isinstance(got[2], list)
    plain = token_advantages([0.1, 0.4, 0.6, 0.9], [[0.1, 0.2], [0.3], [0.4], [0.5]], 0.1, 0.05)
    assert [float(x) for row in got for x in row] == pytest.approx([x for row in plain for x in row], abs=1e-6)


def test_advantages_reproduce_reinforce_plus_plus_where_they_coincide():
    """The reward `-beta k_t + [t = last] R`, undiscounted return to go, whitened over the masked tokens of the batch (arXiv 2501.03262)."""
    rng = torch.Generator().manual_seed(3)
    lengths, width, beta = [4, 2, 5], 5, 0.02
    kl = torch.randn(3, width, generator=rng, dtype=torch.float64)
    rewards = torch.rand(3, generator=rng, dtype=torch.float64)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    token_rewards = -beta * kl * mask
    for i, length in enumerate(lengths):
        token_rewards[i, length - 1] += rewards[i]
    to_go = token_rewards.flip(1).cumsum(1).flip(1)
    chosen = to_go[mask]
    whitened = (to_go - chosen.mean()) / chosen.var(unbiased=False).clamp(min=1e-8).sqrt()
    got = token_advantages(rewards.tolist(), [kl[i, :n] for i, n in enumerate(lengths)], beta, 1e-4)
    for i, length in enumerate(lengths):
        torch.testing.assert_close(got[i], whitened[i, :length], rtol=1e-10, atol=1e-10)


def test_bad_advantage_input_is_named():
    with pytest.raises(ConfigError, match="std_floor"):
        token_advantages([0.1], [[0.0]], 0.1, 0.0)
    with pytest.raises(ConfigError, match="beta"):
        token_advantages([0.1], [[0.0]], -1.0, 0.05)
    with pytest.raises(ConfigError, match="groups"):
        token_advantages([0.1], [[0.0]], 0.1, 0.05, normalise="agent")
    with pytest.raises(TrainerError, match="1 returns for 2"):
        token_advantages([0.1], [[0.0], [0.0]], 0.1, 0.05)
    with pytest.raises(TrainerError, match="shape"):
        token_advantages([0.1], [[[0.0]]], 0.1, 0.05)

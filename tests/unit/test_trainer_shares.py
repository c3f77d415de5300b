"""Samples over ranks: all of them once, even by cost, prefixes together, whatever their order."""

import random

import pytest

from mappa_graph.trainers import Sample
from mappa_graph.trainers.shares import cost, shares
from tests.fakes.batches import random_samples

AGENTS = {"planner": "p", "solver": "s", "checker": "s"}


def sample(number, prompt, completion, policy="p", seed=0):
    rng = random.Random(f"{number}/{seed}")
    ids = tuple(prompt) if not isinstance(prompt, int) else tuple(rng.randrange(1000) for _ in range(prompt))
    own = tuple(rng.randrange(1000) for _ in range(completion))
    return Sample(policy, policy, f"e{number}", f"a{number}", ids, own, (-1.0,) * completion, ret=0.5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_sample_lands_once_whatever_the_order(ranks):
    samples = random_samples(1, agents=AGENTS, count=40)
    parts = shares(samples, ranks)
    assert len(parts) == ranks
    assert sorted(s.action_id for part in parts for s in part) == sorted(s.action_id for s in samples)
    assert shares(random.Random(0).sample(samples, len(samples)), ranks) == parts


def test_loads_are_even_by_cost_not_by_count():
    lengths = [600] * 3 + [40] * 90
    samples = [sample(n, length, 8) for n, length in enumerate(lengths)]
    for width in (64, 4096):
        loads = [sum(cost(n, n, width) for s in part for n in [len(s.prompt_ids) + 7]) for part in shares(samples, 4, width=width)]
        assert max(loads) <= 1.04 * sum(loads) / 4  # to within the last sample given out
    narrow, wide = (sorted(len(part) for part in shares(samples, 4, width=width)) for width in (64, 4096))
    assert narrow[0] < wide[0]  # attention weighs more where layers are narrow, and long samples with it
    ten = [sample(n, 100, 10) for n in range(40)]
    assert [len(part) for part in shares(ten, 4)] == [10, 10, 10, 10]


def test_samples_that_share_a_prefix_stay_together():
    prompts = [tuple(random.Random(p).randrange(1000) for _ in range(400)) for p in range(4)]
    samples = [sample(f"{p}-{n}", prompt, 20) for n in range(8) for p, prompt in enumerate(prompts)]
    parts = shares(samples, 4)
    assert all(len({s.prompt_ids for s in part}) == 1 and len(part) == 8 for part in parts)


def test_fewer_samples_than_ranks_and_none():
    assert [len(part) for part in shares([sample(0, 10, 3), sample(1, 10, 3)], 4)] == [1, 1, 0, 0]
    assert shares([], 3) == [[], [], []]


def test_each_policy_is_shared_out_by_itself():
    samples = [sample(n, 50, 5, policy="p" if n % 2 else "s") for n in range(24)]
    for part in shares(samples, 3):
        assert sorted(s.policy for s in part) == ["p"] * 4 + ["s"] * 4


def test_the_cost_of_a_suffix_is_what_the_whole_costs_more():
    for width in (64, 1024):
        assert cost(300, 300, width) + cost(100, 400, width) == pytest.approx(cost(400, 400, width))

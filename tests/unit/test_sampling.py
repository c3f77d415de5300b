"""Which tasks come when: every one once an epoch, strata in equal parts, easy ones first, and all of it from the seed alone."""

from collections import Counter

import pytest

from mappa_graph import Task
from mappa_graph.errors import ConfigError
from mappa_graph.sections.loop import LoopConfig
from mappa_graph.trainers.sampling import check_sampling, difficulties, tasks_of

TASKS = [Task(f"t{i}", "p") for i in range(10)]
MIXED = [Task(f"c{i}", "p", stratum="classification") for i in range(20)] + [Task(f"r{i}", "p", stratum="regression") for i in range(5)]
STRATIFIED = LoopConfig(sampling="stratified")


def drawn(tasks, n, iterations, seed=0, loop=STRATIFIED):
    return [tasks_of(tasks, n, k, seed, loop) for k in range(1, iterations + 1)]


def test_every_task_comes_once_an_epoch_whatever_the_batch_size():
    seen = [t.id for iteration in range(1, 11) for t in tasks_of(TASKS, 3, iteration, seed=0)]
    for epoch in range(3):
        assert Counter(seen[10 * epoch : 10 * epoch + 10]) == Counter(t.id for t in TASKS)


def test_the_order_of_tasks_follows_from_the_seed_alone():
    for loop in (LoopConfig(), STRATIFIED):
        assert tasks_of(MIXED, 4, 2, 5, loop) == tasks_of(MIXED, 4, 2, 5, loop)
        assert drawn(MIXED, 4, 4, 5, loop) != drawn(MIXED, 4, 4, 6, loop)


def test_a_batch_larger_than_the_task_list_wraps_around():
    assert sorted(Counter(t.id for t in tasks_of(TASKS, 20, 1, seed=0)).values()) == [2] * 10


@pytest.mark.parametrize("n", [2, 3, 7, 8])
def test_every_iteration_holds_as_many_tasks_of_each_stratum(n):
    total = Counter()
    for batch in drawn(MIXED, n, 12):
        counts = Counter(t.stratum for t in batch)
        assert abs(counts["classification"] - counts["regression"]) <= 1
        total += counts
    assert abs(total["classification"] - total["regression"]) <= 1, "and the odd place goes to each in turn"


def test_a_stratum_goes_through_all_its_tasks_before_one_comes_again():
    seen = [t for batch in drawn(MIXED, 4, 20) for t in batch]
    for stratum, size in (("classification", 20), ("regression", 5)):
        ids = [t.id for t in seen if t.stratum == stratum]
        for epoch in range(len(ids) // size):
            assert len(set(ids[epoch * size : (epoch + 1) * size])) == size
    assert {t.id for t in seen} == {t.id for t in MIXED}


def test_more_strata_than_places_take_turns_and_none_is_starved():
    many = [Task(f"{s}-{i}", "p", stratum=str(s)) for s in range(7) for i in range(3)]
    seen = Counter(t.id for batch in drawn(many, 2, 21 * 3) for t in batch)
    assert set(seen) == {t.id for t in many} and set(seen.values()) == {6}


def levels(n=30):
    return [Task(f"t{i}", "p", data={"difficulty": i % 10}) for i in range(n)]


def test_a_curriculum_starts_with_the_easiest_tasks_and_widens_to_all():
    loop = LoopConfig(curriculum="difficulty", curriculum_iterations=10)
    tasks = levels()
    hardest = [max(t.data["difficulty"] for t in batch) for batch in drawn(tasks, 3, 10, loop=loop)]
    assert hardest[0] == 0 and all(hard <= k for k, hard in enumerate(hardest))
    after = [t.id for k in range(10, 20) for t in tasks_of(tasks, 3, k, 0, loop)]
    assert Counter(after) == Counter(t.id for t in tasks), "an epoch of all tasks, from the first iteration that may draw them all"


def test_a_curriculum_without_difficulties_goes_by_the_natural_order_of_strata():
    tasks = [Task(f"{s}-{i}", "p", stratum=s) for s in ("10", "2", "1") for i in range(4)]
    assert difficulties(tasks) == [2.0] * 4 + [1.0] * 4 + [0.0] * 4
    loop = LoopConfig(curriculum="difficulty", curriculum_iterations=3, sampling="stratified")
    first, second, third = drawn(tasks, 4, 3, loop=loop)
    assert Counter(t.stratum for t in first) == {"1": 4} and Counter(t.stratum for t in second) == {"1": 2, "2": 2}
    assert set(Counter(t.stratum for t in third).values()) == {1, 2}


def test_a_pool_is_never_smaller_than_an_iteration():
    loop = LoopConfig(curriculum="difficulty", curriculum_iterations=30)
    assert len({t.id for t in tasks_of(levels(), 8, 1, 0, loop)}) == 8


@pytest.mark.parametrize(
    ("loop", "tasks", "said"),
    [
        (STRATIFIED, TASKS, "all training tasks have the stratum ''"),
        (LoopConfig(curriculum="difficulty", curriculum_iterations=3), TASKS, "equally difficult"),
        (LoopConfig(curriculum="difficulty", curriculum_iterations=3), [*levels(), Task("odd", "p")], "'odd' has the difficulty None"),
        (
            LoopConfig(curriculum="difficulty", curriculum_iterations=3),
            [*levels(), Task("odd", "p", data={"difficulty": "hard"})],
            "'odd' has the difficulty 'hard'",
        ),
    ],
)
def test_an_order_that_cant_take_effect_is_refused(loop, tasks, said):
    with pytest.raises(ConfigError, match=said):
        check_sampling(loop, tasks)
    check_sampling(LoopConfig(), tasks)

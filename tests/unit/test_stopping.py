"""When a run ends early, and when it may go on again."""

import pytest

from mappa_graph.config import make_config
from mappa_graph.evaluation import summarise
from mappa_graph.trainers.guards import Alarm
from mappa_graph.trainers.stopping import better, still_stopped, stop_of

EMPTY = summarise([], mode="m").to_dict()


def rows(*values, metric="accuracy"):
    """Rows with a held-out value each; None = not evaluated then."""
    held = [None if v is None else {**EMPTY, metric: v} if metric == "accuracy" else {**EMPTY, "metrics": {metric: v}} for v in values]
    return [{"iteration": k, "heldout": h} for k, h in enumerate(held)]


def stops(config, made):
    return [stop_of(config, made[:k], made[k], ()) is not None for k in range(len(made))]


def early(patience=2, min_delta=0.0, **evaluate):
    return make_config({"loop": {"early_stop": {"patience": patience, "min_delta": min_delta}}, "evaluate": evaluate})


@pytest.mark.parametrize(
    ("config", "values", "expected"),
    [
        (early(2), [0.1, 0.2, 0.2, 0.3, 0.3, 0.3], [0, 0, 0, 0, 0, 1]),
        (early(1), [0.1, None, 0.1], [0, 0, 1]),
        (early(2), [0.5, None, None, 0.4, None, 0.4], [0, 0, 0, 0, 0, 1]),
        (early(2, 0.05), [0.1, 0.12, 0.14, 0.16], [0, 0, 1, 0]),
        (make_config({}), [0.5, 0.1, 0.1, 0.1], [0, 0, 0, 0]),
    ],
)
def test_a_run_ends_when_the_held_out_value_has_not_risen_for_so_many_evaluations(config, values, expected):
    assert stops(config, rows(*values)) == [bool(e) for e in expected]


def test_a_metric_that_should_fall_is_watched_for_falling():
    config = early(2, best_by="rmse", best_is="min")
    assert stops(config, rows(9.0, 5.0, 5.5, 4.0, 4.1, 4.0, metric="rmse")) == [False] * 5 + [True]
    assert better(3.0, 4.0, config.evaluate) and not better(4.0, 4.0, config.evaluate) and better(9.0, None, config.evaluate)


def test_a_metric_that_is_not_there_never_ends_a_run():
    assert stops(early(1, best_by="rmse"), rows(0.1, 0.1, 0.1)) == [False] * 3


def alarm(name="mismatch", action="stop"):
    return Alarm(name, "solver", 1.0, 0.3, action, "log-probs of solver differ")


def test_an_alarm_stops_a_run_only_where_its_action_says_so():
    config = make_config({"loop": {"alarms": {"mismatch": {"action": "stop"}}}})
    assert stop_of(config, [], rows(0.1)[0], [alarm(action="warn")]) is None
    stop = stop_of(config, [], rows(0.1)[0], [alarm("kl_explosion", "warn"), alarm()])
    assert stop is not None and stop["by"] == "mismatch"
    assert "alarm mismatch: log-probs of solver differ" in stop["message"] and "loop.alarms.mismatch.action to warn" in stop["message"]


def test_a_stopped_run_stays_stopped_until_the_setting_behind_it_changes():
    stopping = {"loop": {"alarms": {"mismatch": {"action": "stop"}}, "early_stop": {"patience": 1}}}
    config = make_config(stopping)
    by_alarm = [{**rows(0.1)[0], "stop": stop_of(config, [], rows(0.1)[0], [alarm()])}]
    assert still_stopped(config, by_alarm) == by_alarm[0]["stop"]
    assert still_stopped(make_config({"loop": {"alarms": {"mismatch": {"action": "warn"}}}}), by_alarm) is None
    made = rows(0.1, 0.1)
    by_patience = [made[0], {**made[1], "stop": stop_of(config, made[:1], made[1], ())}]
    assert still_stopped(config, by_patience) is not None
    assert still_stopped(make_config({"loop": {"early_stop": {"patience": 5}}}), by_patience) is None
    assert still_stopped(make_config({}), by_patience) is None
    assert still_stopped(config, rows(0.1)) is None and still_stopped(config, []) is None

"""Scores between the coach and the returns: calibrated for training only, measured as given, and watched."""

import pytest

from mappa_graph import Task
from mappa_graph.coach import Calibrator
from mappa_graph.errors import ConfigError
from mappa_graph.record import Action, Episode, EpisodeTrace, Outcome, Verdict
from mappa_graph.trainers.scores import Watch, asked, calibrate, check_strata, measure, per_episode


def episode(n, stratum, *scores, outcome=0.5, output="text", **usage):
    actions = tuple(Action(f"{n}/{i}", f"{n}/t", "ab"[i % 2], "p", i, output=output) for i in range(len(scores)))
    verdicts = {f"{n}/{i}": Verdict(s, duration_s=0.5, usage=usage) for i, s in enumerate(scores)}
    return EpisodeTrace(Episode(f"e{n}", stratum=stratum, outcome=Outcome(False, score=outcome)), actions=actions, verdicts=verdicts)


def means(traces):
    out = {}
    for trace in traces:
        out.setdefault(trace.episode.stratum, []).extend(v.score for v in trace.verdicts.values() if v.score is not None)
    return {name: sum(values) / len(values) for name, values in out.items()}


BATCH = [episode(0, "regression", 8.0, 9.0), episode(1, "classification", 4.0, None), episode(2, "classification", 6.0, 5.0)]


def test_calibration_takes_the_offset_of_a_stratum_out_and_invents_no_score():
    out = calibrate(BATCH, Calibrator("stratum"))
    assert means(out)["regression"] == pytest.approx(means(out)["classification"])
    assert out[1].verdicts["1/1"].score is None
    assert means(BATCH) == {"regression": 8.5, "classification": 5.0}
    assert calibrate(BATCH, Calibrator("none")) == BATCH


def test_running_calibration_goes_on_from_its_state_as_if_it_had_not_stopped():
    whole, first = Calibrator("running"), Calibrator("running")
    calibrate(BATCH, whole)
    calibrate(BATCH, first)
    second = Calibrator("running")
    second.restore(first.state())
    last = [episode(7, "regression", 3.0, 4.0), episode(8, "classification", 9.0, 2.0)]
    assert calibrate(last, second) == calibrate(last, whole) != calibrate(last, Calibrator("running"))


def test_calibration_that_can_take_no_effect_is_refused():
    with pytest.raises(ConfigError, match="all training tasks have the stratum 'easy'"):
        check_strata("stratum", [Task("a", "p", stratum="easy"), Task("b", "p", stratum="easy")])
    check_strata("running", [Task("a", "p", stratum="easy"), Task("b", "p", stratum="hard")])
    check_strata("none", [Task("a", "p")])


def test_what_coaching_cost_is_counted_once_for_a_score_that_is_shared():
    traces = [episode(n, "s", 5.0, 5.0, 5.0, calls=1.0, prompt_tokens=100.0, completion_tokens=20.0, usd=0.25) for n in range(2)]
    assert [len(asked(traces[0], unit)) for unit in ("action", "transition")] == [3, 2]
    each = per_episode([measure(traces, "action")])
    assert each == {"calls": 3.0, "tokens": 360.0, "usd": 0.75, "seconds": 1.5}
    assert per_episode([measure(traces, "transition")] * 2)["calls"] == 2.0
    assert per_episode([]) == {"calls": 0.0, "tokens": 0.0, "usd": 0.0, "seconds": 0.0}


def test_a_bias_between_strata_is_measured_and_said_once():
    batch = [episode(n, "regression", 8.0 + n % 2, 8.0) for n in range(6)] + [episode(9 + n, "classification", 6.0, 5.0) for n in range(6)]
    part = measure(batch, "action")
    assert part["by_stratum"]["regression"]["effect"] > 2
    assert part["by_stratum"]["regression"]["excess"] == pytest.approx(2.75)
    watch = Watch()
    _, first = watch.see(part)
    assert any("'regression' is scored 2.8 points higher" in text for text in first)
    assert watch.see(part) == ([], [])


def rising(n):
    return {"iteration": n, "coach": measure([episode(n, "s", 4.0 + 0.3 * n, output="word " * (10 + 5 * n))], "action")}


def test_scores_that_rise_without_outcomes_raise_an_alarm_also_in_a_continued_run():
    rows = [rising(n) for n in range(8)]
    whole, continued = Watch(), Watch([{"iteration": 0}, *rows[:5]])
    said = [whole.see(row["coach"]) for row in rows]
    assert not any(alarms for alarms, _ in said[:7])
    assert {a["kind"] for a in said[7][0]} == {"hacking", "length"}
    assert [continued.see(row["coach"]) for row in rows[5:]] == said[5:]


def test_an_iteration_without_any_score_is_measured_without_numbers():
    part = measure([EpisodeTrace(Episode("e"))], "action")
    assert part["signs"]["score"] is None and part["by_stratum"] == {}
    assert Watch().see(part) == ([], [])

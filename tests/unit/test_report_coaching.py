"""The report's section on the coach: costs by time of scoring, scores by stratum, alarms; lenient to what a row lacks."""

import json

from mappa_graph.report.coaching import alarms, coaching
from mappa_graph.report.data import Run, read_run
from mappa_graph.report.page import render

CSS = {"a": "s0"}


def row(iteration, regression=8.0, **more):
    part = {"n": 8, "mean": regression, "deviation": 1.0, "effect": 1.9, "outcome": 5.0, "excess": 2.5, "warning": ""}
    other = {**part, "mean": 6.0, "effect": -1.9, "excess": None}
    coach = {
        "episodes": 4, "calls": 8, "prompt_tokens": 800, "completion_tokens": 80, "usd": 0.5, "seconds": 6.0, "alarms": [],
        "by_stratum": {"regression": part, "<b>odd": other}, "by_agent": {"solver": part}, **more,
    }  # fmt: skip
    return {"iteration": iteration, "agents": {}, "coach": coach}


def test_what_each_time_of_scoring_cost_an_episode_stands_side_by_side():
    summary = {
        "coach": {"name": "openai:judge", "when": "completed", "per_episode": {"calls": 2, "tokens": 220, "usd": 0.125, "seconds": 1.5}}
    }
    later = {"when": "episode", "unit": "action", "coach": "openai:judge", "episodes": 7, "per_episode": {"calls": 1, "tokens": 150}}
    html = coaching(Run("r", [row(1)], summary, passes=[later]), CSS)
    assert "while training, completed" in html and "later, episode" in html
    assert "0.1250" in html and "1.50 s" in html and ">220<" in html and ">150<" in html
    assert "–" in html  # no price is no price, not 0


def test_a_run_that_is_going_on_shows_its_costs_too():
    html = coaching(Run("r", [row(1), row(2)]), CSS)
    assert "while training, now" in html and ">220<" in html and "0.1250" in html


def test_strata_are_shown_with_effects_and_their_names_are_no_markup():
    html = coaching(Run("r", [row(1), row(2)]), CSS)
    assert "Coach score by stratum" in html and "+1.90" in html and "+2.5" in html
    assert "&lt;b&gt;odd" in html and "<b>odd" not in html


def test_an_alarm_is_shown_once_with_the_iteration_it_began_at_and_in_the_head():
    alarm = {"kind": "hacking", "message": "scores rise <i>"}
    rows = [row(1), row(2, alarms=[alarm]), row(3, alarms=[alarm])]
    run = Run("r", rows)
    assert alarms(run) == [(2, "scores rise <i>")]
    assert coaching(run, CSS).count("scores rise &lt;i&gt;") == 1
    assert "Iteration 2: scores rise &lt;i&gt;" in render(run)


def test_a_warning_of_bias_is_shown():
    biased = row(2)
    biased["coach"]["by_stratum"]["regression"]["warning"] = "'regression' is scored 2.5 points higher"
    assert "2.5 points higher" in coaching(Run("r", [row(1), biased]), CSS)


def test_rows_of_before_and_broken_ones_make_no_section_and_no_error():
    assert coaching(Run("r", [{"iteration": 1, "agents": {}}]), CSS) == ""
    assert 'id="coach"' not in render(Run("r", [{"iteration": 1, "agents": {}}]))
    broken = {"iteration": 1, "coach": {"alarms": "x", "by_stratum": {"a": 3, "b": None}, "by_agent": [], "calls": "many"}}
    assert "Coach score by stratum" not in coaching(Run("r", [broken]), CSS)


def test_passes_are_read_from_the_runs_folder_and_a_broken_line_is_told(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")
    (tmp_path / "coaching.jsonl").write_text('{"when": "episode", "episodes": 3}\nnot json\n{"when": "generated"}\n')
    run = read_run(tmp_path)
    assert [p["when"] for p in run.passes] == ["episode", "generated"]
    assert any("Line 2 of coaching.jsonl" in note for note in run.notes)

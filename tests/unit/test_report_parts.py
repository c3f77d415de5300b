"""Parts of the report: which episodes are chosen, the graph's layout, what flowed through it, and the charts."""

import math
import random
import re
from dataclasses import replace

import pytest

from mappa_graph.inspect import SCORE_STOPS, score_rgb
from mappa_graph.record import Action, Episode, EpisodeTrace, Outcome, Transition, Verdict
from mappa_graph.report.choose import choose_failed, choose_pairs
from mappa_graph.report.flow import END, START, Flow, GraphShape, flow_of, shape_from_summary, shape_from_traces
from mappa_graph.report.picture import NODE_HEIGHT, NODE_WIDTH, draw, layout
from mappa_graph.report.svg import Series, dumbbells, esc, interval_rule, line_chart, percent, seconds, short, stacked_bars, ticks


def episodes(*specs: tuple[str, int, str], split: str = "train", success: bool = True) -> list[Episode]:
    return [
        Episode(
            f"{split}-{task}-{it}", task_id=task, iteration=it, stratum=s, split=split, status="done", outcome=Outcome(success), started=it
        )
        for task, it, s in specs
    ]


def pairs_of(index: list[Episode], count: int) -> list[tuple[str, str | None]]:
    traces = {e.id: EpisodeTrace(e) for e in index}
    return [(p.early.episode.id, p.late.episode.id if p.late else None) for p in choose_pairs(index, traces.get, count)]


def test_an_early_and_a_late_episode_of_one_task_stand_side_by_side() -> None:
    index = episodes(("a", 1, ""), ("a", 5, ""), ("a", 8, ""), ("b", 1, ""), ("c", 8, ""))
    assert pairs_of(index, 1) == [("train-a-1", "train-a-8")]


def test_the_choice_of_episodes_does_not_look_at_their_results() -> None:
    rng = random.Random(0)
    index = episodes(*[(f"t{k % 20}", 1 + k // 10, str(k % 3)) for k in range(80)])
    mixed = [replace(e, outcome=Outcome(rng.random() < 0.5)) for e in index]
    assert pairs_of(index, 6) == pairs_of(mixed, 6)
    assert len(pairs_of(index, 6)) == 6


def test_strata_take_turns_among_the_pairs() -> None:
    index = episodes(*[(f"{s}{k}", it, s) for s in "xyz" for k in range(9) for it in (1, 2)])
    chosen = pairs_of(index, 6)
    assert sorted(first.split("-")[1][0] for first, _ in chosen) == list("xxyyzz")


def test_where_no_task_recurs_equal_difficulty_and_held_out_tasks_stand_in() -> None:
    train = episodes(*[(f"t{it}{k}", it, str(k % 2)) for it in (1, 2) for k in range(6)])
    held = episodes(*[(f"h{k}", it, "0") for it in (0, 2) for k in range(6)], split="heldout/sampled@0.6")
    chosen = pairs_of(train + held, 6)
    assert sum(first.startswith("train") for first, _ in chosen) == 4
    assert all(a.split("-")[1] == (b or "").split("-")[1] and a.endswith("-0") for a, b in chosen if a.startswith("heldout"))


def test_a_single_iteration_gives_single_episodes_and_none_give_none() -> None:
    assert [late for _, late in pairs_of(episodes(("a", 1, ""), ("b", 1, "")), 6)] == [None, None]
    assert pairs_of([], 6) == []
    failed = Episode("f", status="failed", task_id="a")
    assert pairs_of([failed], 6) == []
    assert [t.episode.id for t in choose_failed([failed], {"f": EpisodeTrace(failed)}.get, 3)] == ["f"]


def boxes_overlap(at: dict[str, tuple[float, float]]) -> bool:
    nodes = [p for n, p in at.items() if n not in (START, END)]
    return any(abs(a[0] - b[0]) < NODE_WIDTH and abs(a[1] - b[1]) < NODE_HEIGHT for k, a in enumerate(nodes) for b in nodes[k + 1 :])


@pytest.mark.parametrize("seed", range(6))
def test_any_graph_is_laid_out_without_overlap_and_from_left_to_right(seed: int) -> None:
    rng = random.Random(seed)
    names = [START, *(f"n{k}" for k in range(24)), END]
    edges = tuple({(rng.choice(names[:-1]), rng.choice(names[1:]), rng.random() < 0.5) for _ in range(45)})
    shape = GraphShape(tuple(names), edges)
    plan = layout(shape)
    assert set(plan.at) == set(names) and not boxes_overlap(dict(plan.at))
    for source, target, _ in edges:
        if source != target and (source, target) not in plan.back:
            assert plan.at[source][0] < plan.at[target][0]
    for x, y in plan.at.values():
        assert 0 <= x <= plan.width and 0 <= y <= plan.height


def test_only_edges_that_close_a_cycle_run_back() -> None:
    shape = GraphShape(
        (START, "plan", "act", END), ((START, "plan", False), ("plan", "act", False), ("act", "plan", True), ("act", END, True))
    )
    assert layout(shape).back == {("act", "plan")}


def test_a_node_without_a_score_has_no_colour_and_no_number() -> None:
    shape = GraphShape(("a", "b"), (("a", "b", False), ("b", "b", True)), {"a": "x", "b": "x"})
    picture = draw(shape, Flow(), {"a": 10.0}, {"x": "s0"}, label="g", key="0")
    red, green, blue = score_rgb(10.0)
    assert picture.count(f"rgb({red},{green},{blue})") == 1 and picture.count("node blank") == 1
    assert "10.0" in picture and "not scored" in picture and "0.0<" not in picture.replace("10.0<", "")


def run_of(*path: str, scores: dict[int, float | None] | None = None) -> EpisodeTrace:
    steps = [Transition(f"{k}", n.split("/")[-1], n, k, parents=(f"{k - 1}",) if k else ()) for k, n in enumerate(path)]
    acts = tuple(Action(f"a{k}", f"{k}", "agent", "p", k) for k in range(len(path)))
    verdicts = {f"a{k}": Verdict(s) for k, s in (scores or {}).items()}
    return EpisodeTrace(Episode("e"), tuple(steps), acts, (), verdicts)


def test_a_nodes_score_is_the_mean_over_its_scored_actions_alone() -> None:
    flow = flow_of([run_of("solve", "check", "solve", scores={0: 2.0, 1: None, 2: 8.0}), run_of("solve", scores={0: 8.0})])
    assert flow.scores == {"solve": 6.0} and flow.scored == {"solve": 3}
    assert flow.visits["check"] == 1
    assert flow.taken == {(START, "solve"): 2, ("solve", "check"): 1, ("check", "solve"): 1, ("solve", END): 2}


def test_nodes_of_subgraphs_count_under_each_name_a_drawing_may_use() -> None:
    flow = flow_of([run_of("planner/model", scores={0: 4.0})])
    assert flow.scores == {"model": 4.0, "planner/model": 4.0, "planner:model": 4.0, "planner": 4.0}


def test_without_a_summary_the_shape_is_read_off_the_transitions() -> None:
    shape = shape_from_traces([run_of("solve", "check"), run_of("solve", "check", "solve", "check")])
    assert shape.nodes == (START, "solve", "check", END)
    assert {(a, b): c for a, b, c in shape.edges} == {
        (START, "solve"): False,
        ("solve", "check"): False,
        ("check", END): True,
        ("check", "solve"): True,
    }
    assert shape.agent_of_node == {"solve": "agent", "check": "agent"}
    assert not shape_from_summary({"graph": "none"}) and not shape_from_traces([])


def test_a_gap_in_a_series_breaks_its_line() -> None:
    chart = line_chart([Series("a", "s0", [(1, 0.1), (2, 0.2), (3, None), (4, 0.4), (5, 0.3)])], label="x")
    assert len(re.findall(r'class="s0 line"', chart)) == 2
    assert "iteration 3" not in chart and "iteration 4" in chart
    assert line_chart([Series("a", "s0", [(1, None)])], label="x") == ""


def test_coordinates_stay_inside_the_chart_whatever_the_values() -> None:
    for values in ([5.0], [0.0, 0.0], [-3.0, 1e9, 2.0], [1e-12, 2e-12], [0.1] * 400):
        chart = line_chart([Series("a", "s0", [(k, v) for k, v in enumerate(values)])], label="x", width=300, height=100)
        assert "nan" not in chart and "inf" not in chart
        numbers = [float(v) for v in re.findall(r'c?[xy][12]?="(-?[\d.]+)"', chart)]
        assert all(-60 <= v <= 310 for v in numbers), [v for v in numbers if not -60 <= v <= 310]


def test_bars_are_stacked_to_the_sum_of_their_parts() -> None:
    chart = stacked_bars([("a", "s0"), ("b", "s1")], [(1, {"a": 1.0, "b": 3.0})], label="x")
    low, high = (float(h) for h in re.findall(r'fill" x="[\d.]+" width="[\d.]+" y="[\d.]+" height="([\d.]+)"', chart))
    assert high == pytest.approx(3 * low, rel=0.01) and "iteration 1: 4\na 1\nb 3" in chart
    assert stacked_bars([("a", "s0")], [(1, {"a": 0.0})], label="x") == stacked_bars([("a", "s0")], [], label="x") == ""


def test_a_missing_end_of_a_dumbbell_is_not_drawn() -> None:
    chart = dumbbells([("1", None, 0.5), ("2", 0.25, 0.5), ("3", None, None)], label="x")
    assert chart.count("hollow") == 1 and chart.count('class="s0 dot"') == 2 and chart.count("rail") == 1
    assert interval_rule(None, None, label="x") == "" and interval_rule((0.5, 0.4, 0.6), None, label="x").count("circle") == 1


def test_ticks_are_round_and_lie_inside() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0.31, 0.34, 3) == [0.31, 0.32, 0.33, 0.34]
    for low, high in ((0, 7), (-3, 1e6), (1e-7, 3e-7), (12, 12)):
        assert all(low - 1e-12 <= t <= high + 1e-12 for t in ticks(low, high)) and 1 <= len(ticks(low, high)) <= 12


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (short(0), "0"), (short(0.01234), "0.0123"), (short(1.5e-6), "1.5e-06"), (short(12_345), "12.3k"), (short(2.5e6), "2.5M"),
        (percent(0.617), "61.7%"), (seconds(0.42), "0.42 s"), (seconds(59.4), "59 s"), (seconds(184), "3 min 04 s"),
        (seconds(7800), "2 h 10 min"),
        (esc("<a b='\"'>&\x1b[0m\n"), "&lt;a b=&#x27;&quot;&#x27;&gt;&amp;\n"),
    ],
)  # fmt: skip
def test_numbers_and_texts_are_written_for_readers(made: str, expected: str) -> None:
    assert made == expected


def test_the_score_scale_meets_its_stops_and_is_told_apart_in_greyscale_at_its_ends() -> None:
    assert [score_rgb(stop) for stop, _ in SCORE_STOPS] == [colour for _, colour in SCORE_STOPS]
    assert score_rgb(-1) == score_rgb(0) and score_rgb(99) == score_rgb(10)
    assert math.dist(score_rgb(0), score_rgb(10)) > 150

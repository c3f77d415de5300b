"""The live display: what it tells, and that no terminal, width or missing value breaks it."""

import io
import random
import threading

import pytest
from rich.console import Console

from mappa_graph.display import Display, before_after_table, iteration_table, spark
from tests.fakes.rundir import row, summary


def rows(count: int = 6) -> list[dict]:
    rng = random.Random(0)
    return [row(k, k / count, rng, evaluate=k % 3 == 0, trained=k > 0) for k in range(count + 1)]


def screen(width: int = 120, *, terminal: bool = False, height: int = 40) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=terminal, color_system="truecolor" if terminal else None)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def drawn(table: object, width: int) -> str:
    console = screen(width)
    console.print(table)
    return text(console)


def test_a_wide_terminal_shows_scores_accuracies_tokens_weights_and_time() -> None:
    made = rows()
    shown = drawn(iteration_table(made, 120, 20), 120)
    for words in (
        "solver",
        "executor",
        "verifier",
        "rollout",
        "held-out",
        "tokens",
        "weights",
        "v6",
        "time",
        f"{made[6]['agents']['solver']['score_mean']:.1f}",
    ):
        assert words in shown, words
    assert f"{made[6]['heldout']['accuracy'] * 100:.1f}%" in shown
    assert len(shown.splitlines()) == 1 + len(made) + 1, "a heading, a line an iteration, sparklines"


@pytest.mark.parametrize("width", [1, 2, 7, 20, 45, 60, 79])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_width_is_too_narrow(width: int, terminal: bool) -> None:
    console = screen(width, terminal=terminal, height=5)
    with Display(console=console, title="a title that is longer than a narrow terminal is wide") as display:
        display.status("waiting for something with a long name")
        display.progress(3, 8, "episodes")
        for made in rows():
            display.iteration(made)
        display.before_after(summary(rows(), 12))
    assert text(console)


def test_a_narrow_terminal_keeps_the_scores_and_drops_the_rest() -> None:
    shown = drawn(iteration_table(rows(), 62, 20), 62)
    assert "held-out" in shown and "solver" in shown and "…" not in shown
    assert "tokens" not in shown and "time" not in shown


def test_of_more_iterations_than_fit_the_last_ones_are_shown() -> None:
    shown = drawn(iteration_table(rows(30), 100, 5), 100)
    assert "26 earlier iterations not shown" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.strip()[:1].isdigit()][:5] == ["26", "27", "28", "29", "30"]


def test_a_log_file_gets_one_plain_line_an_iteration() -> None:
    console = screen(terminal=False)
    with Display(console=console) as display:
        for made in rows():
            display.iteration(made)
    lines = text(console).splitlines()
    assert len(lines) == 7 and "\x1b" not in text(console)
    assert lines[3].startswith("iteration 3 | solver ") and "held-out" in lines[3] and "train 4" in lines[3]


def test_in_a_log_file_waiting_is_mentioned_only_now_and_then() -> None:
    now = [0.0]
    console = screen(terminal=False)
    with Display(console=console, clock=lambda: now[0]) as display:
        display.status("building the model")
        display.iteration(rows()[1])
        for done in range(100):
            now[0] += 1.0
            display.status("rolling out")
            display.progress(done, 100, "episodes")
    shown = text(console)
    assert shown.count("building the model") == 1
    assert shown.count("episodes:") == 6, "100 s, a line every 15 s"


def test_a_score_that_is_missing_is_a_dash_and_never_a_zero() -> None:
    made = {
        "iteration": 1,
        "agents": {"solver": {"score_mean": None}, "checker": {"score_mean": float("nan")}},
        "rollout": None,
        "heldout": None,
    }
    for shown in (drawn(iteration_table([made], 100, 5), 100), plain(made)):
        assert "–" in shown and "0.0" not in shown and "nan" not in shown


def plain(made: dict) -> str:
    console = screen()
    with Display(console=console) as display:
        display.iteration(made)
    return text(console)


@pytest.mark.parametrize("terminal", [True, False])
def test_rows_that_hold_nothing_or_nonsense_are_shown_all_the_same(terminal: bool) -> None:
    console = screen(terminal=terminal)
    with Display(console=console) as display:
        for made in (
            {},
            {"iteration": "x", "agents": [1]},
            {"iteration": 2, "agents": {"a": None}, "heldout": {"accuracy": 0.5, "ci95": [None, 1]}},
        ):
            display.iteration(made)
        display.progress(0, 0, "nothing")
        display.before_after({})
        display.before_after({"before": None, "after": {"accuracy": "?"}, "coach": {"mean_by_agent_first": {"a": None}}})
    assert "50.0%" in text(console)


def test_an_iteration_told_twice_has_one_row() -> None:
    console = screen(terminal=True)
    with Display(console=console) as display:
        display.iteration({"iteration": 1, "rollout": {"accuracy": 0.111}})
        display.iteration({"iteration": 1, "rollout": {"accuracy": 0.222}})
    last = text(console).rsplit("iter", 1)[1]
    assert "22.2%" in last and "11.1%" not in last


def test_the_result_shows_both_accuracies_their_intervals_and_the_gain() -> None:
    found = summary(rows(), 12)
    shown = drawn(before_after_table(found), 90)
    before, after = found["before"]["accuracy"], found["after"]["accuracy"]
    assert f"{before * 100:.1f}%" in shown and f"{after * 100:.1f}%" in shown and f"{(after - before) * 100:+.1f} points" in shown
    assert f"{found['after']['ci95'][0] * 100:.1f} to {found['after']['ci95'][1] * 100:.1f}%" in shown and "256" in shown
    assert "coach score, verifier" in shown and "re-tokenised 0" in shown


def test_quiet_says_the_result_alone() -> None:
    console = screen(terminal=True)
    with Display(console=console, title="t", quiet=True) as display:
        display.status("x")
        display.progress(1, 2, "y")
        display.note("z")
        display.iteration(rows()[1])
        assert text(console) == ""
        display.before_after({"before": {"accuracy": 0.1}, "after": {"accuracy": 0.5}})
    assert "held-out accuracy 10.0% -> 50.0% (+40.0 points)" in text(console)


def test_names_and_messages_are_never_read_as_markup_or_escapes() -> None:
    for terminal in (True, False):
        console = screen(terminal=terminal)
        with Display(console=console, title="[bold]t[/bold]") as display:
            display.status("[red]wait[/nope] \x1b]0;pwned\x07")
            display.note("[/] broken")
            display.iteration({"iteration": 1, "agents": {"[b]\x1b[2J": {"score_mean": 5.0}}})
        assert "[/] broken" in text(console) and "[red]wait" in text(console)
        assert "\x1b[2J" not in text(console) and "\x1b]0" not in text(console)


def test_the_terminal_is_given_back_when_the_run_fails() -> None:
    console = screen(terminal=True)
    with pytest.raises(RuntimeError, match="boom"), Display(console=console) as display:
        display.status("working")
        raise RuntimeError("boom")
    assert text(console).rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in text(console), "the cursor is shown again"
    display.status("after the end")


def test_threads_may_report_at_once() -> None:
    console = screen(terminal=True)
    with Display(console=console) as display:
        workers = [threading.Thread(target=lambda k=k: [display.progress(n, 50, f"w{k}") for n in range(50)]) for k in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(30)
        display.iteration(rows()[2])
    assert not any(worker.is_alive() for worker in workers) and "solver" in text(console)


def test_a_sparkline_has_a_gap_where_a_value_is_missing() -> None:
    assert spark([0.0, None, 10.0, 99.0], 0.0, 10.0).plain == "▁ ██"


def test_the_result_shows_the_metric_that_chooses_the_best_and_why_a_run_ended_early() -> None:
    made = summary(rows(), 12)
    made["before"].update(pass_at={"4": {"value": 0.25}}, majority={"value": 0.1}, metrics={"fair_rmse": 31.25})
    made["after"].update(pass_at={"4": {"value": 0.5}}, majority={"value": 0.2}, metrics={"fair_rmse": 30.0})
    made["best"].update(by="fair_rmse", value=30.0)
    made["stopped"] = {"by": "early_stop", "message": "early stop: no better"}
    shown = [" ".join(line.split()) for line in drawn(before_after_table(made), 120).splitlines()]
    assert "held-out pass@4 25.0% 50.0% +25.0 points" in shown and "held-out majority 10.0% 20.0% +10.0 points" in shown
    assert "held-out fair_rmse (chooses the best) 31.25 30 -1.25" in shown
    assert "ended early: early stop: no better" in shown
    made["before"]["metrics"] = {}
    assert "held-out fair_rmse (chooses the best) – 30 –" in [
        " ".join(line.split()) for line in drawn(before_after_table(made), 120).splitlines()
    ]

"""Episodes in a terminal: complete, and deaf to what agents wrote."""

import io
import random
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from mappa_graph.cli import app as cli
from mappa_graph.errors import ConfigError
from mappa_graph.inspect import action_names, clip, content_text, one_line, printable, render_episode, render_list, tool_call_text
from mappa_graph.record import Action, Episode, EpisodeTrace, Verdict
from mappa_graph.store import TraceStore
from tests.fakes.rundir import episode, make_run


def drawn(thing: object, width: int = 120, *, color: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=color, color_system="truecolor" if color else None).print(thing)
    return file.getvalue()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;new title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$r0m\x1b\\x", "x"),
        ("\x1b[2J\x1b[1;1Hgone", "gone"),
        ("\x9b31mc1", "31mc1"),
        ("a\x00b\x08c\x7f", "abc"),
        ("50%\rdone\r\nnext", "50%\ndone\nnext"),
        ("a\u202eb\u2066c\u200bd\ufeff", "a\\u202eb\\u2066c\\u200bd\\ufeff"),
        ("half \ud800 pair", "half \\ud800 pair"),
        ("[bold]kept[/bold] ünïcödé 数 🙂", "[bold]kept[/bold] ünïcödé 数 🙂"),
    ],
)
def test_terminal_controls_go_and_deceiving_characters_are_spelled_out(given: str, shown: str) -> None:
    assert printable(given) == shown
    printable(given).encode("utf-8")


def test_an_escape_cut_in_the_middle_can_not_reach_the_terminal() -> None:
    assert "\x1b" not in printable("tail \x1b") and "\x1b" not in printable("\x1b[") and "\x1b" not in printable("\x1b]0;open")


def test_long_text_keeps_head_and_tail() -> None:
    cut = clip("H" * 900 + "TAIL", 90)
    assert cut.startswith("HHH") and cut.endswith("TAIL") and "814 characters left out" in cut
    assert clip("short", 90) == "short" and one_line(" a\n b ", 3) == "a b" and one_line("abcdef", 3) == "ab…"


def test_an_episode_is_shown_whole() -> None:
    trace = episode("e1", 1, 0.0, random.Random(3))
    shown = drawn(render_episode(trace, messages=True))
    assert trace.episode.task in " ".join(shown.replace("│", " ").split()) and "not solved" in shown
    for action in trace.actions:
        assert action.agent in shown
    assert "SyntaxError" in shown and "does not parse" in shown and "blames solver" in shown and "system" in shown
    assert "You are part of a team" not in drawn(render_episode(trace))


def test_hostile_text_reaches_the_terminal_as_text() -> None:
    hostile = "[red]x[/red] [/] \x1b[2J\x1b]0;pwned\x07 \u202eevil \ud800"
    trace = episode("e[1]", 1, 0.0, random.Random(3), hostile=hostile)
    for color in (False, True):
        shown = drawn(render_episode(trace, messages=True), color=color)
        assert "[red]x[/red] [/]" in shown and "\\u202eevil" in shown
        assert "\x1b[2J" not in shown and "\x1b]0" not in shown and "\u202e" not in shown


def test_an_action_without_a_score_says_so_and_shows_no_number() -> None:
    action = Action("a", "t", "solver", "solver", 0, output="hm")
    trace = EpisodeTrace(
        Episode("e", status="failed", error="SandboxError: gone"), (), (action,), (), {"a": Verdict(None, error="no reply")}
    )
    shown = drawn(render_episode(trace))
    assert "no score" in shown and "no reply" in shown and "0.0" not in shown
    assert "SandboxError: gone" in shown and "hm" in shown, "an action whose transition is unknown is shown all the same"
    assert "no tokens captured" in shown


def test_actions_of_one_agent_are_numbered_in_order() -> None:
    acts = (Action("2", "t", "x", "x", 2), Action("0", "t", "x", "x", 0), Action("1", "t", "y", "y", 1))
    assert action_names(EpisodeTrace(Episode("e"), (), acts)) == {"0": "x 1", "2": "x 2", "1": "y"}


def test_a_list_shows_the_latest_first_and_filters(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", iterations=2, per_iteration=3, heldout=2)
    with TraceStore(folder / "trace.db", read_only=True) as store:
        shown = drawn(render_list(store, split="train", iteration=2))
        assert [line.split()[0] for line in shown.splitlines()[1:]] == ["t2-2", "t2-1", "t2-0"]
        assert "SandboxError" not in shown and "solved" in shown
        assert [line.split()[0] for line in drawn(render_list(store, status="failed")).splitlines()[1:]] == ["broken"]
        assert "no episodes match" in drawn(render_list(store, split="nowhere"))
        assert len(drawn(render_list(store, limit=1)).splitlines()) == 2


@pytest.mark.parametrize("width", [10, 40, 80])
def test_a_narrow_terminal_still_shows_whole_ids(tmp_path: Path, width: int) -> None:
    long_id = "0193c0de-1111-7222-8333-123456789abc"
    with TraceStore(tmp_path / "trace.db") as store:
        store.save_episode(EpisodeTrace(Episode(long_id, task="word " * 60, status="done")))
        shown = drawn(render_list(store), width)
    assert long_id in shown.replace("\n", "").replace(" ", "")
    assert width < 60 or ("done" in shown and "word" in shown)
    assert drawn(render_episode(EpisodeTrace(Episode(long_id, task="word " * 60))), width)


def test_contents_and_tool_calls_of_either_shape_are_read() -> None:
    assert content_text(None) == "" and content_text([{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]) == "a\n[image_url]\nb"
    assert tool_call_text({"function": {"name": "f", "arguments": "{}"}}) == ("f", "{}")
    assert tool_call_text({"name": "g", "args": {"x": 1}}) == ("g", "{'x': 1}")


def test_the_start_of_an_id_is_enough_where_one_episode_alone_has_it(tmp_path: Path) -> None:
    with TraceStore(tmp_path / "trace.db") as store:
        store.save_episodes(EpisodeTrace(Episode(id, environment="e", task="?")) for id in ("ab1", "ab2", "b", "b1"))

    def shown(start: str) -> Result:
        return CliRunner().invoke(cli, ["traces", "show", str(tmp_path), start])

    assert shown("b1").exit_code == shown("ab1").exit_code == 0
    assert shown("b").exit_code == 0  # a whole id, though another begins with it
    several = shown("ab").exception
    assert isinstance(several, ConfigError) and "several episodes that begin with 'ab': ab1, ab2" in str(several)
    for none in ("c", ""):
        assert "has no episode" in str(shown(none).exception)

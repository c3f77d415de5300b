"""The report page: self-contained, safe against hostile text, honest about what is missing."""

import base64
import hashlib
import json
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mappa_graph.errors import ConfigError
from mappa_graph.record import (
    Action,
    Episode,
    EpisodeTrace,
    Execution,
    ExecutionErrorInfo,
    Failure,
    FileChange,
    Outcome,
    Transition,
    Verdict,
)
from mappa_graph.report import write_report
from mappa_graph.report.data import number, read_run
from mappa_graph.store import TraceStore
from tests.fakes.rundir import make_run, row

HOSTILE = (
    "</pre></details></script><script>alert(1)</script><img src=x onerror=alert(2)> &amp; \" ' `"
    "\x1b[31mred\x1b]0;title\x07 \u202egnp.exe\u2028 \x00 \ud800 <!-- <style>*{display:none}</style> javascript:alert(3)"
)
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """What a browser would make of the page: elements with attributes, whether tags nest, and text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attrs for name, attrs in self.elements if name == tag)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text("utf-8"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "attacked", iterations=2, per_iteration=8, heldout=4, hostile=HOSTILE)


def test_the_page_tells_the_run_from_headline_to_settings(demo: Path) -> None:
    page = page_of(demo)
    assert page.open == []
    for words in (
        "7.0%",
        "64.7%",
        "+57.7 points",
        "1,141",
        "0 re-tokenised",
        "SyntaxError",
        "deadline:DeadlineError",
        "no verdict",
        "std_floor",
    ):
        assert words in page.words, words
    sections = [attrs.get("id") for attrs in page.all("section") if attrs.get("id")]
    assert sections == ["learning", "graph", "behaviour", "episodes", "health", "time", "failures", "settings"]
    assert sum("pair" in (a.get("class") or "") for a in page.all("details")) == 7, "six pairs and one episode that failed"


@pytest.mark.parametrize("run", ["demo", "attacked"])
def test_the_page_loads_nothing_and_runs_only_its_own_script(run: str, request: pytest.FixtureRequest) -> None:
    html = write_report(request.getfixturevalue(run)).read_text("utf-8")
    page = Page(html)
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy") or ""
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert not {"img", "iframe", "link", "object", "embed", "form", "base", "image", "use", "foreignobject"} & {
        tag for tag, _ in page.elements
    }
    for tag, attrs in page.elements:
        for name, value in attrs.items():
            assert not name.startswith("on") and name not in {"src", "style", "srcset", "xlink:href"}, (tag, name)
            assert name != "href" or (value or "").startswith("#"), (tag, value)


def test_hostile_text_is_shown_as_text_in_every_place_it_can_reach(attacked: Path) -> None:
    html = write_report(attacked).read_text("utf-8")
    page = Page(html)
    assert page.open == []
    assert "</pre></details></script><script>alert(1)</script><img src=x onerror=alert(2)>" in page.words
    assert len(list(page.all("script"))) == 1 and len(list(page.all("style"))) == 1
    assert not set("\x1b\x00\x07\u202e\u2028") & set(html)
    assert "\\u202egnp.exe" in page.words and "\\ud800" in page.words, "what would deceive the eye is spelled out"


def test_names_in_traces_are_escaped_too(tmp_path: Path) -> None:
    bad = "<img src=x onerror=alert(1)>"
    action = Action(
        f"id{bad}", "t", bad, bad, 0, messages=[{"role": bad, "content": [{"type": bad}]}], finish_reason=bad,
        tool_calls=[{"function": {"name": bad, "arguments": bad}}],
        executions=(Execution("x", "error", name=bad, error=ExecutionErrorInfo(bad, bad), files=(FileChange(bad, "created"),), note=bad),),
    )  # fmt: skip
    head = Episode(
        bad, task=bad, task_id=bad, stratum=bad, iteration=1, status="done", reference=bad, outcome=Outcome(False, bad, answer=bad)
    )
    verdict = Verdict(3.0, bad, blame=(bad, f"id{bad}"), better_action=bad, coach=bad)
    with TraceStore(tmp_path / "trace.db") as store:
        store.save_episode(EpisodeTrace(head, (Transition("t", bad, bad, 0),), (action,), (), {action.id: verdict}))
        store.add_failure(Failure(bad, bad, bad))
    page = page_of(tmp_path)
    assert page.open == [] and "img" not in {tag for tag, _ in page.elements}
    assert page.words.count(bad) > 15


def test_a_name_that_is_markup_stays_a_name(tmp_path: Path) -> None:
    bad = '"><script>alert(1)</script>'
    line = row(1, 0.5, random.Random(0), evaluate=True)
    line["agents"][bad] = line["agents"]["solver"]
    line["agents"]["executor"]["errors"] = {bad: 3}
    line["heldout"]["by_stratum"] = {bad: 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    graph = {"nodes": [bad, "b"], "edges": [[bad, "b", True], ["b", "b"], ["b"], 3], "agent_of_node": {bad: bad}}
    (tmp_path / "summary.json").write_text(
        json.dumps({"environment": bad, "model": bad, "graph": graph, "versions": {bad: 2}, "notes": [bad]})
    )
    page = page_of(tmp_path)
    assert page.open == [] and len(list(page.all("script"))) == 1
    assert bad in page.words


def test_a_run_in_progress_is_shown_as_far_as_it_has_come(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", iterations=4, per_iteration=6, heldout=3, finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "agents": {"solv')
    page = page_of(folder)
    assert "in progress" in page.words and "can't be read" not in page.words
    assert "7.0%" in page.words, "the evaluation before training is the headline until there is a summary"
    assert {a.get("aria-label") for a in page.all("svg")} >= {"accuracy by iteration", "the graph, first training iteration (1)"}


def evaluated_run(folder: Path, *, stored: bool = True, finished: bool = False) -> Path:
    """Six tasks before training, of which two are right; then the first three of them, of which two are right, one of them before too."""
    right = {0: ["t0", "t5"], 4: ["t0", "t1"]}
    sizes = {0: 6, 4: 3}
    folder.mkdir()
    lines = []
    with TraceStore(folder / "trace.db") as store:
        for iteration, n in sizes.items():
            for task in (f"t{k}" for k in range(n)):
                outcome = Outcome(True) if task in right[iteration] else None  # one that failed has no outcome
                head = {"split": "heldout/sampled@0.6", "iteration": iteration, "status": "done" if outcome else "failed"}
                made = Episode(f"{iteration}-{task}", task_id=task, environment="e", task="?", stratum=task[-1], outcome=outcome, **head)
                if stored:
                    store.save_episode(EpisodeTrace(made))
            stray = Episode(
                f"s{iteration}", task_id="t2", split="heldout/sampled@0.6/other", iteration=iteration, environment="e", task="?"
            )
            store.save_episode(EpisodeTrace(stray))
            accuracy = len(right[iteration]) / n
            held = {"accuracy": accuracy, "n": n, "ci95": [0.1, 0.9], "mode": "sampled@0.6", "by_stratum": {"0": 1.0, "1": accuracy}}
            lines.append({"iteration": iteration, "agents": {}, "heldout": held})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        ends = [line["heldout"] for line in lines]
        (folder / "summary.json").write_text(json.dumps({"before": ends[0], "after": ends[1] | {"n": 6}, "environment": "e"}))
    return folder


def test_evaluations_of_different_tasks_are_compared_on_those_that_they_share(tmp_path: Path) -> None:
    folder = evaluated_run(tmp_path / "run")
    run = read_run(folder)
    assert run.common is not None
    before, after = run.common
    assert (before["accuracy"], after["accuracy"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3)) and before["n"] == after["n"] == 3
    assert after["by_stratum"] == {"0": 1.0, "1": 1.0, "2": 0.0} and before["by_stratum"] == {"0": 1.0, "1": 0.0, "2": 0.0}
    words = page_of(folder).words
    assert "Held-out accuracy, before training → so far, 3 tasks" in words and "33.3%→66.7%+33.3 points" in words
    assert "The evaluations were of 6 and of 3 tasks; both are shown on those that they share." in words
    assert "The 3 held-out tasks that the first and the last evaluation share" in words and "held-out tasks (3 to 6 of them)" in words


def test_evaluations_of_different_tasks_that_can_not_be_matched_are_not_compared(tmp_path: Path) -> None:
    folder = evaluated_run(tmp_path / "run", stored=False)
    words = page_of(folder).words
    assert "6 and 3 tasks" in words and "points" not in words
    assert "of different numbers of tasks, and their difference says nothing" in words
    assert "Held-out tasks, of different numbers (6 and 3)" in words
    with TraceStore(folder / "trace.db") as store:  # a part of them would be a selection
        head = {"split": "heldout/sampled@0.6", "environment": "e", "task": "?", "outcome": Outcome(True)}
        store.save_episodes(EpisodeTrace(Episode(f"x{i}", task_id="t0", iteration=i, **head)) for i in (0, 4))
    assert read_run(folder).common is None


def test_a_finished_run_is_told_by_its_own_ends(tmp_path: Path) -> None:
    words = page_of(evaluated_run(tmp_path / "run", finished=True)).words
    assert "before → after training, 6 tasks" in words and "33.3%→66.7%+33.3 points" in words and "those that they share." not in words


def test_without_evaluations_the_headline_says_so_and_invents_no_number(tmp_path: Path) -> None:
    lines = [row(k, 0.4, random.Random(k), evaluate=False) for k in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    page = page_of(tmp_path)
    assert "not evaluated yet" in page.words and "points" not in page.words
    assert "There is no trace.db" in page.words


def test_a_run_that_has_only_begun_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("environment: x\n")
    page = page_of(tmp_path)
    assert page.open == []
    assert "No iteration has ended yet" in page.words and "No finished episode" in page.words


def test_a_missing_score_is_a_gap_and_never_a_zero(tmp_path: Path) -> None:
    lines = [row(k, 0.5, random.Random(k), evaluate=False) for k in (1, 2, 3)]
    for line in lines:
        line["agents"] = {"solver": {"score_mean": 6.25 if line["iteration"] != 2 else None, "scored": 4, "unscored": 60, "actions": 64}}
    lines[2]["agents"]["solver"]["score_mean"] = float("nan")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    html = write_report(tmp_path).read_text("utf-8")
    (chart,) = re.findall(r'aria-label="mean coach score by agent and iteration">.*?</svg>', html, re.DOTALL)
    assert "iteration 1\nsolver 6.2" in chart
    assert "iteration 2" not in chart and "iteration 3" not in chart
    assert number(lines[2], "agents", "solver", "score_mean") is None


def test_an_action_without_a_verdict_is_a_dash_with_its_reason(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", iterations=2, per_iteration=40, heldout=0, seed=1)
    html = write_report(folder).read_text("utf-8")
    shown = [t for p in read_run(folder).pairs for t in (p.early, p.late) if t]
    unscored = [v for t in shown for v in t.verdicts.values() if v.score is None]
    assert unscored, "the made-up run has an unscored action among the shown ones"
    assert html.count('<span class="chip kx">–</span>') == html.count("<b>No score.</b>") == len(unscored)
    assert "held no score after 3 tries" in html


def test_a_broken_trace_store_is_a_note_and_not_a_crash(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", iterations=2, per_iteration=2, heldout=0)
    for name in ("trace.db", "trace.db-wal", "trace.db-shm"):
        (folder / name).unlink(missing_ok=True)
    (folder / "trace.db").write_bytes(b"not a database" * 500)
    (folder / "summary.json").write_text('{"cut": ')
    page = page_of(folder)
    assert "trace.db can't be read" in page.words and "summary.json can't be read" in page.words
    assert "accuracy by iteration" in {a.get("aria-label") for a in page.all("svg")}


def test_unreadable_metric_lines_are_named_and_left_out(tmp_path: Path) -> None:
    good = json.dumps(row(1, 0.2, random.Random(0), evaluate=False))
    again = json.dumps({"iteration": 1, "rollout": {"accuracy": 0.875}})
    (tmp_path / "metrics.jsonl").write_text(f"{good}\nnot json\n[1, 2]\n{again}\n")
    run = read_run(tmp_path)
    assert [number(r, "rollout", "accuracy") for r in run.rows] == [0.875], "of an iteration written twice the later row counts"
    assert any("Line 2 of metrics.jsonl" in n for n in run.notes) and any("Line 3 of metrics.jsonl" in n for n in run.notes)


def test_long_texts_keep_their_head_and_their_tail(tmp_path: Path) -> None:
    long = "BEGIN " + "x" * 50_000 + " END-OF-TRACEBACK"
    html = write_report(make_run(tmp_path / "run", iterations=2, per_iteration=4, heldout=0, hostile=long)).read_text("utf-8")
    assert "BEGIN" in html and "END-OF-TRACEBACK" in html and "characters left out" in html
    assert "x" * 7000 not in html


def test_the_same_command_again_replaces_the_page_and_leaves_nothing_beside_it(demo: Path) -> None:
    first = write_report(demo)
    before = first.read_text("utf-8")
    assert write_report(str(demo)) == first and first.read_text("utf-8") == before
    assert [p.name for p in demo.iterdir() if p.name.startswith(".report")] == []


def test_what_is_no_run_directory_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        write_report(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"not a run directory[\s\S]*metrics\.jsonl"):
        write_report(tmp_path)


def test_a_page_that_cant_be_written_is_a_clear_error_and_leaves_no_litter(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    (tmp_path / "report.html").mkdir()
    (tmp_path / "report.html" / "x").touch()
    with pytest.raises(ConfigError, match="can't be written"):
        write_report(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "report.html"]

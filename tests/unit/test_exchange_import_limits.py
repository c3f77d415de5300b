"""Patience with services that limit requests, and keys that are never said."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from mappa_graph.commands.importing import agents_of, scales_of
from mappa_graph.errors import ConfigError
from mappa_graph.exchange.feedback import as_number, scale_of
from mappa_graph.exchange.importer import task_text
from mappa_graph.exchange.limits import ATTEMPTS, Missing, patient, retry_after, scrubbed
from mappa_graph.exchange.window import begin, cursor_of


class Answer(Exception):
    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"status {status}")
        self.response = type("Response", (), {"status_code": status, "headers": {k.replace("_", "-"): v for k, v in headers.items()}})()


def asking(*answers: Any) -> tuple[Any, list[float], list[int]]:
    left, slept, asked = list(answers), [], []

    def ask() -> Any:
        asked.append(1)
        answer = left.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return (lambda **more: patient(ask, "the thing", sleep=slept.append, **more)), slept, asked


def test_the_service_says_how_long_to_wait_and_else_the_pause_grows() -> None:
    ask, slept, _ = asking(Answer(429, Retry_After="7"), Answer(503), Answer(500), ConnectionError(), 42)
    assert ask() == 42
    assert slept[0] == 7.0 and slept[1:] == sorted(slept[1:]) and slept[1] < slept[3]


def test_patience_ends_unless_there_is_progress() -> None:
    ask, _, asked = asking(*[Answer(429, Retry_After="0") for _ in range(50)])
    with pytest.raises(ConfigError, match="the thing can't be had"):
        ask()
    assert len(asked) == ATTEMPTS
    ask, _, asked = asking(*[Answer(429, Retry_After="0") for _ in range(50)], "done")
    assert ask(progressed=lambda: len(asked)) == "done"


def test_a_refusal_and_a_mistake_of_ours_end_at_once() -> None:
    for answer, kind in ((Answer(401), ConfigError), (Answer(404), Missing), (ZeroDivisionError(), ZeroDivisionError)):
        ask, slept, asked = asking(answer, 1)
        with pytest.raises(kind):
            ask()
        assert len(asked) == 1 and not slept


def test_retry_after_is_found_where_the_sdk_hides_it() -> None:
    try:
        try:
            raise Answer(429, Retry_After="3")
        except Answer:
            raise RuntimeError("rate limit")  # noqa: B904  as the SDK does
    except RuntimeError as error:
        assert retry_after(error) == 3.0
    assert retry_after(Answer(429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT")) == 0.0
    assert retry_after(Answer(429, Retry_After="whenever")) is None and retry_after(None) is None


def test_a_key_in_an_errors_text_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_API_KEY", "lsv2_secret_secret")
    assert scrubbed(ValueError("sent lsv2_secret_secret")) == "ValueError: sent $LANGSMITH_API_KEY"


@pytest.mark.parametrize(
    ("ends", "scale"),
    [((0, 1), (0, 1)), ((0.2, 0.7), (0, 1)), ((-1, 1), (-1, 1)), ((1, 5), (1, 5)), ((0, 4), (0, 5)), ((2, 9), (0, 10)), ((0, 80), (0, 100)),
     ((-3, 7), None)],
)  # fmt: skip
def test_a_scale_is_the_narrowest_usual_one(ends: Any, scale: Any) -> None:
    assert scale_of(*ends) == scale


def test_feedback_in_words_and_numbers() -> None:
    given = [
        {"score": True},
        {"score": 0.5},
        {"value": "Good"},
        {"value": "👎"},
        {"value": "3.5"},
        {"value": "meh"},
        {"score": float("nan")},
        {},
    ]
    assert [as_number(g) for g in given] == [1.0, 0.5, 1.0, 0.0, 3.5, None, None, None]


def test_a_task_is_what_the_user_asked_first() -> None:
    assert task_text({"messages": [["system", "be"], ["user", "go"]]}) == "go"
    assert task_text({"messages": [[{"lc": 1, "id": ["HumanMessage"], "kwargs": {"type": "human", "content": "go"}}]]}) == "go"
    assert task_text({"question": "why?"}) == "why?" and task_text("why?") == "why?" and task_text(None) == ""
    assert task_text({"a": 1}) == '{"a": 1}' and len(task_text("x" * 20_000)) < 8_010


def test_options_name_agents_and_ranges() -> None:
    assert agents_of(None) is None
    assert [a.name for a in agents_of(["solver", "critic", "solver"]) or ()] == ["solver", "critic"]
    mapped = agents_of(["planner/**=planner", "critic"])
    assert isinstance(mapped, dict) and [a.name for a in mapped.values()] == ["planner", "critic"]
    assert scales_of(["stars=1..5", "odd=-1.5..2"]) == {"stars": (1.0, 5.0), "odd": (-1.5, 2.0)}
    with pytest.raises(ConfigError):
        scales_of(["stars"])


def test_a_later_import_begins_an_hour_before_the_latest_trace_unless_it_is_asked_for_older_ones() -> None:
    def at(hour: float) -> datetime:
        return datetime.fromtimestamp(hour * 3600, UTC)

    assert begin(None, None) is None and begin(None, at(5)) == at(5)
    whole = cursor_of(None, None, 10 * 3600.0)
    assert begin(whole, None) == at(9) and begin(whole, at(2)) == at(9) and begin(whole, at(9.5)) == at(9.5)
    part = cursor_of(None, at(5), 10 * 3600.0)
    assert begin(part, at(6)) == at(9) and begin(part, at(4)) == at(4) and begin(part, None) is None
    # The older part was read as well by then, and what lies between is known.
    assert cursor_of(part, at(6), 12 * 3600.0) == {"floor": 5 * 3600.0, "newest": 12 * 3600.0}
    assert cursor_of(part, None, 12 * 3600.0) == {"floor": None, "newest": 12 * 3600.0}
    assert begin("nonsense", at(1)) == at(1) and begin({"newest": "x"}, None) is None

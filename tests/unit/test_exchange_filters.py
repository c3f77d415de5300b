"""What filters ask for, and how they are written down."""

import math

import pytest

from mappa_graph.errors import ConfigError
from mappa_graph.exchange.filters import Filters, seconds
from mappa_graph.record import Episode, Outcome, Verdict
from tests.fakes.exported import episode


@pytest.mark.parametrize(
    ("text", "end", "at"),
    [
        ("1970-01-02", False, 86_400.0),
        ("1970-01-02", True, 172_800.0),
        ("1970-01-01T01:00:00", False, 3600.0),
        ("1970-01-01T01:00:00", True, 3600.0),
        ("1970-01-01T01:00:00+01:00", False, 0.0),
        ("1970-01-01T00:00:00Z", False, 0.0),
    ],
)
def test_dates_are_utc_and_an_end_includes_its_day(text, end, at):
    assert seconds(text, end=end) == at


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "2026-02-03T25:00:00", "9999-12-31x"])
def test_what_is_no_date_is_refused(text):
    with pytest.raises(ConfigError, match="is no date"):
        seconds(text)


@pytest.mark.parametrize(
    "bad",
    [
        {"min_score": 5.0, "max_score": 4.0},
        {"min_length": 5, "max_length": 4},
        {"since": 5.0, "until": 5.0},
        {"min_score": math.nan},
        {"since": math.inf},
    ],
)
def test_ranges_that_hold_nothing_are_refused(bad):
    with pytest.raises(ConfigError):
        Filters(**bad)


def test_the_first_reason_that_holds_is_given():
    trace = episode(0, 0)
    action = trace.actions[0]
    both = Filters(agents=("other",), min_score=9.0)
    assert both.action(action, Verdict(1.0)) == "agent"
    assert Filters(min_score=9.0).action(action, Verdict(1.0)) == "score"
    assert Filters(min_score=0.0).action(action, None) == "no score"
    assert Filters().action(action, None) is None
    assert Filters().action(action, Verdict(None, error="down"), scored=True) == "no score"


def test_an_outcome_is_asked_of_graded_episodes():
    graded, lost, none = (Episode("e", status="done", outcome=o) for o in (Outcome(True), Outcome(False), None))
    assert [Filters(outcome="graded").episode(e) for e in (graded, lost, none)] == [None, None, "outcome"]
    assert [Filters(outcome="failure").episode(e) for e in (graded, lost, none)] == ["outcome", None, "outcome"]
    assert Filters().episode(Episode("e")) == "still running"
    assert Filters().episode(Episode("e", status="failed")) is None


def test_filters_describe_what_they_ask_for():
    assert Filters().describe() == {"split": "train"}
    told = Filters(agents=("a",), min_score=0.0, since=0.0, split=None, truncated=True).describe()
    assert told == {"agents": ["a"], "min_score": 0.0, "since": "1970-01-01T00:00:00+00:00", "truncated": True}

from __future__ import annotations

from typing import Any

import pytest

from mappa_graph.errors import ConfigError
from mappa_graph.sandboxes import Deadlines, Limits


@pytest.mark.parametrize("field", ["memory_mb", "cell_s", "processes", "output_chars", "grace_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "10"])
def test_a_limit_that_is_not_a_positive_number_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        Limits(**{field: value})


def test_a_file_may_not_be_larger_than_the_workspace() -> None:
    with pytest.raises(ConfigError, match="file_mb is 20, more than workspace_mb = 10"):
        Limits(file_mb=20, workspace_mb=10)


def test_nested_deadlines_are_accepted_with_gaps() -> None:
    assert Deadlines(cell_s=1, episode_s=10).transition_s is None
    assert Deadlines(1, 2, 3, 4).session_s == 4


@pytest.mark.parametrize(
    ("deadlines", "named"),
    [
        ({"cell_s": 5, "transition_s": 5}, "cell_s = 5 does not lie inside transition_s = 5"),
        ({"cell_s": 5, "session_s": 2}, "cell_s = 5 does not lie inside session_s = 2"),
        ({"transition_s": 30, "episode_s": 20}, "transition_s = 30 does not lie inside episode_s = 20"),
        ({"episode_s": 0}, "episode_s is 0"),
    ],
)
def test_a_deadline_outside_the_next_one_is_refused(deadlines: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Deadlines(**deadlines)

from typing import Any

import pytest

from mappa_graph import Agent
from mappa_graph.capture.team import Team, base_name, glob
from mappa_graph.coach.base import AgentCard


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("planner/**", "planner", True),
        ("planner/**", "planner/model", True),
        ("planner/**", "planner/a/b", True),
        ("planner/**", "planners/model", False),
        ("planner/*", "planner/model", True),
        ("planner/*", "planner/a/b", False),
        ("*/critic", "team/critic", True),
        ("*/critic", "critic", False),
        ("**/critic", "critic", True),
        ("**/critic", "a/b/critic", True),
        ("n?", "n1", True),
        ("n.", "n1", False),
    ],
)
def test_globs_match_node_paths(pattern: str, path: str, matches: bool) -> None:
    assert bool(glob(pattern).match(path)) == matches


def owner(team: Team, *, mark: Any = None, node: Any = None, path: str = "n", model: str = "gpt", echo: str = "", lc: Any = None) -> Any:
    metadata = {"lc_agent_name": lc} | ({"mappa_agent": mark} if mark else {})
    found = team.owner(metadata, node or {}, path, path.split("/")[-1], model, echo)
    return found.agent, found.policy, found.known


def test_a_model_named_as_an_agent_or_its_policy_at_any_version_is_that_agents() -> None:
    team = Team([Agent("solver"), Agent("judge", policy="shared")], ())
    assert owner(team, model="solver") == ("solver", "solver", True)
    assert owner(team, model="solver@v12") == ("solver", "solver", True)
    assert owner(team, model="shared@v3") == ("judge", "shared", True)
    assert base_name("solver@v12") == "solver"
    assert base_name("user@vendor") == "user@vendor"


def test_a_policy_that_two_agents_share_is_told_apart_by_the_node() -> None:
    team = Team([Agent("a", policy="shared"), Agent("b", policy="shared")], ())
    assert owner(team, model="shared", path="b") == ("b", "shared", True)
    assert owner(team, model="shared", path="elsewhere") == ("elsewhere", "shared", False)
    assert team.unknown == {"elsewhere (shared)": 1}


def test_the_order_of_resolution() -> None:
    agents = {"deep/*": Agent("mapped"), "x": Agent("named"), "y": Agent("modelled"), "z": Agent("noded")}
    team = Team(agents, ())
    both = {"node": {"mappa_agent": "n"}, "lc": "named", "model": "modelled"}
    assert owner(team, mark="m", path="deep/noded", **both)[0] == "m"
    assert owner(team, path="deep/noded", **both)[0] == "mapped"
    assert owner(team, path="noded", **both)[0] == "n"
    assert owner(team, path="noded", lc="named", model="modelled")[0] == "named"
    assert owner(team, path="noded", lc="stranger", model="modelled")[0] == "modelled"
    assert owner(team, path="noded", lc="stranger")[0] == "noded"
    assert owner(team, path="lost", lc="stranger") == ("stranger", "gpt", False)


def test_without_a_list_of_agents_a_reply_that_names_a_version_is_a_policys() -> None:
    team = Team(None, ())
    assert owner(team, model="solver", echo="solver@v3") == ("solver", "solver", True)
    assert owner(team, model="gpt", echo="gpt-4") == ("n", "gpt", False)


def test_the_team_a_coach_is_told_of_is_what_was_given_else_agents_and_marks() -> None:
    team = Team([Agent("a", role="does a", reads=["x.csv"])], ())
    team.owner({"mappa_agent": "b", "mappa_role": "does b"}, {}, "n", "n", "", "")
    assert set(team.cards) == {AgentCard("a", "does a", ("x.csv",)), AgentCard("b", "does b")}
    assert Team([Agent("a")], [AgentCard("only")]).cards == (AgentCard("only"),)

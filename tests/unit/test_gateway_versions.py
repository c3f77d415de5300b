"""Which version a call meets, and when one is unloaded."""

import asyncio
from collections import Counter

import pytest

from mappa_graph.errors import GatewayError
from mappa_graph.gateway.engine import RequestRefused
from mappa_graph.gateway.versions import Versions


def table(**more):
    unloaded: list[tuple[str, int]] = []
    return Versions({"solver": [0], "critic": [0]}, lambda policy, version: unloaded.append((policy, version)), **more), unloaded


def test_an_old_version_goes_when_its_last_call_has_ended_and_only_then():
    versions, unloaded = table()
    with versions.lease("solver", 0):
        with versions.lease("solver", 0):
            versions.flip("solver", versions.reserve("solver", None))
            assert versions.resolve("solver") == ("solver", 1) and versions.resolve("solver@v0") == ("solver", 0)
        assert unloaded == []
    assert unloaded == [("solver", 0)]
    with pytest.raises(RequestRefused, match="does not exist here"):
        versions.resolve("solver@v0")


def test_a_trial_gets_its_share_keeps_episodes_whole_and_goes_when_it_is_withdrawn():
    versions, unloaded = table()
    versions.try_out("solver", versions.reserve("solver", None), 0.3)
    met = Counter(versions.resolve("solver")[1] for _ in range(4000))
    assert 1050 < met[1] < 1350
    by_episode = {e: {versions.resolve("solver", e)[1] for _ in range(3)} for e in map(str, range(400))}
    assert all(len(v) == 1 for v in by_episode.values()) and 80 < sum(v == {1} for v in by_episode.values()) < 160
    assert versions.resolve("critic", "e")[1] == 0
    with versions.lease("solver", 1):
        assert versions.withdraw("solver").share == 0.3
        assert unloaded == []
    assert unloaded == [("solver", 1)] and {versions.resolve("solver")[1] for _ in range(50)} == {0}
    with pytest.raises(GatewayError, match="on trial"):
        versions.withdraw("solver")


def test_a_new_trial_takes_the_place_of_the_one_before_and_a_promoted_one_of_the_current():
    versions, unloaded = table()
    for number in (1, 2):
        versions.try_out("solver", versions.reserve("solver", number), 0.5)
    assert unloaded == [("solver", 1)]
    versions.flip("solver", 2)
    assert unloaded == [("solver", 1), ("solver", 0)] and versions.trials == {} and versions.current["solver"] == 2
    with pytest.raises(GatewayError, match="never used again"):
        versions.reserve("solver", 2)


def test_in_place_an_old_version_can_not_be_asked_for_and_still_goes_after_its_last_call():
    versions, unloaded = table(in_place=True)
    with versions.lease("solver", 0):
        versions.flip("solver", versions.reserve("solver", None))
        with pytest.raises(RequestRefused):
            versions.resolve("solver@v0")
        assert unloaded == []
    assert unloaded == [("solver", 0)] and versions.names() == ["critic", "critic@v0", "solver", "solver@v1"]


async def test_calls_to_a_held_policy_wait_and_others_do_not():
    versions, _ = table()
    with versions.hold("solver"):
        waiting = asyncio.ensure_future(versions.open("solver@v0"))
        await asyncio.wait_for(versions.open("critic"), 1)
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 1)
    assert versions.held == {}

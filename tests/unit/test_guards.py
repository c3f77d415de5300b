"""Alarms on made-up series of rows, and the batches that updates refused."""

import json
from pathlib import Path

import pytest

from mappa_graph.errors import ConfigError
from mappa_graph.sections.loop import AlarmsConfig
from mappa_graph.trainers.batch import Sample
from mappa_graph.trainers.guards import Guard, find_refused, keep_refused, refused_steps, rung

CALM = {
    "tokens": 100.0, "entropy": 1.0, "length_mean": 20.0, "ratio_max": 1.2, "mismatch_abs": 0.01, "kl": 0.1,
    "advantage_mean": 0.1, "advantage_std": 1.0,
}  # fmt: skip


def rows(**series):
    """Rows from 1; `solver__kl=[…]` is a series of one agent's number, the others are calm. None takes the number out."""
    count = max(map(len, series.values()))
    out = []
    for k in range(count):
        agents = {"solver": dict(CALM), "verifier": dict(CALM)}
        for name, values in series.items():
            agent, key = name.split("__")
            agents[agent][key] = values[k]
        out.append({"iteration": k + 1, "agents": agents})
    return out


def watched(made, settings=None):
    """The names of the alarms that are on after each row, and of those that are new."""
    guard = Guard(settings or AlarmsConfig())
    seen = [guard.see(row) for row in made]
    return [[f"{a.name}:{a.agent}" for a in on] for on, _ in seen], [[f"{a.name}:{a.agent}" for a in new] for _, new in seen]


@pytest.mark.parametrize(
    ("series", "on"),
    [
        ({"solver__entropy": [1.0, 0.101, 0.099, 0.05, 0.2]}, [[], [], ["entropy_collapse:solver"], ["entropy_collapse:solver"], []]),
        ({"verifier__length_mean": [20.0, 59.0, 61.0, 20.0, 6.6]}, [[], [], ["length_drift:verifier"], [], ["length_drift:verifier"]]),
        ({"solver__ratio_max": [1.0, 9.9, 10.1, 3.0]}, [[], [], ["ratio_explosion:solver"], []]),
        ({"solver__mismatch_abs": [0.29, 0.31]}, [[], ["mismatch:solver"]]),
        ({"verifier__kl": [0.0, 5.1, None]}, [[], ["kl_explosion:verifier"], []]),
        (
            {"solver__advantage_mean": [0.0, 0.0, 1.0], "solver__advantage_std": [0.0, 0.0, 0.0],
             "verifier__advantage_mean": [0.1, 0.005, -1.0], "verifier__advantage_std": [1.0, 0.005, 0.0]},
            [[], ["no_signal:"], []],
        ),
    ],
)  # fmt: skip
def test_each_alarm_goes_off_past_its_threshold_and_only_there(series, on):
    assert watched(rows(**series))[0] == on


def test_calm_numbers_ring_nothing():
    assert watched(rows(solver__kl=[0.1] * 8))[0] == [[]] * 8


def test_an_alarm_is_said_once_for_each_agent():
    made = rows(solver__kl=[9.0, 9.0, 0.1, 9.0], verifier__kl=[0.1, 9.0, 9.0, 9.0])
    assert watched(made)[1] == [["kl_explosion:solver"], ["kl_explosion:verifier"], [], []]


def test_an_alarm_may_wait_for_several_iterations_in_a_row():
    settings = AlarmsConfig.model_validate({"kl_explosion": {"iterations": 3}})
    assert watched(rows(solver__kl=[9, 9, 0.1, 9, 9, 9, 9]), settings)[0] == [[]] * 5 + [["kl_explosion:solver"]] * 2


def test_an_alarm_can_be_off_or_have_another_threshold():
    settings = AlarmsConfig.model_validate({"kl_explosion": {"action": "off"}, "mismatch": {"threshold": 0.005}})
    assert watched(rows(solver__kl=[99.0]), settings)[0] == [["mismatch:solver", "mismatch:verifier"]]


def test_a_continued_run_hears_what_an_uninterrupted_one_would():
    made = rows(solver__entropy=[1.0, 0.09, 0.09, 0.09], solver__length_mean=[20.0, 20.0, 90.0, 90.0])
    settings = AlarmsConfig.model_validate({"length_drift": {"iterations": 2, "action": "stop"}})
    whole = Guard(settings)
    expected = [whole.see(row) for row in made]
    for cut in range(len(made)):
        assert [Guard(settings, made[:cut]).see(made[cut])] == expected[cut : cut + 1]


def test_rows_without_updates_are_passed_over():
    guard = Guard(AlarmsConfig())
    for row in (
        {"iteration": 0, "agents": {}},
        {"iteration": 1, "agents": {"solver": {"score_mean": 3.0, "actions": 4}}},
        {"iteration": 2, "agents": {"solver": {"refused": 1.0}}},
        {"iteration": 3, "agents": {"solver": {**CALM, "entropy": None, "kl": None, "advantage_std": None, "length_mean": 0.0}}},
    ):
        assert guard.see(row) == ([], [])


def test_the_summary_holds_each_alarm_from_when_it_began():
    alarm = {"name": "mismatch", "agent": "solver", "value": 1.0}
    history = [{"iteration": 1}, {"iteration": 2, "alarms": [alarm]}, {"iteration": 3, "alarms": [alarm, {**alarm, "agent": "verifier"}]}]
    assert [(a["iteration"], a["agent"]) for a in rung(history)] == [(2, "solver"), (3, "verifier")]


SAMPLES = [
    Sample("a", "a", "e", "x", (1, 2), (3, 4), (-0.1, -1e-17), 0.7, 0.5, stratum="s"),
    Sample("b", "b", "e", "y", (1,), (9,), (-3.25,), ret=None, truncated=True),
]


def keep(run: Path, iteration: int, checkpoint: int | None = 3, **more) -> Path:
    parts = {"models": {"a": Path("m")}, "settings": "seed: 3\n", "keep": 2, **more}
    return keep_refused(run / "refused", iteration, SAMPLES, {"a": "loss nan"}, checkpoint=checkpoint, **parts)


def test_a_refused_batch_is_read_back_exactly(tmp_path):
    folder = keep(tmp_path, 4)
    found = find_refused(tmp_path)
    assert (found.folder, found.iteration, found.refused, found.checkpoint) == (folder, 4, {"a": "loss nan"}, 3)
    assert found.samples() == SAMPLES and found.models == {"a": "m"}
    assert (folder / "settings.yaml").read_text() == "seed: 3\n"


def test_only_the_last_refused_batches_are_kept_and_their_checkpoints_are_named(tmp_path):
    for iteration in (4, 9, 11):
        keep(tmp_path, iteration, iteration - 1)
    assert sorted(p.name for p in (tmp_path / "refused").iterdir()) == ["iteration-0009", "iteration-0011"]
    assert refused_steps(tmp_path / "refused") == [8, 10]
    assert find_refused(tmp_path, 9).iteration == 9
    with pytest.raises(ConfigError, match=r"no refused batch of iteration 4\n.*9, 11"):
        find_refused(tmp_path, 4)


def test_without_a_checkpoint_the_trainers_state_is_kept_beside_the_batch(tmp_path):
    def save(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text("w")

    folder = keep(tmp_path, 4, None, save=save)
    assert (folder / "state" / "weights").read_text() == "w" and refused_steps(tmp_path / "refused") == []


def test_a_folder_without_refused_batches_or_with_a_broken_one_is_named(tmp_path):
    with pytest.raises(ConfigError, match="holds no refused batch"):
        find_refused(tmp_path)
    folder = keep(tmp_path, 1)
    (folder / "refused.json").write_text(json.dumps({"iteration": 1}))
    with pytest.raises(ConfigError, match="can't be read: KeyError"):
        find_refused(tmp_path)
    assert refused_steps(tmp_path / "refused") == []

"""What a run tells its trackers, and that it goes on whatever they do."""

import json
import threading
import types
from pathlib import Path

import pytest

from mappa_graph.config import make_config
from mappa_graph.errors import ConfigError
from mappa_graph.trainers import trackers as module
from mappa_graph.trainers.trackers import Trackers, check_trackers, flatten, settings_for


class Foreign:
    """A tracker's class as accelerate has them, that fails where it is told to."""

    def __init__(self, *where: str, hang: threading.Event | None = None) -> None:
        self.where, self.hang, self.rows = where, hang, []

    def start(self):
        self._at("start")

    def store_init_configuration(self, values):
        self._at("config")

    def log(self, values, step):
        self._at("log")
        if self.hang is not None:
            self.hang.wait()
        self.rows.append(step)

    def finish(self):
        self._at("finish")

    def _at(self, place):
        if place in self.where:
            raise ConnectionError(f"no route at {place}")


@pytest.fixture
def foreign(monkeypatch):
    def use(tracker):
        monkeypatch.setattr(module, "_MAKE", {"tensorboard": lambda *_: tracker})
        return tracker

    return use


def log(folder: Path, rows: int = 3) -> tuple[dict, list[str]]:
    notes: list[str] = []
    running = Trackers(make_config({"run": str(folder), "loop": {"trackers": ["tensorboard"]}}), notes.append)
    for k in range(rows):
        running.log({"iteration": k, "loss": 0.5})
    running.close()
    return running.counts()["tensorboard"], notes


@pytest.mark.parametrize(("place", "rows", "failures"), [("start", 0, 4), ("config", 3, 1), ("log", 0, 3), ("finish", 3, 1)])
def test_a_tracker_that_fails_is_counted_and_said_once(tmp_path, foreign, place, rows, failures):
    foreign(Foreign(place))
    counts, notes = log(tmp_path)
    assert counts == {"rows": rows, "failures": failures, "first_failure": f"ConnectionError: no route at {place}"}
    assert len(notes) == 1 and "tensorboard failed" in notes[0] and "the run goes on" in notes[0]


@pytest.mark.parametrize("ids", ["{broken", "[]", '{"tensorboard": 7}'])
def test_ids_that_cant_be_read_begin_a_new_run_of_the_tracker(tmp_path, foreign, ids):
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "ids.json").write_text(ids)
    tracker = foreign(Foreign())
    assert log(tmp_path)[0]["rows"] == 3 and tracker.rows == [0, 1, 2]
    again = foreign(Foreign())
    assert log(tmp_path, rows=5)[0]["rows"] == 2 and again.rows == [3, 4], "a continued run goes on after the last row"


def test_a_tracker_that_hangs_holds_nothing_up(tmp_path, foreign, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    let = threading.Event()
    foreign(Foreign(hang=let))
    counts, notes = log(tmp_path)
    let.set()
    assert counts["failures"] == 1 and "had not finished" in counts["first_failure"] and len(notes) == 1


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "mlflow" else types.SimpleNamespace())
    check_trackers(["wandb", "tensorboard"])
    with pytest.raises(ConfigError, match=r"mlflow, which is not installed\n.*mappa-graph\[mlflow\]"):
        check_trackers(["wandb", "mlflow"])


def test_numbers_are_flattened_and_everything_else_is_left_out():
    row = {
        "agents": {"a b/c": {"kl": 0.5, "errors": {"Name:Error": 2}, "score": None, "scored": True}},
        "list": [1, [2.5, "x"]],
        "nan": float("nan"),
        "text": "7",
    }
    assert flatten(row) == {
        "agents/a b/c/kl": 0.5,
        "agents/a b/c/errors/Name_Error": 2,
        "agents/a b/c/scored": 1,
        "list/0": 1,
        "list/1/0": 2.5,
    }


def test_no_tracker_is_told_a_secret():
    made = make_config({"environment": {"options": {"api_key": "s3cret", "levels": [1], "db": {"Password": "hunter2"}}}})
    told = settings_for(made)
    assert "s3cret" not in json.dumps(told) and "hunter2" not in json.dumps(told)
    assert told["environment.options.levels"] == "[1]" and told["train.lr"] == made.train.lr and told["rollout.max_tokens"] == "null"
    assert all(isinstance(v, bool | int | float | str) for v in told.values())

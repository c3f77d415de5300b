"""Checkpoints: whole or not there, checked byte for byte, and never lost to a crash or a full disk."""

import json
import logging
import shutil

import pytest

from mappa_graph.errors import TrainerError
from mappa_graph.trainers import load_latest, prune, save_checkpoint, trained_weights
from mappa_graph.trainers.checkpoint import verify


class Notebook:
    """Saves some text as its state."""

    def __init__(self, text="state", policies=("solver",)):
        self.text, self.policies = text, policies

    def save(self, folder):
        for policy in self.policies:
            (folder / "policies" / policy).mkdir(parents=True)
            (folder / "policies" / policy / "model.safetensors").write_text(f"{policy} {self.text}")
        (folder / "trainer.pt").write_bytes(self.text.encode() * 100)


class Full(Notebook):
    def save(self, folder):
        super().save(folder)
        raise OSError(28, "No space left on device")


class Killed(Notebook):
    def save(self, folder):
        super().save(folder)
        raise KeyboardInterrupt


def test_the_newest_comes_back_with_its_extra_state(tmp_path):
    assert load_latest(tmp_path / "none") is None
    save_checkpoint(tmp_path, 9, Notebook("nine"), {"iteration": 9})
    folder = save_checkpoint(tmp_path, 10, Notebook("ten"), {"iteration": 10, "best": {"iteration": 9}})
    assert load_latest(tmp_path) == (folder, {"iteration": 10, "best": {"iteration": 9}, "step": 10})
    assert (folder / "trainer.pt").read_text() == "ten" * 100
    assert set(verify(folder)["files"]) == {"trainer.pt", "policies/solver/model.safetensors"}


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "manifest", "no manifest", "other format"])
def test_a_damaged_one_is_skipped_and_said(tmp_path, harm, caplog):
    good = save_checkpoint(tmp_path, 1, Notebook("one"), {})
    bad = save_checkpoint(tmp_path, 2, Notebook("two"), {})
    file, manifest = bad / "trainer.pt", bad / "manifest.json"
    if harm == "truncate":
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "flip":
        file.write_bytes(b"x" + file.read_bytes()[1:])
    elif harm == "remove":
        file.unlink()
    elif harm == "manifest":
        manifest.write_text(manifest.read_text()[:-20])
    elif harm == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with caplog.at_level(logging.WARNING):
        assert load_latest(tmp_path)[0] == good
    assert "step-00000002" in caplog.text


@pytest.mark.parametrize(("trainer", "error"), [(Full("new"), TrainerError), (Killed("new"), KeyboardInterrupt)])
def test_a_failed_write_leaves_what_was_there(tmp_path, trainer, error):
    kept = save_checkpoint(tmp_path, 1, Notebook("one"), {})
    for step in (1, 2):
        with pytest.raises(error):
            save_checkpoint(tmp_path, step, trainer, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert load_latest(tmp_path)[0] == kept and (kept / "trainer.pt").read_text() == "one" * 100


def test_saving_a_step_again_replaces_it(tmp_path):
    save_checkpoint(tmp_path, 1, Notebook("one"), {"n": 1})
    folder = save_checkpoint(tmp_path, 1, Notebook("more"), {"n": 2})
    assert load_latest(tmp_path) == (folder, {"n": 2, "step": 1}) and [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    folder = save_checkpoint(tmp_path, 1, Notebook("one"), {"n": 1})
    folder.rename(tmp_path / "step-00000001.old")
    found, extra = load_latest(tmp_path)
    assert found.name == "step-00000001.old" and extra["n"] == 1
    again = save_checkpoint(tmp_path, 2, Notebook("two"), {})
    assert prune(tmp_path, 1) == [found] and load_latest(tmp_path)[0] == again


def test_prune_keeps_the_last_ones_and_the_best_and_sweeps_up_what_a_crash_left(tmp_path):
    for step in range(1, 7):
        save_checkpoint(tmp_path, step, Notebook(), {})
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000007.abcd1234.tmp")
    gone = prune(tmp_path, 2, keep=[2, tmp_path / "step-00000003"])
    assert {p.name for p in gone} == {"step-00000001", "step-00000004"}
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-0000000{n}" for n in (2, 3, 5, 6)]


def test_prune_never_counts_a_damaged_one_among_those_it_keeps(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, Notebook(), {})
    (tmp_path / "step-00000003" / "trainer.pt").unlink()
    prune(tmp_path, 1)
    assert load_latest(tmp_path)[0].name == "step-00000002"
    with pytest.raises(TrainerError, match="keep_last is 0"):
        prune(tmp_path, 0)


def test_trained_weights_are_found_by_last_best_and_number(tmp_path):
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        save_checkpoint(root, step, Notebook(str(step), ("a", "b")), {"best": {"iteration": 2}})

    def read(step):
        return {p: (f / "model.safetensors").read_text() for p, f in trained_weights(tmp_path, step).items()}

    assert read("last") == {"a": "a 3", "b": "b 3"} and read("best") == {"a": "a 2", "b": "b 2"} and read("1")["a"] == "a 1"
    with pytest.raises(TrainerError, match=r"kept are: 1, 2, 3"):
        trained_weights(tmp_path, "7")
    with pytest.raises(TrainerError, match="'newest'"):
        trained_weights(tmp_path, "newest")
    with pytest.raises(TrainerError, match="no whole checkpoint"):
        trained_weights(tmp_path / "elsewhere")


def test_extra_state_must_be_json(tmp_path):
    with pytest.raises(TrainerError, match="not JSON"):
        save_checkpoint(tmp_path, 1, Notebook(), {"a": object()})
    assert not list(tmp_path.iterdir())

"""The real tracking libraries, offline: what a run logs to each, and goes on with when it is continued, is read back."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
KL, BOUND = "agents/solver/kl", "heldout/ci95/1"


def tracked(name: str, folder: Path, **environment: str) -> None:
    """A process of its own logs three rows and, continued, all of its four; a row is taken once, and nothing fails."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio"), **environment}
    command = [sys.executable, "-m", "tests.fakes.tracked", name, str(folder / "run"), "3", "4"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    well = [{"counts": {"rows": rows, "failures": 0, "first_failure": None}, "notes": []} for rows in (3, 1)]
    assert json.loads(done.stdout.splitlines()[-1]) == well


def test_tensorboard_has_every_number_of_a_run_that_was_continued(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked("tensorboard", tmp_path)
    folder = tmp_path / "run" / "trackers" / "tensorboard"
    events = EventAccumulator(str(folder)).Reload()
    assert [(e.step, e.value) for e in events.Scalars(KL)] == [(k, k / 4) for k in range(4)]
    assert [e.value for e in events.Scalars(BOUND)] == [0.75] * 4
    (told,) = folder.rglob("hparams.yml")
    assert yaml.safe_load(told.read_text())["train.lr"] == 0.25


def records(path: Path) -> list:
    """The records of a W&B file: LevelDB's log format, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, out, whole = path.read_bytes(), [], b""
    at = 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is padding
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            out.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return out


def test_wandb_offline_keeps_every_row_and_a_continued_run_has_the_same_id(tmp_path):
    tracked("wandb", tmp_path)
    files = sorted((tmp_path / "run" / "trackers" / "wandb").glob("offline-run-*/*.wandb"))
    found = [record for file in files for record in records(file)]
    rows = [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item} for r in found if r.HasField("history")]
    assert [(row["_step"], row[KL], row[BOUND]) for row in rows] == [(k, k / 4, 0.75) for k in range(4)]
    runs = {(r.run.run_id, r.run.project) for r in found if r.HasField("run")}
    assert runs == {(json.loads((tmp_path / "run" / "trackers" / "ids.json").read_text())["wandb"]["id"], "tests")}


def test_trackio_keeps_every_row_in_one_run(tmp_path):
    tracked("trackio", tmp_path)
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as store:
        rows = store.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(values)[KL]) for _, step, values in rows] == [(k, k / 4) for k in range(4)]
    assert len({name for name, _, _ in rows}) == 1


def test_mlflow_keeps_every_row_in_one_run_of_a_store_of_the_runs_own(tmp_path):
    tracked("mlflow", tmp_path, MLFLOW_TRACKING_URI="")
    with sqlite3.connect(tmp_path / "run" / "trackers" / "mlflow.db") as store:
        rows = store.execute("select run_uuid, step, value from metrics where key = ? order by step", (KL,)).fetchall()
        told = store.execute("select value from params where key = 'train.lr'").fetchall()
        runs = store.execute(
            "select r.run_uuid, r.status from runs r join experiments e using (experiment_id) where e.name = 'tests'"
        ).fetchall()
    assert [(step, value) for _, step, value in rows] == [(k, k / 4) for k in range(4)] and told == [("0.25",)]
    assert runs == [(rows[0][0], "FINISHED")] and len({run for run, _, _ in rows}) == 1
    assert not (tmp_path / "mlruns").exists()

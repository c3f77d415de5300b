"""A whole run under `accelerate launch`, from the command line to the checkpoint, is the run of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from safetensors.torch import load_file

from mappa_graph.trainers import train, trained_weights
from tests.fakes.team import settings, team
from tests.fakes.tinymodel import make_tiny_model

ROOT = Path(__file__).parents[2]


def test_a_run_of_two_processes_is_the_run_of_one(tmp_path):
    model = make_tiny_model(tmp_path / "model", scale=0.05)
    changes = {"train": {"iterations": 2, "lora": {"rank": 4}}}
    one = train(team(), settings(tmp_path / "one", model, **changes))

    config = {**settings(tmp_path / "two", model, **changes), "environment": {"name": "tests.fakes.team:team"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = subprocess.run(
        [*launch, "-m", "mappa_graph.trainers.launch", "train", "--config", str(tmp_path / "config.yaml"), "--quiet"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((tmp_path / "two" / "summary.json").read_text())
    for key in ("iterations", "episodes", "actions", "versions", "before", "after", "tokens"):
        assert two[key] == json.loads(json.dumps(one[key])), key
    ours, theirs = (trained_weights(tmp_path / run, merged=False) for run in ("one", "two"))
    assert set(ours) == set(theirs) == {"drafter", "editor"}
    for policy in ours:
        mine, other = (load_file(folders[policy] / "adapter_model.safetensors") for folders in (ours, theirs))
        for name, tensor in mine.items():
            assert (tensor - other[name]).abs().max() < 2e-4, (policy, name)  # a step is 1e-2
        assert any(t.any() for n, t in mine.items() if "lora_B" in n)

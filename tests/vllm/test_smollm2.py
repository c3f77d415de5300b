"""`mappa-graph train` on word problems with SmolLM2-135M and an adapter for each agent, all on one vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mappa_graph.trainers.checkpoint import trained_weights


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_iterations_of_the_mathchat_team(alone: None, tmp_path: Path) -> None:
    config = {
        "run": str(tmp_path / "run"),
        "model": "smollm2",
        "environment": {
            "name": "mathchat",
            "options": {"prompts": "compact", "visibility": "previous", "levels": [1], "sandbox": {"size": 1, "preload": []}},
        },
        "engine": {"kind": "vllm", "vllm": {"kv_cache_gib": 1, "max_model_len": 512, "start_timeout_s": 400}},
        "coach": {"kind": "evidence", "when": "completed"},
        "rollout": {"tasks": 2, "samples": 2, "max_tokens": 16, "episode_timeout_s": 300},
        "train": {"iterations": 3, "beta": 0.01, "lora": {"rank": 8, "alpha": 16}, "truncated": "train"},
        "evaluate": {"tasks": 2, "every": 0},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "mappa_graph.cli", "train", "--quiet", "-c", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["engine"] == "vllm" and summary["iterations"] == 3 and summary["failures"] == {}
    assert summary["versions"] == {"executor": 3, "solver": 3, "verifier": 3}
    assert summary["tokens"]["retokenised"] == 0 and summary["tokens"]["trained"] > 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][1:]
    for row in rows:  # what vLLM sampled with, the trainer computes too
        assert all(agent["mismatch_abs"] < 1e-2 for agent in row["agents"].values() if agent.get("tokens")), row["agents"]
    assert all((folder / "adapter_config.json").is_file() for folder in trained_weights(tmp_path / "run", merged=False).values())

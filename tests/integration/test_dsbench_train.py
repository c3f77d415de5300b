"""DSBench under the trainer: the loop takes its environment as it is, and reports its own metrics by kind of task."""

import json

from typer.testing import CliRunner

from mappa_graph.cli import app
from mappa_graph.config import load_config
from mappa_graph.configs import find
from mappa_graph.graphs import dsbench
from mappa_graph.trainers import train
from tests.fakes.team import settings
from tests.fakes.tinymodel import make_tiny_model


def test_a_run_trains_all_three_agents_and_reports_success_by_kind(tmp_path):
    model = make_tiny_model(tmp_path / "model", scale=0.05)
    environment = dsbench.environment(prompts="compact", turns=1, sandbox={"size": 1})
    changes = {
        "coach": {"kind": "evidence", "when": "completed"},
        "rollout": {"tasks": 2, "samples": 1},
        "train": {"iterations": 1},
        "evaluate": {"tasks": 2},
    }
    summary = train(environment, settings(tmp_path / "run", model, **changes))
    assert summary["iterations"] == 1 and summary["episodes"] == 2 and summary["tokens"]["retokenised"] == 0
    assert set(summary["versions"]) == {"data_engineer", "modeler", "analyst"} and summary["failures"] == {}
    assert summary["before"]["accuracy"] == 0.0  # random text names no recipe
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert set(rows[0]["heldout"]["by_stratum"]) == {"classification", "regression"}
    metrics = rows[0]["heldout"]["metrics"]
    assert metrics["success_rate"] == 0.0 and metrics["fair_accuracy"] == 0.5 and metrics["fair_rmse_percent"] == 50.0


def test_the_demos_settings_fit_the_environment_and_the_command_offers_it():
    config = load_config(find("dsbench"))
    environment = dsbench.environment(**config.environment.options)
    environment.check_deadlines(config.rollout.episode_timeout_s)
    assert len(environment.split("heldout")) >= config.evaluate.tasks and environment.demonstrations is not None
    shown = CliRunner().invoke(app, ["demo", "--help"])
    assert shown.exit_code == 0 and "dsbench" in shown.output and "Example" in shown.output

"""Measures MAPPA on SmolLM2-135M: a warm start by supervised training, then an adapter for each agent on one vLLM.

    make vllm; python docs/smollm2.py [--seeds 0] [--iterations 12] [--tasks 24] [--folder runs/smollm2-results]

For each seed two runs from the same warm-started base: with the coach's scores, and with the same scores shuffled among the actions of an
agent. Finished runs are kept, so that the same command continues. Figures go to `docs/smollm2.json`, from which `docs/results.py`
writes its section. The one thing to know: the demonstrations are wrong more often than right, as the demo's are
(`graphs/mathchat/demonstrations.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from mappa_graph.commands.options import load_environment
from mappa_graph.config import RunConfig, load_config
from mappa_graph.configs import find
from mappa_graph.graphs.mathchat.demonstrations import demonstrations
from mappa_graph.trainers.models import resolve_model
from mappa_graph.trainers.run import train
from mappa_graph.trainers.warmstart import warm_start

FIGURES = Path(__file__).with_suffix(".json")
ARMS = {"mappa": "none", "shuffled": "shuffle_scores"}
STEPS, BATCH, LR = 60, 8, 1e-4


def base(folder: Path) -> tuple[Path, float]:
    """The warm-started model, and the seconds that it took."""
    made = folder / "base"
    if not (made / "seconds.json").exists():
        began = time.perf_counter()
        shown = demonstrations(STEPS * BATCH, 0, levels=(1, 2), visibility="previous", style="compact")
        warm_start(resolve_model("smollm2"), made, shown, steps=STEPS, batch=BATCH, lr=LR)
        (made / "seconds.json").write_text(json.dumps(time.perf_counter() - began))
    return made, json.loads((made / "seconds.json").read_text())


def settings(model: Path, run: Path, seed: int, arm: str, given: argparse.Namespace) -> RunConfig:
    asked: dict[str, Any] = {
        "run": str(run), "seed": seed, "model": str(model), "engine": {"kind": "vllm"}, "train.control": ARMS[arm],
        "engine.vllm": {"kv_cache_gib": 1, "max_model_len": 512}, "rollout.tasks": given.tasks, "rollout.samples": 2,
        "rollout.max_tokens": 40, "rollout.concurrency": 64, "rollout.episode_timeout_s": 600, "train.iterations": given.iterations,
        "train.lr": given.lr, "train.lora": {"rank": 16, "alpha": 32}, "train.micro_batch_tokens": 1024,
        "evaluate.every": 0, "evaluate.tasks": given.heldout,
    }  # fmt: skip
    return load_config(find("demo"), [f"{key}={json.dumps(value)}" for key, value in asked.items()])


def measured(model: Path, run: Path, seed: int, arm: str, given: argparse.Namespace) -> dict[str, Any]:
    kept = run / "measured.json"
    if not kept.exists():
        config = settings(model, run, seed, arm, given)
        summary = train(load_environment(config), config)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        curve = [row["rollout"]["accuracy"] for row in rows if row["iteration"]]
        worst = max(agent["mismatch_abs"] for row in rows for agent in row.get("agents", {}).values() if agent.get("tokens"))
        told = {name: summary[name] for name in ("before", "after", "episodes", "tokens", "wall_s", "failures")}
        kept.write_text(json.dumps({"arm": arm, "seed": seed, **told, "curve": curve, "mismatch_abs": worst}))
    return json.loads(kept.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--heldout", type=int, default=128)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2-results"))
    given = parser.parse_args()
    model, seconds = base(given.folder)
    runs = [measured(model, given.folder / f"{arm}-{seed}", seed, arm, given) for seed in given.seeds for arm in given.arms]
    made = {name: getattr(given, name) for name in ("iterations", "tasks", "heldout", "lr")}
    warm = {"steps": STEPS, "batch": BATCH, "lr": LR, "s": round(seconds, 1)}
    FIGURES.write_text(json.dumps({"settings": made, "cores": os.cpu_count(), "warm_start": warm, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Makes `docs/results.md`: what MAPPA does on this machine, beside its controls, seed by seed.

`make results` runs everything (each finished run is kept under `runs/results/`, so that the same command continues);
`python docs/results.py --render` only writes the page again from what is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mappa_graph.commands.options import load_environment
from mappa_graph.config import RunConfig, load_config
from mappa_graph.configs import find
from mappa_graph.trainers.checkpoint import trained_weights
from mappa_graph.trainers.run import evaluate_team, train

HEAD = """# Results

Made by `make results` (`docs/results.py`) on {cores} CPU cores, no GPU, Python {python}. Each arm is the demo's configuration
with one thing changed: {iterations} iterations of {episodes} episodes, three agents with a 1M-parameter model each, all starting
from the same warm-started weights. A seed decides the order of tasks, all sampling, and the trainer. Held-out tasks are disjoint
from training tasks by construction; each evaluation runs {tasks} of them through the whole graph, once each, and shows the 95%
Wilson interval. "Greedy" is temperature 0; the grade is math-verify's and never the coach's.

* **outcome-only reward**: every action gets its episode's grade instead of a coach's score (through the same trainer).
* **scores shuffled**: the coach's scores permuted among the actions of the same agent within each batch; the distribution stays,
  the meaning goes.
* **neighbour's weights**: after training, each agent acts with the weights of the next one in the pipeline.
"""
READING = """
## What this supports

* **MAPPA learns, on every seed.** The gain over the untrained team is 76 points or more greedy and 55 or more sampled; the untrained
  team's commonest answers are mistakes by construction of its warm start, so that greedy decoding starts at nothing.
* **It is the scores' meaning that teaches.** The same scores, permuted within each agent, leave nothing of what the team could do.
* **Scores of actions beat the grade alone** clearly on two seeds of three; on the third the intervals overlap. The outcome-only runs end
  anywhere between 34% and 75% greedy, MAPPA's between 77% and 80%.
* **The agents learn trades of their own:** with a neighbour's weights the team fails.
* **`gamma: 0.5` stays the default.** With gamma 0 one seed of three collapsed, and its episodes show how: the Solver came to write
  its plan as a block of code, which scores as well as a plain plan, but which the Executor had never met and answered with nothing
  to run. Judged by its own score alone, the Solver never learned what became of its work; with credit from later actions (0.5,
  0.9) no seed went that way. One collapse in three is a hint, not a rate. Between 0.5 and 0.9, and between `normalise: batch` and
  `agent`, the intervals overlap: the data prefer neither, and the method's own `batch` stays.

The seconds are those of runs made two at a time beside other work; alone, a run takes about half. One model, one environment,
three seeds, one evaluation of each: enough to see that the machinery works, and no claim about large models.
"""
"""What the tables say, written by hand once they are there."""
SMOLLM2_HEAD = """
## A language model, adapters, and vLLM

`make vllm; python docs/smollm2.py`, on {cores} CPU cores. SmolLM2-135M gets a warm start by TRL's `SFTTrainer` on {demonstrations}
demonstrations ({steps} steps, {minutes:.1f} minutes), of which more are wrong than right, as for the demo. The team of three then
shares that base on one vLLM server, an adapter of rank 16 each, and is trained for {iterations} iterations of {episodes} episodes
(learning rate {lr:g}); each new adapter is swapped into the running server. {heldout} held-out tasks, sampled at 0.6, with the 95%
Wilson interval. The engine's log-probs and the trainer's differed by {mismatch:.0e} nats on average in the worst iteration.
"""
SMOLLM2_READING = """
One seed of each. The control was interrupted and continued, partly beside other work: its time says little. As with the tiny model,
the coach's scores teach only where they are the right ones: the same scores, shuffled, leave nothing of what the team could do.
"""
SMOLLM2_ARMS = {"mappa": "MAPPA", "shuffled": "scores shuffled"}
ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / "docs" / "smollm2.json"
RUNS = ROOT / "runs" / "results"
SEEDS = (0, 1, 2)
TASKS = 256
BASE = ["evaluate.every=0", "evaluate.tasks=16"]
ARMS: dict[str, tuple[str, list[str]]] = {
    "mappa": ("MAPPA (the demo's settings)", []),
    "outcome": ("outcome-only reward", ["coach.kind=outcome", "coach.when=episode"]),
    "shuffled": ("MAPPA, scores shuffled", ["train.control=shuffle_scores"]),
    "none": ("no training", ["train.control=no_training", "train.iterations=0"]),
    "agent": ("MAPPA, normalised by agent", ["train.normalise=agent"]),
    "gamma0": ("MAPPA, gamma 0", ["train.gamma=0.0"]),
    "gamma0.9": ("MAPPA, gamma 0.9", ["train.gamma=0.9"]),
}
SWAPPED = "swapped"
MODES = {"greedy": 0.0, "sampled": 0.6}


def config_of(arm: str, seed: int) -> RunConfig:
    return load_config(find("demo"), [*BASE, *ARMS[arm][1], f"seed={seed}", f"run={json.dumps(str(RUNS / f'{arm}-{seed}'))}"])


def measure(arm: str, seed: int) -> None:
    """Trains one arm on one seed and evaluates it on held-out tasks, greedy and sampled; a finished measurement is kept."""
    config = config_of(arm, seed)
    done = config.run / "measured.json"
    if done.exists():
        return
    summary = train(load_environment(config), config)
    trained = None if arm == "none" else config.run
    result = {"summary": summary, **evaluations(config, trained and trained_weights(trained, "last"), "evaluated")}
    done.write_text(json.dumps(result), encoding="utf-8")


def measure_swapped(seed: int) -> None:
    """MAPPA's weights, each agent acting with its neighbour's: what the agents learned is theirs, or it would not matter."""
    config = config_of("mappa", seed)
    done = config.run / "swapped.json"
    if done.exists():
        return
    weights = trained_weights(config.run, "last")
    names = [a.name for a in load_environment(config).agents]
    rotated = {name: weights[names[(i + 1) % len(names)]] for i, name in enumerate(names)}
    done.write_text(json.dumps(evaluations(config, rotated, SWAPPED)), encoding="utf-8")


def evaluations(config: RunConfig, weights: Mapping[str, Path] | None, label: str) -> dict[str, Any]:
    found = {}
    for mode, temperature in MODES.items():
        place = config.model_copy(update={"run": config.run / f"{label}-{mode}"})
        environment = load_environment(place)
        found[mode] = asyncio.run(evaluate_team(environment, place, limit=TASKS, temperature=temperature, models=weights))
    return found


def load(arm: str, seed: int) -> dict[str, Any]:
    if arm == SWAPPED:
        return json.loads((RUNS / f"mappa-{seed}" / "swapped.json").read_text())
    return json.loads((RUNS / f"{arm}-{seed}" / "measured.json").read_text())


def interval(row: Mapping[str, Any]) -> str:
    return f"{row['accuracy']:.1%} ({row['ci95'][0]:.1%} to {row['ci95'][1]:.1%})"


def render() -> str:
    """The page, from what was measured."""
    arms = [*list(ARMS)[:4], SWAPPED, *list(ARMS)[4:]]
    titles = {**{k: v[0] for k, v in ARMS.items()}, SWAPPED: "MAPPA, then each agent with its neighbour's weights"}
    base = {seed: load("none", seed) for seed in SEEDS}
    lines = []
    for mode in MODES:
        lines += [
            f"### Held-out accuracy, {mode}" + ("" if mode == "greedy" else f" at temperature {MODES[mode]}"),
            "",
            "| | " + " | ".join(f"seed {s}" for s in SEEDS) + " | mean | gain over no training, by seed |",
            "|---|" + "---|" * (len(SEEDS) + 2),
        ]
        for arm in arms:
            rows = [load(arm, s)[mode] for s in SEEDS]
            gains = ", ".join(f"{100 * (r['accuracy'] - base[s][mode]['accuracy']):+.1f}" for r, s in zip(rows, SEEDS, strict=True))
            mean = statistics.mean(r["accuracy"] for r in rows)
            lines.append(f"| {titles[arm]} | " + " | ".join(map(interval, rows)) + f" | {mean:.1%} | {gains} |")
        lines.append("")
    lines += ["### Learning, and what it cost", "", "Rollout accuracy on the training tasks (mean of the seeds) by iteration:", ""]
    marks = None
    for arm in arms:
        if arm in ("none", SWAPPED):
            continue
        curves = [[json.loads(x) for x in (RUNS / f"{arm}-{s}" / "metrics.jsonl").read_text().splitlines()][1:] for s in SEEDS]
        last = len(curves[0])
        if marks is None:
            marks = sorted({1, *range(5, last + 1, 5), last})
            lines += [
                "| | " + " | ".join(str(m) for m in marks) + " | tokens trained | s of training run |",
                "|---|" + "---|" * (len(marks) + 2),
            ]
        values = [statistics.mean(c[m - 1]["rollout"]["accuracy"] for c in curves) for m in marks]
        tokens = statistics.mean(load(arm, s)["summary"]["tokens"]["trained"] for s in SEEDS)
        wall = statistics.mean(load(arm, s)["summary"]["wall_s"]["total"] for s in SEEDS)
        lines.append(f"| {titles[arm]} | " + " | ".join(f"{v:.0%}" for v in values) + f" | {tokens:,.0f} | {wall:.0f} |")
    default = load_config(find("demo"))
    facts = {
        "iterations": default.train.iterations,
        "episodes": default.rollout.tasks * default.rollout.samples,
        "tasks": TASKS,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    return HEAD.format(**facts) + "\n" + "\n".join(lines) + "\n" + READING + smollm2()


def smollm2() -> str:
    """The section on a language model, from what `docs/smollm2.py` measured."""
    found = json.loads(SMOLLM2.read_text(encoding="utf-8"))
    made, warm = found["settings"], found["warm_start"]
    rows = []
    for run in found["runs"]:
        minutes = {part: run["wall_s"][part] / 60 for part in ("total", "rollout", "train")}
        rows.append(
            f"| {SMOLLM2_ARMS[run['arm']]}, seed {run['seed']} | {interval(run['before'])} | {interval(run['after'])} | "
            f"{100 * (run['after']['accuracy'] - run['before']['accuracy']):+.1f} | {minutes['total']:.0f} min "
            f"({minutes['rollout']:.0f} rollouts, {minutes['train']:.0f} training) |"
        )
    curves = [
        f"* {SMOLLM2_ARMS[run['arm']]}, seed {run['seed']}: " + ", ".join(f"{accuracy:.0%}" for accuracy in run["curve"])
        for run in found["runs"]
    ]
    head = SMOLLM2_HEAD.format(
        **made,
        episodes=2 * made["tasks"],
        cores=found["cores"],
        demonstrations=warm["steps"] * warm["batch"],
        steps=warm["steps"],
        minutes=warm["s"] / 60,
        mismatch=max(run["mismatch_abs"] for run in found["runs"]),
    )
    table = ["| | before | after | points | time |", "|---|---|---|---|---|", *rows]
    told = ["", "Rollout accuracy on the training tasks, iteration by iteration:", "", *curves, SMOLLM2_READING]
    return "\n".join([head, *table, *told])


def in_a_process(item: str) -> None:
    subprocess.run([sys.executable, __file__, "--only", item], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", action="store_true", help="only write the page from finished runs")
    parser.add_argument("--smollm2", action="store_true", help="only write the language model's section again")
    parser.add_argument("--only", help="one arm:seed, in this process")
    parser.add_argument("--jobs", type=int, default=1, help="how many arms to run beside each other")
    args = parser.parse_args()
    if args.only:
        arm, seed = args.only.split(":")
        measure_swapped(int(seed)) if arm == SWAPPED else measure(arm, int(seed))
        return
    page = ROOT / "docs" / "results.md"
    if args.smollm2:
        before = page.read_text(encoding="utf-8").partition(SMOLLM2_HEAD.strip().splitlines()[0])[0]
        page.write_text(before.rstrip() + "\n" + smollm2(), encoding="utf-8")
        return
    if not args.render:
        for work in ([f"{arm}:{seed}" for seed in SEEDS for arm in ARMS], [f"{SWAPPED}:{seed}" for seed in SEEDS]):
            with ThreadPoolExecutor(args.jobs) as pool:
                list(pool.map(in_a_process, work))
    page.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()

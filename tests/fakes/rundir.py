"""A run directory such as training leaves behind, made up: a MathChat team whose skill rises from iteration to iteration.

Numbers and texts are drawn from one seed. `hostile` is a text that is put wherever an agent, a coach or a task can put one.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mappa_graph.record import (
    Action,
    Call,
    Episode,
    EpisodeTrace,
    Execution,
    ExecutionErrorInfo,
    Failure,
    Outcome,
    Transition,
    Verdict,
)
from mappa_graph.store import TraceStore

AGENTS = ("solver", "executor", "verifier")
GRAPH = {
    "nodes": ["__start__", "solver", "executor", "verifier", "__end__"],
    "edges": [
        ["__start__", "solver", False],
        ["solver", "executor", False],
        ["executor", "executor", True],
        ["executor", "verifier", True],
        ["verifier", "__end__", False],
    ],
    "agent_of_node": {"solver": "solver", "executor": "executor", "verifier": "verifier"},
}
NAMES = ("Ada", "Omar", "Lin", "Priya", "Tom", "Sofia")
THINGS = ("pears", "stamps", "marbles", "tickets", "books")


def make_run(
    folder: Path,
    *,
    iterations: int = 12,
    per_iteration: int = 24,
    heldout: int = 24,
    finished: bool = True,
    hostile: str | None = None,
    seed: int = 0,
) -> Path:
    """Writes `config.yaml`, `metrics.jsonl`, `trace.db` and, when `finished`, `summary.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    (folder / "config.yaml").write_text(CONFIG)
    rows = [row(0, 0.0, rng, evaluate=True, trained=False)]
    with TraceStore(folder / "trace.db") as store:
        for k in range(heldout):
            store.save_episode(episode(f"h0-{k}", k + 900, 0.0, rng, split="heldout/greedy@0", coached=False))
        for iteration in range(1, iterations + 1):
            skill = 1 - math.exp(-iteration / 4.5)
            rows.append(row(iteration, skill, rng, evaluate=iteration % 3 == 0 or iteration == iterations))
            for k in range(per_iteration):
                trace = episode(f"t{iteration}-{k}", (iteration * per_iteration + k) % 60, skill, rng, iteration=iteration, hostile=hostile)
                store.add_calls(calls_of(trace, iteration))
                store.save_episode(trace)
        if iterations:
            for k in range(heldout):
                store.save_episode(
                    episode(f"h1-{k}", k + 900, 0.9, rng, split=f"heldout/greedy@{iterations}", iteration=iterations, coached=False)
                )
            broken = Episode(
                id="broken", environment="mathchat", task_id="t-7", task="How many?", iteration=1, status="failed",
                error=hostile or "SandboxError: the kernel died while it ran a cell", started=5.0, ended=6.0,
            )  # fmt: skip
            store.save_episode(EpisodeTrace(broken))
            for kind, error, message in (
                ("sandbox", "SandboxError", "the kernel died while it ran a cell"),
                ("deadline", "DeadlineError", "episode ran past its 30 s deadline"),
                ("deadline", "DeadlineError", "episode ran past its 30 s deadline"),
            ):
                store.add_failure(Failure(kind, error, hostile or message, "broken", 6.0))
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(r) + "\n" for r in rows)
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary(rows, iterations * per_iteration)))
    return folder


def row(iteration: int, skill: float, rng: random.Random, *, evaluate: bool, trained: bool = True) -> dict[str, Any]:
    """One line of `metrics.jsonl`; iteration 0 is before training."""
    accuracy = 0.07 + 0.62 * skill
    agents: dict[str, Any] = {}
    for k, name in enumerate(AGENTS if trained else ()):
        mean = min(9.4, 2.2 + 0.9 * k + (6.1 - 0.8 * k) * skill + rng.gauss(0, 0.18))
        runs = 64 if name == "executor" else 0
        bad = round(runs * (0.62 * (1 - skill) + 0.04)) if runs else 0
        agents[name] = {
            "score_mean": mean, "score_std": 2.9 - 1.3 * skill,
            "scored": 62 + 30 * (k == 1), "unscored": 2 * (k == 2), "actions": 64 + 30 * (k == 1),
            "length_mean": 30 - 8 * skill + 4 * k + rng.gauss(0, 0.8), "truncated": round(7 * (1 - skill)), "return_mean": mean / 10 + 0.02,
            "loss": rng.gauss(0, 0.01), "kl": 0.004 + 0.03 * skill + abs(rng.gauss(0, 0.002)), "ratio_mean": 1 + rng.gauss(0, 0.004),
            "clip_share": abs(rng.gauss(0.01, 0.006)), "entropy": 1.3 - 0.75 * skill + rng.gauss(0, 0.03),
            "grad_norm": 0.9 - 0.3 * skill + abs(rng.gauss(0, 0.1)),
            "mismatch_kl": abs(rng.gauss(2e-6, 1e-6)), "lr": 1e-4, "tokens": 1900, "version": iteration,
            "mismatch_abs": 1e-5, "weight_mean": 1.0, "ratio_max": 1.2 + skill / 10, "advantage_mean": 0.2 - 0.2 * k, "advantage_std": 1.0,
            "executions": {"ok": runs - bad, "error": bad, "timeout": 0} if runs else {},
            "errors": {"SyntaxError": bad // 2, "NameError": bad // 3, "ZeroDivisionError": bad - bad // 2 - bad // 3} if bad else {},
            "tool_use": 0.55 + 0.43 * skill if runs else 0.0,
        }  # fmt: skip
    held = None
    if evaluate:
        half = 1.96 * math.sqrt(accuracy * (1 - accuracy) / 256)
        held = {
            "accuracy": accuracy, "n": 256, "ci95": [max(accuracy - half, 0), accuracy + half], "mode": "greedy",
            "by_stratum": {str(level): max(0.0, min(1.0, accuracy * 1.35 - 0.11 * level + 0.1)) for level in (1, 2, 3, 4)},
        }  # fmt: skip
    rollout = {
        "episodes": 64,
        "accuracy": min(max(accuracy - 0.03 + rng.gauss(0, 0.03), 0), 1),
        "failures": {},
        "by_stratum": {"1": accuracy},
    }
    return {
        "iteration": iteration, "agents": agents, "rollout": rollout if trained else None, "heldout": held,
        "tokens": {"trained": 5800 + rng.randrange(600) if trained else 0, "retokenised": 0},
        "wall_s": {
            "rollout": 6.1 + rng.random() if trained else 0, "coach": 0.3 + 0.2 * rng.random() if trained else 0,
            "train": 4.2 + rng.random() if trained else 0, "publish": 0.2 if trained else 0, "evaluate": 4.4 if evaluate else 0,
        },
    }  # fmt: skip


def summary(rows: list[dict[str, Any]], episodes: int) -> dict[str, Any]:
    """`summary.json` of the rows of a finished run."""
    tested = [r["heldout"] for r in rows if r["heldout"]]
    done = [r for r in rows if r["agents"]]
    phases = {k: sum(r["wall_s"][k] for r in rows) for k in ("rollout", "coach", "train", "publish", "evaluate")}

    def means(r: dict[str, Any]) -> dict[str, float]:
        return {name: values["score_mean"] for name, values in r["agents"].items()}

    return {
        "environment": "mathchat", "engine": "local", "model": "demo-1M", "seed": 7,
        "iterations": rows[-1]["iteration"], "episodes": episodes,
        "actions": episodes * 4, "before": {k: tested[0][k] for k in ("accuracy", "n", "ci95")},
        "after": {k: tested[-1][k] for k in ("accuracy", "n", "ci95")},
        "best": {"iteration": rows[-1]["iteration"], "accuracy": tested[-1]["accuracy"]},
        "coach": {
            "scored": episodes * 4 - 11, "unscored": 11, "mean_by_agent_first": means(done[0]) if done else {},
            "mean_by_agent_last": means(done[-1]) if done else {},
        },
        "tokens": {"trained": sum(r["tokens"]["trained"] for r in rows), "retokenised": 0},
        "versions": dict.fromkeys(AGENTS, len(done)),
        "failures": {"deadline:DeadlineError": 2}, "left_out": {"no verdict": 11, "truncated": 37},
        "wall_s": {"total": sum(phases.values()) + 6.0, **phases}, "graph": GRAPH, "isolation": "bubblewrap",
    }  # fmt: skip


def episode(
    id: str,
    number: int,
    skill: float,
    rng: random.Random,
    *,
    iteration: int = 0,
    split: str = "train",
    coached: bool = True,
    hostile: str | None = None,
) -> EpisodeTrace:
    """One MathChat run: solver, executor with up to two turns and its tool, verifier."""
    who, thing = NAMES[number % 6], THINGS[number % 5]
    a, b, c = 7 + number % 40, 3 + number % 6, 2 + number % 9
    level = 1 + number % 4
    task = hostile or f"{who} has {a} {thing}. Each of {b} friends brings {c} more. How many {thing} are there now?"
    truth = a + b * c
    good = rng.random() < 0.15 + 0.8 * skill
    neat = rng.random() < 0.3 + 0.68 * skill
    plan = f"multiply {b} by {c}, then add {a}." if good else f"add {a} and {b}, then {c}. the"
    code = f"```python\ntotal = {a} + {b} * {c}\nprint(total)\n```" if neat else f"```python\ntotal = {a} + {b} *\nprint(totl)\n```"
    error = ExecutionErrorInfo(
        "SyntaxError", "invalid syntax", f"  Cell In[1], line 1\n    total = {a} + {b} *\n                   ^\nSyntaxError: invalid syntax"
    )
    right = truth if good else a + b + c
    ran = Execution(
        id=f"{id}-x", status="ok" if neat else "error", code=hostile or code[10:-4], stdout=hostile or (f"{right}\n" if neat else ""),
        stderr=hostile or "", error=None if neat else error, duration_s=0.004 + rng.random() / 100,
    )  # fmt: skip
    says = [("solver", "solver", plan, ()), ("executor", "executor", code, (ran,))]
    if not neat:
        says.append(
            (
                "executor",
                "executor",
                f"```python\nprint({right})\n```",
                (Execution(f"{id}-y", "ok", code=f"print({right})", stdout=f"{right}\n", duration_s=0.003),),
            )
        )
    says.append(
        ("verifier", "verifier", f"The answer is \\boxed{{{right}}}." if good or rng.random() < 0.7 else "so the answer is is is", ())
    )
    start = 1_700_000_000.0 + iteration * 15
    transitions: list[Transition] = []
    actions: list[Action] = []
    verdicts: dict[str, Verdict] = {}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are part of a team that solves word problems."},
        {"role": "user", "content": task},
    ]
    for k, (node, agent, text, executions) in enumerate(says):
        parent = (transitions[-1].id,) if transitions else ()
        transitions.append(Transition(f"{id}-n{k}", node, node, 2 * k, parents=parent, started=start + k, ended=start + k + 0.5))
        action = Action(
            id=f"{id}-a{k}", transition_id=f"{id}-n{k}", agent=agent, policy=agent, order=k, call_id=f"{id}-c{k}",
            messages=list(messages), output=hostile or text, finish_reason="stop" if good or agent != "solver" else "length",
            executions=executions, started=start + k,
        )  # fmt: skip
        actions.append(action)
        messages.append({"role": "assistant", "content": hostile or text})
        if executions:
            messages.append({"role": "tool", "content": hostile or executions[0].stdout or "SyntaxError: invalid syntax"})
        if coached:
            verdicts[action.id] = _verdict(agent, good, neat or k == 2, rng, actions, hostile)
    answer = str(right) if "boxed" in says[-1][2] else None
    outcome = Outcome(
        answer == str(truth),
        "the answer equals the reference" if answer == str(truth) else "not equal" if answer else "no boxed answer",
        answer=answer,
    )
    head = Episode(
        id=id, environment="mathchat", task_id=f"t-{number}", task=task, reference=str(truth), stratum=str(level), split=split,
        iteration=iteration, status="done", outcome=outcome, started=start, ended=start + len(says),
    )  # fmt: skip
    edges = tuple((k, k + 1) for k in range(len(actions) - 1))
    return EpisodeTrace(head, tuple(transitions), tuple(actions), edges, verdicts)


def calls_of(trace: EpisodeTrace, version: int) -> Iterator[Call]:
    """The gateway's calls behind an episode's actions."""
    for action in trace.actions:
        ids = tuple(range(5, 5 + len(action.output.split())))
        yield Call(action.call_id or "", action.policy, version, (1, 2, 3), ids, (-0.1,) * len(ids), "stop", action.output)


def _verdict(agent: str, good: bool, neat: bool, rng: random.Random, actions: list[Action], hostile: str | None) -> Verdict:
    if agent == "verifier" and rng.random() < 0.05:
        return Verdict(None, error=hostile or "the coach's reply held no score after 3 tries", coach="evidence-1")
    if agent == "solver":
        score, why = (
            (8.5, "names the right operations in the right order") if good else (2.0, "the friends' share is added, not multiplied")
        )
    elif agent == "executor":
        score, why = (9.0, "the code ran and printed one number") if neat else (1.5, "the code does not parse: SyntaxError on line 1")
    else:
        score, why = (
            (9.5, "boxed the number the code printed") if good else (3.0, "boxed a wrong number without checking it against the task")
        )
    blame = () if good or agent != "verifier" else (actions[0].id,)
    better = f"print({len(why)})" if score < 2 else None
    return Verdict(max(0.0, min(10.0, score + rng.gauss(0, 0.5))), hostile or why, blame, better, coach="evidence-1")


CONFIG = """\
environment: mathchat
model: demo
iterations: 12
episodes: 64
engine: {kind: local, temperature: 1.0}
trainer: {lr: 1.0e-4, beta: 0.01, gamma: 0.9, std_floor: 0.05}
"""

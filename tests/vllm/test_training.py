"""Training against vLLM: what the trainer writes is what the engine serves, iteration by iteration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph

from mappa_graph import Agent, Environment, Task
from mappa_graph.errors import EngineError
from mappa_graph.gateway import Gateway
from mappa_graph.sections.train import LoraConfig
from mappa_graph.trainers import ReinforceTrainer, TrainerSettings
from mappa_graph.trainers.batch import Sample
from mappa_graph.trainers.publishing import write_weights
from mappa_graph.trainers.run import atrain


class State(TypedDict, total=False):
    topic: str
    draft: str
    note: str


def build_graph(models: Any) -> Any:
    async def draft(state: State) -> Any:
        return {"draft": (await models["drafter"].ainvoke([("user", state["topic"])])).text}

    async def edit(state: State) -> Any:
        return {"note": (await models["editor"].ainvoke([("user", state["draft"][:20])])).text}

    return StateGraph(State).add_node(draft).add_node(edit).add_edge(START, "draft").add_edge("draft", "edit").compile()


def notes() -> Environment:
    return Environment(
        "notes",
        agents=[Agent("drafter", role="drafts a note"), Agent("editor", role="keeps it short")],
        build_graph=build_graph,
        to_input=lambda task: {"topic": task.prompt},
        grade=lambda task, state: 0.5 * ("a" in state["draft"]) + 0.5 * (len(state["note"]) % 2),
        tasks=[Task(f"t{i}", f"Ann has {i} pens.") for i in range(40)],
    )


async def test_a_run_trains_adapters_on_one_server_and_every_log_prob_agrees(alone: None, base: Path, tmp_path: Path) -> None:
    lora = {"rank": 4, "policies": {"editor": {"rank": 8}}}
    await train_and_compare(base, tmp_path, {"iterations": 3, "lr": 1e-2, "lora": lora})


async def test_a_run_trains_whole_weights_on_a_server_each_and_every_log_prob_agrees(alone: None, base: Path, tmp_path: Path) -> None:
    await train_and_compare(base, tmp_path, {"iterations": 3, "lr": 1e-3})
    published = sorted(path.name for path in (tmp_path / "run" / "weights" / "editor").iterdir())
    assert published == ["v2", "v3"]  # the one that serves, and the one before it


async def train_and_compare(base: Path, tmp_path: Path, train: dict[str, Any]) -> None:
    settings = {
        "run": str(tmp_path / "run"),
        "model": str(base),
        "coach": {"when": "episode"},
        "engine": {"kind": "vllm", "vllm": {"kv_cache_gib": 1, "start_timeout_s": 280}},
        "rollout": {"tasks": 6, "max_tokens": 16},
        "evaluate": {"tasks": 4},
        "train": {"truncated": "train", **train},
    }
    summary = await atrain(notes(), settings)
    assert summary["tokens"]["retokenised"] == 0 and summary["versions"] == {"drafter": 3, "editor": 3}
    written = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [row for row in map(json.loads, written.splitlines()) if row["iteration"]]
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    for row in rows:
        for agent in ("drafter", "editor"):
            assert row["agents"][agent]["tokens"] > 0
            assert row["agents"][agent]["mismatch_abs"] < 1e-3, row["agents"][agent]
    assert not [path for path in (tmp_path / "run" / "engine").glob("vllm-*.log") if not path.stat().st_size]


async def test_adapters_are_published_merged_where_whole_weights_serve(full: Gateway, models: list[Path], tmp_path: Path) -> None:
    trainer = ReinforceTrainer({"solver": models[0]}, TrainerSettings(beta=0.0, lr=1e-2, lora=LoraConfig(rank=4)))
    ids = (9, 30, 31, 90, 12, 14)
    samples = [Sample("a", "solver", "e", str(i), (5, 6, 7), (ids[i], *ids), (-2.0,) * 7, ret=i / 5) for i in range(6)]
    trainer.update(samples)
    adapter = write_weights(trainer, "solver", tmp_path / "adapter")
    with pytest.raises(EngineError, match="an adapter"):
        await full.publish("solver", adapter)
    merged = write_weights(trainer, "solver", tmp_path / "merged", merged=True)
    canary = trainer.canary("solver")
    assert canary is not None
    version = await full.publish("solver", merged, canary=canary)
    assert full.versions()["solver"] == version

"""The decode loop: each row's tokens are its own, whatever model shape and whatever company."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mappa_graph.errors import ConfigError, EngineError
from mappa_graph.gateway import Request
from mappa_graph.gateway.local import LocalEngine
from mappa_graph.gateway.local.decode import Batch, Row, new_cache
from mappa_graph.gateway.local.fast import fast_step
from tests.fakes.tinymodel import make_tiny_model

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 96,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "llama grouped tied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True)
    ),
    "llama yarn": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, num_key_value_heads=2)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=16)),
    "gpt-neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SHAPE)),
}
FAST = {"llama", "llama grouped tied", "llama yarn", "qwen2", "qwen3"}


def row(prompt: Sequence[int], **changes: Any) -> Row:
    options: dict[str, Any] = {
        "max_new": 12, "eos": frozenset(), "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": "0", "top_logprobs": None,
        "text": None, "stream": False, "sink": lambda *_: None, "loop": None,
    }  # fmt: skip
    return Row(prompt, **{**options, **changes})


def finish(batch: Batch, rows: Sequence[Row]) -> None:
    batch.waiting.extend(rows)
    with torch.inference_mode():
        while batch.busy:
            batch.step()


def logprobs_of(module: Any, row: Row) -> list[float]:
    with torch.inference_mode():
        logits = module(torch.tensor([[*row.prompt, *row.ids]])).logits[0, len(row.prompt) - 1 : -1]
    picked = (logits / row.temperature).log_softmax(-1).gather(1, torch.tensor(row.ids)[:, None])
    return [float(x) for x in picked[:, 0]]


@pytest.fixture(params=list(MODELS))
def module(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = MODELS[request.param]().eval().requires_grad_(False)
    made.kind = request.param
    return made


@pytest.mark.parametrize("fast", [True, False])
def test_rows_that_come_and_go_keep_their_own_tokens_and_logprobs(module: Any, fast: bool) -> None:
    step = fast_step(module, new_cache(module), 512, compare=True) if fast else None
    assert (step is not None) == (fast and module.kind in FAST)
    batch = Batch(module, "cpu", 1 << 16, step)
    rows = [
        row(
            [1 + (7 * i + k) % 90 for k in range(1 + 11 * i % 140)],
            max_new=3 + 5 * i % 31, seed=str(i), temperature=(0.5, 1.0, 1.7)[i % 3], eos=frozenset({96}),
        )
        for i in range(24)
    ]  # fmt: skip
    with torch.inference_mode():
        for joining in (rows[:1], rows[1:9], rows[9:]):
            batch.waiting.extend(joining)
            batch.step()
            batch.step()
    finish(batch, [])
    for one in rows:
        assert one.finish_reason == ("stop" if one.ids[-1] == 96 else "length")
        assert one.logprobs == pytest.approx(logprobs_of(module, one), abs=2e-4)
    alone = row(rows[5].prompt, max_new=rows[5].max_new, seed="5", temperature=rows[5].temperature, eos=frozenset({96}))
    finish(Batch(module, "cpu", 1 << 16, step), [alone])
    assert alone.ids == rows[5].ids


def test_samples_follow_the_distribution_and_its_limits() -> None:
    torch.manual_seed(1)
    module = MODELS["llama"]().eval().requires_grad_(False)
    prompt = [3, 4, 5]
    with torch.inference_mode():
        masses = module(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    ordered = masses.argsort(descending=True)
    nucleus = set(ordered[: int((masses[ordered].cumsum(0) < 0.5).sum()) + 1].tolist())

    def sample(n: int, **limits: Any) -> list[int]:
        rows = [row(prompt, max_new=1, seed=str(i), **limits) for i in range(n)]
        finish(Batch(module, "cpu", 1 << 16), rows)
        return [r.ids[0] for r in rows]

    free = torch.bincount(torch.tensor(sample(4000)), minlength=97) / 4000
    assert float((free - masses).abs().sum()) < 0.25
    assert set(sample(300, top_p=0.5)) == nucleus
    assert set(sample(300, top_k=2)) == set(ordered[:2].tolist())
    assert set(sample(5, temperature=0.0)) == {int(ordered[0])}
    assert set(sample(50, top_p=1e-9)) == {int(ordered[0])}


def test_a_bound_on_tokens_makes_rows_wait_and_loses_none() -> None:
    torch.manual_seed(0)
    module = MODELS["llama"]().eval().requires_grad_(False)
    batch = Batch(module, "cpu", 300)
    rows = [row([1 + i] * 80, max_new=5, seed=str(i)) for i in range(9)]
    batch.waiting.extend(rows)
    with torch.inference_mode():
        batch.step()
    assert len(batch.rows) == 3 and len(batch.waiting) == 6
    finish(batch, [])
    assert all(len(r.ids) == 5 for r in rows)


def test_a_cancelled_row_leaves_at_the_next_step() -> None:
    torch.manual_seed(0)
    module = MODELS["llama"]().eval().requires_grad_(False)
    batch = Batch(module, "cpu", 1 << 16)
    rows = [row([1, 2], max_new=400, seed=str(i)) for i in range(3)]
    batch.waiting.extend(rows)
    with torch.inference_mode():
        batch.step()
        rows[0].cancelled = rows[2].cancelled = True
        batch.step()
    assert batch.rows == [rows[1]] and len(rows[1].ids) == 2 and len(rows[0].ids) == 1


# -- the engine around it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def ask(**changes: Any) -> Request:
    return Request("a", 0, [{"role": "user", "content": "hi"}], **{"max_tokens": 6, "seed": 1, **changes})


async def test_policies_of_one_folder_share_a_module_until_one_is_published(folder: Path) -> None:
    engine = LocalEngine({"a": folder, "b": str(folder) + "/"}, threads=1)
    await engine.start()
    assert engine._module("a", 0) is engine._module("b", 0)
    await engine.load("a", 1, folder)
    assert engine._module("a", 1) is not engine._module("b", 0)
    gone = weakref.ref(engine._module("a", 1))
    await engine.complete(Request("a", 1, ask().messages, max_tokens=3))
    await engine.unload("a", 1)
    async with asyncio.timeout(10):
        while gone() is not None:
            gc.collect()
            await engine.complete(ask())
    await engine.stop()


async def test_the_decode_threads_count_is_its_own(folder: Path) -> None:
    torch.set_num_threads(2)
    engine = LocalEngine({"a": folder}, threads=1)
    await engine.start()
    await engine.complete(ask())
    assert await asyncio.wrap_future(engine._running().call(torch.get_num_threads)) == 1
    others: list[int] = [torch.get_num_threads()]
    thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert others == [2, 2], "a trainer in this process must keep its threads"
    await engine.stop()


async def test_a_model_that_fails_fails_its_calls_and_not_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine({"a": folder}, threads=1)
    await engine.start()
    with monkeypatch.context() as patched:
        patched.setattr(Batch, "step", lambda self: 1 / 0)
        with pytest.raises(EngineError, match="the model failed: ZeroDivisionError"):
            await engine.complete(ask())
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            async for _ in engine.stream(ask()):
                pass
    assert len((await engine.complete(ask()))[0].completion_ids) == 6
    await engine.stop()


async def test_a_folder_that_is_no_chat_model_is_said_at_the_start(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is not a model folder"):
        await LocalEngine({"a": tmp_path}).start()
    shutil.copytree(folder, tmp_path, ignore=shutil.ignore_patterns("chat_template.jinja"), dirs_exist_ok=True)
    with pytest.raises(EngineError, match="no chat template"):
        await LocalEngine({"a": tmp_path}).start()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="can't be loaded"):
        await LocalEngine({"a": tmp_path}).start()
    for wrong in ({}, {"a": folder}):
        with pytest.raises(ConfigError):
            LocalEngine(wrong, dtype="float33")


async def test_tool_calls_in_the_text_become_openais_streamed_or_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are forced, since no tiny model writes tool calls; all that follows them is real."""
    engine = LocalEngine({"a": folder}, threads=1)
    await engine.start()
    said = 'Sure. <tool_call>\n{"name": "run", "arguments": {"code": "1"}}\n</tool_call>'
    forced = [*engine._vocabularies["a"].tokenizer(said)["input_ids"], 2]
    add = Row.add
    monkeypatch.setattr(Row, "add", lambda self, _id, logprob: add(self, forced[len(self.ids)], logprob))
    tool = {"type": "function", "function": {"name": "run", "parameters": {}}}
    (whole,) = await engine.complete(ask(tools=[tool], max_tokens=200))
    assert whole.text == "Sure. " and whole.finish_reason == "tool_calls"
    assert whole.tool_calls[0]["function"] == {"name": "run", "arguments": '{"code": "1"}'}
    assert len(whole.prompt_ids) > len((await engine.complete(ask(max_tokens=200)))[0].prompt_ids), "the prompt shows the tools"
    chunks = [chunk async for chunk in engine.stream(ask(tools=[tool], max_tokens=200))]
    assert "".join(c.delta.get("content", "") for c in chunks) == "Sure. "
    assert chunks[-1].delta["tool_calls"][0]["function"]["name"] == "run" and chunks[-1].finish_reason == "tool_calls"
    (plain,) = await engine.complete(ask(max_tokens=200))
    assert plain.text == said and plain.tool_calls == ()
    await engine.stop()

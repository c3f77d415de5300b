"""Weights swapped while many clients call: the gateway over real models."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from mappa_graph.errors import EngineError
from mappa_graph.gateway import Canary, Gateway
from mappa_graph.gateway.local import LocalEngine
from mappa_graph.store import TraceStore
from tests.fakes.tinymodel import make_tiny_model

ASK: dict[str, Any] = {"model": "solver", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_tiny_model(root / f"m{seed}", seed) for seed in range(3)]


@pytest.fixture
async def gateway(folders: list[Path], tmp_path: Path) -> AsyncIterator[Gateway]:
    with TraceStore(tmp_path / "t.db") as store:
        async with Gateway(LocalEngine({"solver": folders[0], "critic": folders[0]}, threads=1), store) as running:
            yield running


async def said(gateway: Gateway, model: str = "solver") -> str:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        reply = (await client.post("/chat/completions", json={**ASK, "model": model})).json()
    return str(reply["choices"][0]["message"]["content"])


def canary(folder: Path, tolerance: float = 1e-3) -> Canary:
    """What the weights in a folder really answer, by transformers alone."""
    from transformers import AutoModelForCausalLM

    prompt, completion = [5, 6, 7], [9, 10, 11, 12]
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([prompt + completion])).logits[0, 2:-1]
    logprobs = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
    return Canary(prompt, completion, logprobs, temperature=0.8, tolerance=tolerance)


async def test_a_publish_changes_one_policy_and_publishing_back_changes_it_back(gateway: Gateway, folders: list[Path]) -> None:
    first = await said(gateway)
    assert first == await said(gateway, "critic")
    assert await gateway.publish("solver", folders[1], canary=canary(folders[1])) == 1
    assert await said(gateway) != first and await said(gateway, "critic") == first
    assert await gateway.publish("solver", folders[0], canary=canary(folders[0])) == 2
    assert await said(gateway) == first


async def test_weights_that_are_not_the_trainers_never_serve(gateway: Gateway, folders: list[Path], tmp_path: Path) -> None:
    first = await said(gateway)
    with pytest.raises(EngineError, match="canary"):
        await gateway.publish("solver", folders[2], canary=canary(folders[1]))

    tensors = load_file(folders[1] / "model.safetensors")
    half = dict(list(tensors.items())[:5])
    wrong = {name: t[:4].clone() if "embed" in name else t for name, t in tensors.items()}
    nan = {name: t * float("nan") for name, t in tensors.items()}
    for case, broken in (("half", half), ("wrong", wrong), ("strange", {**tensors, "extra.weight": torch.zeros(1)}), ("nan", nan)):
        (tmp_path / case).mkdir()
        save_file(broken, tmp_path / case / "model.safetensors")
        with pytest.raises(EngineError):
            await gateway.publish("solver", tmp_path / case, canary=canary(folders[1]))
    cut = tmp_path / "cut"
    shutil.copytree(folders[1], cut)
    (cut / "model.safetensors").write_bytes((folders[1] / "model.safetensors").read_bytes()[:-1000])
    for missing in (cut, tmp_path / "none", tmp_path):
        with pytest.raises(EngineError):
            await gateway.publish("solver", missing)
    assert await said(gateway) == first and gateway.versions()["solver"] == 0
    assert gateway.engine.models() == {"solver": [0], "critic": [0]}


async def test_a_lora_adapter_is_merged_as_peft_does(gateway: Gateway, folders: list[Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folders[0]), peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    # An adapter lies on the first weights, whatever was published since.
    await gateway.publish("solver", folders[1])
    await gateway.publish("solver", tmp_path / "adapter", canary=canary(tmp_path / "merged", tolerance=1e-4))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 8}))
    with pytest.raises(EngineError, match="canary"):
        await gateway.publish("solver", tmp_path / "adapter", canary=canary(tmp_path / "merged", tolerance=1e-4))


async def test_twenty_swaps_under_64_clients_fail_drop_or_garble_no_call(gateway: Gateway, folders: list[Path]) -> None:
    store = gateway.store
    assert store is not None
    loop = asyncio.get_running_loop()
    swaps = [(0, 0.0, 0.0)]
    """(version, when its publish was begun, when it was done)"""
    done = asyncio.Event()
    replies: list[tuple[str, int, float, float]] = []

    async def client(number: int, http: httpx.AsyncClient) -> None:
        stream = number % 2 == 0
        while not done.is_set():
            begun = loop.time()
            body = {**ASK, "seed": number, "messages": [{"role": "user", "content": "x" * (number % 7)}], "stream": stream}
            response = await http.post("/chat/completions", json=body)
            assert response.status_code == 200, response.text
            if stream:
                lines = [line[6:] for line in response.text.split("\n\n") if line]
                assert lines[-1] == "[DONE]"
                chunks = [json.loads(line) for line in lines[:-1]]
                assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
                text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
                (served,) = {c["model"] for c in chunks}
                id = chunks[0]["id"]
            else:
                reply = response.json()
                id, served, text = reply["id"], reply["model"], reply["choices"][0]["message"]["content"]
            call = store.call(id)
            assert call is not None and f"{call.policy}@v{call.version}" == served and call.text == text
            replies.append((id, call.version, begun, loop.time()))

    async def publisher() -> None:
        for i in range(20):
            begun = loop.time()
            version = await gateway.publish("solver", folders[(i + 1) % 3])
            swaps.append((version, begun, loop.time()))
            await asyncio.sleep(0.05)
        done.set()

    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, limits=limits) as http:
        await asyncio.gather(publisher(), *(client(i, http) for i in range(64)))

    assert len({id for id, *_ in replies}) == len(replies) > 64
    assert {version for version, *_ in swaps} == set(range(21)) and len({version for _, version, *_ in replies}) > 3
    for _, version, begun, ended in replies:
        # Its version can't have been replaced before the call began, nor first published after the call ended.
        assert swaps[version][1] <= ended
        assert version == 20 or swaps[version + 1][2] >= begun
    # Each version's tokens are its own weights' tokens.
    for id, version, *_ in replies[:: max(1, len(replies) // 20)]:
        call = store.call(id)
        assert call is not None
        engine = LocalEngine({"solver": folders[version % 3]}, threads=1)
        await engine.start()
        scored = await engine.score("solver", 0, call.prompt_ids, call.completion_ids, call.sampling["temperature"])
        await engine.stop()
        assert call.logprobs == pytest.approx(scored, abs=1e-4)
    async with asyncio.timeout(10):
        while gateway.engine.models()["solver"] != [20]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

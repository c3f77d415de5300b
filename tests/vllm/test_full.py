"""Whole weights swapped in place: verified before the first byte, atomic for calls, and never at the price of a paused server."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mappa_graph.errors import EngineError
from mappa_graph.gateway import Gateway, Request
from mappa_graph.gateway.vllm import VllmEngine, write_manifest
from mappa_graph.gateway.vllm.control import Control
from tests.vllm.conftest import aon
from tests.vllm.load import clients
from tests.vllm.models import canary, make_model, truth


def engine_of(gateway: Gateway) -> VllmEngine:
    assert isinstance(gateway.engine, VllmEngine)
    return gateway.engine


def control_of(gateway: Gateway) -> Control:
    return engine_of(gateway).server("solver").control


async def made(gateway: Gateway) -> Any:
    request = Request("solver", gateway.versions()["solver"], [{"role": "user", "content": "hi"}], max_tokens=10, seed=4, temperature=0.8)
    return (await aon(gateway, gateway.engine.complete(request)))[0]


async def holds(gateway: Gateway, folder: Path) -> None:
    """The server runs, says which version it holds, and answers as the weights in `folder` do."""
    engine, control = engine_of(gateway), control_of(gateway)
    version = gateway.versions()["solver"]
    assert engine.serving("solver") == version and engine.models() == {"solver": [version]}
    assert (await aon(gateway, control.get("/weight_info")))["weight_version"] == f"solver@v{version}"
    assert (await aon(gateway, control.get("/is_paused"))) == {"is_paused": False}
    answer = await made(gateway)
    assert answer.logprobs == pytest.approx(truth(folder, answer.prompt_ids, answer.completion_ids, 0.8), abs=2e-4)


async def test_weights_change_and_change_back_exactly_also_from_several_files(full: Gateway, models: list[Path]) -> None:
    assert len(list(models[2].glob("*.safetensors"))) > 1
    await full.publish("solver", models[0], canary=canary(models[0]))
    first = await made(full)
    for folder in (models[1], models[2], models[0]):
        await full.publish("solver", folder, canary=canary(folder, tolerance=1e-4))
        await holds(full, folder)
    assert (await made(full)).completion_ids == first.completion_ids


async def test_a_tied_head_may_be_in_the_file_or_not(full: Gateway, models: list[Path], tmp_path: Path) -> None:
    tensors = load_file(models[1] / "model.safetensors")
    assert "lm_head.weight" not in tensors
    both = tmp_path / "both"
    shutil.copytree(models[1], both)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, both / "model.safetensors")
    await full.publish("solver", both, canary=canary(models[1], tolerance=1e-4))
    await full.publish("solver", models[1], canary=canary(models[1], tolerance=1e-4))
    await holds(full, models[1])


async def test_weights_that_are_not_the_trainers_never_serve(full: Gateway, models: list[Path], tmp_path: Path) -> None:
    await full.publish("solver", models[0], canary=canary(models[0]))
    before = full.versions()
    with pytest.raises(EngineError, match="failed its canary"):
        await full.publish("solver", models[1], canary=canary(models[2]))
    await holds(full, models[0])

    tensors = load_file(models[1] / "model.safetensors")
    half = dict(list(tensors.items())[:5])
    for case, broken, told in (
        ("half", half, "tensors are missing"),
        ("strange", {**tensors, "extra.weight": torch.zeros(1)}, "not this model's"),
        ("wide", {**tensors, "model.norm.weight": torch.zeros(65)}, "has shape"),
    ):
        shutil.copytree(models[1], tmp_path / case)
        save_file(broken, tmp_path / case / "model.safetensors")
        with pytest.raises(EngineError, match=told):
            await full.publish("solver", tmp_path / case)
    zeroed = tmp_path / "zeroed"
    shutil.copytree(models[1], zeroed)
    write_manifest(zeroed)
    raw = (zeroed / "model.safetensors").read_bytes()
    (zeroed / "model.safetensors").write_bytes(raw[:-4000] + bytes(4000))
    with pytest.raises(EngineError, match="checksum"):
        await full.publish("solver", zeroed, canary=canary(models[1]))
    with pytest.raises(EngineError, match=r"no config\.json"):
        await full.publish("solver", tmp_path)
    assert full.versions() == before
    await holds(full, models[0])


async def test_weights_that_break_off_half_loaded_are_replaced_by_those_that_served(
    full: Gateway, models: list[Path], tmp_path: Path
) -> None:
    await full.publish("solver", models[1], canary=canary(models[1]))
    broken = tmp_path / "broken"
    shutil.copytree(models[2], broken)
    last = sorted(broken.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-64])  # its header is whole, so that this is found only when its turn comes
    restarts = engine_of(full).restarts
    with pytest.raises(EngineError):
        await full.publish("solver", broken)
    await holds(full, models[1])
    assert engine_of(full).restarts == restarts
    await full.publish("solver", models[2], canary=canary(models[2], tolerance=1e-4))
    await holds(full, models[2])


async def test_an_update_that_somebody_began_and_left_does_not_block_the_next(full: Gateway, models: list[Path]) -> None:
    await aon(full, control_of(full).post("/start_weight_update"))
    await full.publish("solver", models[0], canary=canary(models[0], tolerance=1e-4))
    await holds(full, models[0])


async def test_a_lost_resume_is_sent_again(full: Gateway, models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[str] = []
    post = Control.post

    async def lossy(self: Control, path: str, *args: Any, **kwargs: Any) -> Any:
        if path == "/resume" and len(lost) < 3:
            lost.append(path)
            raise EngineError("the request was lost")
        return await post(self, path, *args, **kwargs)

    monkeypatch.setattr(Control, "post", lossy)
    await full.publish("solver", models[1], canary=canary(models[1], tolerance=1e-4))
    assert len(lost) == 3
    await holds(full, models[1])


async def test_a_publish_that_is_cancelled_resumes_the_server(full: Gateway, models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    paused = asyncio.Event()
    loop = asyncio.get_running_loop()
    take = Control.take_folder

    async def slow(self: Control, *args: Any) -> None:
        loop.call_soon_threadsafe(paused.set)
        await asyncio.sleep(0.5)
        await take(self, *args)

    monkeypatch.setattr(Control, "take_folder", slow)
    publish = asyncio.ensure_future(full.publish("solver", models[2]))
    await paused.wait()
    publish.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publish
    monkeypatch.undo()
    for _ in range(100):
        if not (await aon(full, control_of(full).get("/is_paused")))["is_paused"]:
            break
        await asyncio.sleep(0.05)
    await holds(full, models[1])


async def test_a_pause_whose_maker_is_gone_ends_by_itself(full: Gateway) -> None:
    control = control_of(full)
    await aon(full, control.post("/pause?mode=keep", headers={"x-mappa-resume-after": "0.5"}))
    assert (await aon(full, control.get("/is_paused")))["is_paused"]
    for _ in range(100):
        if not (await aon(full, control.get("/is_paused")))["is_paused"]:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the server is paused still")


async def test_twenty_swaps_under_64_clients_fail_drop_or_garble_no_call(full: Gateway, models: list[Path]) -> None:
    loop = asyncio.get_running_loop()
    first = await full.publish("solver", models[0])
    which = {first: 0}
    swaps = {first: (0.0, 0.0)}
    """version -> when its publish was begun, when it was done"""
    async with clients(full, ["solver"], tokens=60) as load:
        await asyncio.sleep(1)
        for i in range(20):
            begun = loop.time()
            version = await full.publish("solver", models[(i + 1) % 3], canary=canary(models[(i + 1) % 3]))
            which[version] = (i + 1) % 3
            swaps[version] = (begun, loop.time())
            await asyncio.sleep(0.1)
    assert not load.refused and len(load.calls) > 64
    order = sorted(swaps)
    mixed = 0
    for call, begun, ended in load.calls:
        assert swaps[call.version][0] <= ended
        later = order[order.index(call.version) + 1 :]
        assert not later or swaps[later[0]][1] >= begun
    for call, begun, ended in load.calls[:: max(1, len(load.calls) // 60)]:
        # Each token was sampled from one of the versions that served while its call ran, and its log-prob is exactly that version's.
        served = {which[v] for v in order if swaps[v][0] <= ended and (v == order[-1] or swaps[order[order.index(v) + 1]][1] >= begun)}
        expected = {m: truth(models[m], call.prompt_ids, call.completion_ids, 0.8) for m in served}
        nearest = [min(served, key=lambda m: abs(expected[m][i] - logprob)) for i, logprob in enumerate(call.logprobs)]
        assert [expected[m][i] for i, m in enumerate(nearest)] == pytest.approx(list(call.logprobs), abs=2e-3)
        mixed += len(set(nearest)) > 1
    assert mixed, "no call ran across a swap"
    await holds(full, models[2])


async def test_the_server_holds_what_is_published_after_a_config_of_another_shape_was_refused(full: Gateway, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", 5, tied=False)
    config = json.loads((other / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    before = full.versions()
    with pytest.raises(EngineError):  # its head is its own, which a model with a tied head has no place for
        await full.publish("solver", other, canary=canary(other))
    assert full.versions() == before

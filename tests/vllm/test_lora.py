"""Many agents on one base: adapters loaded beside each other, checked, flipped and unloaded while calls run."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from mappa_graph.errors import EngineError
from mappa_graph.gateway import Gateway, Request
from mappa_graph.gateway.vllm import VllmEngine, write_manifest
from tests.vllm.conftest import aon
from tests.vllm.load import clients
from tests.vllm.models import canary, make_adapter, truth

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, "seed": 4, "temperature": 0.8}


def engine_of(gateway: Gateway) -> VllmEngine:
    assert isinstance(gateway.engine, VllmEngine)
    return gateway.engine


async def made_by(gateway: Gateway, policy: str) -> Any:
    version = gateway.versions()[policy]
    (made,) = await aon(gateway, gateway.engine.complete(Request(policy, version, ASK["messages"], max_tokens=10, seed=4, temperature=0.8)))
    return made


async def there(gateway: Gateway) -> set[str]:
    """The adapters that the server itself lists."""
    cards = await aon(gateway, engine_of(gateway).server("solver").control.models())
    return {card["id"] for card in cards if card.get("parent") is not None}


async def settled(gateway: Gateway, expected: set[str]) -> set[str]:
    """The same, once what was retired has gone."""
    for _ in range(100):
        if await there(gateway) == expected:
            break
        await asyncio.sleep(0.1)
    return await there(gateway)


async def test_agents_of_different_ranks_and_targets_are_served_beside_each_other_and_the_base(
    lora: Gateway, base: Path, adapters: list[Path]
) -> None:
    policies = ("solver", "critic", "verifier")
    for policy in policies:  # version 0 is the base, without an adapter
        if lora.versions()[policy] == 0:
            made = await made_by(lora, policy)
            assert made.logprobs == pytest.approx(truth(base, made.prompt_ids, made.completion_ids, 0.8), abs=2e-4)
    for policy, adapter in zip(policies, adapters, strict=True):
        await lora.publish(policy, adapter, canary=canary(adapter / "merged"))
    together = await asyncio.gather(*(made_by(lora, policy) for policy in policies))
    for adapter, made in zip(adapters, together, strict=True):
        assert made.logprobs == pytest.approx(truth(adapter / "merged", made.prompt_ids, made.completion_ids, 0.8), abs=2e-4)
    assert len({made.completion_ids for made in together}) == 3
    assert await settled(lora, {f"{p}@v{lora.versions()[p]}" for p in policies}) == {f"{p}@v{lora.versions()[p]}" for p in policies}


async def test_a_canary_at_another_temperature_is_exact_too(lora: Gateway, adapters: list[Path]) -> None:
    await lora.publish("solver", adapters[1], canary=canary(adapters[1] / "merged", temperature=0.6, tolerance=5e-4))
    with pytest.raises(EngineError, match="canary"):
        await lora.publish("solver", adapters[1], canary=canary(adapters[0] / "merged", temperature=0.6, tolerance=5e-4))


async def test_a_wrong_scaling_a_swapped_adapter_and_half_a_file_never_serve(lora: Gateway, adapters: list[Path], tmp_path: Path) -> None:
    await lora.publish("solver", adapters[0], canary=canary(adapters[0] / "merged"))
    before, first = lora.versions(), await made_by(lora, "solver")
    good = canary(adapters[0] / "merged", tolerance=0.02)

    def copy(name: str, *, checked: bool) -> Path:
        shutil.copytree(adapters[0], tmp_path / name)
        if checked:
            write_manifest(tmp_path / name)
        return tmp_path / name

    scaled = copy("scaled", checked=True)
    config = json.loads((scaled / "adapter_config.json").read_text())
    (scaled / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] / 2}))
    with pytest.raises(EngineError, match="failed its canary"):
        await lora.publish("solver", scaled, canary=good)
    with pytest.raises(EngineError, match="failed its canary"):
        await lora.publish("solver", adapters[1], canary=good)

    cut = copy("cut", checked=False)
    raw = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(EngineError, match="can't load"):
        await lora.publish("solver", cut, canary=good)
    zeroed = copy("zeroed", checked=True)
    (zeroed / "adapter_model.safetensors").write_bytes(raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2))
    with pytest.raises(EngineError, match="checksum"):
        await lora.publish("solver", zeroed)
    (zeroed / "checksums.json").unlink()
    with pytest.raises(EngineError, match="failed its canary"):
        await lora.publish("solver", zeroed, canary=good)

    assert lora.versions() == before
    assert (await made_by(lora, "solver")).completion_ids == first.completion_ids
    names = {f"{p}@v{v}" for p, v in before.items() if engine_of(lora)._adapters[p][v] is not None}
    assert await settled(lora, names) == names


async def test_what_is_no_adapter_for_this_server_is_refused_with_the_way_out(lora: Gateway, base: Path, tmp_path: Path) -> None:
    before = lora.versions()
    with pytest.raises(EngineError, match="not a LoRA adapter folder"):
        await lora.publish("solver", base)
    wide = make_adapter(tmp_path / "wide", base, 9, 64, ["q_proj"])
    with pytest.raises(EngineError, match=r"rank 64, the server takes 16\n.*max_lora_rank to 64"):
        await lora.publish("solver", wide)
    assert lora.versions() == before


async def test_a_full_table_is_an_error_that_says_what_to_raise(
    lora: Gateway, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(lora)
    monkeypatch.setattr("mappa_graph.gateway.vllm.engine.PLACE_WAIT_S", 0.2)
    taken: list[int] = []
    with pytest.raises(EngineError, match=r"full: 12 of 12 hold (?s:.*)raise engine.vllm.max_adapters"):
        for version in range(1000, 1013):
            await aon(lora, engine.load("critic", version, adapters[0]))
            taken.append(version)
    assert taken
    for version in taken:
        await aon(lora, engine.unload("critic", version))
    await lora.publish("critic", adapters[1], canary=canary(adapters[1] / "merged"))


async def test_twenty_swaps_under_64_clients_fail_drop_or_garble_no_call(lora: Gateway, adapters: list[Path]) -> None:
    loop = asyncio.get_running_loop()
    which: dict[int, int] = {}
    first = await lora.publish("solver", adapters[0])
    which[first] = 0
    swaps = {first: (0.0, 0.0)}
    """version -> when its publish was begun, when it was done"""
    async with clients(lora, ["solver"]) as load:
        await asyncio.sleep(1)
        for i in range(20):
            begun = loop.time()
            version = await lora.publish("solver", adapters[(i + 1) % 3], canary=canary(adapters[(i + 1) % 3] / "merged"))
            which[version] = (i + 1) % 3
            swaps[version] = (begun, loop.time())
    assert not load.refused and len(load.calls) > 64
    order = sorted(swaps)
    assert len({call.version for call, *_ in load.calls}) > 3
    for call, begun, ended in load.calls:
        # Its version can't have been replaced before the call began, nor first published after the call ended.
        assert swaps[call.version][0] <= ended
        later = order[order.index(call.version) + 1 :]
        assert not later or swaps[later[0]][1] >= begun
    for call, *_ in load.calls[:: max(1, len(load.calls) // 40)]:
        expected = truth(adapters[which[call.version]] / "merged", call.prompt_ids, call.completion_ids, 0.8)
        assert call.logprobs == pytest.approx(expected, abs=5e-4)
    names = {f"{p}@v{v}" for p, v in lora.versions().items() if engine_of(lora)._adapters[p][v] is not None}
    assert await settled(lora, names) == names


def test_whoever_lacks_the_key_can_not_touch_the_server(lora: Gateway) -> None:
    process = engine_of(lora).server("solver").process
    assert process is not None
    with httpx.Client(base_url=process.url) as stranger:
        for method, path in (("GET", "/v1/models"), ("GET", "/version"), ("POST", "/v1/load_lora_adapter"), ("POST", "/tokenize")):
            assert stranger.request(method, path, json={}).status_code == 401
        assert stranger.get("/health").status_code == 200
    assert process.key not in process.log.read_text(encoding="utf-8", errors="replace")
    assert process.key not in Path(f"/proc/{process.popen.pid}/cmdline").read_text()

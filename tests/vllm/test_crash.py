"""Servers that die: calls are told to come again, wait for the restart, and meet the versions that served."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from mappa_graph.errors import EngineError
from mappa_graph.gateway import Gateway
from mappa_graph.gateway.vllm import VllmEngine
from mappa_graph.sections.engine import VllmConfig
from tests.vllm.load import clients
from tests.vllm.models import canary, truth


def processes(leader: int) -> dict[int, str]:
    """Process id -> command, of a server and all it started."""
    listed = subprocess.run(["ps", "-ww", "-o", "pid=,args=", "-g", str(leader)], capture_output=True, text=True, check=False).stdout
    return {int(row.split(None, 1)[0]): row.split(None, 1)[1] for row in listed.splitlines() if "<defunct>" not in row}


def leader(gateway: Gateway) -> int:
    assert isinstance(gateway.engine, VllmEngine)
    process = gateway.engine.server("solver").process
    assert process is not None
    return process.popen.pid


def find(pid: int, word: str) -> int:
    return next(p for p, command in processes(pid).items() if word in command and p != pid)


async def killed(gateway: Gateway, folders: dict[str, Path], word: str) -> None:
    """Kills the part of the server whose command has `word` while 32 clients call; `folders`: policy -> whole model it answers as."""
    assert isinstance(gateway.engine, VllmEngine)
    before, versions, restarts = leader(gateway), gateway.versions(), gateway.engine.restarts
    async with clients(gateway, list(folders), count=32, tokens=40) as load:
        while len(load.calls) < 32:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        os.kill(find(before, word), signal.SIGKILL)
        answered = len(load.calls)
        async with asyncio.timeout(500):
            while gateway.engine.restarts == restarts or len(load.calls) < answered + 64:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
    assert load.refused
    for reply in load.refused:
        text = reply.text
        assert "engine_restarting" in text and "try again" in text, text[-300:]
        if reply.status_code != 200:
            assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
    assert gateway.engine.restarts == restarts + 1 and gateway.engine.health == "ok"
    assert not processes(before) and leader(gateway) != before
    assert gateway.versions() == versions
    for policy, folder in folders.items():
        call = next(call for call, begun, _ in reversed(load.calls) if call.policy == policy)
        assert call.version == versions[policy]
        assert call.logprobs == pytest.approx(truth(folder, call.prompt_ids, call.completion_ids, 0.8), abs=5e-4)


async def test_adapters_are_loaded_again_after_the_api_server_was_killed(lora: Gateway, adapters: list[Path]) -> None:
    await lora.publish("solver", adapters[0])
    await lora.publish("critic", adapters[1])
    await killed(lora, {"solver": adapters[0] / "merged", "critic": adapters[1] / "merged"}, "api_server")
    await lora.publish("solver", adapters[2], canary=canary(adapters[2] / "merged"))


async def test_whole_weights_are_there_again_after_the_engine_was_killed_and_a_publish_outlives_it(
    full: Gateway, models: list[Path]
) -> None:
    await full.publish("solver", models[2])
    await killed(full, {"solver": models[2]}, "EngineCore")
    await full.publish("solver", models[1], canary=canary(models[1], tolerance=1e-4))
    assert isinstance(full.engine, VllmEngine)
    assert full.engine.serving("solver") == full.versions()["solver"]


async def test_a_server_that_can_not_start_says_why(models: list[Path], tmp_path: Path) -> None:
    engine = VllmEngine({"solver": models[0]}, VllmConfig(extra_args=("--no-such-flag",)), mode="full", folder=tmp_path / "engine")
    with pytest.raises(EngineError, match=r"ended while it started(?s:.*)unrecognized arguments: --no-such-flag"):
        await engine.start()


async def test_nothing_is_left_of_a_server_that_was_stopped(full: Gateway) -> None:
    pid, engine = leader(full), full.engine
    assert len(processes(pid)) >= 3
    full.stop()
    assert not processes(pid)
    with pytest.raises(EngineError, match="not running"):
        await engine.score("solver", 0, [1], [2])

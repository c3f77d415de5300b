"""Servers that are started, watched over, restarted and ended, with a stand-in where vLLM would be."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mappa_graph.errors import ConfigError, EngineError
from mappa_graph.gateway import Request, RequestRefused
from mappa_graph.gateway.vllm import VllmEngine, write_manifest
from mappa_graph.gateway.vllm import control as control_module
from mappa_graph.gateway.vllm.environment import inspect
from mappa_graph.gateway.vllm.process import Launch, lora_table
from mappa_graph.gateway.vllm.transfer import SyncClient, init_arguments
from mappa_graph.sections.engine import VllmConfig
from tests.fakes.vllm import alive, asked, make_interpreter

Make = Callable[..., VllmEngine]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "engine").mkdir()
    return tmp_path / "engine"


def weights(folder: Path, content: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    (folder / "model.safetensors").write_bytes(content)
    return folder


def adapter(folder: Path, rank: int = 8) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(folder.name.encode())
    return folder


@pytest.fixture
async def make(tmp_path: Path, place: Path) -> AsyncIterator[Make]:
    engines: list[VllmEngine] = []

    def made(mode: Any = "lora", policies: tuple[str, ...] = ("solver", "critic"), **options: Any) -> VllmEngine:
        base = tmp_path / "base"
        if not base.exists():
            weights(base)
        chosen = VllmConfig(**{"python": make_interpreter(tmp_path), "start_timeout_s": 20, "stop_timeout_s": 1, **options})
        engine = VllmEngine(dict.fromkeys(policies, base), chosen, mode=mode, folder=place, ranks=[8])
        engines.append(engine)
        return engine

    yield made
    for engine in engines:
        await engine.stop()


def ask(version: int = 0, policy: str = "solver") -> Request:
    return Request(policy, version, [{"role": "user", "content": "hi"}], max_tokens=1000)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def worker(place: Path) -> int:
    return int((place / "worker").read_text())


async def test_a_server_is_started_asked_what_it_can_do_and_ended_with_its_workers(make: Make, place: Path) -> None:
    engine = make()
    await engine.start()
    assert engine.health == "ok" and engine.models() == {"solver": [0], "critic": [0]}
    process = engine.server("solver").process
    assert process is not None and engine.server("critic") is engine.server("solver")
    can = engine.server("solver").capabilities
    assert (can.version, can.token_ids, can.processed_logprobs, can.lora, can.weights) == ("0.32.0", True, True, True, True)
    (made,) = await engine.complete(ask())
    assert made.text == process.name and made.completion_ids == (5,)
    bodies = [row["body"] for row in asked(place) if row["path"] == "/v1/chat/completions"]
    assert bodies[0]["max_tokens"] == 128  # type: ignore[index] # cut to the server's context
    below = worker(place)
    assert alive(below)
    await engine.stop()
    assert not alive(below) and not alive(process.popen.pid)
    with pytest.raises(EngineError, match="not running"):
        await engine.complete(ask())
    assert process.key not in process.tail() + " ".join(process.popen.args)  # type: ignore[arg-type]


async def test_a_server_that_does_not_come_up_says_why_with_the_end_of_its_log(make: Make, place: Path) -> None:
    (place / "say").write_text("dies")
    with pytest.raises(EngineError, match=r"ended while it started, with status 3(?s:.*)the model is broken"):
        await make().start()
    (place / "say").write_text("hangs")
    engine = make(start_timeout_s=1.0)
    with pytest.raises(EngineError, match=r"did not come up in 1 s(?s:.*)still loading"):
        await engine.start()
    assert engine.health == "stopped"


async def test_a_port_that_was_taken_meanwhile_is_left_for_another(make: Make, place: Path) -> None:
    (place / "say").write_text("port")
    engine = make()
    await engine.start()
    assert engine.health == "ok"


async def test_another_process_on_the_port_is_never_taken_for_ours(make: Make, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    await first.start()
    process = first.server("solver").process
    assert process is not None
    monkeypatch.setattr("mappa_graph.gateway.vllm.process._free_port", lambda: process.port)
    with pytest.raises(EngineError, match=r"(?i)address already in use"):
        await make(start_timeout_s=5.0).start()


async def test_a_server_that_can_not_do_what_is_needed_is_refused_with_the_flag(make: Make, place: Path) -> None:
    (place / "say").write_text("raw")
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        await make().start()


@pytest.mark.parametrize("end", ["crash", "sick", "late", "worker"])
async def test_a_crash_is_a_503_and_the_next_call_waits_for_the_versions_to_be_there_again(
    make: Make, place: Path, tmp_path: Path, end: str
) -> None:
    engine = make()
    await engine.start()
    await engine.load("solver", 1, adapter(tmp_path / "a1"))
    await engine.load("critic", 4, adapter(tmp_path / "a2"))
    await engine.unload("critic", 4)
    below = worker(place)
    if end == "worker":
        process = engine.server("solver").process
        assert process is not None
        os.kill(process.popen.pid, signal.SIGKILL)  # the watchdog itself
        await until(lambda: engine.health != "ok")
    else:
        (place / "say").write_text(end)
        with pytest.raises(RequestRefused) as refused:
            await engine.complete(ask(1))
        assert refused.value.status == 503 and refused.value.headers == {"retry-after": "1"}
        assert refused.value.error["code"] == "engine_restarting"
    (made,) = await engine.complete(ask(1))
    assert made.text == "solver@v1" and engine.restarts == 1 and engine.health == "ok"
    if end != "worker":
        assert not alive(below)
    loads = [row["body"]["lora_name"] for row in asked(place) if row["path"] == "/v1/load_lora_adapter"]  # type: ignore[index]
    assert loads == ["solver@v1", "critic@v4", "solver@v1"]


async def test_a_call_does_not_wait_for_a_restart_longer_than_it_is_told_to(make: Make, place: Path) -> None:
    engine = make(restart_wait_s=0.2)
    await engine.start()
    (place / "say").write_text("crash hangs")
    with pytest.raises(RequestRefused):
        await engine.complete(ask())
    with pytest.raises(RequestRefused, match="being restarted") as refused:
        await engine.complete(ask())
    assert refused.value.status == 503


async def test_a_server_that_ends_again_and_again_is_given_up_with_its_log(make: Make, place: Path) -> None:
    engine = make(max_restarts=2)
    await engine.start()
    (place / "say").write_text("crash dies")
    with pytest.raises(RequestRefused):
        await engine.complete(ask())
    with pytest.raises(EngineError, match=r"ended 3 times in ten minutes(?s:.*)the model is broken"):
        await engine.complete(ask())
    assert engine.health.startswith("failed")


async def test_our_own_sudden_death_leaves_no_server_behind(tmp_path: Path, place: Path) -> None:
    base = weights(tmp_path / "base")
    code = f"""
        import asyncio, pathlib
        from mappa_graph.gateway.vllm import VllmEngine
        from mappa_graph.sections.engine import VllmConfig
        async def main():
            options = VllmConfig(python={str(make_interpreter(tmp_path))!r})
            engine = VllmEngine({{"solver": pathlib.Path({str(base)!r})}}, options, mode="lora", folder=pathlib.Path({str(place)!r}))
            await engine.start()
            print(engine.server("solver").process.popen.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    us = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert us.stdout is not None
    watchdog = int(us.stdout.readline())
    below = worker(place)
    assert alive(watchdog) and alive(below)
    us.kill()
    us.wait()
    us.stdout.close()
    await until(lambda: not alive(watchdog) and not alive(below))


async def test_weights_are_swapped_in_a_pause_that_ends_whatever_happens(make: Make, place: Path, tmp_path: Path) -> None:
    engine = make("full", ("solver",))
    await engine.start()
    assert engine.swaps_in_place and engine.models() == {"solver": [0]}
    new = weights(tmp_path / "v1", b"new")
    sums = write_manifest(new)
    before = len(asked(place))
    await engine.load("solver", 1, new)
    told = asked(place)[before:]
    paths = [str(row["path"]) for row in told]
    expected = ["/pause?mode=keep&clear_cache=true", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert paths[:4] == expected and paths[-2:] == ["/resume", "/is_paused"]
    assert float(str(told[0]["resume_after"])) > 0
    assert told[2]["body"] == {"update_info": {"folder": str(new), "files": sums}}
    assert told[3]["body"] == {"weight_version": "solver@v1"}
    assert engine.serving("solver") == 1 and engine.models() == {"solver": [1]}

    for word, error in (("liar", "says that it holds"), ("breaks", "out of memory")):
        (place / "say").write_text(word)
        with pytest.raises(EngineError, match=error):
            await engine.load("solver", 2, weights(tmp_path / word))
        (place / "say").unlink()
        # What it holds then is not known, so it's replaced by one that was started with the version before.
        await until(lambda: engine.health == "ok" and engine.server("solver").name != "")
        await engine.complete(ask(1))
        assert engine.serving("solver") == 1
    assert engine.restarts == 2
    with pytest.raises(EngineError, match="solver@v7"):
        await engine.complete(ask(7))


async def test_going_back_from_what_serves_is_a_swap_to_the_version_before(make: Make, place: Path, tmp_path: Path) -> None:
    engine = make("full", ("solver",))
    await engine.start()
    await engine.load("solver", 1, weights(tmp_path / "v1"))
    await engine.load("solver", 2, weights(tmp_path / "v2"))
    await engine.unload("solver", 2)
    assert engine.serving("solver") == 1
    last = [row["body"] for row in asked(place) if row["path"] == "/update_weights"][-1]
    assert last["update_info"]["folder"] == str(tmp_path / "v1")  # type: ignore[index]
    await engine.unload("solver", 0)
    assert engine.models() == {"solver": [1]}


async def test_a_server_that_does_not_resume_is_replaced_by_one_with_the_version_before(
    make: Make, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "_RESUME_TRIES", 2)
    engine = make("full", ("solver",))
    await engine.start()
    tried = asyncio.ensure_future(engine.load("solver", 1, weights(tmp_path / "v1")))
    (place / "say").write_text("stuck")
    await until(lambda: engine.restarts == 1)
    (place / "say").unlink()
    await tried  # what was cut is done once more, by the new server
    assert engine.serving("solver") == 1 and engine.restarts == 1
    labels = [row["body"] for row in asked(place) if row["path"] == "/update_weight_version"]
    assert labels == [{"new_version": "solver@v0"}] * 2


async def test_a_cancelled_publish_ends_with_the_version_before(make: Make, place: Path, tmp_path: Path) -> None:
    engine = make("full", ("solver",))
    await engine.start()
    (place / "say").write_text("slow")
    publish = asyncio.ensure_future(engine.load("solver", 1, weights(tmp_path / "v1")))
    await until(lambda: any(row["path"] == "/update_weights" for row in asked(place)))
    publish.cancel()
    (place / "say").unlink()
    with pytest.raises(asyncio.CancelledError):
        await publish
    assert engine.serving("solver") == 0
    control = engine.server("solver").control
    assert await control.get("/weight_info") == {"weight_version": "solver@v0"}
    assert await control.get("/is_paused") == {"is_paused": False}


async def test_weights_that_are_not_what_was_written_are_refused_before_the_server_is_asked(
    make: Make, place: Path, tmp_path: Path
) -> None:
    engine = make()
    await engine.start()
    bad = adapter(tmp_path / "bad")
    write_manifest(bad)
    (bad / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(EngineError, match=r"checksum(?s:.*)half a file"):
        await engine.load("solver", 1, bad)
    (bad / "another.safetensors").write_bytes(b"more")
    with pytest.raises(EngineError, match="lists"):
        await engine.load("solver", 1, bad)
    (bad / "checksums.json").write_text("{")
    with pytest.raises(EngineError, match="can't be read"):
        await engine.load("solver", 1, bad)
    assert "/v1/load_lora_adapter" not in {row["path"] for row in asked(place)}


def test_the_command_line_has_what_exactness_needs_and_no_secret(tmp_path: Path) -> None:
    weights(tmp_path / "base")
    found = inspect(make_interpreter(tmp_path))
    launch = Launch(found, tmp_path / "base", tmp_path / "log", lora=(4, 8, 16), extra_args=("--seed", "3"), max_num_seqs=7)
    words = launch.arguments("name", 1234)
    option = dict(pairwise(words))
    assert option["--logprobs-mode"] == "processed_logprobs" and option["--max-model-len"] == "128" and option["--max-num-seqs"] == "7"
    assert json.loads(option["--override-generation-config"])["repetition_penalty"] == 1.0
    assert (option["--max-loras"], option["--max-cpu-loras"], option["--max-lora-rank"]) == ("4", "8", "16")
    assert "--enforce-eager" in words and "--enable-lora" in words and words[-2:] == ["--seed", "3"]
    env = launch.variables("the-key", {"PATH": "/bin", "OPENAI_API_KEY": "x", "HF_TOKEN": "y", "PYTHONPATH": "/z"})
    assert env["VLLM_API_KEY"] == "the-key" and not {"OPENAI_API_KEY", "HF_TOKEN"} & set(env) and "/z" not in env["PYTHONPATH"]
    assert "VLLM_SERVER_DEV_MODE" not in env and "VLLM_ALLOW_INSECURE_SERIALIZATION" not in env
    shared = Launch(found, tmp_path / "base", tmp_path / "log", transfer="shared")
    words = shared.arguments("name", 1)
    assert json.loads(dict(pairwise(words))["--weight-transfer-config"]) == {"backend": "mappa_shared"}
    assert shared.variables("k")["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_table_of_adapters_is_sized_by_policies_and_ranks() -> None:
    assert lora_table(3, [4, 24], adapters=None, rank=None) == (9, 12, 32)
    assert lora_table(3, [], adapters=4, rank=64) == (4, 4, 64)
    with pytest.raises(EngineError, match="rank 513"):
        lora_table(1, [513], adapters=None, rank=None)


def test_policies_with_different_bases_can_not_share_adapters(tmp_path: Path) -> None:
    models = {"a": weights(tmp_path / "a"), "b": weights(tmp_path / "b")}
    with pytest.raises(ConfigError, match="different base models"):
        VllmEngine(models, mode="lora", folder=tmp_path)
    assert VllmEngine(models, mode="full", folder=tmp_path).models() == {"a": [0], "b": [0]}


def test_an_interpreter_without_vllm_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"has no vLLM\n.*make vllm"):
        inspect(Path(sys.executable))
    with pytest.raises(EngineError, match="no Python interpreter"):
        inspect(tmp_path / "nothing")


async def test_what_vllms_own_trainer_side_sends_reaches_the_server_with_its_key_and_label(make: Make, place: Path) -> None:
    engine = make("full", ("solver",))
    await engine.start()
    control = engine.server("solver").control
    before = len(asked(place))

    def drive() -> None:
        client = SyncClient(control.url, control.headers)
        client.label = "solver@v3"
        client.init_weight_transfer_engine({"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2})
        client.start_weight_update()
        client.update_weights({"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 2]]})
        client.update_weights({"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]], "ipc_handles": [{"gpu": (1, 2)}]})
        client.finish_weight_update()
        client.close()

    await asyncio.to_thread(drive)
    told = asked(place)[before:]
    assert [row["path"] for row in told] == [
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/update_weights", "/finish_weight_update"),
    ]
    bodies: list[Any] = [row["body"] for row in told]
    assert bodies[0]["init_info"]["world_size"] == 2
    assert bodies[2] == {"update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 2]]}}
    assert set(bodies[3]["update_info"]) == {"names", "dtype_names", "shapes", "ipc_handles_pickled"}
    assert bodies[4] == {"weight_version": "solver@v3"}
    assert init_arguments("nccl", 2, host="h", port=5) == {
        "rank": 0,
        "master_address": "h",
        "master_port": 5,
        "world_size": 3,
        "packed": True,
    }

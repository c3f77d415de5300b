"""A deployment: an app goes on calling one address while versions are published, tried out on a share, promoted and rolled back."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mappa_graph.errors import ConfigError, EngineError, GatewayError
from mappa_graph.gateway import Canary, Gateway
from mappa_graph.gateway.admin import CONTROL, Admin, Control, alone, running
from mappa_graph.gateway.deployment import HISTORY, Deployment, read_canary, write_canary
from mappa_graph.store import TraceStore
from tests.fakes.engine import ScriptedEngine

ASK = {"model": "solver", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def weights(root: Path, name: str, content: bytes = b"x") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content + name.encode())
    return folder


class Running:
    """A deployment as `serve` makes it, over a scripted engine."""

    def __init__(self, folder: Path, first: Path, **options: Any) -> None:
        self.admin = Admin("admin-key")
        self.engine = ScriptedEngine("solver", "critic")
        self.store = TraceStore(folder / "trace.db")
        self.gateway = Gateway(self.engine, self.store, routes=self.admin.routes())
        self.folder = folder
        self.first = first
        self.options = options

    async def __aenter__(self) -> Running:
        await self.gateway.__aenter__()
        self.deployment = Deployment(self.gateway, self.folder, {"solver": self.first, "critic": self.first}, **self.options)
        self.failed = await self.deployment.restore()
        self.admin.deployment = self.deployment
        self._announced = self.admin.announced(self.folder, self.gateway.url)
        self._announced.__enter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._announced.__exit__(None, None, None)
        await asyncio.to_thread(self.gateway.stop)
        self.store.close()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Running]:
    (tmp_path / "live").mkdir()
    async with Running(tmp_path / "live", weights(tmp_path, "first")) as running:
        yield running


async def versions_of(gateway: Gateway, calls: int, **headers: str) -> Counter[str]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, headers=headers) as client:
        replies = await asyncio.gather(*(client.post("/chat/completions", json=ASK) for _ in range(calls)))
    assert all(r.status_code == 200 for r in replies)
    return Counter(r.json()["model"] for r in replies)


async def test_a_share_of_the_calls_meets_the_version_on_trial_and_the_record_says_which(served: Running, tmp_path: Path) -> None:
    release = await served.deployment.publish("solver", weights(tmp_path, "a"), share=0.25)
    assert release.version == 1 and served.gateway.versions()["solver"] == 0
    met = await versions_of(served.gateway, 400)
    assert 60 <= met["solver@v1"] <= 145 and met["solver@v1"] + met["solver@v0"] == 400  # 100 +- 5 deviations
    by_version = served.deployment.status()["policies"]["solver"]["calls"]
    assert by_version["1"] == met["solver@v1"]
    await served.deployment.promote("solver")
    assert await versions_of(served.gateway, 5) == {"solver@v1": 5}
    assert "unload solver@v0" in served.engine.events


async def test_publish_rollback_and_publish_go_back_to_what_served_before_and_never_reuse_a_number(served: Running, tmp_path: Path) -> None:
    deployment = served.deployment
    with pytest.raises(GatewayError, match="nothing older to go back to"):
        await deployment.rollback("solver")
    await deployment.publish("solver", weights(tmp_path, "good"))
    await deployment.publish("solver", weights(tmp_path, "bad"))
    back = await deployment.rollback("solver")
    assert back is not None and (back.version, back.of) == (3, 1) and back.digest == deployment.releases[0].digest
    await deployment.publish("solver", weights(tmp_path, "worse"))
    again = await deployment.rollback("solver")
    assert again is not None and (again.version, again.of) == (5, 1)  # not v2, which was left for good reason
    first = await deployment.rollback("solver")
    assert first is not None and (first.version, first.of) == (6, 0)
    with pytest.raises(GatewayError, match="nothing older to go back to"):
        await deployment.rollback("solver")
    assert served.gateway.versions() == {"solver": 6, "critic": 0}


async def test_a_canary_can_not_allow_any_difference(served: Running, tmp_path: Path) -> None:
    served.engine.score_offset = 9.0
    for tolerance in (float("nan"), 1e9):
        bad = weights(tmp_path, f"t{tolerance}")
        write_canary(bad, Canary([1], [2], [-0.5], tolerance=tolerance))
        with pytest.raises(EngineError, match="canary"):
            await served.deployment.publish("solver", bad)
    served.engine.score_offset = 0.0


async def test_a_rollback_during_a_trial_ends_the_trial(served: Running, tmp_path: Path) -> None:
    await served.deployment.publish("solver", weights(tmp_path, "a"))
    await served.deployment.publish("solver", weights(tmp_path, "b"), share=0.5)
    assert await served.deployment.rollback("solver") is None
    assert served.gateway.versions()["solver"] == 1 and await versions_of(served.gateway, 20) == {"solver@v1": 20}


async def test_a_publish_that_fails_leaves_everything_as_it_was(served: Running, tmp_path: Path) -> None:
    await served.deployment.publish("solver", weights(tmp_path, "a"))
    bad = weights(tmp_path, "b")
    write_canary(bad, Canary([1], [2], [-0.5]))
    served.engine.score_offset = 3.0
    with pytest.raises(EngineError, match="canary"):
        await served.deployment.publish("solver", bad)
    for wrong, share in ((tmp_path / "none", 1.0), (bad, 0.0), (bad, 1.5)):
        with pytest.raises(GatewayError):
            await served.deployment.publish("solver", wrong, share=share)
    with pytest.raises(GatewayError, match="no policy 'nobody'"):
        await served.deployment.publish("nobody", bad)
    assert served.gateway.versions()["solver"] == 1 and len(served.deployment.releases) == 1
    assert sorted(p.name for p in (served.folder / "releases" / "solver").iterdir()) == ["v1"]
    served.engine.score_offset = 0.0


async def test_a_deployment_started_again_serves_what_it_served_before(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    first = weights(tmp_path, "first")
    async with Running(tmp_path / "live", first) as run:
        source = weights(tmp_path, "a")
        await run.deployment.publish("solver", source)
        await run.deployment.publish("solver", weights(tmp_path, "b"), share=0.5)
        shutil.rmtree(source)  # a training run prunes its checkpoints
    async with Running(tmp_path / "live", first) as run:
        assert run.failed == {} and run.gateway.versions()["solver"] == 1
        assert run.gateway.trials()["solver"].version == 2
        assert (await run.deployment.publish("solver", weights(tmp_path, "c"))).version == 3
    (tmp_path / "live" / "releases" / "solver" / "v3" / "model.safetensors").write_bytes(b"changed")
    async with Running(tmp_path / "live", first) as run:
        assert "changed" in run.failed["solver"] and run.gateway.versions()["solver"] == 0
    (tmp_path / "live" / HISTORY).write_text("{")
    run = Running(tmp_path / "live", first)
    with pytest.raises(GatewayError, match="can't be read"):
        await run.__aenter__()
    run.gateway.stop()
    run.store.close()


async def test_what_serves_keeps_its_weights_when_the_history_can_not_be_written_after(
    served: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = []

    def full(path: Path, text: str, **_: object) -> None:
        writes.append(text)
        if len(writes) == 2:  # the one after the name has turned
            raise OSError(28, "No space left on device")
        path.write_text(text)

    monkeypatch.setattr("mappa_graph.gateway.deployment.write_aside", full)
    with pytest.raises(OSError, match="No space"):
        await served.deployment.publish("solver", weights(tmp_path, "a"))
    assert served.gateway.versions()["solver"] == 1
    (release,) = served.deployment.releases
    assert (Path(release.weights) / "model.safetensors").is_file() and json.loads(writes[0])["releases"][0]["version"] == 1


async def test_a_failed_start_of_one_policy_is_not_forgotten_by_a_publish_of_another(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    first = weights(tmp_path, "first")
    async with Running(tmp_path / "live", first) as run:
        await run.deployment.publish("solver", weights(tmp_path, "a"))
    away = tmp_path / "live" / "releases" / "solver" / "v1"
    away.rename(tmp_path / "away")
    async with Running(tmp_path / "live", first) as run:
        assert set(run.failed) == {"solver"} and run.gateway.versions()["solver"] == 0
        await run.deployment.publish("critic", weights(tmp_path, "b"))
    (tmp_path / "away").rename(away)
    async with Running(tmp_path / "live", first) as run:
        assert run.failed == {} and run.gateway.versions() == {"solver": 1, "critic": 1}


async def test_a_deployment_may_move_and_may_not_begin_with_other_weights(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    first = weights(tmp_path, "first")
    async with Running(tmp_path / "live", first) as run:
        await run.deployment.publish("solver", weights(tmp_path, "a"))
    (tmp_path / "live" / "releases" / "solver" / "v9").mkdir()  # what a crash in a publish left
    (tmp_path / "live").rename(tmp_path / "moved")
    async with Running(tmp_path / "moved", first) as run:
        assert run.failed == {} and run.gateway.versions()["solver"] == 1
        assert (await run.deployment.publish("solver", weights(tmp_path, "c"))).version == 2
    run = Running(tmp_path / "moved", weights(tmp_path, "other first"))
    with pytest.raises(GatewayError, match="other first weights of"):
        await run.__aenter__()
    run.gateway.stop()
    run.store.close()


def test_a_folder_serves_once_and_a_key_of_a_dead_process_is_not_sent(tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(GatewayError, match="another deployment runs"), alone(tmp_path):
        pass
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / CONTROL).write_text(json.dumps({"url": "http://127.0.0.1:1", "key": "k", "pid": ended.pid}))
    with pytest.raises(GatewayError, match="ended without a word"):
        Control(tmp_path)


async def test_weights_that_can_be_gone_back_to_are_kept_and_others_are_not(served: Running, tmp_path: Path) -> None:
    for number in range(8):
        await served.deployment.publish("solver", weights(tmp_path, f"w{number}"))
    kept = sorted(p.name for p in (served.folder / "releases" / "solver").iterdir())
    assert kept == ["v3", "v4", "v5", "v6", "v7", "v8"]  # what serves, and five steps back


async def test_going_back_again_and_again_passes_every_release_that_is_kept_and_ends_at_the_first_weights(
    served: Running, tmp_path: Path
) -> None:
    deployment = served.deployment
    for number in range(1, 5):
        await deployment.publish("solver", weights(tmp_path, f"w{number}"), source=f"run {number}")
    assert deployment.status()["policies"]["solver"]["back"] == [3, 2, 1, 0]
    for version, (of, said, older) in enumerate(
        [(3, "back to v3: run 3", [2, 1, 0]), (2, "back to v2: run 2", [1, 0]), (1, "back to v1: run 1", [0])], start=5
    ):
        back = await deployment.rollback("solver")
        assert back is not None and (back.version, back.of, back.source) == (version, of, said)
        assert served.gateway.versions()["solver"] == version and f"w{of}" in (Path(back.weights) / "model.safetensors").read_text()
        assert deployment.status()["policies"]["solver"]["back"] == older
    first = await deployment.rollback("solver")
    assert first is not None and (first.of, first.source) == (0, f"back to the first weights: {served.first}")
    with pytest.raises(GatewayError, match="there is nothing older to go back to"):
        await deployment.rollback("solver")


async def test_going_back_past_what_is_kept_says_what_it_passed_over(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    async with Running(tmp_path / "live", weights(tmp_path, "first"), keep=1, sources={"solver": "runs/a, best"}) as run:
        for number in range(1, 6):
            await run.deployment.publish("solver", weights(tmp_path, f"w{number}"))
        assert sorted(p.name for p in (tmp_path / "live" / "releases" / "solver").iterdir()) == ["v4", "v5"]
        assert run.deployment.status()["policies"]["solver"]["back"] == [4, 0]
        back = await run.deployment.rollback("solver")
        assert back is not None and back.of == 4 and "gone" not in back.source
        first = await run.deployment.rollback("solver")
        assert first is not None and first.of == 0
        assert first.source == (
            "back to the first weights: runs/a, best (the weights of v3 to v1 are gone or were changed; gateway.keep_releases: 1)"
        )
    with pytest.raises(GatewayError, match="0 releases can't be kept"):
        Deployment(run.gateway, tmp_path / "live", {}, keep=0)


async def test_a_release_that_was_changed_on_disk_is_passed_over_and_named(served: Running, tmp_path: Path) -> None:
    deployment = served.deployment
    for number in range(1, 4):
        await deployment.publish("solver", weights(tmp_path, f"w{number}"), source=f"run {number}")
    (served.folder / "releases" / "solver" / "v2" / "model.safetensors").write_bytes(b"other")
    back = await deployment.rollback("solver")
    assert back is not None and back.of == 1 and back.source.startswith("back to v1: run 1 (the weights of v2 are gone or were changed")
    (served.first / "model.safetensors").write_bytes(b"other")
    with pytest.raises(GatewayError, match=r"nothing older than v1 is kept, and the first weights in .* are gone or changed"):
        await deployment.rollback("solver")
    assert served.gateway.versions()["solver"] == 4


async def test_going_back_works_across_a_restart(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    first = weights(tmp_path, "first")
    async with Running(tmp_path / "live", first) as run:
        for number in range(1, 5):
            await run.deployment.publish("solver", weights(tmp_path, f"w{number}"))
        await run.deployment.rollback("solver")
    async with Running(tmp_path / "live", first) as run:
        assert [(await run.deployment.rollback("solver")).of for _ in range(3)] == [2, 1, 0]  # type: ignore[union-attr]


async def test_what_serves_is_named_however_many_releases_came_after(served: Running, tmp_path: Path) -> None:
    await served.deployment.publish("solver", weights(tmp_path, "good"), source="the good run")
    for number in range(12):
        await served.deployment.publish("solver", weights(tmp_path, f"t{number}"), share=0.1)
    told = served.deployment.status()["policies"]["solver"]
    assert [r["source"] for r in told["releases"] if r["version"] == told["version"]] == ["the good run"] and told["back"] == [0]
    assert told["first"] == {"source": str(served.first), "weights": str(served.first)}


async def test_the_client_in_another_process_needs_the_key_and_finds_the_deployment(served: Running, tmp_path: Path) -> None:
    control_file = served.folder / CONTROL
    assert stat.S_IMODE(control_file.stat().st_mode) == 0o600
    assert running(tmp_path) == [served.folder]
    a = weights(tmp_path, "a")

    def use() -> None:
        with Control(served.folder) as control:
            assert control.publish("solver", a, share=0.5)["version"] == 1
            assert control.status()["policies"]["solver"]["trial"] == {"version": 1, "share": 0.5}
            assert control.promote("solver")["version"] == 1
            with pytest.raises(GatewayError, match="no version of 'solver' is on trial"):
                control.promote("solver")
            assert control.rollback("solver")["of"] == 0  # type: ignore[index]
        base = served.gateway.url.removesuffix("/v1")
        for headers in ({}, {"authorization": "Bearer wrong"}):
            for method, path in (("GET", "status"), ("POST", "publish"), ("POST", "rollback"), ("POST", "promote")):
                assert httpx.request(method, f"{base}/admin/{path}", headers=headers, json={}).status_code == 401
        key = {"authorization": "Bearer admin-key"}
        for body in ([], {"policy": 3}, {"policy": "solver"}, {"policy": "solver", "weights": str(a), "share": "all"}):
            assert httpx.post(f"{base}/admin/publish", headers=key, json=body).status_code == 400
        assert httpx.post(f"{base}/admin/publish", headers=key, content=b"{").status_code == 400

    await asyncio.to_thread(use)
    assert "admin-key" not in (served.folder / HISTORY).read_text()
    with pytest.raises(GatewayError, match="no deployment runs in"):
        Control(tmp_path)


async def test_calls_of_an_episode_meet_one_version(served: Running, tmp_path: Path) -> None:
    await served.deployment.publish("solver", weights(tmp_path, "a"), share=0.5)
    met = Counter()
    for episode in range(40):
        (version,) = await versions_of(served.gateway, 3, **{"x-mappa-episode": f"e{episode}"})
        met[version] += 1
    assert 5 <= met["solver@v1"] <= 35


def test_a_canary_that_is_none_is_said(tmp_path: Path) -> None:
    folder = weights(tmp_path, "a")
    assert read_canary(folder) is None
    (folder / "canary.json").write_text('{"prompt_ids": [1], "completion_ids": [2], "logprobs": ["x"]}')
    with pytest.raises(GatewayError, match="is no canary"):
        read_canary(folder)
    (folder / "canary.json").write_text('{"prompt": 1}')
    with pytest.raises(GatewayError, match="is no canary"):
        read_canary(folder)


class Trained:
    """What a trainer saves of one policy."""

    def __init__(self, model: Path) -> None:
        self.model = model

    def save(self, folder: Path) -> None:
        shutil.copytree(self.model, folder / "policies" / "solver")


def said_by(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    from mappa_graph.cli import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        main(list(args))
    told = "".join(capsys.readouterr())
    assert done.value.code == code, told
    return " ".join(told.split())


def test_without_a_step_the_best_checkpoint_is_taken_and_the_last_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mappa_graph.trainers.checkpoint import save_checkpoint

    monkeypatch.setenv("COLUMNS", "400")
    judged, unjudged = tmp_path / "judged", tmp_path / "unjudged"
    for step in (1, 2):
        model = Trained(weights(tmp_path, f"w{step}"))
        save_checkpoint(judged / "checkpoints", step, model, {"best": {"iteration": 1}})
        save_checkpoint(unjudged / "checkpoints", step, model, {"best": {}})

    def taken(run: Path, *args: str) -> str:
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        said_by(capsys, "weights", str(run), "--out", str(out), *args)
        return (out / "solver" / "model.safetensors").read_text()

    assert taken(judged) == taken(judged, "--step", "best") == "xw1"
    assert taken(judged, "--step", "last") == "xw2"
    assert taken(unjudged) == taken(unjudged, "--step", "last") == "xw2"
    assert "has no best checkpoint" in said_by(capsys, "weights", str(unjudged), "--out", str(tmp_path / "o"), "--step", "best", code=1)
    shutil.rmtree(judged / "checkpoints" / "step-00000001")  # a best one that is gone is not passed over
    assert "checkpoint 1 of run" in said_by(capsys, "weights", str(judged), "--out", str(tmp_path / "o"), code=1)
    assert "--step best can't take effect" in said_by(capsys, "serve", "demo", "--step", "best", code=1)
    for share in ("nan", "inf", "0"):
        assert f"--share {float(share)} is no share" in said_by(capsys, "publish", str(judged), "--share", share, code=1)
    assert "--seconds nan can't be waited" in said_by(capsys, "status", "--seconds", "nan", code=1)


@pytest.mark.slow
def test_serve_publish_status_and_rollback_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mappa_graph.cli import main
    from mappa_graph.trainers.checkpoint import save_checkpoint
    from tests.fakes.tinymodel import make_tiny_model

    monkeypatch.setenv("COLUMNS", "400")
    models = [make_tiny_model(tmp_path / f"m{seed}", seed) for seed in range(2)]
    live = tmp_path / "live"
    environment = """
from langgraph.graph import START, StateGraph
from mappa_graph import Agent, Environment, Task
def build(models):
    return StateGraph(dict).add_node("a", lambda s: s).add_edge(START, "a").compile()
team = Environment("team", agents=[Agent("solver")], build_graph=build, tasks=[Task("t", "p")], grade=lambda t, s: True)
"""
    (tmp_path / "served_team.py").write_text(environment)
    save_checkpoint(tmp_path / "run" / "checkpoints", 3, Trained(models[0]), {"best": {"iteration": 3}})
    (tmp_path / "served.yaml").write_text(f"model: {models[0]}\nenvironment:\n  name: served_team:team\n")
    server = subprocess.Popen(
        [sys.executable, "-m", "mappa_graph.cli", "serve", "served.yaml", "--port", "0", "--run", str(live), "--from", "run"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "COLUMNS": "400", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        said = ""
        while "serving solver@v0" not in said:
            line = server.stdout.readline()
            assert line, said
            said += line
        main_args = ["--to", str(live)]
        with pytest.raises(SystemExit) as done:
            main(["publish", str(models[1]), "--agent", "solver", "--share", "0.5", *main_args])
        assert done.value.code == 0
        url = json.loads((live / CONTROL).read_text())["url"]
        reply = httpx.post(f"{url}/v1/chat/completions", json={**ASK, "model": "solver@v1"}, timeout=60)
        assert reply.json()["model"] == "solver@v1"
        assert "(first weights: run, best)" in said
        assert "first weights: run, best" in said_by(capsys, "status", *main_args)
        for args in (["publish", "--promote"], ["status"]):
            said_by(capsys, *args, *main_args)
        told = said_by(capsys, "rollback", *main_args)
        assert "solver: v2 serves: back to the first weights: run, best; there is nothing older" in told
        told = said_by(capsys, "rollback", *main_args, code=1)
        assert "every policy serves its first weights, solver (run, best): there is nothing older to go back to" in told
        assert httpx.get(f"{url}/health").json()["versions"] == {"solver": 2}
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()
    assert not (live / CONTROL).exists()
    with pytest.raises(SystemExit) as done:
        main(["status", *main_args])
    assert done.value.code == 1
    with pytest.raises((ConfigError, SystemExit)):
        main(["publish", str(models[1]), "--agent", "solver", "--promote", *main_args])

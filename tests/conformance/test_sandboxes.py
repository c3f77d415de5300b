"""What every kind of sandbox session keeps to, local or remote. A new kind passes by adding a pool to `pools`."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from mappa_graph.errors import SandboxError
from mappa_graph.sandboxes import Limits, RemotePool, SandboxPool, isolation, python_tool, run_code_blocks

LIMITS = Limits(cell_s=30, grace_s=2, output_chars=2000, output_mb=2)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A kernel gateway in a process of its own, as (address, token)."""
    pytest.importorskip("kernel_gateway")
    pytest.importorskip("websockets")
    folder = tmp_path_factory.mktemp("gateway")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address, token = f"http://127.0.0.1:{port}", secrets.token_hex(8)
    command = [sys.executable, "-m", "kernel_gateway", "--KernelGatewayApp.ip=127.0.0.1", f"--KernelGatewayApp.port={port}"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env={**os.environ, "KG_AUTH_TOKEN": token}, stdout=log, stderr=log)
    try:
        for _ in range(300):
            try:
                if httpx.get(f"{address}/api", headers={"Authorization": f"token {token}"}).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        else:
            pytest.fail((folder / "log").read_text()[-2000:])
        yield address, token
    finally:
        server.terminate()
        server.wait(20)


@asynccontextmanager
async def local(kind: str) -> AsyncIterator[SandboxPool]:
    if kind != "none" and not isolation.describe_isolation()["usable"]:
        pytest.skip("no bubblewrap here")
    pool = SandboxPool(size=0 if kind == "process" else 1, isolation="none" if kind == "none" else "bubblewrap", limits=LIMITS, preload=())
    if kind == "process":
        path, version = isolation._find()
        pool.isolation = isolation.Isolation("process", path, version, reason="forced")
    elif kind == "full" and pool.isolation.wall != "full":
        pytest.skip("no namespaces inside namespaces here")
    elif kind == "shared user":
        path, version = isolation._find()
        pool.isolation = isolation.Isolation("full", path, version)
        if isolation._trial(pool.isolation) is not None:
            pytest.skip("no user namespaces here")
    async with pool:
        yield pool


@pytest.fixture(params=["full", "shared user", "process", "none", "gateway"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    if request.param == "gateway":
        address, token = request.getfixturevalue("gateway")
        opened: Any = RemotePool(address, token, limits=LIMITS)
    else:
        opened = local(request.param)
    async with opened as pool:
        yield pool


async def test_a_session_keeps_the_contract(pool: Any) -> None:
    """One session taken through everything: a start per behaviour would make the slow kinds slower still."""
    async with pool.session(files={"data/in.txt": b"given"}) as box:
        shown = await box.run("import sys\nx = 20\nprint('out'); print('err', file=sys.stderr)\nx + 1")
        assert (shown.status, shown.stdout, shown.stderr, shown.result) == ("ok", "out\n", "err\n", "21")
        assert shown.error is None and shown.files == () and shown.duration_s > 0 and not shown.truncated

        state = await box.run("x + 2", name="python", tool_call_id="call_1")
        assert (state.result, state.tool_call_id) == ("22", "call_1")

        failed = await box.run("def f():\n    raise ValueError('bad \\x1b[31mred')\nf()")
        assert failed.status == "error" and failed.error is not None
        assert failed.error.type == "ValueError" and "\x1b" not in failed.error.message + failed.error.traceback
        assert "in f()" in failed.error.traceback or "f()" in failed.error.traceback

        broken = await box.run("def broken(:")
        assert broken.error is not None and broken.error.type == "SyntaxError"

        wrote = await box.run("open('a.txt', 'w').write('abc'); text = open('data/in.txt').read(); text")
        assert wrote.result == "'given'"
        assert [(f.path, f.change, f.size) for f in wrote.files] == [("a.txt", "created", 3)]
        assert wrote.files[0].sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        gone = await box.run("import os; os.remove('a.txt'); open('data/in.txt', 'w').write('2')")
        assert [(f.path, f.change) for f in gone.files] == [("a.txt", "deleted"), ("data/in.txt", "changed")]

        await box.put("sub/p.bin", b"\x00\x01")
        assert await box.get("sub/p.bin") == b"\x00\x01"
        assert await box.files() == {"data/in.txt": 1, "sub/p.bin": 2}
        for name in ("nothing", "sub"):
            with pytest.raises(SandboxError):
                await box.get(name)
        with pytest.raises(SandboxError, match="not inside the workspace"):
            await box.put("../out", b"")
        await box.run("os.symlink('/etc/passwd', 'link')")
        with pytest.raises(SandboxError):
            await box.get("link")

        long = await box.run("print('a' * 5000 + 'end')")
        assert long.truncated and long.stdout.startswith("aaa") and long.stdout.rstrip().endswith("end") and len(long.stdout) < 2200

        image = await box.run("from IPython.display import HTML, display; display(HTML('<b>hi</b>'))")
        assert [f.path.rpartition(".")[2] for f in image.files] == ["html"]
        assert await box.get(image.files[0].path) == b"<b>hi</b>"

        slow = await box.run("import time\nwhile True: time.sleep(0.05)", timeout_s=0.5)
        assert slow.status == "timeout" and "interrupted" in slow.note
        assert (await box.run("x")).result == "20"

        await box.restart()
        lost = await box.run("x")
        assert lost.error is not None and lost.error.type == "NameError"
        assert (await box.run("open('data/in.txt').read()")).result == "'2'"

        died = await box.run("import os; os._exit(5)")
        assert died.status == "killed" and "lost" in died.note
        assert (await box.run("1 + 1")).result == "2"
        assert "data/in.txt" in await box.files()


async def test_a_cell_that_ignores_interrupts_is_killed_and_says_that_state_is_lost(pool: Any) -> None:
    async with pool.session() as box:
        await box.run("x = 1")
        stuck = await box.run("import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)", timeout_s=0.5)
        assert stuck.status == "killed"
        assert "variables and imports are lost" in stuck.note
        after = await box.run("x")
        assert after.error is not None and after.error.type == "NameError"


async def test_a_cancelled_cell_stops_and_the_session_goes_on(pool: Any) -> None:
    async with pool.session() as box:
        await box.run("x = 1")
        task = asyncio.create_task(box.run("import time\nfor i in range(600): time.sleep(0.1)"))
        await asyncio.sleep(0.7)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        started = time.monotonic()
        assert (await box.run("x")).result == "1"
        assert time.monotonic() - started < 30  # not the minute the cell wanted


async def test_two_sessions_share_nothing(pool: Any) -> None:
    async with pool.session(files={"mine": b"1"}) as one, pool.session() as two:
        await one.run("x = 1")
        assert (await two.run("x")).status == "error"
        assert await two.files() == {}
        assert set(await one.files()) == {"mine"}


async def test_agents_reach_it_as_a_tool_and_by_code_blocks(pool: Any) -> None:
    async with pool.session() as box:
        message = await python_tool(box).ainvoke({"type": "tool_call", "name": "python", "id": "c7", "args": {"code": "print(6 * 7)"}})
        assert (message.content, message.artifact.stdout, message.artifact.tool_call_id) == ("42", "42\n", "c7")
        ran = await run_code_blocks(box, "```python\ny = 2\n```\ntext\n```python\n1 / 0\n```\n```python\ny\n```")
        assert [e.status for e in ran] == ["ok", "error"]


async def test_a_closed_session_says_so(pool: Any) -> None:
    async with pool.session() as box:
        pass
    with pytest.raises(SandboxError, match="not open"):
        await box.run("1")

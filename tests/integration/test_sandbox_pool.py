"""Pool and sessions with real kernels: what persists, what is cleaned up, and what happens when something dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mappa_graph.errors import SandboxError
from mappa_graph.sandboxes import Ledger, Limits, SandboxPool, describe_isolation, python_tool

if not describe_isolation()["usable"]:
    pytest.skip("no bubblewrap here", allow_module_level=True)

QUICK = Limits(cell_s=20, grace_s=1, memory_mb=512)


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(size=1, limits=QUICK, preload=("numpy", "pandas", "no_such_module_at_all")) as opened:
        yield opened


def descendants() -> set[int]:
    """Processes below this one, through any number of generations."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.add(child)
            waiting.append(child)
    return found


def footprint(pool: SandboxPool) -> tuple[int, int, int, int]:
    """Processes, descriptors, workspaces and socket folders."""
    fds = len(os.listdir("/proc/self/fd"))
    return len(descendants()), fds, len(os.listdir(pool.sessions)), len(os.listdir(pool._folders.connections))


async def settled(pool: SandboxPool, expected: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    for _ in range(200):
        if footprint(pool) <= expected:
            break
        await asyncio.sleep(0.05)
    return footprint(pool)


async def test_a_session_that_runs_no_code_takes_no_kernel(pool: SandboxPool) -> None:
    await pool.warmed()
    before = pool.warm
    async with pool.session(files={"a": b"1"}) as box:
        assert await box.files() == {"a": 1}
        assert pool.warm == before
        assert (await box.run("open('a').read()")).result == "'1'"
        assert pool.warm == before - 1 or pool.describe()["sessions"] == 1


async def test_kernels_are_never_used_twice(pool: SandboxPool) -> None:
    seen = set()
    for _ in range(4):
        async with pool.session() as box:
            ran = await box.run("import os, numpy\n'state' in globals(), numpy.random.rand(), os.listdir('.')")
            assert ran.result is not None and ran.result.startswith("(False") and ran.result.endswith("[])")
            await box.run("state = 1; open('left', 'w').write('x')")
            seen.add(ran.result)
    assert len(seen) == 4  # and forks don't draw the same random numbers


async def test_agents_import_what_they_wrote_and_see_output_of_child_processes(pool: SandboxPool) -> None:
    async with pool.session(files={"helper.py": "def f(): return 'from helper'"}) as box:
        assert (await box.run("import helper; helper.f()")).result == "'from helper'"
        ran = await box.run("import os, subprocess\nos.system('echo from sh')\nsubprocess.run(['echo', 'from child'])\n!echo magic")
        for text in ("from sh", "from child", "magic"):
            assert text in ran.stdout


async def test_parallel_work_inside_a_session(pool: SandboxPool) -> None:
    async with pool.session() as box:
        code = """
from multiprocessing import get_context
def f(x): return x * x
with get_context('fork').Pool(2) as p: print(p.map(f, range(4)))
"""
        assert (await box.run(code)).stdout == "[0, 1, 4, 9]\n"


async def test_a_preload_that_is_missing_does_not_stop_the_pool(pool: SandboxPool) -> None:
    async with pool.session() as box:
        ran = await box.run("import sys; 'pandas' in sys.modules, 'debugpy' in sys.modules and sys.modules['debugpy']")
        assert ran.result == "(True, None)"


async def test_cells_of_one_session_run_one_after_the_other(pool: SandboxPool) -> None:
    async with pool.session() as box:
        await box.run("order = []")
        await asyncio.gather(*(box.run(f"order.append({i})") for i in range(8)))
        assert (await box.run("order")).result == str(list(range(8)))


def test_a_session_works_from_other_loops_and_threads(pool: SandboxPool) -> None:
    async def enter() -> Any:
        return await pool.session().__aenter__()

    box = asyncio.run(enter())
    results = [asyncio.run(box.run("x = 1; x")).result]
    thread = threading.Thread(target=lambda: results.append(asyncio.run(box.run("x + 1")).result))
    thread.start()
    thread.join()
    results.append(box.run_sync("x + 2").result)
    box.close_sync()
    assert results == ["1", "2", "3"]


async def test_an_unused_pool_says_how_to_open_it() -> None:
    pool = SandboxPool(size=0)
    with pytest.raises(SandboxError, match="async with SandboxPool"):
        async with pool.session():
            pass


async def test_a_table_is_previewed_inside(pool: SandboxPool) -> None:
    async with pool.session(files={"t.csv": b"a,b\n1,x\n2,y\n", "notes.md": b"# hi", "broken.pkl": b"nonsense"}) as box:
        await box.run("import pandas as pd, builtins\npd.read_csv('t.csv').to_pickle('t.pkl')\npd.read_csv = None; builtins.open = None")
        table, pickled = await box.preview("t.csv"), await box.preview("t.pkl", rows=1)
        for seen in (table, pickled):
            assert (seen.shape, [c[0] for c in seen.columns], seen.error) == ((2, 2), ["a", "b"], "")
        assert "y" in table.head and "y" not in pickled.head
        assert (await box.preview("notes.md")).head == "# hi"
        assert "UnpicklingError" in (await box.preview("broken.pkl")).error
        assert (await box.preview("none.csv")).error == "no such file"
        assert str(table).startswith("t.csv: pandas")
    async with pool.session(files={"t.csv": b"a\n1\n"}) as box:
        assert (await box.preview("t.csv")).shape == (1, 1)  # no cell has run


async def test_the_ledger_follows_real_executions(pool: SandboxPool) -> None:
    class Declared:
        def __init__(self, name: str, writes: list[str]) -> None:
            self.name, self.writes = name, writes
            self.reads: list[str] = []

    ledger = Ledger([Declared("one", ["a.pkl"]), Declared("two", ["b.pkl"])])
    async with pool.session() as box:
        ledger.record("one", "a1", await box.run("open('a.pkl', 'w').write('1')"))
        ledger.record("two", "a2", await box.run("open('a.pkl', 'w').write('2')"))
    assert ledger.who_broke("a.pkl").agents == ("two",)
    assert ledger.missing() == {"b.pkl": ("two",)}


async def test_the_tool_works_in_an_agent_with_the_session_as_context(pool: SandboxPool) -> None:
    pytest.importorskip("langchain")
    from langchain.agents import create_agent
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage

    class Scripted(GenericFakeChatModel):
        def bind_tools(self, tools: Any, **_: Any) -> Any:
            return self

    call = {"name": "python", "args": {"code": "print(6 * 7)"}, "id": "c1"}
    for by_context in (True, False):
        async with pool.session() as box:
            tool = python_tool() if by_context else python_tool(lambda box=box: box)
            app: Any = create_agent(Scripted(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("done")])), [tool])
            state = await app.ainvoke({"messages": [("user", "go")]}, context={"box": box} if by_context else None)
            answer = state["messages"][-2]
            assert (answer.content, answer.artifact.status, answer.artifact.tool_call_id) == ("42", "ok", "c1")


async def test_when_the_fork_server_dies_sessions_are_lost_and_the_pool_recovers() -> None:
    async with SandboxPool(size=1, limits=QUICK, preload=()) as pool:
        await pool.warmed()
        async with pool.session() as box:
            await box.run("open('kept', 'w').write('x'); x = 1")
            running = asyncio.create_task(box.run("import time; open('up', 'w').close(); time.sleep(60)"))
            for _ in range(600):
                if "up" in os.listdir(next(pool.sessions.glob("*/kept")).parent):
                    break
                await asyncio.sleep(0.05)
            assert pool._server is not None and pool._server.pid is not None
            os.kill(pool._server.pid, signal.SIGKILL)
            ran = await running
            assert ran.status == "lost"
            assert "lost" in ran.note
            again = await box.run("open('kept').read()")
            assert (again.status, again.result) == ("ok", "'x'")
        async with pool.session() as other:
            assert (await other.run("1")).result == "1"


async def test_many_sessions_in_a_row_leak_nothing(pool: SandboxPool) -> None:
    async def once(i: int) -> None:
        async with pool.session(files={"f": b"1"}) as box:
            if i % 2:
                assert (await box.run(f"{i}")).result == str(i)

    for i in range(6):
        await once(i)
    await pool.warmed()
    await asyncio.sleep(0.3)
    before = footprint(pool)
    for i in range(200):
        await once(i)
    await pool.warmed()
    after = await settled(pool, before)
    assert after <= before, (before, after)
    assert after[1] <= before[1] + 2


async def test_sixteen_sessions_at_once_leak_nothing(pool: SandboxPool) -> None:
    await pool.warmed()
    before = footprint(pool)

    async def once(i: int) -> str | None:
        async with pool.session() as box:
            await box.run(f"x = {i}; open('f', 'w').write('{i}')")
            return (await box.run("x, open('f').read()")).result

    assert await asyncio.gather(*(once(i) for i in range(16))) == [f"({i}, '{i}')" for i in range(16)]
    await pool.warmed()
    after = await settled(pool, before)
    assert after[0] <= before[0] and after[2:] == before[2:], (before, after)
    assert after[1] <= before[1] + 2, (before, after)


async def test_cancelled_sessions_leak_nothing(pool: SandboxPool) -> None:
    await pool.warmed()
    before = footprint(pool)

    async def once() -> None:
        async with pool.session() as box:
            await box.run("import time; time.sleep(15)")

    for delay in (0.0, 0.005, 0.05, 0.3):
        task = asyncio.create_task(once())
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await pool.warmed()
    after = await settled(pool, before)
    assert after[0] <= before[0] and after[2:] == before[2:], (before, after)
    assert pool.describe()["sessions"] == 0


async def test_a_session_waits_for_a_free_kernel_and_says_when_none_came() -> None:
    async with SandboxPool(size=0, max_kernels=1, wait_s=1.0, limits=QUICK, preload=()) as pool:
        async with pool.session() as one, pool.session() as two:
            await one.run("1")
            with pytest.raises(SandboxError, match="max_kernels"):
                await two.run("1")
            await one.close()
            assert (await two.run("2")).result == "2"


async def test_a_closed_pool_leaves_nothing_even_with_open_sessions() -> None:
    before = descendants()
    pool = SandboxPool(size=2, limits=QUICK, preload=())
    await pool.__aenter__()
    box = await pool.session().__aenter__()
    running = asyncio.create_task(box.run("import time; open('up', 'w').close(); time.sleep(60)"))
    root = pool.sessions.parent
    for _ in range(600):
        if list(pool.sessions.glob("*/up")):
            break
        await asyncio.sleep(0.05)
    await pool.aclose()
    assert (await running).status in ("killed", "lost")
    assert not root.exists()
    for _ in range(100):
        if descendants() <= before:
            break
        await asyncio.sleep(0.05)
    assert descendants() <= before
    with pytest.raises(SandboxError):
        await box.run("1")
    await pool.aclose()


async def test_isolation_none_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with SandboxPool(size=0, isolation="none", preload=()) as pool:
            assert pool.describe()["wall"] == "none"
    assert "ISOLATION IS OFF" in caplog.text


SCRIPT = """
import asyncio, signal, sys
from mappa_graph.sandboxes import SandboxPool
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without
async def main():
    async with SandboxPool(size=1, preload=(), root=sys.argv[1]) as pool:
        async with pool.session() as box:
            await box.run("import subprocess; subprocess.Popen(['sleep', sys_arg])".replace("sys_arg", repr(sys.argv[2])))
            print("up", flush=True)
            if sys.argv[3] == "error":
                sys.stdin.readline()
                raise RuntimeError("on purpose")
            await box.run("import time; time.sleep(60)")
asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGINT", "error"])
def test_nothing_outlives_the_owner_however_it_ends(tmp_path: Path, end: str) -> None:
    mark = str(50_000 + os.getpid() % 10_000)
    owner = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), mark, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdin is not None and owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    assert sleeping(mark)
    if end == "error":
        owner.stdin.write("\n")
        owner.stdin.flush()
    else:
        owner.send_signal(getattr(signal, end))
    owner.wait(60)
    owner.stdin.close()
    owner.stdout.close()
    for _ in range(200):
        if not sleeping(mark):
            break
        time.sleep(0.05)
    assert not sleeping(mark)
    with SandboxPool(size=0, preload=(), root=tmp_path) as pool:
        assert [p.name for p in tmp_path.iterdir()] == [pool.sessions.parent.name]  # what a killed owner left is swept
    assert list(tmp_path.iterdir()) == []


def sleeping(mark: str) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes().split(b"\0")[:2] == [b"sleep", mark.encode()]:
                    return True
            except OSError:
                continue
    return False

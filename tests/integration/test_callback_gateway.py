"""Gateway and callback together: every action finds the tokens of its own call, and what only one of the two saw is counted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from typer.testing import CliRunner

from mappa_graph import Agent, CoachCallback, Policy, TraceStore
from mappa_graph.cli import app as cli
from mappa_graph.gateway import Gateway
from mappa_graph.record import Episode
from tests.fakes.engine import ScriptedEngine


def app(gateway: Gateway, *, unseen: bool = False) -> Any:
    solver = Policy("solver", base_url=gateway.url)

    async def solve(state: MessagesState) -> Any:
        if unseen:
            await solver.ainvoke("nobody sees this", config={"callbacks": []})
        return {"messages": [await solver.ainvoke(state["messages"])]}

    def again(state: MessagesState) -> Any:
        return {"messages": [solver.invoke([*state["messages"], ("user", "and again?")])]}

    graph = StateGraph(MessagesState).add_node("solve", solve).add_node("again", again)
    return graph.add_edge(START, "solve").add_edge("solve", "again").compile()


@pytest.mark.parametrize("how", ["ainvoke", "messages", "v2", "v3"])
async def test_every_action_has_the_tokens_of_its_own_call(tmp_path: Path, how: str) -> None:
    with TraceStore(tmp_path / "t.db") as store:
        async with Gateway(ScriptedEngine("solver"), store) as gateway:
            graph = app(gateway)
            async with CoachCallback(None, store=store, agents=[Agent("solver")]) as callback:

                async def run(number: int) -> Any:
                    id = str(uuid4())
                    callback.begin(Episode(id))
                    asked = {"messages": [("user", f"question {number}")]}
                    config: Any = {"callbacks": [callback], "run_id": UUID(id)}
                    if how == "ainvoke":
                        await graph.ainvoke(asked, config)
                    elif how == "messages":
                        async for _ in graph.astream(asked, config, stream_mode="messages"):
                            pass
                    else:
                        events = graph.astream_events(asked, config, version=how)
                        async for _ in await events if how == "v3" else events:
                            pass
                    return await callback.finish(id)

                traces = await asyncio.gather(*(run(i) for i in range(6)))
        for number, trace in enumerate(traces):
            assert len(trace.calls) == len(trace.actions) == 2
            for action in trace.actions:
                call = trace.calls[action.id]
                assert call.completion_ids
                assert call.policy == action.policy == "solver"
                assert call.agent == "solver"
                assert call.text == action.output
                assert [m["role"] for m in call.messages] == [m["role"] for m in action.messages]
                assert action.messages[0]["content"] == f"question {number}"
                assert call.messages[0]["content"] == action.messages[0]["content"]
            assert len(trace.actions[1].messages) == 3
        assert list(store.orphan_calls()) == []


async def test_a_call_that_no_callback_saw_is_an_orphan_with_its_agent(tmp_path: Path) -> None:
    with TraceStore(tmp_path / "t.db") as store:
        async with Gateway(ScriptedEngine("solver"), store) as gateway:
            async with CoachCallback(None, store=store, agents=[Agent("solver")]) as callback:
                await app(gateway, unseen=True).ainvoke({"messages": [("user", "go")]}, {"callbacks": [callback]})
                await callback.drain()
        (orphan,) = store.orphan_calls()
        assert orphan.messages[0]["content"] == "nobody sees this"
        assert orphan.agent == "solver"
        assert store.counts()["calls"] == 3


OTHER_LANGUAGE = """
import json, sys, urllib.request
body = json.dumps({"model": "solver", "messages": [{"role": "user", "content": "no LangChain here"}]}).encode()
headers = {"content-type": "application/json", "x-mappa-agent": "outsider", "x-mappa-episode": sys.argv[2]}
print(json.load(urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/chat/completions", body, headers)))["id"])
"""


async def test_calls_from_bare_threads_agenerate_and_another_program_are_kept_counted_and_attributed(tmp_path: Path) -> None:
    with TraceStore(tmp_path / "trace.db") as store:
        async with Gateway(ScriptedEngine("solver"), store) as gateway:
            solver = Policy("solver", base_url=gateway.url)
            plain = Policy("critic", policy="solver", base_url=gateway.url)

            async def solve(state: MessagesState) -> Any:
                with ThreadPoolExecutor(1) as pool:
                    await asyncio.wrap_future(pool.submit(solver.invoke, "in a bare thread"))
                await plain.agenerate([[HumanMessage("agenerate")]])
                return {"messages": [await solver.ainvoke(state["messages"])]}

            graph = StateGraph(MessagesState).add_node("solve", solve).add_edge(START, "solve").compile()
            episode = str(uuid4())
            async with CoachCallback(None, store=store, agents=[Agent("solver"), Agent("critic", policy="solver")]) as callback:
                callback.begin(Episode(episode))
                await graph.ainvoke({"messages": [("user", "go")]}, {"callbacks": [callback], "run_id": UUID(episode)})
                trace = await callback.finish(episode)
            command = [sys.executable, "-c", OTHER_LANGUAGE, gateway.url, episode]
            ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
            assert ran.returncode == 0, ran.stderr
        assert [a.agent for a in trace.actions] == ["solver"] and len(trace.calls) == 1
        orphans = {str(c.messages[0]["content"]): c for c in store.orphan_calls()}
        assert {said: c.agent for said, c in orphans.items()} == {
            "in a bare thread": "solver",
            "agenerate": "critic",
            "no LangChain here": "outsider",
        }
        outside = orphans["no LangChain here"]
        assert (outside.id, outside.episode, outside.policy) == (ran.stdout.strip(), episode, "solver")
        assert all(c.completion_ids and c.policy == "solver" for c in orphans.values())
        assert store.orphan_counts() == {"solver": 1, "critic": 1, "outsider": 1}
        assert store.orphan_counts(episode) == {"outsider": 1}
    shown = CliRunner().invoke(cli, ["traces", "list", str(tmp_path)])
    assert shown.exit_code == 0 and "3 orphan calls" in " ".join(shown.output.split())
    shown = CliRunner().invoke(cli, ["traces", "show", str(tmp_path), episode[:6]])
    assert shown.exit_code == 0 and "1 orphan call (" in " ".join(shown.output.split())

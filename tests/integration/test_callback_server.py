"""An app that `langgraph dev` serves, which refuses blocking calls on its loop, is recorded as any other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mappa_graph import TraceStore
from tests.fakes.apps import Numbered
from tests.fakes.openai_server import OpenAIServer
from tests.fakes.recorded import check_joins, nodes

LANGGRAPH = Path(sys.executable).with_name("langgraph")
APP = """
import os
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from mappa_graph import Agent, CoachCallback, Verdict

class Fives:
    name = "fives"
    async def score(self, case):
        return Verdict(5.0)

model = ChatOpenAI(model="solver", base_url=os.environ["GATEWAY"], api_key="x")
callback = CoachCallback(Fives(), store=os.environ["TRACES"], agents=[Agent("solver")])

async def solve(state: MessagesState):
    return {"messages": [await model.ainvoke(state["messages"])]}

def again(state: MessagesState):
    return {"messages": [model.invoke(state["messages"])]}

builder = StateGraph(MessagesState).add_node("solve", solve).add_node("again", again)
builder.add_edge(START, "solve").add_edge("solve", "again")
graph = builder.compile().with_config(callbacks=[callback])
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, OpenAIServer, Path]]:
    (tmp_path / "agent.py").write_text(APP)
    (tmp_path / "langgraph.json").write_text(json.dumps({"dependencies": ["."], "graphs": {"agent": "./agent.py:graph"}}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with OpenAIServer(Numbered()) as server:
        root = str(Path(__file__).parents[2])
        env = {**os.environ, "GATEWAY": server.url, "TRACES": str(tmp_path / "t.db"), "PYTHONPATH": root, "LANGSMITH_TRACING": "false"}
        command = [str(LANGGRAPH), "dev", "--no-browser", "--no-reload", "--port", str(port)]
        with open(tmp_path / "log.txt", "w") as log:
            process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(240):
                assert process.poll() is None, (tmp_path / "log.txt").read_text()
                try:
                    if httpx.get(f"{url}/ok", timeout=2).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.25)
            yield url, server, tmp_path
        finally:
            process.terminate()
            process.wait(20)


def test_an_app_served_by_langgraph_dev_is_recorded_and_scored(served: tuple[str, OpenAIServer, Path]) -> None:
    url, server, folder = served
    thread = httpx.post(f"{url}/threads", json={}).json()["thread_id"]
    asked = {"assistant_id": "agent", "input": {"messages": [{"role": "user", "content": "go"}]}}
    for _ in range(2):
        answer = httpx.post(f"{url}/threads/{thread}/runs/wait", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
    deadline = time.monotonic() + 30
    traces = []
    while time.monotonic() < deadline and len(traces) < 2:
        time.sleep(0.25)
        if (folder / "t.db").exists():
            with TraceStore(folder / "t.db", read_only=True) as store:
                traces = list(store.traces())
    log = (folder / "log.txt").read_text()
    assert len(traces) == 2, log
    assert "recording failed" not in log
    assert "BlockingError" not in log
    for trace in traces:
        assert [n[0] for n in nodes(trace)] == ["solve", "again"]
        assert trace.edges == ((0, 1),)
        assert trace.episode.thread_id == thread
        assert [v.score for v in trace.verdicts.values()] == [5.0, 5.0]
        assert check_joins(trace, server) == 2

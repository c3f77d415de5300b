"""An app in production traced by LangSmith alone: its exported runs find their tokens at the gateway by the id in the message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.tracers.langchain import LangChainTracer
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langsmith import Client

from mappa_graph import TraceStore
from mappa_graph.gateway import Gateway
from mappa_graph.gateway.engine import Request
from tests.fakes.engine import ScriptedEngine
from tests.fakes.langsmith import LangSmith


def echo(request: Request) -> dict[str, Any]:
    """Every question has an answer and tokens of its own."""
    number = int(str(request.messages[-1]["content"]).split()[-1])
    return {"text": f"answer {number}", "prompt_ids": (1, number), "completion_ids": (2, number)}


def app(url: str) -> Any:
    """A plain LangGraph app: nothing of this package in it, but where the server is."""
    model = ChatOpenAI(model="solver", base_url=url, api_key="x")

    async def first(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def second(state: MessagesState) -> Any:
        number = int(str(state["messages"][0].content).split()[-1])
        return {"messages": [model.invoke([*state["messages"], ("user", f"and of {number + 100}")])]}

    graph = StateGraph(MessagesState).add_node("first", first).add_node("second", second)
    return graph.add_edge(START, "first").add_edge("first", "second").compile()


@pytest.mark.parametrize("stream_mode", [None, "messages"])
async def test_an_exported_langsmith_trace_joins_the_gateways_calls(tmp_path: Path, stream_mode: Any) -> None:
    with LangSmith() as service, TraceStore(tmp_path / "t.db") as store:
        client = Client(api_url=service.url, api_key="x", auto_batch_tracing=True)
        async with Gateway(ScriptedEngine("solver", answer=echo), store) as gateway:
            config: Any = {"callbacks": [LangChainTracer(client=client, project_name="production")]}
            for number in range(3):
                asked = {"messages": [("user", f"question {number}")]}
                if stream_mode is None:
                    await app(gateway.url).ainvoke(asked, config)
                else:
                    async for _ in app(gateway.url).astream(asked, config, stream_mode=stream_mode):
                        pass
        client.flush(timeout=60)
        exported = json.loads(json.dumps(list(service.runs.values())))
        client.cleanup()
        models = [run for run in exported if run["run_type"] == "llm"]
        assert len(models) == 6 and {run["extra"]["metadata"]["langgraph_node"] for run in models} == {"first", "second"}
        joined = set()
        for run in models:
            message = run["outputs"]["generations"][0][0]["message"]["kwargs"]
            # A streamed message has the call's id for its own, a whole one has it among what the response said of itself.
            id = message["id"] if stream_mode else message["response_metadata"]["id"]
            call = store.call(id)
            assert call is not None and call.text == message["content"]
            assert call.messages[-1]["content"] == run["inputs"]["messages"][0][-1]["kwargs"]["content"]
            number = int(call.text.split()[-1])
            assert (call.prompt_ids, call.completion_ids) == ((1, number), (2, number))
            joined.add(call.id)
        assert len(joined) == 6 == store.counts()["calls"]

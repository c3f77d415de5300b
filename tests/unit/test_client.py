import asyncio

from langchain_openai import ChatOpenAI

from mappa_graph.client import LoopClient, detached
from tests.fakes.openai_server import OpenAIServer


def test_a_detached_model_answers_on_several_loops_one_after_the_other() -> None:
    with OpenAIServer(lambda body: "hello") as server:
        model = detached(ChatOpenAI(model="m", base_url=server.url, api_key="x", max_retries=0).bind(stop=["x"]))
        said = [asyncio.run(model.ainvoke("hi")).content for _ in range(3)]
    assert said == ["hello"] * 3
    assert [c["body"].get("stop") for c in server.calls.values()] == [["x"]] * 3


def test_a_detached_model_answers_on_two_loops_at_once() -> None:
    with OpenAIServer(lambda body: "hello", delay_s=0.05) as server:
        model = detached(ChatOpenAI(model="m", base_url=server.url, api_key="x", max_retries=0))

        async def several() -> list[str]:
            return [str(m.content) for m in await asyncio.gather(*(model.ainvoke("hi") for _ in range(5)))]

        async def both() -> list[list[str]]:
            return list(await asyncio.gather(asyncio.to_thread(lambda: asyncio.run(several())), several()))

        assert asyncio.run(both()) == [["hello"] * 5] * 2


def test_detaching_twice_or_what_has_no_client_changes_nothing() -> None:
    model = detached(ChatOpenAI(model="m", api_key="x"))
    assert isinstance(model.root_async_client._client, LoopClient)
    assert detached(model) is model
    assert detached("no model") == "no model"

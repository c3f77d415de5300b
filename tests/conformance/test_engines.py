"""What every engine must do, whichever it is.

`local` runs in process; `upstream` speaks HTTP to a gateway over a local engine of the same weights, which answers in vLLM's shape.
`tests/vllm/test_conformance.py` runs the same tests over a real vLLM.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mappa_graph.errors import EngineError
from mappa_graph.gateway import Chunk, Engine, Gateway, Request, RequestRefused
from mappa_graph.gateway.local import LocalEngine
from mappa_graph.gateway.upstream import UpstreamEngine
from tests.fakes.tinymodel import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_positions=256)


@pytest.fixture(params=["local", "upstream"])
async def engine(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Engine]:
    local = LocalEngine({"solver": folder}, threads=1)
    if request.param == "local":
        await local.start()
        yield local
        await local.stop()
        return
    async with Gateway(local) as gateway:
        upstream = UpstreamEngine(gateway.url, {"solver": "solver"})
        await upstream.start()
        yield upstream
        await upstream.stop()


def ask(text: str = "hello", **changes: Any) -> Request:
    return replace(Request("solver", 0, [{"role": "user", "content": text}], max_tokens=12, seed=1), **changes)


async def collect(engine: Engine, request: Request) -> list[Chunk]:
    return [chunk async for chunk in engine.stream(request)]


async def test_a_completion_has_exact_tokens_and_their_logprobs(engine: Engine, folder: Path) -> None:
    (made,) = await engine.complete(ask(temperature=0.7))
    reference = LocalEngine({"solver": folder}, threads=1)
    await reference.start()
    scored = await reference.score("solver", 0, made.prompt_ids, made.completion_ids, 0.7)
    await reference.stop()
    assert len(made.completion_ids) == 12 and made.finish_reason == "length"
    assert made.logprobs == pytest.approx(scored, abs=2e-5)


async def test_it_says_which_versions_it_has(engine: Engine) -> None:
    assert {policy: list(versions) for policy, versions in engine.models().items()} == {"solver": [0]}


async def test_a_seeded_call_gives_the_same_tokens_alone_and_in_a_crowd(engine: Engine) -> None:
    alone = await engine.complete(ask())
    crowd = [engine.complete(ask("x" * i, seed=i, temperature=0.5 + i % 3 / 2, max_tokens=4 + i)) for i in range(12)]
    together = (await asyncio.gather(*crowd[:6], engine.complete(ask()), *crowd[6:]))[6]
    assert [c.completion_ids for c in together] == [c.completion_ids for c in alone]
    assert (await engine.complete(ask(seed=2)))[0].completion_ids != alone[0].completion_ids


async def test_n_completions_differ_and_share_the_prompt(engine: Engine) -> None:
    made = await engine.complete(ask(n=4))
    assert [c.index for c in made] == [0, 1, 2, 3]
    assert len({c.completion_ids for c in made}) == 4 and len({c.prompt_ids for c in made}) == 1


async def test_greedy_repeats_itself_and_reports_the_distribution_at_one(engine: Engine) -> None:
    first, second = [(await engine.complete(ask(temperature=0.0, seed=s)))[0] for s in (1, 2)]
    assert first.completion_ids == second.completion_ids
    assert all(-math.inf < lp < -1e-4 for lp in first.logprobs)


async def test_a_stream_is_the_completion_in_pieces(engine: Engine) -> None:
    (whole,) = await engine.complete(ask(max_tokens=60, seed=5))
    chunks = [c for c in await collect(engine, ask(max_tokens=60, seed=5)) if c.usage is None]
    assert "".join(c.delta.get("content", "") for c in chunks) == whole.text
    assert tuple(i for c in chunks for i in c.token_ids) == whole.completion_ids
    assert tuple(x for c in chunks for x in c.logprobs) == pytest.approx(whole.logprobs, abs=1e-5)
    assert chunks[0].prompt_ids == whole.prompt_ids and all(c.prompt_ids is None for c in chunks[1:])
    assert [c.finish_reason for c in chunks if c.finish_reason] == [whole.finish_reason]
    assert len(chunks) > 5


async def test_a_stream_of_several_ends_each(engine: Engine) -> None:
    chunks = [c for c in await collect(engine, ask(n=3)) if c.usage is None]
    assert sorted(c.index for c in chunks if c.finish_reason) == [0, 1, 2]


async def test_a_stop_string_ends_the_text_and_keeps_its_tokens(engine: Engine) -> None:
    (free,) = await engine.complete(ask(max_tokens=60, seed=5))
    place = next(i for i in range(3, len(free.text)) if free.text[i].isprintable() and free.text[i].isascii())
    stop = free.text[place]
    expected = free.text[: free.text.index(stop)]
    (made,) = await engine.complete(ask(max_tokens=60, seed=5, stop=(stop,)))
    assert made.text == expected and made.finish_reason == "stop"
    assert made.completion_ids == free.completion_ids[: len(made.completion_ids)]
    assert len(made.completion_ids) < len(free.completion_ids)
    chunks = await collect(engine, ask(max_tokens=60, seed=5, stop=(stop,)))
    assert "".join(c.delta.get("content", "") for c in chunks) == expected


async def test_the_end_token_is_among_the_tokens_and_not_in_the_text(engine: Engine) -> None:
    made = await engine.complete(ask(n=64, max_tokens=200, temperature=1.5))
    ended = [c for c in made if c.finish_reason == "stop"]
    assert ended and all(c.completion_ids[-1] == 2 and "<|im_end|>" not in c.text for c in ended)
    assert all(2 not in c.completion_ids[:-1] for c in made)


async def test_the_alternatives_asked_for_come_in_openais_shape(engine: Engine) -> None:
    (made,) = await engine.complete(ask(top_logprobs=3))
    assert made.content_logprobs is not None and len(made.content_logprobs) == 12
    for entry, logprob in zip(made.content_logprobs, made.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(logprob, abs=1e-5)
        others = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(others) == 3 and others == sorted(others, reverse=True) and others[0] >= logprob - 1e-5


async def test_a_prompt_that_does_not_fit_is_refused_in_openais_shape(engine: Engine) -> None:
    for attempt in (engine.complete(ask("x" * 300)), collect(engine, ask("x" * 300))):
        with pytest.raises(RequestRefused) as refused:
            await attempt
        assert refused.value.status == 400
        assert b"context_length_exceeded" in (refused.value.body or str(refused.value.error).encode())


async def test_max_tokens_is_cut_to_what_the_context_leaves(engine: Engine) -> None:
    (made,) = await engine.complete(ask("x" * 200, max_tokens=10_000, temperature=0.01))
    assert len(made.prompt_ids) + len(made.completion_ids) == 256 or made.finish_reason == "stop"


async def test_what_it_can_not_do_is_refused_and_not_left_out(engine: Engine) -> None:
    try:
        (made,) = await engine.complete(ask(extra={"response_format": {"type": "json_object"}}, max_tokens=4))
    except RequestRefused as refused:
        assert refused.status == 400
    else:
        assert made.text.lstrip().startswith("{")
    try:
        (made,) = await engine.complete(ask(extra={"logit_bias": {"5": 100}}))
    except RequestRefused as refused:
        assert refused.status == 400
    else:
        assert set(made.completion_ids) == {5}


async def test_an_unknown_version_is_an_engine_error(engine: Engine) -> None:
    with pytest.raises(EngineError, match="solver@v9"):
        await engine.complete(ask(version=9))


async def test_an_abandoned_call_does_not_keep_others_from_ending(engine: Engine) -> None:
    stream = engine.stream(ask(max_tokens=200))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    task = asyncio.ensure_future(engine.complete(ask(max_tokens=200, n=8)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len((await engine.complete(ask()))[0].completion_ids) == 12


async def test_a_stopped_engine_says_so(folder: Path) -> None:
    engine = LocalEngine({"solver": folder}, threads=1)
    with pytest.raises(EngineError, match="not running"):
        await engine.complete(ask())
    await engine.start()
    running = asyncio.ensure_future(engine.complete(ask(max_tokens=200, n=16)))
    await asyncio.sleep(0.05)
    await engine.stop()
    with pytest.raises(EngineError, match="stopped"):
        await running
    await engine.stop()

"""Events of an upstream's stream that came together: as few chunks as say the same, and nothing of them lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from mappa_graph.codec import decode, encode
from mappa_graph.errors import EngineError
from mappa_graph.gateway.engine import Chunk, Request
from mappa_graph.gateway.events import Merger, events

CHAT = Request("solver", 0, ({"role": "user", "content": "hi"},))
WITH_LOGPROBS = Request("solver", 0, ({"role": "user", "content": "hi"},), top_logprobs=0)


class Pieces:
    """A body that comes in these pieces."""

    status = 200
    headers: Mapping[str, str] = {}

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    async def pieces(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part

    async def read(self) -> bytes:
        return b"".join(self._parts)


def choice(delta: dict[str, Any], *ids: int, index: int = 0, finish: str | None = None) -> dict[str, Any]:
    entries = [{"token": str(id), "logprob": -float(id)} for id in ids]
    return {"index": index, "delta": delta, "logprobs": {"content": entries}, "finish_reason": finish, "token_ids": list(ids)}


def merged(*choices: dict[str, Any], request: Request = CHAT, prompt_ids: tuple[int, ...] | None = None) -> list[Chunk]:
    return Merger(request).chunks(
        [encode({"choices": [one], **({"prompt_token_ids": prompt_ids} if i == 0 else {})}) for i, one in enumerate(choices)]
    )


def test_pieces_of_one_text_are_one_chunk_with_all_their_tokens() -> None:
    (chunk,) = merged(choice({"role": "assistant", "content": ""}), *(choice({"content": f"w{i} "}, i) for i in range(5)), prompt_ids=(7,))
    assert chunk.delta == {"content": "w0 w1 w2 w3 w4 "} and chunk.token_ids == (0, 1, 2, 3, 4)
    assert chunk.logprobs == (0.0, -1.0, -2.0, -3.0, -4.0) and chunk.prompt_ids == (7,) and chunk.content_logprobs is None


def test_a_server_without_tokens_is_merged_as_well() -> None:
    plain = [{"index": 0, "delta": {"content": text}, "finish_reason": None} for text in "abc"]
    (chunk,) = merged(*plain)
    assert chunk.delta == {"content": "abc"} and chunk.token_ids == () and chunk.logprobs == ()


def test_the_log_prob_entries_that_the_client_wants_stay_in_order() -> None:
    (chunk,) = merged(choice({"content": "a"}, 1), choice({"content": "b"}, 2, 3), request=WITH_LOGPROBS)
    assert [entry["token"] for entry in chunk.content_logprobs] == ["1", "2", "3"]


def test_thinking_text_tool_calls_and_the_end_are_chunks_of_their_own() -> None:
    call = {"tool_calls": [{"index": 0, "id": "t", "function": {"name": "f", "arguments": ""}}]}
    more = {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}
    chunks = merged(
        choice({"reasoning": "so"}, 1), choice({"reasoning": " far"}, 2), choice({"content": "x"}, 3), choice(call, 4), choice(more, 5),
        choice({"content": "y"}, 6, finish="tool_calls"),
    )  # fmt: skip
    assert [c.delta for c in chunks] == [{"reasoning": "so far"}, {"content": "x"}, call, more, {"content": "y"}]
    assert [c.token_ids for c in chunks] == [(1, 2), (3,), (4,), (5,), (6,)]
    assert [c.finish_reason for c in chunks] == [None, None, None, None, "tool_calls"]


def test_what_a_server_said_before_it_failed_is_given_out() -> None:
    merger = Merger(CHAT)
    chunks = merger.chunks([encode({"choices": [choice({"content": "a"}, 1)]}), b'{"error": {"message": "out of memory"}}', b"{}"])
    assert [c.delta for c in chunks] == [{"content": "a"}] and merger.error == {"message": "out of memory"}


def test_prompt_ids_come_with_the_first_chunk_of_each_index() -> None:
    merger = Merger(CHAT)
    first = merger.chunks(
        [encode({"prompt_token_ids": [7, 8], "choices": [choice({"content": "a"}, 1), choice({"content": "b"}, 2, index=1)]})]
    )
    later = merger.chunks([encode({"choices": [choice({"content": "c"}, 3)], "usage": {"completion_tokens": 3}})])
    assert [c.prompt_ids for c in first + later] == [(7, 8), (7, 8), None]
    assert merger.tokens == 3 and merger.usage == {"completion_tokens": 3}


def test_completions_of_one_request_are_not_mixed() -> None:
    chunks = merged(choice({"content": "a"}, 1), choice({"content": "b"}, 2, index=1), choice({"content": "c"}, 3))
    assert [(c.index, c.delta["content"]) for c in chunks] == [(0, "a"), (1, "b"), (0, "c")]


def test_a_piece_whose_tokens_do_not_match_its_log_probs_counts_for_none() -> None:
    lost = choice({"content": "b"}, 2)
    del lost["token_ids"]
    unknown = choice({"content": "d"}, 4)
    unknown["logprobs"]["content"][0]["logprob"] = None
    chunks = merged(choice({"content": "a"}, 1), lost, choice({"content": "c"}, 3), unknown)
    assert "".join(c.delta["content"] for c in chunks) == "abcd"
    # Fewer tokens than the server counted: the whole call is then kept without any.
    assert sum(len(c.token_ids) for c in chunks) < 4 and all(len(c.token_ids) == len(c.logprobs) for c in chunks)


@pytest.mark.parametrize("cut", range(1, 60, 7))
async def test_events_are_read_wherever_the_stream_is_cut(cut: int) -> None:
    data = b"".join(b"data: " + encode({"n": i, "text": "a\nb \u2028"}) + b"\r\n\r\n" for i in range(4)) + b": ping\n\ndata: [DONE]\n\n"
    parts = [data[i : i + cut] for i in range(0, len(data), cut)]
    seen = [decode(event) async for together in events(Pieces(*parts)) for event in together]
    assert [event["n"] for event in seen] == [0, 1, 2, 3] and all(event["text"] == "a\nb \u2028" for event in seen)


async def test_a_stream_that_ends_before_its_end_is_an_error() -> None:
    with pytest.raises(EngineError, match="broke off"):
        _ = [together async for together in events(Pieces(b'data: {"a": 1}\n\n'))]

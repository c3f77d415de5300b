"""The quick reader of whole replies: what it reads is what the general one reads, and what it does not know it leaves alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mappa_graph.codec import decode
from mappa_graph.gateway.engine import Request
from mappa_graph.gateway.events import Merger
from mappa_graph.gateway.replies import completions
from mappa_graph.gateway.upstream import _completion

CHAT = Request("solver", 0, ({"role": "user", "content": "hi"},))


def reply(**changes: Any) -> dict[str, Any]:
    choices = []
    for index in range(2):
        entries = [{"token": "x", "logprob": -i / 3, "bytes": [120], "top_logprobs": []} for i in range(3)]
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        message = {"role": "assistant", "content": f"text {index}", "reasoning": "hm", "tool_calls": [call] * index}
        choices.append(
            {"index": index, "message": message, "logprobs": {"content": entries}, "finish_reason": "stop", "token_ids": [1, 2, index]}
        )
    usage = {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    return {"id": "x", "object": "chat.completion", "choices": choices, "prompt_token_ids": [7, 8], "usage": usage, **changes}


def test_both_readers_agree() -> None:
    data = reply()
    quick = completions(json.dumps(data).encode())
    assert quick == [_completion(c, data["prompt_token_ids"], CHAT, None if i else data["usage"]) for i, c in enumerate(data["choices"])]
    assert quick is not None and quick[1].tool_calls and quick[0].extra == {"reasoning": "hm"} and quick[0].logprobs[2] == -2 / 3


def _changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    data = reply()
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("prompt_token_ids",), None),
        (("prompt_token_ids",), []),
        (("prompt_token_ids",), [1.5]),
        (("choices",), None),
        (("choices", 0, "token_ids"), [1]),
        (("choices", 0, "token_ids"), None),
        (("choices", 0, "logprobs"), None),
        (("choices", 0, "logprobs", "content", 0, "logprob"), None),
        (("choices", 0, "finish_reason"), "content_filter"),
        (("choices", 0, "message"), None),
        (("choices", 0, "index"), "0"),
        (("choices", 0, "index"), 2**70),
        (("choices", 0, "index"), -1),
        (("choices", 0, "message", "tool_calls"), 5),
    ],
)
def test_what_is_in_another_shape_is_left_to_the_general_reader(path: tuple[Any, ...], value: Any) -> None:
    assert completions(json.dumps(_changed(path, value)).encode()) is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"error": "x"}', b"[" * 100_000, b"\xff\xfe"])
def test_what_is_no_reply_is_left_as_well(body: bytes) -> None:
    assert completions(body) is None


def test_a_lone_surrogate_is_read_by_one_of_the_two() -> None:
    body = json.dumps(reply()).replace("text 0", "\\ud800").encode()
    quick = completions(body)
    assert (quick[0].text if quick is not None else decode(body)["choices"][0]["message"]["content"]) == "\ud800"


@pytest.mark.parametrize(
    "choice", [{"index": 2**70}, {"index": [0]}, {"index": None}, {"index": True}, {"index": 0, "finish_reason": ["stop"]}]
)
def test_the_general_reader_refuses_what_would_fail_in_the_store_with_others_beside_it(choice: dict[str, Any]) -> None:
    whole = {**reply()["choices"][0], **choice}
    with pytest.raises(ValueError, match=r"index|finish_reason"):
        _completion(whole, [1], CHAT, None)
    with pytest.raises(ValueError, match=r"index|finish_reason"):
        Merger(CHAT).chunks([json.dumps({"choices": [{**whole, "delta": {"content": "a"}}]}).encode()])

"""Tokens to text as they come, chat messages, tool calls in the text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mappa_graph.gateway import RequestRefused
from mappa_graph.gateway.text import TextStream, held_back, plain_messages, split_tool_calls


def decode(ids: Sequence[int]) -> str:
    """Byte tokens, with 256 as a special token that is left out."""
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def run(data: Sequence[int], **options: object) -> tuple[str, list[str], TextStream]:
    stream = TextStream(decode, **options)  # type: ignore[arg-type]
    pieces = []
    for id in data:
        pieces.append(stream.push(id))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    return "".join(pieces), pieces, stream


@pytest.mark.parametrize("text", ["", "plain", "Grüße 🙂 你好", "🙂" * 50, "a\ufffdb"])
def test_pieces_add_up_to_the_text_and_no_character_is_split(text: str) -> None:
    joined, pieces, _ = run(text.encode())
    assert joined == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


def test_random_bytes_add_up_to_what_decoding_them_at_once_gives() -> None:
    rng = random.Random(0)
    for _ in range(300):
        data = [rng.randrange(257) for _ in range(rng.randrange(150))]
        joined, _, stream = run(data)
        assert joined == decode(data) == stream.text
        assert len(stream._window) < 60, "the window must not grow with the text"


def test_text_goes_out_at_once_where_nothing_holds_it() -> None:
    _, pieces, _ = run(b"hello", stop=("zz",))
    assert pieces == ["h", "e", "l", "l", "o", ""]


def test_a_stop_string_is_never_given_out_not_even_in_part() -> None:
    joined, pieces, stream = run(b"one STO two STOP three", stop=("STOP", "never"))
    assert joined == "one STO two " and stream.stopped
    assert "one S" not in "".join(pieces[:5])


def test_the_first_of_several_stop_strings_wins() -> None:
    assert run(b"ab\n\nc END", stop=("END", "\n\n"))[0] == "ab"
    assert run("x🙂y".encode(), stop=("🙂",))[0] == "x"


def test_a_marker_holds_the_rest_until_the_end() -> None:
    joined, pieces, _ = run(b"say <tool_call>{}</tool_call>", marker="<tool_call>")
    assert "".join(pieces[:-1]) == "say " and joined == "say <tool_call>{}</tool_call>"


def test_held_back_is_the_longest_end_that_may_go_on_to_a_guard() -> None:
    assert held_back("abc", ("cd", "bcd")) == 2
    assert held_back("abc", ("x",)) == 0
    assert held_back("", ("x",)) == 0


def test_tool_calls_are_read_from_the_text() -> None:
    text = 'Let me see.<tool_call>\n{"name": "run", "arguments": {"code": "1+1"}}\n</tool_call>\n<tool_call>{"name": "stop"}</tool_call>'
    content, calls = split_tool_calls(text)
    assert content == "Let me see."
    assert [c["function"] for c in calls] == [{"name": "run", "arguments": '{"code": "1+1"}'}, {"name": "stop", "arguments": "{}"}]
    assert len({c["id"] for c in calls}) == 2


@pytest.mark.parametrize(
    "bad", ["<tool_call>{</tool_call>", "<tool_call>[]</tool_call>", '<tool_call>{"name": 1}</tool_call>', "<tool_call>{}"]
)
def test_what_is_no_tool_call_stays_text(bad: str) -> None:
    assert split_tool_calls(f"x {bad}") == (f"x {bad}", ())


def test_messages_are_made_plain_for_templates() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    odd = {"id": "d", "type": "function", "function": {"name": "f", "arguments": "{oops"}}
    plain = plain_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
            {"role": "assistant", "content": None, "tool_calls": [call, odd]},
        ]
    )
    assert plain[0] == {"role": "system", "content": "be brief"}
    assert [c["function"]["arguments"] for c in plain[1]["tool_calls"]] == [{"a": 1}, "{oops"]
    assert call["function"]["arguments"] == '{"a": 1}', "what is kept with the call must not change"
    with pytest.raises(RequestRefused, match=r"messages\[0\].content has a part of type 'image_url'"):
        plain_messages([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])

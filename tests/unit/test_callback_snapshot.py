from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.types import Command, Send
from pydantic import BaseModel

from mappa_graph.capture.snapshot import CommandSnap, Interner, Message, SendSnap, found, frozen


def test_a_message_is_copied_once_and_again_when_its_content_changed() -> None:
    interner = Interner()
    history: list[Any] = [HumanMessage(f"m{i}", id=str(i)) for i in range(40)]
    first = interner.messages(history)
    history.append(AIMessage("new", id="new"))
    again = interner.messages(history)
    assert all(a is b for a, b in zip(first, again, strict=False))
    history[3].content = "changed"
    history.append(AIMessage("newer", id="newer"))
    third = interner.messages(history)
    assert [m.text for m in third][:5] == ["m0", "m1", "m2", "changed", "m4"]
    assert [m.text for m in first][3] == "m3"
    assert sum(a is not b for a, b in zip(again, third, strict=False)) == 1
    assert [m.text for m in third][-2:] == ["new", "newer"]


def test_an_equal_message_made_anew_is_the_one_known_and_two_answers_without_ids_are_two() -> None:
    interner = Interner()
    one, same = interner.messages([HumanMessage("hi", id="1")])[0], interner.messages([HumanMessage("hi", id="1")])[0]
    assert one is same
    answers = [interner.message(ToolMessage("ok", tool_call_id="c")) for _ in range(2)]
    assert answers[0] is not answers[1]
    calls: Any = [{"name": "f", "args": {"a": a}, "id": "c", "type": "tool_call"} for a in (1, 2)]
    a, b = (interner.message(AIMessage("", id="2", tool_calls=[call])) for call in calls)
    assert [m.tool_calls[0]["args"] for m in (a, b)] == [{"a": 1}, {"a": 2}]


def test_a_copy_does_not_follow_later_changes() -> None:
    blocks: list[Any] = [{"type": "text", "text": "one"}]
    call: Any = {"name": "f", "args": {"list": [1]}, "id": "c", "type": "tool_call"}
    live = AIMessage(blocks, tool_calls=[call])
    copy = Interner().message(live)
    live.content[0]["text"] = "two"  # type: ignore[index]
    live.tool_calls[0]["args"]["list"].append(2)
    assert copy.text == "one"
    assert copy.openai()["content"] == "one"
    assert copy.tool_calls[0]["args"] == {"list": [1]}


def test_calls_whose_arguments_did_not_parse_keep_their_text() -> None:
    live = AIMessage("", invalid_tool_calls=[{"name": "f", "args": "{broken", "id": "c", "error": None, "type": "invalid_tool_call"}])
    assert Interner().message(live).openai()["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{broken"}}
    ]


@dataclass
class Plain:
    x: int
    deep: Any


class Model(BaseModel):
    y: int = 2


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_states_of_any_kind_are_copied_and_what_is_foreign_is_named_only() -> None:
    value = {"a": Plain(1, [Model()]), "b": Hostile(), "c": (1, "two", None), "m": [HumanMessage("hi")]}
    out = frozen(value, Interner())
    assert out["a"] == {"x": 1, "deep": [{"y": 2}]}
    assert out["b"].endswith(".Hostile>")
    assert out["c"] == [1, "two", None]
    assert isinstance(out["m"][0], Message)
    assert [m.text for m in found(out)] == ["hi"]


def test_a_large_or_deep_state_is_cut() -> None:
    wide = frozen({"rows": list(range(100_000))}, Interner())
    assert len(wide["rows"]) < 1000
    assert "more" in wide["rows"][-1]
    deep: Any = "end"
    for _ in range(50):
        deep = [deep]
    assert "end" not in str(frozen(deep, Interner()))
    loop: dict[str, Any] = {}
    loop["self"] = loop
    assert "…" in str(frozen(loop, Interner()))


def test_commands_and_sends_keep_their_targets_and_the_object_that_was_sent() -> None:
    arg = {"x": 1}
    sent = frozen([Send("worker", arg)], Interner())
    assert isinstance(sent[0], SendSnap)
    assert sent[0].arg is arg
    command = frozen(Command(goto=["a", Send("b", arg)], update={"x": 1}, resume=3), Interner())
    assert isinstance(command, CommandSnap)
    assert command.goto[0] == "a"
    assert (command.update, command.resume) == ({"x": 1}, True)

"""What is done to an agent's text before anyone else reads it. Agents' text is hostile: nothing here trusts it.

Three things matter. Thinking belongs to the agent alone, so it is taken off before the text travels, also where the chat template
opened it and only the closing tag shows. Control tokens are broken up, because the engine puts plain message content through a chat
template and would obey a quoted `<|im_end|>`. And everything is capped, head and tail, so that one endless print cannot fill the
next prompt.
"""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
_TAG = re.compile(r"</?think>")
_PIPED = re.compile(r"<(?=[|｜])")
_NAMED = re.compile(
    r"(<|\[)(?=/?(?:s|bos|eos|pad|unk|mask|start_of_turn|end_of_turn|INST|SYS|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS)[>\]])"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def split_thinking(text: str, *, opened: bool = False) -> tuple[str, str]:
    """`(thinking, rest)` of a completion, in one pass.

    A closing tag that nothing opened marks all before it as thinking, an opening tag that nothing closes all after it. `opened` says that
    the chat template opened the thinking: then a completion without a closing tag is thinking from end to end.
    """
    if opened and CLOSE not in text:
        return text.replace(OPEN, "").strip(), ""
    thinking: list[str] = []
    rest: list[str] = []
    inside, start = False, 0
    for tag in _TAG.finditer(text):
        (thinking if inside else rest).append(text[start : tag.start()])
        start = tag.end()
        if tag.group() == CLOSE and not inside:
            thinking += rest
            rest = []
        inside = tag.group() == OPEN
    (thinking if inside else rest).append(text[start:])
    return "\n".join(t for t in map(str.strip, thinking) if t), "".join(rest).strip()


def spoken(text: str, *, opened: bool = False) -> str:
    """The completion without its thinking."""
    return split_thinking(text, opened=opened)[1]


def neutral(text: str) -> str:
    """`text` with control tokens of known chat templates broken by a space, terminal escapes and unprintable characters removed."""
    text = _UNPRINTABLE.sub("", _ESCAPES.sub("", text))
    text = _NAMED.sub(r"\1 ", _PIPED.sub("< ", text))
    return text.replace(OPEN, "< think>").replace(CLOSE, "< /think>")


def cap(text: str, limit: int) -> str:
    """At most about `limit` characters: the head and the tail, so that the end of a traceback survives."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters cut ...]\n{text[-tail:]}"


def quoted(text: str, limit: int, *, opened: bool = False) -> str:
    """An agent's completion as the next prompt may hold it: no thinking, no control tokens, capped."""
    return cap(neutral(spoken(text, opened=opened)), limit)

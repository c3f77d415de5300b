"""What is read out of an agent's message: its code, whether it says that it is done, and what is left as a summary."""

from __future__ import annotations

import re

from mappa_graph.graphs.mathchat.text import cap, neutral, quoted, spoken

DONE = "DONE"
"""Alone on a line, outside of code: the agent's part is over."""
_FENCED = re.compile(r"^[ \t]{0,3}(`{3,}|~{3,})[^\n]*\n.*?(?:^[ \t]{0,3}\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_MARKER = re.compile(rf"^[ \t*#>-]*{DONE}[ \t*.!]*$", re.MULTILINE)


def without_code(text: str) -> str:
    """The message without its fenced blocks; one that is never closed goes to the end."""
    return _FENCED.sub("", text)


def says_done(text: str) -> bool:
    """Whether a line outside of code is the marker."""
    return bool(_MARKER.search(without_code(text)))


def summary_of(texts: list[str]) -> str:
    """What an agent leaves to those after it: the words of its last message that has any, without code and marker."""
    for text in reversed(texts):
        words = re.sub(r"\n{3,}", "\n\n", _MARKER.sub("", without_code(text))).strip()
        if words:
            return words
    return ""


__all__ = ["DONE", "cap", "neutral", "quoted", "says_done", "spoken", "summary_of", "without_code"]

"""Text that hostile code wrote, made fit for a record: bounded, and free of terminal escapes."""

from __future__ import annotations

import re
from collections import deque

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~]?)")
_CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 127, *range(128, 160), 0x2028, 0x2029])


def clean(text: str) -> str:
    """`text` without terminal escapes and control characters; of a line redrawn with carriage returns, the last drawing. Linear time."""
    text = _ESCAPES.sub("", text.encode("utf-8", "replace").decode("utf-8"))
    text = text.replace("\r\n", "\n").translate(_CONTROLS)
    if "\r" not in text:
        return text
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


class HeadTail:
    """Collects text and keeps the first and last `limit // 2` characters."""

    def __init__(self, limit: int) -> None:
        self.half = max(1, limit // 2)
        self.head = ""
        self.tail: deque[str] = deque()
        self.tail_size = 0
        self.total = 0

    def write(self, text: str) -> None:
        self.total += len(text)
        room = self.half - len(self.head)
        if room > 0:
            self.head += text[:room]
            text = text[room:]
        if not text:
            return
        text = text[-self.half :]
        self.tail.append(text)
        self.tail_size += len(text)
        while self.tail_size - len(self.tail[0]) >= self.half:
            self.tail_size -= len(self.tail.popleft())

    @property
    def truncated(self) -> bool:
        return self.total > 2 * self.half

    def text(self) -> str:
        """What was kept, cleaned; where the middle is missing a line says how much."""
        tail = "".join(self.tail)
        if not self.truncated:
            return clean(self.head + tail)
        return f"{clean(self.head)}\n[... {self.total - 2 * self.half} characters cut ...]\n{clean(tail[-self.half :])}"


def shorten(text: str, limit: int) -> str:
    """`text` cleaned, with head and tail kept past `limit` characters."""
    kept = HeadTail(limit)
    kept.write(text)
    return kept.text()

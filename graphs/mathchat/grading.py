"""Whether the answer in the last box equals the reference. Deterministic: no model, no coach.

Plain numbers and simple fractions, nearly all answers, are compared right here, exactly. Anything else goes to math-verify in a child
process that is killed when it takes too long: its own time limits need the main thread's signals, and a box may hold `9^{9^{9}}`.
The text is hostile: everything read from it is bounded before it is looked at.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
import time
import weakref
from fractions import Fraction
from functools import cache
from pathlib import Path

from mappa_graph.errors import ConfigError
from mappa_graph.record import Outcome

from .arithmetic import number
from .text import neutral, spoken

MAX_ANSWER = 400
"""Characters of an answer that is still looked at."""
MAX_DEPTH = 60
COMPARE_S = 5.0
"""Seconds one comparison by math-verify may take."""
_START_S = 120.0
_ROUNDING = Fraction(1, 1000)
"""Decimals that differ by less may be one number rounded, which math-verify judges."""
_BOX = "\\boxed"
_PROSE = re.compile(r"\s+\([A-Za-z][A-Za-z ,.;]*\)\s*$")
_SPACING = re.compile(r"\\[,;:! ]|~|\$|\\left|\\right|\\displaystyle")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?:\D|$))")
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{(-?\d{1,40})\}\{(\d{1,40})\}")
_RATIO = re.compile(r"([+-]?\d{1,40})\s*/\s*(\d{1,40})")
_TOWER = re.compile(r"(?:\^|\*\*)\s*[({\s]*-?(?:\d{4,}|[^\s)}]*(?:\^|\*\*))|\d{60,}|\d{4,}\s*!|!\s*!")


def grade(completion_text: str, reference: str) -> Outcome:
    """Success if the last `\\boxed{}` outside thinking equals the reference.

    A reference may name alternatives ("080 or 081 (both were accepted)"). Safe in any thread, and for any text; never raises
    for what the text holds. Raises `ConfigError` where an answer is not a plain number and math-verify is not installed.
    """
    answer = boxed(spoken(completion_text))
    quick = _without_help(answer, reference)
    if quick is not None:
        return quick
    assert answer is not None
    if _TOWER.search(answer) or max(map(answer.count, "([{")) > MAX_DEPTH:
        return _wrong(answer, reference, "is too much to be compared with")
    for one in alternatives(reference):
        same = _comparer().same(answer, one)
        if same is None:
            return _wrong(answer, reference, f"could not within {COMPARE_S:g} s be compared with")
        if same:
            return _right(answer)
    return _wrong(answer, reference, "is not")


def quick_grade(completion_text: str, reference: str) -> Outcome | None:
    """As `grade`, in microseconds; None where the answer and the reference are not plain numbers and don't read the same."""
    return _without_help(boxed(spoken(completion_text)), reference)


def same_number(answer: str | None, reference: str) -> bool | None:
    """Whether two plain answers are equal; None where that takes more than reading numbers."""
    if answer is None:
        return False
    unsure = False
    for one in alternatives(reference):
        if _tidy(answer) == _tidy(one):
            return True
        a, b = _value(answer), _value(one)
        if a is not None and a == b:
            return True
        unsure = unsure or a is None or b is None or ("." in answer + one and abs(a - b) < _ROUNDING)
    return None if unsure else False


def boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` of a text without thinking (braces balanced); None where there is no whole one."""
    end = len(text)
    for _ in range(4):
        start = text.rfind(_BOX, 0, end)
        if start < 0:
            return None
        found = _braced(text, start + len(_BOX))
        if found is not None:
            return found.strip()
        end = start
    return None


def alternatives(reference: str) -> list[str]:
    """The answers that a reference accepts: "080 or 081 (both were accepted)" -> ["080", "081"]."""
    plain = _PROSE.sub("", reference.strip())
    parts = [part.strip() for part in re.split(r"\s+or\s+", plain) if part.strip()]
    return parts or [reference.strip()]


def _braced(text: str, position: int) -> str | None:
    while position < len(text) and text[position].isspace():
        position += 1
    if not text.startswith("{", position):
        return None
    depth, start = 0, position + 1
    for i in range(position, min(len(text), position + MAX_ANSWER * 4)):
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[start:i]
    return None


def _without_help(answer: str | None, reference: str) -> Outcome | None:
    if answer is None:
        return Outcome(False, "no boxed answer")
    if not answer:
        return Outcome(False, "no boxed answer: the box is empty", answer="")
    if len(answer) > MAX_ANSWER:
        return _wrong(answer, reference, f"has more than {MAX_ANSWER} characters, so it is not")
    same = same_number(answer, reference)
    if same is None:
        return None
    return _right(answer) if same else _wrong(answer, reference, "is not")


def _right(answer: str) -> Outcome:
    return Outcome(True, "the answer equals the reference", answer=_shown(answer))


def _wrong(answer: str, reference: str, why: str) -> Outcome:
    return Outcome(False, f"the answer {_shown(answer, 80)} {why} {_shown(reference, 80)}", answer=_shown(answer))


def _shown(text: str, limit: int = 200) -> str:
    text = " ".join(neutral(text[: 2 * limit]).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _tidy(text: str) -> str:
    return " ".join(_SPACING.sub("", text).split()).rstrip(".")


def _value(text: str) -> Fraction | None:
    if len(text) > MAX_ANSWER:
        return None
    text = _THOUSANDS.sub("", _tidy(text)).replace("−", "-")
    match = _FRACTION.fullmatch(text)
    if match:
        return None if int(match[3]) == 0 else Fraction(int(match[2]), int(match[3])) * (-1 if match[1] == "-" else 1)
    match = _RATIO.fullmatch(text)
    if match:
        return None if int(match[2]) == 0 else Fraction(int(match[1]), int(match[2]))
    return number(text)


class Comparer:
    """math-verify in a child process: one question at a time, killed when it takes too long, started again for the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def same(self, answer: str, reference: str, timeout_s: float = COMPARE_S) -> bool | None:
        """Whether the two are mathematically equal; None where that could not be said in time."""
        with self._lock:
            child = self._running()
            question = json.dumps({"answer": answer, "reference": reference}).encode() + b"\n"
            try:
                assert child.stdin is not None
                child.stdin.write(question)
                child.stdin.flush()
            except OSError:
                self._stop()
                return None
            reply = _line(child, timeout_s)
            if reply is None:
                self._stop()
                return None
            same = json.loads(reply)["same"]
            return None if same is None else bool(same)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._owner == os.getpid() and self._child.poll() is None:
            return self._child
        child = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("compare.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath},
        )
        self._child, self._owner = child, os.getpid()
        weakref.finalize(self, child.kill)
        ready = _line(child, _START_S)
        if ready is None or not json.loads(ready).get("ready"):
            self._stop()
            why = "it did not start" if ready is None else json.loads(ready)["error"]
            raise ConfigError(f"math-verify can't be used to compare answers: {why}", hint="pip install 'mappa-graph[math]'")
        return child

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()
            self._child = None


@cache
def _comparer() -> Comparer:
    return Comparer()


def _line(child: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """The child's next line, None if it takes longer or the child ends."""
    assert child.stdout is not None
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        piece = os.read(child.stdout.fileno(), 65536)
        if not piece:
            return None
        line += piece
    return line

"""The child process of `grading.Comparer`: answers `{"answer", "reference"}` lines with `{"same": true | false | null}`.

Runs as a script of its own, so that it needs nothing but math-verify. It has no secrets, little memory, and is killed by its parent when
a question takes too long.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys

MEMORY = 2 << 30


def main() -> None:
    """Serves questions until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        import math_verify
    except ImportError as error:
        reply(replies, {"ready": False, "error": str(error)})
        return
    sys.set_int_max_str_digits(10_000)
    reply(replies, {"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        reply(replies, {"same": same(math_verify, question["answer"], question["reference"])})


def same(math_verify: object, answer: str, reference: str) -> bool | None:
    """Whether math-verify holds the two equal; None where it fails on them."""
    parse, verify = math_verify.parse, math_verify.verify  # type: ignore[attr-defined]
    try:
        target = parse(f"\\boxed{{{reference}}}", parsing_timeout=None)
        given = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
        return bool(verify(target, given, timeout_seconds=None))
    except (Exception, RecursionError, MemoryError):  # noqa: BLE001 - whatever a hostile answer breaks, it is not shown to be equal
        return None


def reply(replies: object, data: dict[str, object]) -> None:
    """Writes one line."""
    replies.write(json.dumps(data) + "\n")  # type: ignore[attr-defined]
    replies.flush()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()

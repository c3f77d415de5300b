"""When a provider fails: which failures are tried again, how long to wait, and what the rate-limit headers say.

`Pause` is shared by all requests of a coach: one reply that says "come back in 20 s" holds them all, instead of each finding out for
itself. A wait longer than the coach's `max_wait_s` is not sat out: the request fails, and the action stays pending.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import tenacity

from ..errors import CoachError

_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|h|m|s)", re.IGNORECASE)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class RateLimited(CoachError):
    """The provider asks for a wait that is longer than allowed."""


def status_of(error: BaseException) -> int | None:
    """HTTP status of a provider's error, whichever library it comes from."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "http_status", "code", "status"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and 100 <= value < 600:
                return value
    return None


def headers_of(error: BaseException) -> Mapping[str, str]:
    headers = getattr(getattr(error, "response", None), "headers", None)
    return {str(k).lower(): str(v) for k, v in headers.items()} if headers else {}


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: time-outs, lost connections, 429, 5xx. Our own refusals never do."""
    if isinstance(error, CoachError):
        return False
    status = status_of(error)
    if status is not None:
        return status in _AGAIN or status < 300  # a body that can't be read under a good status is a broken gateway's
    if isinstance(error, TimeoutError | ConnectionError | httpx.TransportError | asyncio.IncompleteReadError):
        return True
    return any(word in type(error).__name__ for word in ("Timeout", "Connection", "RateLimit", "Overloaded", "Unavailable"))


def wait_asked(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that a reply's headers ask to wait, or None.

    Reads `retry-after-ms`, `retry-after` (seconds or an HTTP date), and `x-ratelimit-reset-*` or `anthropic-ratelimit-*-reset` where
    the matching `-remaining` is 0.
    """
    now = time.time() if now is None else now
    headers = {k.lower(): v for k, v in headers.items()}
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return max(0.0, milliseconds / 1000)
    after = headers.get("retry-after")
    if after is not None:
        asked = _moment(after, now)
        if asked is not None:
            return asked
    waits: list[float] = []
    for name, value in headers.items():
        if "ratelimit" in name and "reset" in name and _number(headers.get(name.replace("reset", "remaining"))) == 0:
            asked = _moment(value, now)
            if asked is not None:
                waits.append(asked)
    return max(waits, default=None)


def _moment(text: str, now: float) -> float | None:
    """Seconds from now: a number, a duration like "6m0s", an HTTP date, or an ISO date."""
    number = _number(text)
    if number is not None:
        return max(0.0, number - now if number > 1e9 else number)
    parts = _DURATION.findall(text)
    if parts and "".join(n + u for n, u in parts).lower() == text.replace(" ", "").lower():
        return sum(float(n) * _UNITS[u.lower()] for n, u in parts)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (TypeError, ValueError):
        pass
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp() - now)
    except ValueError:
        return None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


class Pause:
    """A moment before which no request of a coach is sent. `clock` and `sleep` can be replaced in tests."""

    def __init__(self, max_wait_s: float, *, clock: Any = time.monotonic, sleep: Any = asyncio.sleep) -> None:
        self.max_wait_s = max_wait_s
        self._clock = clock
        self.sleep = sleep
        self._until = 0.0

    def ask(self, seconds: float | None) -> None:
        """Holds all requests for some seconds from now; a shorter wait never shortens a longer one."""
        if seconds:
            self._until = max(self._until, self._clock() + seconds)

    async def wait(self) -> None:
        """Sleeps out the pause. Raises `RateLimited` if it is longer than `max_wait_s`."""
        while (left := self._until - self._clock()) > 0:
            if left > self.max_wait_s:
                raise RateLimited(
                    f"the provider asks to wait {left:.0f} s, longer than max_wait_s {self.max_wait_s:.0f}",
                    hint="score what is pending later, ask for fewer requests at once (concurrency), or raise max_wait_s",
                )
            await self.sleep(left)


def retrying(retries: int, pause: Pause, *, longest_s: float = 30.0, on_retry: Any = None) -> tenacity.AsyncRetrying:
    """Up to `retries` further tries after transient failures: full-jitter back-off from 0.5 s, or what the headers ask."""

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        asked = wait_asked(headers_of(error)) if error is not None else None
        if asked is not None:
            pause.ask(asked)
            return 0.0  # the pause, shared by all requests, is waited out before the next try
        return random.uniform(0.0, min(longest_s, 0.5 * 2 ** (state.attempt_number - 1)))

    return tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(retries + 1),
        wait=wait,
        retry=tenacity.retry_if_exception(is_transient),
        reraise=True,
        before_sleep=on_retry,
        sleep=pause.sleep,
    )

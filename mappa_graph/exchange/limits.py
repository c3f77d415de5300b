"""Asking services that limit how often they are asked, and never saying a key.

A service that answers 429 says when to come back (`Retry-After`); one that fails in passing (5xx, a lost connection) is asked again after
a growing pause. A refusal (401, 403, 404) is the user's to mend and ends at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import ConfigError

T = TypeVar("T")


class Missing(ConfigError):
    """What was asked for is not there (404)."""


ATTEMPTS = 8
_LONGEST_PAUSE_S = 300.0
_KEYS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def patient(
    ask: Callable[[], T], what: str, *, progressed: Callable[[], Any] | None = None, sleep: Callable[[float], None] = time.sleep
) -> T:
    """What `ask` returns, asked again while the service asks for patience, up to `ATTEMPTS` times without progress.

    `progressed()` says how far it has come: another answer than after the last failure starts the count anew. Raises `ConfigError` for a
    refusal and when patience ends.
    """
    from tenacity import RetryCallState, Retrying, retry_if_exception

    failures = 0
    last: Any = object()

    def pause(state: RetryCallState) -> float:
        # The pause is worked out before it is asked whether to stop.
        nonlocal failures, last
        here = progressed() if progressed is not None else None
        failures = 1 if progressed is not None and here != last else failures + 1
        last = here
        assert state.outcome is not None
        asked = retry_after(state.outcome.exception())
        return min(_LONGEST_PAUSE_S, asked if asked is not None else 0.5 * 2.0 ** (failures - 1))

    retrying = Retrying(retry=retry_if_exception(passing), stop=lambda _: failures >= ATTEMPTS, wait=pause, sleep=sleep, reraise=True)
    try:
        return retrying(ask)
    except ConfigError:
        raise
    except Exception as error:
        if not _of_a_service(error):
            raise
        if status_of(error) == 404:
            raise Missing(f"{what}: not found: {scrubbed(error)}") from None
        raise ConfigError(f"{what} can't be had: {scrubbed(error)}", hint="what has come is kept; the same command goes on") from None


def passing(error: BaseException) -> bool:
    """Whether an error may pass by itself."""
    status = status_of(error)
    if status is not None:
        return status == 429 or status >= 500 or status == 408
    name = type(error).__name__
    return name in ("LangSmithRateLimitError", "LangSmithConnectionError", "LangSmithAPIError", "LangSmithRequestTimeout") or isinstance(
        error, ConnectionError | TimeoutError
    )


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status that an error, or what it was raised from, tells of."""
    response = _response(error)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def retry_after(error: BaseException | None) -> float | None:
    """Seconds to wait, as the service said."""
    headers = getattr(_response(error), "headers", None) or {}
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        from email.utils import parsedate_to_datetime

        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except (TypeError, ValueError):
            return None


def _response(error: BaseException | None) -> Any:
    seen = 0
    while error is not None and seen < 8:
        response = getattr(error, "response", None)
        if response is not None:
            return response
        error = error.__cause__ or error.__context__
        seen += 1
    return None


def _of_a_service(error: BaseException) -> bool:
    return status_of(error) is not None or type(error).__module__.split(".")[0] in ("langsmith", "requests", "urllib3", "mlflow", "httpx")


def scrubbed(error: BaseException) -> str:
    """An error's text without the value of any key in the environment."""
    text = f"{type(error).__name__}: {error}"
    for name, value in os.environ.items():
        if len(value) >= 6 and any(word in name.upper() for word in _KEYS):
            text = text.replace(value, f"${name}")
    return text

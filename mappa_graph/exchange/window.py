"""Which part of a service's traces to ask for, when some of it was imported before.

A cursor says from when on (`floor`) and up to when (`newest`) a source was read. A later import begins an hour before `newest`, since
a trace may have been running then, unless it is asked for older traces than `floor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

OVERLAP_S = 3600.0


def begin(cursor: Any, since: datetime | None) -> datetime | None:
    """The start of what has to be read; None for the very beginning."""
    newest = cursor.get("newest") if isinstance(cursor, Mapping) else None
    if not isinstance(newest, int | float) or not covers(cursor, since):
        return since
    again = datetime.fromtimestamp(max(0.0, newest - OVERLAP_S), UTC)
    return again if since is None else max(since, again)


def covers(cursor: Mapping[str, Any], since: datetime | None) -> bool:
    """Whether what was read reaches back to `since`."""
    floor = cursor.get("floor")
    return floor is None or (since is not None and since.timestamp() >= floor)


def cursor_of(cursor: Any, since: datetime | None, newest: float) -> dict[str, Any]:
    """The cursor after what began at `newest` was read, in an import asked for from `since` on, that went on from `cursor`."""
    floor = None if since is None else since.timestamp()
    if isinstance(cursor, Mapping) and isinstance(cursor.get("newest"), int | float) and covers(cursor, since):
        floor, newest = cursor.get("floor"), max(newest, cursor["newest"])
    return {"floor": floor, "newest": newest}

"""One base class, and one type per boundary a failure can cross.

A bad episode is data: whatever fails is recorded once with the `kind` of its boundary and the name of its type, left out
of training, counted and shown. An error that is the user's to mend (`ConfigError`, `TaskError`) is printed without a traceback;
its message names the thing, the value it had, and the way out.
"""

from __future__ import annotations

from typing import ClassVar


class MappaError(Exception):
    """Base of every error that this package raises on purpose."""

    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n  {hint}")
        self.hint = hint


class ConfigError(MappaError):
    """A setting is unknown, out of range, or can't take effect."""

    kind = "config"


class GatewayError(MappaError):
    """The gateway can't be started, reached, or can't do what was asked of it."""

    kind = "gateway"


class EngineError(MappaError):
    """A model could not be loaded, or failed while it generated or scored tokens."""

    kind = "engine"


class SandboxError(MappaError):
    """A sandbox could not be made or was lost; an agent's own failing code is an `Execution`, never this."""

    kind = "sandbox"


class CoachError(MappaError):
    """A coach failed to give a verdict."""

    kind = "coach"


class StoreError(MappaError):
    """The trace store can't be opened, written, or read."""

    kind = "store"


class TaskError(MappaError):
    """A task file can't be read, or a row of it is not a task."""

    kind = "task"


class EpisodeError(MappaError):
    """A graph, its input, or its grading function failed."""

    kind = "episode"


class TrainerError(MappaError):
    """An update was refused, or a checkpoint can't be written or read."""

    kind = "trainer"


class DeadlineError(MappaError):
    """An episode, a transition or a call ran past its deadline."""

    kind = "deadline"


def describe(error: BaseException) -> tuple[str, str, str]:
    """`(kind, type name, message)` of any exception, as it is recorded; foreign types get kind "foreign"."""
    kind = error.kind if isinstance(error, MappaError) else "foreign"
    return kind, type(error).__name__, str(error) or repr(error)

"""Frozen values as JSON-ready data."""

from __future__ import annotations

from typing import Any

from ..record import Execution, to_json
from .snapshot import CommandSnap, Message, SendSnap


class Renderer:
    """Writes a message out where the episode's transitions first hold it, and by its id from then on."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._hold: list[Message] = []

    def json(self, value: Any) -> Any:
        if isinstance(value, Message):
            if id(value) in self._seen:
                return value.reference()
            self._seen.add(id(value))
            self._hold.append(value)
            return value.openai() | {"id": value.id} if value.id else value.openai()
        if isinstance(value, dict):
            return {k: self.json(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.json(v) for v in value]
        if isinstance(value, CommandSnap):
            data = {"goto": [self.json(g) for g in value.goto], "update": self.json(value.update)}
            return {"command": {k: v for k, v in data.items() if v}}
        if isinstance(value, SendSnap):
            return {"send": value.node}
        if isinstance(value, Execution):
            return to_json(value)
        return value


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

"""From the messages of one cell to the parts of an `Execution`. Every field of a message may hold anything."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from mappa_graph.record import ExecutionErrorInfo

from .limits import MB, Limits
from .output import HeadTail, shorten
from .wire import Message

_KEPT = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "application/pdf": "pdf",
    "image/svg+xml": "svg",
    "text/html": "html",
}
_TEXT = ("svg", "html")
_DISPLAYS = 20


class Recorder:
    """Feed it a cell's messages; read the result afterwards."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.streams = {"stdout": HeadTail(limits.output_chars), "stderr": HeadTail(limits.output_chars)}
        self.result: str | None = None
        self.error: ExecutionErrorInfo | None = None
        self.displays: list[tuple[str, bytes]] = []
        """(file extension, content) of images, documents and HTML shown, in order."""
        self.seen = 0
        """Characters of output so far."""

    @property
    def flooded(self) -> bool:
        return self.seen > self.limits.output_mb * MB

    @property
    def truncated(self) -> bool:
        return any(stream.truncated for stream in self.streams.values())

    def feed(self, message: Message) -> None:
        content = message.content
        match message.kind:
            case "stream":
                self._write(str(content.get("name")), content.get("text"))
            case "execute_result":
                data = _mapping(content.get("data"))
                text = data.get("text/plain")
                if isinstance(text, str):
                    self.seen += len(text)
                    self.result = shorten(text, self.limits.output_chars)
                self._display({kind: value for kind, value in data.items() if kind != "text/html"})
            case "display_data" | "update_display_data":
                data = _mapping(content.get("data"))
                text = data.get("text/plain")
                if isinstance(text, str):
                    self._write("stdout", text + "\n")
                self._display(data)
            case "error":
                lines = content.get("traceback")
                traceback = "\n".join(str(line) for line in lines) if isinstance(lines, list) else ""
                self.fail(content.get("ename"), content.get("evalue"), traceback)

    def fail(self, kind: Any, message: Any, traceback: str = "") -> None:
        """Record the exception that ended the cell."""
        limit = self.limits.output_chars
        self.error = ExecutionErrorInfo(shorten(str(kind), 200), shorten(str(message), limit), shorten(traceback, limit))

    def _write(self, stream: str, text: Any) -> None:
        if isinstance(text, str) and stream in self.streams:
            self.seen += len(text)
            self.streams[stream].write(text)

    def _display(self, data: Mapping[str, Any]) -> None:
        for kind, extension in _KEPT.items():
            value = data.get(kind)
            if not isinstance(value, str):
                continue
            self.seen += len(value)
            if len(self.displays) >= _DISPLAYS or len(value) > self.limits.file_mb * MB:
                continue
            if extension in _TEXT:
                self.displays.append((extension, value.encode("utf-8", "replace")))
                continue
            try:
                self.displays.append((extension, base64.b64decode("".join(value.split()), validate=True)))
            except (binascii.Error, ValueError):
                continue


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

"""What a table, an array or a model file holds, found out inside a sandbox and never by loading it outside.

Every look is a fresh kernel with the session's workspace bound read-only: nothing an agent left in its own kernel can dress up the answer,
and a file with a payload meets the wall and the limits. What comes back is still the word of hostile data: it is text, bounded and checked
for its form.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mappa_graph.errors import SandboxError

from .inside import wall
from .output import shorten
from .recorder import Recorder

if TYPE_CHECKING:
    from .pool import SandboxPool
    from .workspace import Workspace

_SOURCE = Path(wall.__file__).with_name("preview.py")
_CHARS = 200_000


@dataclass(frozen=True, slots=True)
class Preview:
    """A file as a look at it found it."""

    name: str
    kind: str = ""
    """Its extension."""
    type: str = ""
    """Type of the object it holds, e.g. `pandas.DataFrame`."""
    shape: tuple[int, ...] | None = None
    columns: tuple[tuple[str, str], ...] = ()
    """(column, dtype); for an array one entry with an empty name."""
    head: str = ""
    """The first rows, or the beginning of a text."""
    error: str = ""
    """Why it could not be read: then it is missing, broken, or too large for the limits."""

    def __str__(self) -> str:
        if self.error:
            return f"{self.name}: {self.error}"
        shape = "" if self.shape is None else " " + " x ".join(map(str, self.shape))
        columns = ", ".join(f"{name}: {dtype}" if name else dtype for name, dtype in self.columns)
        return "\n".join(part for part in (f"{self.name}: {self.type}{shape}", columns, self.head) if part)


async def look(pool: SandboxPool, workspace: Workspace, name: str, rows: int, timeout_s: float) -> Preview:
    """A preview of one file. Runs on the pool's loop."""
    if name not in workspace.snapshot().files:
        return Preview(name, error="no such file")
    kernel = await pool.helper_kernel(workspace)
    try:
        marker = secrets.token_hex(16)
        recorder = Recorder(dataclasses.replace(pool.limits, output_chars=_CHARS))
        code = f"{_SOURCE.read_text()}\nmain({name!r}, {rows}, {marker!r})"
        cell = asyncio.ensure_future(kernel.channels.execute(code, recorder.feed, silent=True))
        waited: set[asyncio.Future[Any]] = {cell, kernel.process.exited}
        await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not cell.done():
            cell.cancel()
            ended = "loading it ended the kernel" if kernel.process.exited.done() else f"loading it took more than {timeout_s:g} s"
            return Preview(name, error=ended)
        return parse(name, recorder.streams["stdout"].text(), marker)
    finally:
        await pool.end_helper(kernel)


def parse(name: str, text: str, marker: str) -> Preview:
    """The preview in a cell's output; anything that doesn't have its form is an error in it."""
    try:
        data = json.loads(text.split(marker)[1])
        shape, columns = data.get("shape"), data.get("columns", [])
        return Preview(
            name,
            kind=shorten(str(data.get("kind", "")), 20),
            type=shorten(str(data.get("type", "")), 200),
            shape=None if shape is None else tuple(int(n) for n in shape)[:8],
            columns=tuple((shorten(str(column), 200), shorten(str(dtype), 100)) for column, dtype in columns[:200]),
            head=shorten(str(data.get("head", "")), 8000),
            error=shorten(str(data.get("error", "")), 1000),
        )
    except (IndexError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return Preview(name, error="loading it gave no description")


def check_rows(rows: int) -> int:
    """`rows`, if it is a number that makes sense. Raises `SandboxError`."""
    if not 0 < rows <= 1000:
        raise SandboxError(f"preview of {rows!r} rows", hint="give 1 to 1000")
    return rows

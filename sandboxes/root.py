"""The folder that holds a pool's workspaces and sockets, and the removal of those whose owner was killed.

A lock on a file in it, which the kernel lets go when the owner dies however it dies, tells the living from the dead, in whatever container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mappa_graph.errors import SandboxError

from .workspace import remove_tree

_PREFIX = "mappa-sandbox-"
_LOCK = "lock"
_PATH_MAX = 60
"""A unix socket's path may have 107 bytes, of which the part below the root takes some forty."""


class Root:
    """A fresh folder below `parent` (default: the system's temporary folder) with `sessions` and `connections` in it."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        self._locks: list[int] = []
        base = self._make(parent)
        short = base
        if len(str(base)) > _PATH_MAX:
            sweep(Path("/tmp"))
            short = self._make(Path("/tmp"))
        self._folders = (base, short)
        self.sessions, self.connections = base / "s", short / "c"
        for folder in (self.sessions, self.connections):
            folder.mkdir(mode=0o755)

    def _make(self, parent: Path) -> Path:
        base = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)).resolve()
        fd = os.open(base / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self._locks.append(fd)
        return base

    def remove(self) -> None:
        """Delete everything. May be called twice."""
        for folder in self._folders:
            remove_tree(folder)
        while self._locks:
            os.close(self._locks.pop())


def sweep(parent: Path) -> list[Path]:
    """Remove the roots below `parent` that belong to this user and whose owner is dead; returns them."""
    removed = []
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, SandboxError):
            if folder.is_symlink() or folder.lstat().st_uid != os.geteuid():
                continue
            with _abandoned(folder) as abandoned:
                if abandoned:
                    remove_tree(folder)
                    removed.append(folder)
    return removed


@contextlib.contextmanager
def _abandoned(folder: Path) -> Iterator[bool]:
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)

"""A session's folder, as seen from outside: everything in it is hostile.

Agents can put symbolic links, pipes, endless trees and a million files there. So every path is walked one component at a time without
following links, only regular files are opened, and every listing is bounded in depth and number.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from mappa_graph.errors import SandboxError
from mappa_graph.record import FileChange

DEPTH = 32
"""Folders nested deeper are not looked into."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells whether a file changed; the change time can't be set by the agent."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(slots=True)
class Snapshot:
    """The regular files of a workspace at one moment, and what the whole tree takes."""

    files: dict[str, Stamp] = field(default_factory=dict)
    entries: int = 0
    """Files, folders, links, everything."""
    size: int = 0
    """Bytes of disk, by blocks."""
    cut: bool = False
    """Whether there was more than could be listed."""


def parts_of(name: str) -> tuple[str, ...]:
    """The components of a file name relative to the workspace. Raises `SandboxError` for one that leads out of it."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or any(p in ("..", "/") or "\0" in p for p in parts) or len(parts) > DEPTH:
        raise SandboxError(
            f"file name {name!r} is not inside the workspace", hint="give a relative name without '..', e.g. 'data/train.csv'"
        )
    return parts


class Workspace:
    """The folder `path`, whose files belong to host user `uid` (0: to this process's user)."""

    def __init__(self, path: Path, uid: int = 0, limit_entries: int = 10_000) -> None:
        self.path, self.uid, self.limit_entries = path, uid, limit_entries

    def create(self) -> None:
        self.path.mkdir(mode=0o700)
        if self.uid:
            os.chown(self.path, self.uid, self.uid)

    @contextmanager
    def _folder(self, parts: tuple[str, ...], make: bool = False) -> Iterator[int]:
        fd = os.open(self.path, _FOLDER)
        try:
            for part in parts:
                if make:
                    try:
                        os.mkdir(part, 0o755, dir_fd=fd)
                    except FileExistsError:
                        pass
                    else:
                        if self.uid:
                            os.chown(part, self.uid, self.uid, dir_fd=fd, follow_symlinks=False)
                inner = os.open(part, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def put(self, name: str, data: bytes | str | Path) -> None:
        """Write a file, replacing what has that name. A `Path` is copied; text is written as UTF-8. Raises `SandboxError`."""
        *folders, last = parts_of(name)
        try:
            with self._folder(tuple(folders), make=True) as folder:
                # A fresh name, then a rename: never opens what an agent may have put under the final name.
                aside = f".put-{secrets.token_hex(8)}"
                fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=folder)
                try:
                    with os.fdopen(fd, "wb") as file:
                        if self.uid:
                            os.fchown(file.fileno(), self.uid, self.uid)
                        if isinstance(data, Path):
                            with data.open("rb") as source:
                                shutil.copyfileobj(source, file, 1 << 20)
                        else:
                            file.write(data.encode() if isinstance(data, str) else data)
                    os.rename(aside, last, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    os.unlink(aside, dir_fd=folder)
                    raise
        except OSError as error:
            raise SandboxError(f"{name!r} could not be put into the workspace: {error.strerror or error}") from error

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        *folders, last = parts_of(name)
        with self._folder(tuple(folders)) as folder:
            fd = os.open(last, _FILE, dir_fd=folder)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise SandboxError(f"{name!r} is not a regular file")
                yield fd
            finally:
                os.close(fd)

    def get(self, name: str, limit: int | None = None) -> bytes:
        """The content of a regular file. Raises `SandboxError` where there is none, it is a link, or it is larger than `limit` bytes."""
        try:
            with self._open(name) as fd:
                size = os.fstat(fd).st_size
                if limit is not None and size > limit:
                    raise SandboxError(
                        f"{name!r} has {size} bytes, more than {limit}", hint="raise the limit, or have the agent write less"
                    )
                with os.fdopen(os.dup(fd), "rb") as file:
                    return file.read() if limit is None else file.read(limit)
        except OSError as error:
            raise SandboxError(f"no file {name!r} in the workspace ({error.strerror or error})", hint="links are not followed") from error

    def digest(self, name: str) -> str:
        """The hex sha256 of a file, "" if it is gone or not readable."""
        try:
            with self._open(name) as fd, os.fdopen(os.dup(fd), "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, SandboxError):
            return ""

    def snapshot(self) -> Snapshot:
        """List the workspace; past twice the allowed number of entries, or deeper than `DEPTH`, the rest is left out."""
        found = Snapshot()
        try:
            self._list(found, os.open(self.path, _FOLDER), "", 0)
        except OSError:
            found.cut = True
        return found

    def _list(self, found: Snapshot, fd: int, prefix: str, depth: int) -> None:
        inner: list[str] = []
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    found.entries += 1
                    if found.entries > 2 * self.limit_entries:
                        found.cut = True
                        return
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    found.size += info.st_blocks * 512
                    if stat.S_ISREG(info.st_mode):
                        found.files[prefix + entry.name] = Stamp(info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
                    elif stat.S_ISDIR(info.st_mode):
                        inner.append(entry.name)
            for name in inner:
                if depth >= DEPTH:
                    found.cut = True
                    return
                try:
                    child = os.open(name, _FOLDER, dir_fd=fd)
                except OSError:
                    found.cut = True
                    continue
                self._list(found, child, f"{prefix}{name}/", depth + 1)
        finally:
            os.close(fd)

    def changes(self, before: Mapping[str, Stamp], after: Mapping[str, Stamp], limit: int = 1000) -> tuple[FileChange, ...]:
        """What happened to the files between two snapshots, by name; at most `limit` changes, each with size and sha256."""
        out: list[FileChange] = []
        for name in sorted({*before, *after}):
            old, new = before.get(name), after.get(name)
            if old == new:
                continue
            if len(out) >= limit:
                break
            shown = name.encode("utf-8", "backslashreplace").decode()
            if new is None:
                out.append(FileChange(shown, "deleted"))
            else:
                out.append(FileChange(shown, "created" if old is None else "changed", new.size, self.digest(name)))
        return tuple(out)

    def adopt(self, other: Workspace) -> None:
        """Move everything from `other`, which only the host has written to, into this workspace; `other` is gone afterwards."""
        for name in os.listdir(other.path):
            os.rename(other.path / name, self.path / name)
            if self.uid:
                target = self.path / name
                os.chown(target, self.uid, self.uid, follow_symlinks=False)
                for folder, folders, files in os.walk(target):
                    for inner in (*folders, *files):
                        os.chown(Path(folder, inner), self.uid, self.uid, follow_symlinks=False)
        other.path.rmdir()

    def remove(self) -> None:
        """Delete the folder and everything in it."""
        remove_tree(self.path)


def remove_tree(path: Path) -> None:
    """Delete a tree that an agent wrote, in time linear in its entries however deeply they are nested. Links are not followed.

    Every folder is first moved up beside the others, so that no path grows and nothing recurses. Nobody may still write to the tree.
    """
    try:
        if not path.is_dir() or path.is_symlink():
            path.unlink()
            return
        waiting = path.with_name(f".gone-{secrets.token_hex(8)}")
        waiting.mkdir(mode=0o700)
        os.chmod(path, 0o700)
        os.rename(path, waiting / "0")
        made, done = 1, 0
        while done < made:
            folder = waiting / str(done)
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry.path, 0o700)
                        os.rename(entry.path, waiting / str(made))
                        made += 1
                    else:
                        os.unlink(entry.path)
            os.rmdir(folder)
            done += 1
        waiting.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        raise SandboxError(f"workspace {path} could not be removed: {error}") from error

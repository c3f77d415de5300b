"""Control groups for sessions, where this process may make them: version 2 or version 1, each controller on its own.

Nothing of the control-group file system is visible inside a sandbox: the host makes the group, opens its `cgroup.procs`, and hands the
open file to the fork server, whose fork moves itself in before anything else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .limits import MB, Limits

log = logging.getLogger(__name__)
_CONTROLLERS = ("memory", "pids", "cpu")
_KERNEL_MB = 192
"""What an idle kernel's private pages and its tmpfs may take on top of `memory_mb`."""


@dataclass(frozen=True)
class ControlGroups:
    """Where groups can be made: controller -> (version, folder)."""

    places: dict[str, tuple[int, Path]] = field(default_factory=dict)

    def make(self, name: str, limits: Limits) -> Group:
        """A group for one session with its limits set. A controller that fails at it is left out and logged."""
        folders: list[Path] = []
        for controller, (version, place) in self.places.items():
            if controller == "cpu" and limits.cpus is None:
                continue
            folder = place / f"mappa-{name}"
            try:
                folder.mkdir(exist_ok=True)
                _set(folder, controller, version, limits)
            except OSError as error:
                log.warning("control group %s: %s", folder, error)
                continue
            if folder not in folders:
                folders.append(folder)
        return Group(tuple(folders))

    def describe(self) -> dict[str, str]:
        """Controller -> "v1" or "v2"."""
        return {controller: f"v{version}" for controller, (version, _) in self.places.items()}


@dataclass(frozen=True)
class Group:
    """The control groups of one session."""

    folders: tuple[Path, ...] = ()

    @contextlib.contextmanager
    def joined(self) -> Iterator[list[int]]:
        """File descriptors to hand to the process that is to join, one per folder."""
        with contextlib.ExitStack() as stack:
            descriptors = []
            for folder in self.folders:
                descriptors.append(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
                stack.callback(os.close, descriptors[-1])
            yield descriptors

    def ran_out(self) -> bool:
        """Whether the kernel killed something in this group for memory."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    for line in (folder / name).read_text().splitlines():
                        key, _, value = line.partition(" ")
                        if key == "oom_kill" and int(value) > 0:
                            return True
        return False

    def remove(self) -> None:
        """Remove the folders. A group that still holds a dying process is retried for a second, then left and logged."""
        for folder in self.folders:
            for attempt in range(20):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    pass
                except OSError as error:
                    if attempt == 19:
                        log.warning("control group %s stays: %s", folder, error)
                    time.sleep(0.05)
                    continue
                break


def probe() -> ControlGroups:
    """Find out, by trying, which controllers this process can set limits with."""
    places: dict[str, tuple[int, Path]] = {}
    for controller, version, place in _candidates():
        if controller not in places and _works(controller, version, place):
            places[controller] = (version, place)
    _sweep({place for _, place in places.values()})
    return ControlGroups(places)


def _sweep(places: set[Path]) -> None:
    """Remove the empty groups of processes that were killed; one in use can't be removed."""
    for place in places:
        for folder in place.glob("mappa-*-*"):
            owner = folder.name.split("-")[1]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _candidates() -> list[tuple[str, int, Path]]:
    try:
        memberships = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return []
    found: list[tuple[str, int, Path]] = []
    for line in memberships:
        _, names, path = line.split(":", 2)
        for _, target, kind, options, *_ in mounts:
            if names == "" and kind == "cgroup2":
                own = Path(target + path)
                found += [(c, 2, place) for c in _CONTROLLERS for place in (own, own.parent) if place.is_relative_to(target)]
            elif names and kind == "cgroup" and set(names.split(",")) <= set(options.split(",")):
                found += [(c, 1, Path(target + path)) for c in names.split(",") if c in _CONTROLLERS]
    return found


def _works(controller: str, version: int, place: Path) -> bool:
    if not os.access(place, os.W_OK):
        return False
    folder = place / f"mappa-probe-{uuid.uuid4().hex[:8]}"
    try:
        if version == 2 and controller not in (place / "cgroup.subtree_control").read_text().split():
            (place / "cgroup.subtree_control").write_text(f"+{controller}")
        folder.mkdir()
    except OSError:
        return False
    try:
        _set(folder, controller, version, Limits())
        script = 'echo 0 > "$1/cgroup.procs"'
        return subprocess.run(["/bin/sh", "-c", script, "sh", str(folder)], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
    finally:
        Group((folder,)).remove()


def _set(folder: Path, controller: str, version: int, limits: Limits) -> None:
    memory = (limits.memory_mb + _KERNEL_MB + 2 * limits.tmp_mb) * MB
    match controller:
        case "memory" if version == 2:
            (folder / "memory.max").write_text(str(memory))
            with contextlib.suppress(OSError):
                (folder / "memory.swap.max").write_text("0")
        case "memory":
            (folder / "memory.limit_in_bytes").write_text(str(memory))
            with contextlib.suppress(OSError):
                (folder / "memory.memsw.limit_in_bytes").write_text(str(memory))
        case "pids":
            (folder / "pids.max").write_text(str(limits.processes + 2))
        case "cpu" if limits.cpus is not None:
            quota, period = int(limits.cpus * 100_000), 100_000
            if version == 2:
                (folder / "cpu.max").write_text(f"{quota} {period}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(period))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))

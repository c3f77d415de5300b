"""What a session may use, and how long things may take.

`Limits` are per session unless they say otherwise. How each is enforced depends on the machine (control groups or resource limits);
`describe_isolation` tells. `Deadlines` only checks that a shorter deadline lies inside a longer one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from typing import Any

from mappa_graph.errors import ConfigError

MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What one session may use. Sizes are MiB, times seconds."""

    memory_mb: int = 2048
    """Memory of all processes together where a memory control group can be made;

    address space of each process, beyond what an idle kernel maps, everywhere.
    """
    cpu_s: int = 600
    """CPU time of each process."""
    cpus: float | None = None
    """Share of the machine's CPUs (1.5 = one and a half), where a cpu control group can be made; None = no limit."""
    threads: int = 1
    """Threads of BLAS and OpenMP libraries; more cost every idle kernel memory."""
    processes: int = 128
    """Processes and threads; an idle kernel has 9."""
    open_files: int = 512
    """Open files of each process."""
    file_mb: int = 512
    """Size of a single file."""
    workspace_mb: int = 1024
    """Size of all files in the workspace, watched while code runs:

    what a program writes between two looks (a quarter of a second) comes on top.
    """
    workspace_files: int = 10_000
    """Files and folders in the workspace, watched likewise."""
    tmp_mb: int = 256
    """Size of /tmp and of /dev/shm, each, in memory."""
    output_chars: int = 20_000
    """Characters of stdout, of stderr, of the result and of the traceback that a record keeps, each:

    half from the head, half from the tail.
    """
    output_mb: int = 64
    """Output of one cell; beyond it the cell is stopped."""
    cell_s: float = 60.0
    """Wall time of one cell."""
    grace_s: float = 2.0
    """How long an interrupted cell may take to stop before the kernel is killed."""
    start_s: float = 30.0
    """How long a kernel may take to start."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if value is None and field.name == "cpus":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"sandbox limit {field.name} is {value!r}", hint="give a number greater than 0")
        if self.file_mb > self.workspace_mb:
            raise ConfigError(
                f"sandbox limit file_mb is {self.file_mb}, more than workspace_mb = {self.workspace_mb}",
                hint="a file can't be larger than the workspace: lower file_mb or raise workspace_mb",
            )
        if self.processes < 16:
            raise ConfigError(f"sandbox limit processes is {self.processes}", hint="a kernel needs 9 threads to start: give 16 or more")

    def rlimits(self) -> dict[str, int]:
        """Resource limits by the name of their constant without RLIMIT_; AS is on top of what the process already maps."""
        return {
            "AS": self.memory_mb * MB,
            "CPU": int(self.cpu_s),
            "NPROC": self.processes,
            "NOFILE": self.open_files,
            "FSIZE": self.file_mb * MB,
            "CORE": 0,
            "MSGQUEUE": 0,
            "MEMLOCK": 64 * 1024,
        }


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Nested deadlines in seconds, None = none. Raises `ConfigError` unless cell < transition < episode < session, among those given."""

    cell_s: float | None = None
    transition_s: float | None = None
    episode_s: float | None = None
    session_s: float | None = None

    def __post_init__(self) -> None:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) is not None]
        for name, value in given:
            if not value > 0:
                raise ConfigError(f"deadline {name} is {value!r}", hint="give seconds greater than 0, or leave it out")
        for (inner, short), (outer, long) in itertools.pairwise(given):
            if not short < long:
                raise ConfigError(
                    f"deadline {inner} = {short} does not lie inside {outer} = {long}",
                    hint=f"lower {inner} or raise {outer}: cell_s < transition_s < episode_s < session_s",
                )

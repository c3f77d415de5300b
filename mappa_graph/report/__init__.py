"""`write_report(run_dir)`: one self-contained HTML file that shows what a run did and what came of it.

No plotting library, no network, no script that holds data. The page's policy (a CSP meta tag) forbids every load, and allows only the
one style sheet and the one script that are written into it, by their hashes: text that an agent wrote could not act even if it were
markup, and it never is.

`data` reads the run, `choose` picks episodes, `flow` and `picture` draw the graph, `svg` and `charts` the charts, `coaching`,
`evaluations` and `health` are sections made of them, `browser` shows the episodes, and `page` sets it all.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ..errors import ConfigError
from ..store import TraceStore
from .data import read_run
from .page import render

__all__ = ["write_report"]


def write_report(run_dir: str | Path, *, store: TraceStore | None = None) -> Path:
    """Writes `report.html` into `run_dir` and returns its path. A run may be in progress, empty, or broken off.

    The file is replaced in one step, so an open page never reloads a half-written one. `store` is read instead of `trace.db` where given.
    Raises `ConfigError` where `run_dir` is not a run directory, or can't be written to.
    """
    folder = Path(run_dir)
    page = render(read_run(folder, store))
    target = folder / "report.html"
    try:
        handle, aside = tempfile.mkstemp(prefix=".report-", suffix=".html", dir=folder)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(page)
            os.chmod(aside, 0o644)
            os.replace(aside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
    except OSError as error:
        raise ConfigError(
            f"report {str(target)!r} can't be written: {error.strerror or error}", hint="check the folder's rights and space"
        ) from error
    return target

"""`Spool`: spans put down on disk until those of one trace are together.

Sources give spans in the order of time, not trace by trace, and a trace's root may come last; memory must not grow with the source. A
spool that outlives its process says how far it was filled, so that a killed import need not ask a rate-limited service again. Only its
owner may read it, and what it holds went through the importer's redactor first; `sweep` takes away what nobody will go on with.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..codec import dump, load
from ..database import way_out
from ..errors import StoreError

SORTING = "import-sort-"
"""How the names of spools begin that are of no use to another process."""
_KEPT_S = 7 * 86_400.0
_JOINS = frozenset(
    {"id", "trace_id", "parent_id", "parent_run_id", "run_id", "span_id", "session", "session_id", "tool_call_id", "dotted_order", "kind",
     "run_type", "start", "end", "start_time", "end_time"}
)  # fmt: skip
"""What puts a trace together again; it is redacted where it is stored."""


def sweep(folder: Path) -> None:
    """Deletes what killed imports left: spools for sorting, and those of a service that nobody went on with for a week."""
    for path in folder.glob("import-*.spool*"):
        try:
            if path.name.startswith(SORTING) or time.time() - path.stat().st_mtime > _KEPT_S:
                path.unlink(missing_ok=True)
        except OSError:
            continue  # another's, or gone


class Spool:
    """A file of spans, which `redact` is applied to before they are written. Raises `StoreError` when it can't be written or read."""

    def __init__(self, path: Path, redact: Callable[[Any], Any] | None = None) -> None:
        self.path = path
        self._redact = redact
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            path.chmod(0o600)  # SQLite gives its log the rights of its file
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(
                "CREATE TABLE IF NOT EXISTS spans (trace TEXT, id TEXT, payload BLOB, PRIMARY KEY (trace, id)) WITHOUT ROWID;"
                "CREATE TABLE IF NOT EXISTS traces (trace TEXT PRIMARY KEY, start REAL NOT NULL) WITHOUT ROWID;"
                "CREATE INDEX IF NOT EXISTS traces_by_start ON traces (start, trace);"
                "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;"
            )
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"can't open {path}: {error}", hint=way_out(error)) from error

    def add(self, spans: Sequence[tuple[str, str, float, Mapping[str, Any]]], cursor: Any = None) -> int:
        """Keeps `(trace id, span id, start, span)`s in one transaction, and how far the source was read; returns how many are new."""
        new = 0
        try:
            self._db.execute("BEGIN")
            for trace, id, start, span in spans:
                self._db.execute(
                    "INSERT INTO traces VALUES (?, ?) ON CONFLICT (trace) DO UPDATE SET start = min(start, excluded.start)",
                    (trace, start),
                )
                new += self._db.execute("INSERT OR IGNORE INTO spans VALUES (?,?,?)", (trace, id, dump(self._clean(span)))).rowcount
            if cursor is not None:
                self._put("cursor", cursor)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise StoreError(f"can't write {self.path}: {error}", hint=way_out(error)) from error
        return new

    def _clean(self, span: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._redact is None:
            return span
        clean = self._redact({name: part for name, part in span.items() if name not in _JOINS})
        return {**(clean if isinstance(clean, Mapping) else {}), **{name: span[name] for name in span if name in _JOINS}}

    def get(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else load(row[0])

    def _put(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (key, dump(value)))

    def put(self, key: str, value: Any) -> None:
        self._put(key, value)

    def traces(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """`(trace id, its spans)` in the order in which traces began: what resumes a run comes after what it resumes."""
        last: tuple[float, str] = (-1e300, "")
        sql = "SELECT start, trace FROM traces WHERE (start, trace) > (?, ?) ORDER BY start, trace LIMIT 100"
        while rows := self._db.execute(sql, last).fetchall():
            for _, trace in rows:
                spans = self._db.execute("SELECT payload FROM spans WHERE trace = ?", (trace,)).fetchall()
                yield trace, [load(row[0]) for row in spans]
            last = rows[-1]

    def close(self, *, delete: bool = False) -> None:
        self._db.close()
        if delete:
            for end in ("", "-wal", "-shm"):
                Path(f"{self.path}{end}").unlink(missing_ok=True)

"""`Spool`: spans put down on disk until those of one trace are together.

Sources give spans in the order of time, not trace by trace, and a trace's root may come last; memory must not grow with the source. A
spool that outlives its process says how far it was filled, so that a killed import need not ask a rate-limited service again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..codec import dump, load
from ..database import way_out
from ..errors import StoreError


class Spool:
    """A file of spans. Raises `StoreError` when it can't be written or read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(
                "CREATE TABLE IF NOT EXISTS spans (trace TEXT, id TEXT, payload BLOB, PRIMARY KEY (trace, id)) WITHOUT ROWID;"
                "CREATE TABLE IF NOT EXISTS traces (seq INTEGER PRIMARY KEY, trace TEXT UNIQUE);"
                "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;"
            )
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"can't open {path}: {error}", hint=way_out(error)) from error

    def add(self, spans: Sequence[tuple[str, str, Mapping[str, Any]]], cursor: Any = None) -> int:
        """Keeps `(trace id, span id, span)`s in one transaction, and with them how far the source was read; returns how many are new."""
        new = 0
        try:
            self._db.execute("BEGIN")
            for trace, id, span in spans:
                self._db.execute("INSERT OR IGNORE INTO traces (trace) VALUES (?)", (trace,))
                new += self._db.execute("INSERT OR IGNORE INTO spans VALUES (?,?,?)", (trace, id, dump(span))).rowcount
            if cursor is not None:
                self._put("cursor", cursor)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise StoreError(f"can't write {self.path}: {error}", hint=way_out(error)) from error
        return new

    def get(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else load(row[0])

    def _put(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (key, dump(value)))

    def put(self, key: str, value: Any) -> None:
        self._put(key, value)

    def traces(self, after: int = 0) -> Iterator[tuple[int, str, list[dict[str, Any]]]]:
        """`(place, trace id, its spans)` in the order in which traces were first seen."""
        while rows := self._db.execute("SELECT seq, trace FROM traces WHERE seq > ? ORDER BY seq LIMIT 100", (after,)).fetchall():
            for seq, trace in rows:
                spans = self._db.execute("SELECT payload FROM spans WHERE trace = ?", (trace,)).fetchall()
                yield seq, trace, [load(row[0]) for row in spans]
            after = rows[-1][0]

    def close(self, *, delete: bool = False) -> None:
        self._db.close()
        if delete:
            for end in ("", "-wal", "-shm"):
                Path(f"{self.path}{end}").unlink(missing_ok=True)

"""Verdicts kept across runs, keyed by case, prompt and model: the same question is never paid for twice.

One SQLite file, safe for several threads and processes. Only verdicts with a score are kept, so an outage is never remembered.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path

from ..errors import StoreError
from ..record import Verdict, from_json, to_json


class VerdictCache:
    """A file of verdicts by key. Raises `StoreError` where it can't be opened, read or written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None, timeout=30.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID")
        except (OSError, sqlite3.Error) as error:
            raise self._failed("open", error) from error

    def get(self, key: str) -> Verdict | None:
        try:
            with self._lock:
                row = self._db.execute("SELECT body FROM verdicts WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise self._failed("read", error) from error
        return None if row is None else from_json(Verdict, json.loads(row[0]))

    def put(self, key: str, verdict: Verdict) -> None:
        """Keeps a verdict; one without a score is not kept."""
        if verdict.score is None:
            return
        try:
            with self._lock:
                self._db.execute("INSERT OR REPLACE INTO verdicts VALUES (?,?)", (key, json.dumps(to_json(verdict))))
        except sqlite3.Error as error:
            raise self._failed("write", error) from error

    def __len__(self) -> int:
        with self._lock:
            return int(self._db.execute("SELECT COUNT(*) FROM verdicts").fetchone()[0])

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _failed(self, doing: str, error: Exception) -> StoreError:
        return StoreError(
            f"can't {doing} the coach's cache {str(self.path)!r}: {error}",
            hint="give another path, delete the file if it is no longer needed, or coach without a cache",
        )

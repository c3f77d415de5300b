"""What a run's folder remembers of its imports: `imports.db`, beside `trace.db`.

Which traces are in, from where, and how they looked, so that a second import adds nothing; how far a source was read, so that a killed
import goes on; the human feedback that was found; and what was written back to whom. A trace is noted as pending before it is
stored and as done after, so a kill between the two costs one batch done again. No text of a trace is kept here, comments on it aside,
and no key.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..database import way_out
from ..errors import StoreError

_TABLES = """
CREATE TABLE IF NOT EXISTS sources (source TEXT PRIMARY KEY, cursor TEXT, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS episodes (
  id TEXT PRIMARY KEY, source TEXT NOT NULL, session TEXT, thread TEXT, digest TEXT NOT NULL, done INTEGER NOT NULL,
  host TEXT, interrupted INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS episodes_by_thread ON episodes (thread);
CREATE INDEX IF NOT EXISTS episodes_by_host ON episodes (host);
CREATE TABLE IF NOT EXISTS feedback (
  action TEXT NOT NULL, id TEXT NOT NULL, episode TEXT NOT NULL, agent TEXT NOT NULL, key TEXT NOT NULL, score REAL, value TEXT,
  comment TEXT, source TEXT NOT NULL, PRIMARY KEY (action, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS written (
  target TEXT NOT NULL, action TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, remote TEXT,
  PRIMARY KEY (target, action, key)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Known:
    """A trace that was imported before."""

    source: str
    session: str | None
    digest: str
    done: bool


@dataclass(frozen=True, slots=True)
class Rated:
    """One feedback on one action, as it was found."""

    action: str
    id: str
    episode: str
    agent: str
    key: str
    score: float | None
    value: str | None
    comment: str | None
    source: str
    """human, model or code."""


class Ledger:
    """One object for one process. Raises `StoreError` when its file can't be opened, read or written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "imports.db"
        with self._guard("open"):
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=30.0)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_TABLES)

    # -- traces

    def known(self, id: str) -> Known | None:
        row = self._one("SELECT source, session, digest, done FROM episodes WHERE id = ?", (id,))
        return None if row is None else Known(row[0], row[1], row[2], bool(row[3]))

    def begin(self, rows: Sequence[tuple[str, str, str | None, str | None, str, str | None, bool]]) -> None:
        """Notes traces, `(id, source, session, thread, digest, host, interrupted)`, that are about to be stored.

        `host` is the episode that a trace goes on with, after an interrupt; None for one of its own. What went on with a trace that is
        stored anew has to come again.
        """
        with self._write() as db:
            db.executemany("INSERT OR REPLACE INTO episodes VALUES (?,?,?,?,?,0,?,?)", rows)
            db.executemany("UPDATE episodes SET done = 0 WHERE host = ?", [(row[0],) for row in rows if row[5] is None])

    def interrupted(self, thread: str) -> list[str]:
        """Ids of a thread's traces that ended with an interrupt, whatever became of them since."""
        sql = "SELECT id FROM episodes WHERE thread = ? AND host IS NULL AND done = 1 AND interrupted = 1"
        return [row[0] for row in self._all(sql, (thread,))]

    def done(self, ids: Iterable[str], feedback: Iterable[Rated], source: str, cursor: Any) -> None:
        """Notes that traces are stored, with their feedback, and how far the source was read by then."""
        with self._write() as db:
            db.executemany("UPDATE episodes SET done = 1 WHERE id = ?", [(id,) for id in ids])
            db.executemany(
                "INSERT OR REPLACE INTO feedback VALUES (?,?,?,?,?,?,?,?,?)",
                [(f.action, f.id, f.episode, f.agent, f.key, f.score, f.value, f.comment, f.source) for f in feedback],
            )
            if cursor is not None:
                self._put_cursor(db, source, cursor)

    def cursor(self, source: str) -> Any:
        row = self._one("SELECT cursor FROM sources WHERE source = ?", (source,))
        return None if row is None or row[0] is None else json.loads(row[0])

    def put_cursor(self, source: str, cursor: Any) -> None:
        with self._write() as db:
            self._put_cursor(db, source, cursor)

    @staticmethod
    def _put_cursor(db: sqlite3.Connection, source: str, cursor: Any) -> None:
        db.execute("INSERT OR REPLACE INTO sources VALUES (?,?,?)", (source, json.dumps(cursor), time.time()))

    # -- feedback

    def feedback(self) -> Iterator[Rated]:
        """All feedback, by action."""
        last = ("", "")
        sql = "SELECT * FROM feedback WHERE (action, id) > (?, ?) ORDER BY action, id LIMIT 500"
        while rows := self._all(sql, last):
            for action, id, episode, agent, key, score, value, comment, source in rows:
                yield Rated(action, id, episode, agent, key, score, value, comment, source)
            last = (rows[-1][0], rows[-1][1])

    # -- what was written back

    def written(self, target: str, action: str, key: str) -> tuple[str, str | None] | None:
        """`(digest, id over there)` of what was last written."""
        row = self._one("SELECT digest, remote FROM written WHERE target = ? AND action = ? AND key = ?", (target, action, key))
        return None if row is None else (row[0], row[1])

    def note_written(self, target: str, action: str, key: str, digest: str, remote: str | None) -> None:
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO written VALUES (?,?,?,?,?)", (target, action, key, digest, remote))

    # -- SQLite

    def close(self) -> None:
        with self._guard("close"):
            self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"can't {doing} {self.path}: {error}", hint=way_out(error)) from error

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._guard("write"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _one(self, sql: str, values: Sequence[Any]) -> Any:
        with self._guard("read"):
            return self._db.execute(sql, values).fetchone()

    def _all(self, sql: str, values: Sequence[Any]) -> list[Any]:
        with self._guard("read"):
            return self._db.execute(sql, values).fetchall()

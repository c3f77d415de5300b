"""`Rows`: the work file of an export, where rows gather until they are written out.

An SQLite file beside the output. De-duplication, pairing, balancing and the order of rows are its queries, so memory does not grow with the
store; what was gathered is committed together with how far the store was read, so that a killed export goes on where it was. It holds
redacted rows only. The one thing to know: it belongs to one set of options over one state of the store, its `fingerprint`; with
another one it begins anew.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..codec import encode, load
from ..database import way_out
from ..errors import StoreError
from .formats import holdable
from .pairs import Sibling

_TABLES = """
CREATE TABLE state (id INTEGER PRIMARY KEY CHECK (id = 0), fingerprint TEXT NOT NULL, done INTEGER NOT NULL, phase INTEGER NOT NULL,
  counts TEXT NOT NULL);
CREATE TABLE rows (seq INTEGER PRIMARY KEY, side TEXT NOT NULL, balance TEXT NOT NULL, digest BLOB UNIQUE, hash BLOB NOT NULL,
  label INTEGER, chosen INTEGER NOT NULL DEFAULT 1, tokens INTEGER NOT NULL, value REAL, grp TEXT NOT NULL, agent TEXT, stratum TEXT,
  score REAL, data BLOB NOT NULL);
CREATE TABLE states (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, side TEXT NOT NULL, data BLOB NOT NULL);
CREATE TABLE siblings (seq INTEGER PRIMARY KEY, state INTEGER NOT NULL, digest BLOB NOT NULL, score REAL NOT NULL, data BLOB NOT NULL);
CREATE INDEX siblings_by_state ON siblings (state, digest);
"""
_DEFLATE_FROM = 16_384


@dataclass(frozen=True, slots=True)
class Row:
    """A row to be kept. `balance` is what balancing goes by, `grp` what advantages are normalised by."""

    data: dict[str, Any]
    side: str
    digest: bytes | None = None
    """Rows of the same digest are the same row; None is like no other."""
    balance: str = ""
    label: bool | None = None
    tokens: int = 0
    value: float | None = None
    """The return of a row of the format `rl`."""
    grp: str = ""


class Rows:
    """Raises `StoreError` where the work file can't be written."""

    def __init__(self, path: Path, fingerprint: str, *, resume: bool = True) -> None:
        self.path = path
        self.resumed = False
        if not resume:
            self._remove()
        with self._guard():
            self._db = self._open()
            row = None
            try:
                row = self._db.execute("SELECT fingerprint, done, phase, counts FROM state").fetchone()
            except sqlite3.DatabaseError:
                self._anew()  # an empty file, or one that a power cut spoiled
            else:
                if row is None or row[0] != fingerprint:  # without a row: killed while it was made
                    self._anew()
                    row = None
            if row is None:
                self._db.executescript(_TABLES)
                self._db.execute("INSERT INTO state VALUES (0, ?, 0, 0, '{}')", (fingerprint,))
                row = (fingerprint, 0, 0, "{}")
        self.done, self.phase = int(row[1]), int(row[2])
        self.counts: dict[str, Any] = json.loads(row[3])
        self.resumed = bool(self.done or self.phase)
        self._db.execute("BEGIN")

    def add(self, row: Row) -> str | None:
        """Keeps a row. Returns why not, where it doesn't: "duplicate", or "contradicted" where the same text has another label."""
        data = _packed(row.data)
        lot = row.digest or hashlib.blake2b(data, digest_size=16).digest()
        about = (row.label, row.tokens, row.value, holdable(row.grp), *_about(row.data))
        values = (row.side, holdable(row.balance), row.digest, lot, *about, data)
        with self._guard():
            kept = self._db.execute(
                "INSERT OR IGNORE INTO rows (side, balance, digest, hash, label, tokens, value, grp, agent, stratum, score, data) "
                "VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
                values,
            ).rowcount
            if kept:
                return None
            old = self._db.execute("SELECT label FROM rows WHERE digest = ?", (row.digest,)).fetchone()
        return "duplicate" if row.label is None or bool(old[0]) == row.label else "contradicted"

    def add_sibling(self, key: bytes, head: dict[str, Any], side: str, digest: bytes, score: float, data: dict[str, Any]) -> None:
        """Keeps a scored completion at the state `key`; `head`, what its siblings share, is kept once."""
        with self._guard():
            found = self._db.execute("SELECT id FROM states WHERE key = ?", (key,)).fetchone()
            if found is None:
                found = (self._db.execute("INSERT INTO states (key, side, data) VALUES (?,?,?)", (key, side, _packed(head))).lastrowid,)
            values = (found[0], digest, score, _packed(data))
            self._db.execute("INSERT INTO siblings (state, digest, score, data) VALUES (?,?,?,?)", values)

    def commit(self, done: int, phase: int = 0) -> None:
        """Makes all of it durable, with how many episodes were read."""
        with self._guard():
            self._db.execute("UPDATE state SET done = ?, phase = ?, counts = ?", (done, phase, json.dumps(self.counts)))
            self._db.execute("COMMIT")
            self._db.execute("BEGIN")
        self.done, self.phase = done, phase

    def states(self) -> Iterator[tuple[dict[str, Any], str, Iterator[Sibling]]]:
        """`(head, side, siblings)` of each state with two distinct completions, in the order they were first met; siblings
        best first, and among equals the first met. Siblings must be read before the next state is asked for."""
        states = self._db.execute(
            "SELECT s.id, s.side, s.data FROM states s WHERE "
            "(SELECT COUNT(*) FROM (SELECT 1 FROM siblings b WHERE b.state = s.id GROUP BY b.digest LIMIT 2)) > 1 ORDER BY s.id"
        )
        for state, side, data in states:
            found = self._db.execute(
                "SELECT MIN(seq), AVG(score) AS mean FROM siblings WHERE state = ? GROUP BY digest ORDER BY mean DESC, MIN(seq)", (state,)
            )
            yield _unpacked(data), side, (Sibling(key, score) for key, score in found)

    def sibling(self, key: int) -> dict[str, Any]:
        return _unpacked(self._db.execute("SELECT data FROM siblings WHERE seq = ?", (key,)).fetchone()[0])

    def balance(self, side: str) -> dict[str, int]:
        """Keeps as many rows of each kind as the rarest has, chosen by the hash of their text; returns how many of each were dropped."""
        with self._guard():
            self._db.execute("UPDATE rows SET chosen = 1 WHERE side = ?", (side,))
            sizes = dict(self._db.execute("SELECT balance, COUNT(*) FROM rows WHERE side = ? GROUP BY balance", (side,)).fetchall())
            least = min(sizes.values(), default=0)
            for kind, size in sizes.items():
                if size > least:
                    self._db.execute(
                        "UPDATE rows SET chosen = 0 WHERE seq IN (SELECT seq FROM rows WHERE side = ? AND balance = ? "
                        "ORDER BY hash, seq LIMIT ?)",
                        (side, kind, size - least),
                    )
        return {kind: size - least for kind, size in sorted(sizes.items()) if size > least}

    def moments(self, side: str, floor: float) -> dict[str, tuple[float, float]]:
        """Group -> (mean, divisor) of the values, each weighed by its row's tokens: `trainers.returns.token_advantages` with beta 0."""
        where = "FROM rows WHERE side = ? AND chosen AND grp = ? AND value IS NOT NULL"
        out = {}
        for (group,) in self._db.execute("SELECT DISTINCT grp FROM rows WHERE side = ? AND chosen ORDER BY grp", (side,)).fetchall():
            count, total, low, high = self._db.execute(
                f"SELECT SUM(tokens), SUM(tokens * value), MIN(value), MAX(value) {where}", (side, group)
            ).fetchone()
            mean = min(max(total / count, low), high)
            squares = self._db.execute(f"SELECT SUM(tokens * (value - ?) * (value - ?)) {where}", (mean, mean, side, group)).fetchone()[0]
            out[group] = (mean, max((squares / count) ** 0.5, floor))
        return out

    def sizes(self) -> dict[str, int]:
        """Side -> rows that are to be written."""
        return dict(self._db.execute("SELECT side, COUNT(*) FROM rows WHERE chosen GROUP BY side").fetchall())

    def by(self, column: str) -> dict[str, int]:
        """Rows to be written by agent or stratum."""
        found = self._db.execute(f"SELECT COALESCE({column}, ''), COUNT(*) FROM rows WHERE chosen GROUP BY 1 ORDER BY 1")
        return dict(found.fetchall())

    def scores(self) -> dict[str, float | int | None]:
        """Count, mean, least and greatest score of the rows to be written; of a pair, that of the chosen one."""
        found = self._db.execute("SELECT COUNT(score), AVG(score), MIN(score), MAX(score) FROM rows WHERE chosen").fetchone()
        return dict(zip(("count", "mean", "min", "max"), found, strict=True))

    def read(self, side: str) -> Iterator[tuple[bytes, float | None, str]]:
        """`(JSON, value, group)` of each row to be written, in the order they were added."""
        for data, value, group in self._db.execute("SELECT data, value, grp FROM rows WHERE side = ? AND chosen ORDER BY seq", (side,)):
            yield (zlib.decompress(memoryview(data)[1:]) if data[:1] == b"z" else data), value, group

    def close(self, *, remove: bool = False) -> None:
        with self._guard():
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._db.close()
        if remove:
            self._remove()

    def _anew(self) -> None:
        self._db.close()
        self._remove()
        self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.DatabaseError:
            db.close()
            self._remove()
            db = sqlite3.connect(self.path, isolation_level=None)
            db.execute("PRAGMA journal_mode = WAL")
        # A power cut costs the work file and nothing else; a kill costs what was not committed.
        db.execute("PRAGMA synchronous = OFF")
        return db

    def _remove(self) -> None:
        for ending in ("", "-wal", "-shm"):
            Path(f"{self.path}{ending}").unlink(missing_ok=True)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"can't write the work file {self.path}: {error}", hint=way_out(error)) from error


def _packed(data: dict[str, Any]) -> bytes:
    raw = encode(data)
    if b"\\ud" in raw:
        raw = encode(holdable(data))  # a lone surrogate: neither Arrow nor other JSON readers take one
    return b"z" + zlib.compress(raw, 1) if len(raw) >= _DEFLATE_FROM else raw


def _unpacked(data: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = load(data)
    return loaded


def _about(data: dict[str, Any]) -> tuple[Any, Any, Any]:
    # SQLite's text can't hold a lone surrogate either.
    return holdable(data.get("agent")), holdable(data.get("stratum")), data.get("score", data.get("chosen_score"))

"""The SQLite file under a `TraceStore`: its tables, how it is opened, and what its errors mean.

A file is known by SQLite's `application_id` and by the schema number in its `meta` table; anything else is refused and left as it is.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from .codec import dump, load
from .errors import StoreError

SCHEMA = 1
APPLICATION_ID = 0x4D415050

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE calls (
  seq INTEGER PRIMARY KEY, id TEXT NOT NULL, idx INTEGER NOT NULL, policy TEXT NOT NULL, version INTEGER NOT NULL,
  agent TEXT, episode TEXT, finish_reason TEXT NOT NULL, started REAL NOT NULL, ended REAL NOT NULL,
  prompt_ids BLOB NOT NULL, completion_ids BLOB NOT NULL, logprobs BLOB NOT NULL, payload BLOB NOT NULL, UNIQUE (id, idx));
CREATE TABLE episodes (
  seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, split TEXT NOT NULL, iteration INTEGER NOT NULL,
  status TEXT NOT NULL, payload BLOB NOT NULL);
CREATE INDEX episodes_by_iteration ON episodes (split, iteration);
CREATE TABLE bodies (episode TEXT PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE actions (
  episode TEXT NOT NULL, id TEXT NOT NULL, call_id TEXT, call_index INTEGER NOT NULL, PRIMARY KEY (episode, id)) WITHOUT ROWID;
CREATE INDEX actions_by_call ON actions (call_id, call_index);
CREATE TABLE verdicts (
  episode TEXT NOT NULL, action TEXT NOT NULL, payload BLOB NOT NULL, PRIMARY KEY (episode, action)) WITHOUT ROWID;
CREATE TABLE outcomes (episode TEXT PRIMARY KEY, payload BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE failures (
  seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, type TEXT NOT NULL, message TEXT NOT NULL, episode TEXT, at REAL NOT NULL);
CREATE TABLE trained (episode TEXT PRIMARY KEY, iteration INTEGER NOT NULL) WITHOUT ROWID;
"""
_WAYS_OUT = {
    "disk is full": "free some space and run again; nothing of this write was kept",
    "locked": "another process holds a long write on this file; end it, or give this run a path of its own",
    "not a database": "the file is not an SQLite file; give another path",
    "readonly": "the file or its folder can't be written; check its owner and mode",
    "unable to open": "check that the folder exists and can be written",
    "malformed": "the file is damaged; restore it from a copy, or start a new run",
}


def connect(path: Path, *, read_only: bool, busy_timeout_s: float) -> sqlite3.Connection:
    """An autocommit connection to a trace store, made where it is missing.

    Raises `StoreError` for a file that is not a trace store, or of another schema; `sqlite3.Error` and `OSError` pass.
    """
    where = path.absolute().as_uri()
    if not read_only:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _connect(where, path, False, busy_timeout_s)
    if not path.exists():
        raise StoreError(f"trace store {path} does not exist", hint="give the path of a run's trace.db")
    try:
        return _connect(f"{where}?mode=ro", path, True, busy_timeout_s)
    except sqlite3.OperationalError:
        # In a folder that can't be written, WAL needs the promise that nobody else writes; a leftover log breaks it.
        if Path(f"{path}-wal").exists():
            raise
        return _connect(f"{where}?immutable=1", path, True, busy_timeout_s)


def connect_quick(path: Path) -> sqlite3.Connection:
    """One more connection to a trace store that is open for writing: it never waits for a lock, and makes no checkpoints."""
    db = sqlite3.connect(path, timeout=0.0, check_same_thread=False, isolation_level=None)
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA wal_autocheckpoint = 0")
    # A connection that has read nothing yet knows of no log, and its checkpoints do nothing.
    db.execute("PRAGMA schema_version").fetchone()
    return db


def way_out(error: BaseException) -> str | None:
    """What a user can do about an error of SQLite."""
    text = str(error)
    return next((hint for part, hint in _WAYS_OUT.items() if part in text), None)


def _connect(target: str, path: Path, read_only: bool, busy_timeout_s: float) -> sqlite3.Connection:
    db = sqlite3.connect(target, timeout=busy_timeout_s, check_same_thread=False, isolation_level=None, uri=True)
    try:
        if not read_only:
            _turn_on_wal(db, busy_timeout_s)
            db.execute("PRAGMA synchronous = NORMAL")
        db.execute("BEGIN" if read_only else "BEGIN IMMEDIATE")
        _check_schema(db, path, read_only)
        db.execute("COMMIT")
    except BaseException:
        db.close()
        raise
    return db


def _turn_on_wal(db: sqlite3.Connection, busy_timeout_s: float) -> None:
    deadline = time.monotonic() + busy_timeout_s
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # This one statement does not honour the busy timeout.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _check_schema(db: sqlite3.Connection, path: Path, read_only: bool) -> None:
    """Inside a transaction: makes the tables of an empty file, refuses what is not a trace store of this schema."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    tables = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
    if application != APPLICATION_ID:
        if tables or application or read_only:
            raise StoreError(f"{path} is not a trace store", hint="give another path; this file was left as it is")
        for statement in _TABLES.split(";"):
            db.execute(statement)
        db.execute("INSERT INTO meta VALUES ('schema', ?)", (dump(SCHEMA),))
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    version = load(row[0]) if row else None
    if version != SCHEMA:
        raise StoreError(
            f"trace store {path} has schema {version}; this version of mappa-graph reads schema {SCHEMA}",
            hint="open it with the version of mappa-graph that wrote it, or start a new run",
        )

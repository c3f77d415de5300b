"""`CallWriter`: how calls get into the file without making an event loop wait.

All calls that arrive in one turn of a loop are committed in one transaction, on the loop itself: handing them to a thread and
back costs several times what SQLite takes to write them. The loop never waits for the file: where another process or thread is
writing, where calls are large or a redaction hook has to see them, and whenever the quick way fails in any manner, they go to the
writer's thread, which waits, commits, and tells what went wrong. Checkpoints, which sync to disk, are that thread's work too.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .errors import StoreError
from .record import Call

Rows = list[tuple[Any, ...]]

_GROUP = 512
_LARGE = 65_536
"""Tokens of one group from which on packing them is left to the thread."""
_CHECKPOINT = 32 << 20
_ANEW = 4 * _CHECKPOINT
_MOST = 2 * _ANEW
"""Bytes written on loops after which the log is copied into the database, which nobody waits for; after which the loops stand aside for
the rest of it, so that the log begins anew: two syncs to disk, which calls of that moment wait for; and after which they wait in any
case."""


class CallWriter:
    """Commits calls for a store.

    Args:
        row: makes the row of a call.
        insert: commits rows, waiting for other writers; raises `StoreError`.
        connect: opens a connection that never waits (busy timeout 0) and makes no checkpoints; None = there is only the thread.
        sql: inserts one row.
    """

    def __init__(
        self,
        row: Callable[[Call], tuple[Any, ...]],
        insert: Callable[[Rows], None],
        connect: Callable[[], sqlite3.Connection] | None,
        sql: str,
    ) -> None:
        self._row = row
        self._insert = insert
        self._connect = connect
        self._sql = sql
        self._quick: sqlite3.Connection | None = None
        self._folder: sqlite3.Connection | None = None
        # Held by the loop that commits, and by the thread while a checkpoint must not be overtaken. Loops never wait for it.
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._arrived: dict[asyncio.AbstractEventLoop, list[_Pending]] = {}
        self._queue: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._written = 0
        self._folded = 0
        self._folding = False
        self.closed = False

    def add(self, calls: Sequence[Call]) -> asyncio.Future[None] | None:
        """The commit of these calls, to be awaited on the running loop; None once closed."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.closed:
                return None
            waiting = self._arrived.get(loop)
            if waiting is not None:
                waiting.append((calls, done))
                return done
            self._arrived[loop] = [(calls, done)]
        loop.call_soon(self._commit, loop)
        return done

    def close(self) -> None:
        """Commits what waits. A second close does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for loop in list(self._arrived):
                self._hand_over(_Group(loop, self._arrived.pop(loop)))
            self._queue.put(None)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._turn:
            for db in (self._quick, self._folder):
                if db is not None:
                    db.close()
            self._quick = self._folder = None

    # -- on a loop

    def _commit(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            arrived = self._arrived.pop(loop, None)
            if arrived is None:
                return
            if self._connect is None or sum(len(call.prompt_ids) for calls, _ in arrived for call in calls) > _LARGE:
                self._hand_over(_Group(loop, arrived))
                return
        rows, waiting = self._rows(arrived, _settle)
        if not rows or self._commit_quickly(rows):
            for done in waiting:
                _settle(done, None)
            return
        with self._lock:
            if not self.closed:
                self._hand_over(_Group(loop, [], rows, waiting))
                return
        for done in waiting:
            _settle(done, StoreError("the trace store was closed while calls were being written"))

    def _rows(self, arrived: list[_Pending], refuse: Callable[[asyncio.Future[None], BaseException], None]) -> tuple[Rows, list[Any]]:
        """A call that can't be written down is its own awaiter's error, not that of the whole group."""
        rows: Rows = []
        waiting = []
        for calls, done in arrived:
            try:
                made = [self._row(call) for call in calls]
            except Exception as error:  # noqa: BLE001  the awaiter gets it
                refuse(done, error)
            else:
                rows += made
                waiting.append(done)
        return rows, waiting

    def _commit_quickly(self, rows: Rows) -> bool:
        """Whether the rows are committed; where not, nothing of them is kept."""
        if (self._written > _MOST and self._folding) or not self._turn.acquire(blocking=False):
            return False
        try:
            if self._quick is None:
                if self.closed or self._connect is None:
                    return False
                self._quick = self._connect()
            db = self._quick
            db.execute("BEGIN IMMEDIATE")
            db.executemany(self._sql, rows)
            db.execute("COMMIT")
        except Exception:  # noqa: BLE001  mostly another writer's lock; the thread tries again, and its errors are told
            with contextlib.suppress(sqlite3.Error):
                if self._quick is not None and self._quick.in_transaction:
                    self._quick.execute("ROLLBACK")
            return False
        finally:
            self._turn.release()
        self._written += sum(len(row[9]) + len(row[12]) for row in rows) + 1024 * len(rows)
        if self._written - self._folded > _CHECKPOINT and not self._folding:
            self._folding = True
            with self._lock:
                if not self.closed:
                    self._hand_over(_Group(None, []))
        return True

    def _hand_over(self, group: _Group) -> None:
        """With the lock held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mappa-store", daemon=True)
            self._thread.start()
        self._queue.put(group)

    # -- on the thread

    def _work(self) -> None:
        """One transaction for all that waits."""
        open_ = True
        while open_:
            groups = [self._queue.get()]
            while len(groups) < _GROUP and not self._queue.empty():
                groups.append(self._queue.get())
            open_ = None not in groups
            rows: Rows = []
            waiting: list[tuple[asyncio.AbstractEventLoop, list[asyncio.Future[None]]]] = []
            fold = False
            for group in groups:
                if group is None:
                    continue
                if group.loop is None:
                    fold = True
                    continue
                loop = group.loop
                made, futures = self._rows(group.arrived, lambda done, error, loop=loop: _tell(loop, [done], error))  # type: ignore[misc]
                rows += group.rows + made
                waiting.append((loop, group.waiting + futures))
            error: BaseException | None = None
            try:
                if rows:
                    self._insert(rows)
            except Exception as failed:  # noqa: BLE001  every awaiter gets it
                error = failed
            for loop, futures in waiting:
                _tell(loop, futures, error)
            if fold:
                self._fold()

    def _fold(self) -> None:
        """Checkpoints the log while the loops go on writing to it, and now and then all of it."""
        written, anew = self._written, False
        # A checkpoint that fails is made up for by the next, and by any other connection's.
        with contextlib.suppress(sqlite3.Error, OSError):
            if self._folder is None and self._connect is not None:
                self._folder = self._connect()
            if self._folder is not None:
                self._folder.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                anew = self._written > _ANEW
                if anew:
                    with self._turn:
                        self._folder.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        self._folded = written
        if anew:
            self._written = self._folded = 0
        self._folding = False


_Pending = tuple[Sequence[Call], "asyncio.Future[None]"]


class _Group:
    """What a loop hands to the thread: calls as they arrived, or rows; without a loop, word that a checkpoint is due."""

    __slots__ = ("arrived", "loop", "rows", "waiting")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None,
        arrived: list[_Pending],
        rows: Rows | None = None,
        waiting: list[asyncio.Future[None]] | None = None,
    ) -> None:
        self.loop = loop
        self.arrived = arrived
        self.rows = rows or []
        self.waiting = waiting or []


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _tell(loop: asyncio.AbstractEventLoop, futures: list[asyncio.Future[None]], error: BaseException | None) -> None:
    """From another thread. A loop that was closed meanwhile has nobody waiting on it."""

    def settle() -> None:
        for done in futures:
            _settle(done, error)

    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)

"""`TraceStore`: everything a run recorded, in one SQLite file.

The file is in WAL mode, so the gateway, the app and a reader in another process share it; a write has been committed when its
method returns, so what was acknowledged outlives a `kill -9` of the writer. Calls are written once, by the gateway, before the
client has its reply; episodes point at them by id, so saving an episode never rewrites tokens. Reading goes page by page: no
listing holds more than a page of records, and none holds a lock while the caller works.

Token ids and log-probs are little-endian arrays; texts are JSON, deflated when long. The one thing to know about `redact`: token
ids spell out the text, so a call whose texts the hook changed is kept without its tokens, and is never trained on.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from .codec import DEFLATE_CALL_FROM, dump, load, pack_floats, pack_ids, read_call, read_episode, read_steps, write_steps
from .database import connect, connect_quick, way_out
from .errors import StoreError
from .record import Call, Episode, EpisodeStatus, EpisodeTrace, Failure, Outcome, Verdict, from_json, to_json
from .writer import CallWriter

_PAGE = 256
_TRACE_PAGE = 16

_CALL = "id, idx, policy, version, agent, episode, finish_reason, started, ended, prompt_ids, completion_ids, logprobs, payload"
_INSERT_CALL = f"INSERT OR REPLACE INTO calls ({_CALL}) VALUES ({','.join('?' * 13)})"
_COUNTED = ("episodes", "calls", "actions", "verdicts", "outcomes", "failures", "trained")


class TraceStore:
    """The records of one run. Safe for several threads and, as one object each, for several processes.

    Args:
        path: the SQLite file; it and its folder are made where they are missing.
        read_only: open an existing file without the right to write.
        redact: `redact(payload) -> payload`, applied to the JSON of every call's texts (`messages`, `text`, `tool_calls`,
            `sampling`), every episode, its transitions and actions, verdict and failure before it is written.
        busy_timeout_s: how long a write waits for another process's write.

    Every method raises `StoreError` when the file can't be opened, read or written; after a failed write nothing of it is kept.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        read_only: bool = False,
        redact: Callable[[Any], Any] | None = None,
        busy_timeout_s: float = 30.0,
    ) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self._redact = redact
        self._lock = threading.RLock()
        self._closed = False
        with self._guard("open"):
            self._db = connect(self.path, read_only=read_only, busy_timeout_s=busy_timeout_s)
        # A hook of the user's may take its time; it is not for an event loop.
        quick = None if read_only or redact is not None else lambda: connect_quick(self.path)
        self._writer = CallWriter(self._call_row, self._insert_calls, quick, _INSERT_CALL)

    # -- calls

    def add_call(self, call: Call) -> None:
        """Keeps a call; it is committed on return. A second call with the same id and index replaces the first."""
        self.add_calls((call,))

    def add_calls(self, calls: Iterable[Call]) -> None:
        """Keeps calls in one transaction."""
        self._insert_calls([self._call_row(call) for call in calls])

    def _insert_calls(self, rows: Sequence[tuple[Any, ...]]) -> None:
        with self._write("write calls") as db:
            db.executemany(_INSERT_CALL, rows)

    async def aadd_calls(self, calls: Sequence[Call]) -> None:
        """Keeps calls without blocking the event loop; awaiters of the same moment share one transaction (group commit)."""
        done = self._writer.add(calls)
        if done is None:
            raise self._is_closed()
        await done

    def call(self, id: str, index: int = 0) -> Call | None:
        row = self._one(f"SELECT {_CALL} FROM calls WHERE id = ? AND idx = ?", (id, index))
        return None if row is None else read_call(row)

    def orphan_calls(self) -> Iterator[Call]:
        """Calls that no saved action points to, in the order they were kept."""
        last = 0
        sql = (
            f"SELECT seq, {_CALL} FROM calls c WHERE seq > ? AND NOT EXISTS "
            f"(SELECT 1 FROM actions a WHERE a.call_id = c.id AND a.call_index = c.idx) ORDER BY seq LIMIT {_PAGE}"
        )
        while rows := self._all(sql, (last,)):
            for row in rows:
                yield read_call(row[1:])
            last = rows[-1][0]

    def orphan_counts(self, episode: str | None = None) -> Counter[str]:
        """How many orphan calls there are, by the agent that their headers name, else by policy.

        `episode`: only those whose headers name this episode.
        """
        where, values = ("", ()) if episode is None else (" AND c.episode = ?", (episode,))
        sql = (
            "SELECT COALESCE(c.agent, c.policy) AS who, COUNT(*) FROM calls c WHERE NOT EXISTS "
            f"(SELECT 1 FROM actions a WHERE a.call_id = c.id AND a.call_index = c.idx){where} GROUP BY who"
        )
        return Counter(dict(self._all(sql, values)))

    # -- episodes

    def save_episode(self, trace: EpisodeTrace) -> None:
        """Keeps an episode, its transitions, actions and verdicts in one transaction, replacing an earlier save of the same id.

        Calls are not written (the gateway did); verdicts and an outcome that were added apart stay unless `trace` has its own.
        """
        self.save_episodes((trace,))

    def save_episodes(self, traces: Iterable[EpisodeTrace]) -> None:
        """Keeps episodes, as `save_episode` does, all of them in one transaction: after a failure there is none of them."""
        rows = [self._episode_rows(trace) for trace in traces]
        with self._write("save episodes") as db:
            for head, body, actions, verdicts, outcome in rows:
                id = head[0]
                db.execute(
                    "INSERT INTO episodes (id, split, iteration, status, payload) VALUES (?,?,?,?,?) ON CONFLICT (id) DO UPDATE SET "
                    "split = excluded.split, iteration = excluded.iteration, status = excluded.status, payload = excluded.payload",
                    head,
                )
                db.execute("INSERT OR REPLACE INTO bodies VALUES (?,?)", (id, body))
                db.execute("DELETE FROM actions WHERE episode = ?", (id,))
                db.executemany("INSERT OR REPLACE INTO actions VALUES (?,?,?,?)", actions)
                db.executemany("INSERT OR REPLACE INTO verdicts VALUES (?,?,?)", verdicts)
                if outcome is not None:
                    db.execute("INSERT OR REPLACE INTO outcomes VALUES (?,?)", (id, outcome))

    def add_verdict(self, episode_id: str, action_id: str, verdict: Verdict) -> None:
        """Keeps a verdict, before or after its episode is saved. A later one for the same action replaces it."""
        self.add_verdicts(episode_id, {action_id: verdict})

    def add_verdicts(self, episode_id: str, verdicts: Mapping[str, Verdict]) -> None:
        """Keeps verdicts on actions of an episode, by action id, in one transaction; see `add_verdict`."""
        rows = [(episode_id, action, self._dump(to_json(verdict))) for action, verdict in verdicts.items()]
        if rows:
            with self._write("write verdicts") as db:
                db.executemany("INSERT OR REPLACE INTO verdicts VALUES (?,?,?)", rows)

    def drop_verdicts(self, episode_id: str, action_ids: Iterable[str]) -> None:
        """Takes verdicts away, so that their actions are pending again. One that there isn't is passed over."""
        rows = [(episode_id, action) for action in action_ids]
        if rows:
            with self._write("take verdicts away") as db:
                db.executemany("DELETE FROM verdicts WHERE episode = ? AND action = ?", rows)

    def set_outcome(self, episode_id: str, outcome: Outcome) -> None:
        """Keeps an episode's grade, before or after the episode is saved."""
        with self._write("write an outcome") as db:
            db.execute("INSERT OR REPLACE INTO outcomes VALUES (?,?)", (episode_id, self._dump(to_json(outcome))))

    def as_kept(self, trace: EpisodeTrace) -> EpisodeTrace:
        """A trace with its transitions and actions as they would come back from the store: redacted, and of plain JSON."""
        transitions, actions, edges = read_steps(load(self._dump(write_steps(trace))))
        return replace(trace, transitions=transitions, actions=actions, edges=edges)

    def episode(self, id: str) -> EpisodeTrace | None:
        """The episode with its calls and verdicts joined in."""
        with self._lock:
            row = self._one("SELECT e.payload, o.payload FROM episodes e LEFT JOIN outcomes o ON o.episode = e.id WHERE e.id = ?", (id,))
            return None if row is None else self._trace(read_episode(row))

    def episodes(
        self,
        *,
        split: str | None = None,
        iteration: int | None = None,
        status: EpisodeStatus | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> Iterator[Episode]:
        """Episodes without their steps, in the order they were first saved, a page at a time."""
        for rows in self._pages(split, iteration, status, limit, newest_first, _PAGE):
            for row in rows:
                yield read_episode(row)

    def traces(
        self,
        *,
        ids: Iterable[str] | None = None,
        split: str | None = None,
        iteration: int | None = None,
        status: EpisodeStatus | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> Iterator[EpisodeTrace]:
        """Whole episodes, in the order they were first saved.

        `ids`: only these, in their own order; an id that there isn't is passed over. `newest_first` is refused with it.
        """
        if ids is None:
            pages = self._pages(split, iteration, status, limit, newest_first, _TRACE_PAGE)
        elif newest_first:
            raise StoreError("newest_first can't take effect with ids", hint="give the ids in the order that is wanted")
        else:
            pages = self._named(ids, split, iteration, status, limit)
        for rows in pages:
            for row in rows:
                yield self._trace(read_episode(row))

    def delete_episodes(self, split: str | None = None, iteration: int | None = None) -> int:
        """Takes out episodes with all that belongs to them, calls included; returns how many. Without arguments: all of them."""
        where, values = _where(split, iteration, None)
        chosen = f"(SELECT id FROM episodes e{where})"
        with self._write("delete episodes") as db:
            db.execute(
                "DELETE FROM calls WHERE seq IN (SELECT c.seq FROM actions a JOIN calls c ON c.id = a.call_id AND c.idx = a.call_index "
                f"WHERE a.episode IN {chosen})",
                values,
            )
            for table in ("actions", "bodies", "verdicts", "outcomes", "failures", "trained"):
                db.execute(f"DELETE FROM {table} WHERE episode IN {chosen}", values)
            return db.execute(f"DELETE FROM episodes AS e{where}", values).rowcount

    def mark_trained(self, episode_ids: Iterable[str], iteration: int) -> None:
        """Notes that an update was made from these episodes."""
        with self._write("mark episodes as trained") as db:
            db.executemany("INSERT OR REPLACE INTO trained VALUES (?,?)", [(id, iteration) for id in episode_ids])

    def trained(self) -> set[str]:
        return {row[0] for row in self._all("SELECT episode FROM trained")}

    # -- failures, counts, meta

    def add_failure(self, failure: Failure) -> None:
        message = self._clean({"message": failure.message})["message"]
        row = (failure.kind, failure.type, _text(message), failure.episode, failure.at or time.time())
        with self._write("write a failure") as db:
            db.execute("INSERT INTO failures (kind, type, message, episode, at) VALUES (?,?,?,?,?)", row)

    def failures(self) -> Counter[str]:
        """How many failures there were of each `"kind:type"`."""
        return Counter(
            {f"{kind}:{type}": n for kind, type, n in self._all("SELECT kind, type, COUNT(*) FROM failures GROUP BY kind, type")}
        )

    def failure_list(self, limit: int = 100) -> list[Failure]:
        """The latest failures, newest first."""
        rows = self._all("SELECT kind, type, message, episode, at FROM failures ORDER BY seq DESC LIMIT ?", (limit,))
        return [Failure(*row) for row in rows]

    def counts(self) -> dict[str, int]:
        """How many episodes, calls, actions, verdicts, outcomes, failures and trained episodes there are."""
        row = self._one("SELECT " + ", ".join(f"(SELECT COUNT(*) FROM {table})" for table in _COUNTED))
        return dict(zip(_COUNTED, row or (), strict=True))

    def put_meta(self, key: str, value: Any) -> None:
        """Keeps a small JSON value under a name of the caller's own."""
        with self._write("write meta data") as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", ("user:" + key, dump(value)))

    def get_meta(self, key: str, default: Any = None) -> Any:
        row = self._one("SELECT value FROM meta WHERE key = ?", ("user:" + key,))
        return default if row is None else load(row[0])

    def close(self) -> None:
        """Commits what waits and closes the file. A second close does nothing."""
        self._writer.close()
        with self._lock, self._guard("close"):
            self._closed = True
            self._db.close()

    def __enter__(self) -> TraceStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- rows

    def _call_row(self, call: Call) -> tuple[Any, ...]:
        payload: Any = {"text": call.text, "sampling": call.sampling, "messages": call.messages, "tool_calls": call.tool_calls}
        if call.last_version is not None:
            payload["last_version"] = call.last_version
        kept = True
        if self._redact is not None:
            plain = load(dump(payload))
            payload = self._clean(payload)
            kept = payload == plain
        return (
            call.id, call.index, call.policy, call.version, call.agent, call.episode, call.finish_reason, call.started, call.ended,
            pack_ids(call.prompt_ids if kept else ()), pack_ids(call.completion_ids if kept else ()),
            pack_floats(call.logprobs if kept else ()), dump(payload, DEFLATE_CALL_FROM),
        )  # fmt: skip

    def _episode_rows(self, trace: EpisodeTrace) -> tuple[tuple[Any, ...], bytes, list[Any], list[Any], bytes | None]:
        """Rows of an episode, its actions and verdicts, the bytes of its body and, where it has one, of its outcome."""
        episode = trace.episode
        id, outcome = episode.id, episode.outcome
        return (
            (id, episode.split, episode.iteration, episode.status, self._dump(to_json(replace(episode, outcome=None)))),
            self._dump(write_steps(trace)),
            [(id, a.id, a.call_id, a.call_index) for a in trace.actions],
            [(id, action, self._dump(to_json(verdict))) for action, verdict in trace.verdicts.items()],
            None if outcome is None else self._dump(to_json(outcome)),
        )

    def _trace(self, episode: Episode) -> EpisodeTrace:
        with self._lock:
            body = self._one("SELECT payload FROM bodies WHERE episode = ?", (episode.id,))
            verdicts = self._all("SELECT action, payload FROM verdicts WHERE episode = ?", (episode.id,))
            columns = ", ".join(f"c.{name}" for name in _CALL.split(", "))
            calls = self._all(
                f"SELECT a.id, {columns} FROM actions a JOIN calls c ON c.id = a.call_id AND c.idx = a.call_index WHERE a.episode = ?",
                (episode.id,),
            )
        transitions, actions, edges = read_steps(load(body[0])) if body else ((), (), ())
        return EpisodeTrace(
            episode=episode,
            transitions=transitions,
            actions=actions,
            edges=edges,
            verdicts={action: from_json(Verdict, load(payload)) for action, payload in verdicts},
            calls={row[0]: read_call(row[1:]) for row in calls},
        )

    def _pages(
        self, split: str | None, iteration: int | None, status: str | None, limit: int | None, newest_first: bool, page: int
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Rows of (episode, outcome) a page at a time, by `seq`: no cursor stays open between pages."""
        where, values = _where(split, iteration, status)
        last, order, side = (1 << 62, "DESC", "<") if newest_first else (0, "ASC", ">")
        glue = " AND " if where else " WHERE "
        sql = (
            "SELECT e.seq, e.payload, o.payload FROM episodes e LEFT JOIN outcomes o ON o.episode = e.id"
            f"{where}{glue}e.seq {side} ? ORDER BY e.seq {order} LIMIT ?"
        )
        left = limit if limit is not None else 1 << 62
        while left > 0 and (rows := self._all(sql, (*values, last, min(page, left)))):
            yield [row[1:] for row in rows]
            last, left = rows[-1][0], left - len(rows)

    def _named(
        self, ids: Iterable[str], split: str | None, iteration: int | None, status: str | None, limit: int | None
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Rows of (episode, outcome) of given episodes, in their order, a page at a time."""
        where, values = _where(split, iteration, status)
        left, wanted = limit if limit is not None else 1 << 62, iter(dict.fromkeys(ids))
        while left > 0 and (page := list(islice(wanted, _TRACE_PAGE))):
            sql = (
                "SELECT e.id, e.payload, o.payload FROM episodes e LEFT JOIN outcomes o ON o.episode = e.id"
                f"{where}{' AND ' if where else ' WHERE '}e.id IN ({','.join('?' * len(page))})"
            )
            found = {row[0]: row[1:] for row in self._all(sql, (*values, *page))}
            rows = [found[id] for id in page if id in found][:left]
            yield rows
            left -= len(rows)

    def _clean(self, payload: Any) -> Any:
        # The hook gets plain JSON data of its own, so that what it changes in place can't reach the live record.
        return payload if self._redact is None else self._redact(load(dump(payload)))

    def _dump(self, payload: Any) -> bytes:
        return dump(self._clean(payload))

    # -- SQLite

    def _check_open(self) -> None:
        if self._closed:
            raise self._is_closed()

    def _is_closed(self) -> StoreError:
        return StoreError(f"trace store {self.path} is closed")

    @contextlib.contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"can't {doing} in trace store {self.path}: {error}", hint=way_out(error)) from error

    @contextlib.contextmanager
    def _write(self, doing: str) -> Iterator[sqlite3.Connection]:
        if self.read_only:
            raise StoreError(f"can't {doing} in trace store {self.path}: it was opened read-only")
        with self._lock, self._guard(doing):
            self._check_open()
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _all(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._guard("read"):
            self._check_open()
            return self._db.execute(sql, values).fetchall()

    def _one(self, sql: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        with self._lock, self._guard("read"):
            self._check_open()
            return cast("tuple[Any, ...] | None", self._db.execute(sql, values).fetchone())


def _where(split: str | None, iteration: int | None, status: str | None) -> tuple[str, list[Any]]:
    filters = (("split", split), ("iteration", iteration), ("status", status))
    given = [(f"e.{name} = ?", value) for name, value in filters if value is not None]
    return (" WHERE " + " AND ".join(c for c, _ in given) if given else ""), [v for _, v in given]


def _text(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()

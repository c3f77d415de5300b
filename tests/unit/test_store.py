"""`TraceStore`: what goes in comes out, whoever writes and whatever breaks."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mappa_graph import writer
from mappa_graph.errors import StoreError
from mappa_graph.record import (
    Action,
    Call,
    Episode,
    EpisodeTrace,
    Execution,
    ExecutionErrorInfo,
    Failure,
    FileChange,
    Outcome,
    Transition,
    Verdict,
)
from mappa_graph.store import TraceStore


def call(id: str = "c1", index: int = 0, **changes: Any) -> Call:
    base = Call(
        id=id,
        index=index,
        policy="solver",
        version=3,
        prompt_ids=(1, 2, 150_000),
        completion_ids=(7, 8),
        logprobs=(-0.1, -2.5),
        finish_reason="stop",
        text="ein Grüß",
        sampling={"temperature": 0.7, "stop": ["x"]},
        messages=({"role": "user", "content": "hi " * 400},),
        tool_calls=({"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}},),
        agent="a",
        episode="e",
        started=1.5,
        ended=2.25,
    )
    return replace(base, **changes)


def trace(id: str = "e1", *, actions: int = 2, **head: Any) -> EpisodeTrace:
    message = {"role": "user", "content": "solve " * 50}
    acts = tuple(
        Action(
            id=f"{id}-a{i}",
            transition_id=f"{id}-t",
            agent="solver",
            policy="solver",
            order=i,
            call_id=f"{id}-c{i}",
            messages=(message, {"role": "assistant", "content": f"turn {i}"}),
            output=f"out {i}",
            executions=(
                Execution(
                    id="x",
                    status="error",
                    code="1/0",
                    error=ExecutionErrorInfo("ZeroDivisionError", "division by zero", "tb"),
                    files=(FileChange("a.csv", "created", 3, "ff"),),
                ),
            ),
        )
        for i in range(actions)
    )
    return EpisodeTrace(
        episode=Episode(id=id, environment="math", task="1+1", status="done", **head),
        transitions=(Transition(id=f"{id}-t", node="solve", path="solve", step=1, output={"x": [1]}),),
        actions=acts,
        edges=tuple((i, i + 1) for i in range(actions - 1)),
    )


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with TraceStore(tmp_path / "deep" / "trace.db") as opened:
        yield opened


def test_a_call_comes_back_equal(store: TraceStore) -> None:
    store.add_call(call())
    store.add_calls([call("c2", 0, tool_calls=()), call("c2", 1, completion_ids=(), logprobs=())])
    assert store.call("c1") == call()
    assert store.call("c2", 1) == call("c2", 1, completion_ids=(), logprobs=())
    assert store.call("c2", 2) is None


def test_float32_logprobs_take_four_bytes_and_others_stay_exact(store: TraceStore) -> None:
    narrow, wide = (-0.5, -0.1 * 0 - 1.25) * 100, (-0.1, -0.2) * 100
    store.add_calls([call("n", completion_ids=range(200), logprobs=narrow), call("w", completion_ids=range(200), logprobs=wide)])
    assert store.call("n").logprobs == narrow and store.call("w").logprobs == wide  # type: ignore[union-attr]
    sizes = dict(sqlite3.connect(store.path).execute("SELECT id, LENGTH(logprobs) FROM calls"))
    assert sizes == {"n": 801, "w": 1601}


def test_hostile_texts_are_kept(store: TraceStore) -> None:
    nasty = "lone \ud800 nul \x00 esc \x1b[31m"
    store.add_call(call(text=nasty, messages=[{"role": "user", "content": nasty, "big": 10**400, "odd": {1, 2}, "obj": Path("/x")}]))
    kept = store.call("c1")
    assert kept is not None and kept.text == nasty
    assert kept.messages[0] == {"role": "user", "content": nasty, "big": 10**400, "odd": [1, 2], "obj": "/x"}
    store.add_failure(Failure("coach", "CoachError", nasty))
    assert "lone" in store.failure_list()[0].message


def test_an_episode_comes_back_with_calls_and_verdicts_joined(store: TraceStore) -> None:
    store.add_call(call("e1-c0"))
    store.add_verdict("e1", "e1-a1", Verdict(4.0, "meh", blame=("e1-a0",)))
    store.set_outcome("e1", Outcome(True, "equal", metrics={"f1": 0.5}))
    saved = trace(split="heldout", iteration=2)
    store.save_episode(replace(saved, verdicts={"e1-a0": Verdict(9.0)}))
    back = store.episode("e1")
    assert back is not None
    assert back.actions == saved.actions and back.transitions == saved.transitions and back.edges == saved.edges
    assert back.calls == {"e1-a0": call("e1-c0")}
    assert back.verdicts == {"e1-a0": Verdict(9.0), "e1-a1": Verdict(4.0, "meh", blame=("e1-a0",))}
    assert back.episode == replace(saved.episode, outcome=Outcome(True, "equal", metrics={"f1": 0.5}))
    assert store.episode("nope") is None


def test_a_second_save_replaces_the_first_and_keeps_the_order(store: TraceStore) -> None:
    store.save_episode(trace("e1", actions=3))
    store.save_episode(trace("e2"))
    store.save_episode(trace("e1", actions=1, iteration=5))
    assert [(e.id, e.iteration) for e in store.episodes()] == [("e1", 5), ("e2", 0)]
    assert store.counts()["actions"] == 3
    assert len(store.episode("e1").actions) == 1  # type: ignore[union-attr]


def test_episodes_that_are_saved_together_come_back_as_those_saved_one_by_one(store: TraceStore, tmp_path: Path) -> None:
    given = [trace(f"e{i}", actions=1 + i % 3, split="train" if i % 2 else "heldout", iteration=i) for i in range(40)]
    given[3] = replace(given[3], episode=replace(given[3].episode, outcome=Outcome(True)), verdicts={"e3-a0": Verdict(7.0)})
    store.add_verdict("e5", "e5-a0", Verdict(2.0))
    store.save_episodes(iter(given))
    with TraceStore(tmp_path / "single.db") as single:
        single.add_verdict("e5", "e5-a0", Verdict(2.0))
        for one in given:
            single.save_episode(one)
        assert list(store.traces()) == list(single.traces())
    again = trace("e7", actions=3)
    store.save_episodes([trace("e7"), again])  # the later of two with one id stays
    assert store.episode("e7") == again and store.counts()["episodes"] == 40
    store.save_episodes([])


def test_of_episodes_that_are_saved_together_a_failure_leaves_none(store: TraceStore) -> None:
    store.save_episode(trace("old"))
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    broken = trace("e2")
    broken = replace(broken, transitions=(replace(broken.transitions[0], output=cyclic),))
    with pytest.raises(RecursionError):
        store.save_episodes([trace("e1"), broken, trace("old", actions=3)])
    store._db.execute("CREATE TRIGGER full BEFORE INSERT ON bodies WHEN NEW.episode = 'e3' BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(StoreError, match="save episodes"):
        store.save_episodes([trace("e1"), trace("old", actions=3), trace("e3")])
    assert [t.episode.id for t in store.traces()] == ["old"] and store.episode("old") == trace("old")


def test_verdicts_that_are_added_together_are_all_there_or_none(store: TraceStore) -> None:
    store.save_episode(trace(actions=3))
    store.add_verdict("e1", "e1-a0", Verdict(1.0))
    store.add_verdicts("e1", {"e1-a0": Verdict(9.0), "e1-a1": Verdict(None, error="no")})
    store.add_verdicts("later", {"later-a0": Verdict(3.0)})  # before its episode
    store.add_verdicts("e1", {})
    assert store.episode("e1").verdicts == {"e1-a0": Verdict(9.0), "e1-a1": Verdict(None, error="no")}  # type: ignore[union-attr]
    store._db.execute("CREATE TRIGGER full BEFORE INSERT ON verdicts WHEN NEW.action = 'e1-a2' BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(StoreError, match="write verdicts"):
        store.add_verdicts("e1", {"e1-a0": Verdict(0.0), "e1-a2": Verdict(0.0)})
    assert store.episode("e1").verdicts["e1-a0"] == Verdict(9.0)  # type: ignore[union-attr]
    store.drop_verdicts("e1", ["e1-a1", "nobody"])
    assert set(store.episode("e1").verdicts) == {"e1-a0"} and store.counts()["verdicts"] == 2  # type: ignore[union-attr]


def test_given_episodes_are_read_in_the_order_that_is_asked_for(store: TraceStore) -> None:
    store.save_episodes([trace(f"e{i}", split="train" if i % 2 else "heldout") for i in range(60)])
    store.add_calls([call("e7-c0"), call("e7-c1")])
    store.add_verdict("e7", "e7-a1", Verdict(4.0))
    wanted = [f"e{i}" for i in range(59, -1, -1)]
    assert list(store.traces(ids=wanted)) == [store.episode(id) for id in wanted]
    assert [t.episode.id for t in store.traces(ids=iter(["e3", "none", "e1", "e3"]))] == ["e3", "e1"]
    assert [t.episode.id for t in store.traces(ids=wanted, split="train", limit=20)] == [f"e{i}" for i in range(59, 19, -2)]
    assert list(store.traces(ids=[])) == list(store.traces(ids=wanted, limit=0)) == []
    with pytest.raises(StoreError, match="newest_first can't take effect with ids"):
        next(store.traces(ids=wanted, newest_first=True))


def test_a_conversation_is_stored_in_its_length_not_its_square(store: TraceStore) -> None:
    turns = [{"role": "user", "content": os.urandom(300).hex()} for _ in range(100)]
    base = trace(actions=100)
    long = replace(base, actions=tuple(replace(a, messages=tuple(turns[: i + 1])) for i, a in enumerate(base.actions)))
    store.save_episode(long)
    assert store.episode("e1").actions == long.actions  # type: ignore[union-attr]
    size = sqlite3.connect(store.path).execute("SELECT LENGTH(payload) FROM bodies").fetchone()[0]
    assert size < 100 * 600 + 30_000


def test_listings_filter_limit_and_turn_round(store: TraceStore) -> None:
    for i in range(600):
        store.save_episode(trace(f"e{i:03}", actions=0, split="train" if i % 2 else "heldout", iteration=i // 300))
    assert [e.id for e in store.episodes()] == [f"e{i:03}" for i in range(600)]
    assert [e.id for e in store.episodes(newest_first=True, limit=3)] == ["e599", "e598", "e597"]
    assert [e.id for e in store.episodes(split="train", iteration=1, limit=2)] == ["e301", "e303"]
    assert len(list(store.traces(split="heldout"))) == 300
    assert list(store.episodes(status="failed")) == []


def test_a_listing_may_be_written_into_while_it_is_read(store: TraceStore) -> None:
    for i in range(300):
        store.save_episode(trace(f"e{i}", actions=1))
    for episode in store.episodes():
        store.add_verdict(episode.id, f"{episode.id}-a0", Verdict(1.0))
    assert store.counts()["verdicts"] == 300


def test_orphans_are_the_calls_that_no_action_points_to(store: TraceStore) -> None:
    store.add_calls([call("e1-c0"), call("e1-c0", 1), call("raw")])
    store.save_episode(trace("e1"))
    assert [(c.id, c.index) for c in store.orphan_calls()] == [("e1-c0", 1), ("raw", 0)]


def test_deleting_an_iteration_takes_all_that_belongs_to_it(store: TraceStore) -> None:
    for id, iteration in (("e1", 1), ("e2", 2)):
        store.add_call(call(f"{id}-c0"))
        store.save_episode(trace(id, iteration=iteration))
        store.add_verdict(id, f"{id}-a0", Verdict(5.0))
        store.set_outcome(id, Outcome(True))
        store.add_failure(Failure("coach", "X", "m", episode=id))
    store.mark_trained(["e1", "e2"], 1)
    assert store.delete_episodes(split="train", iteration=2) == 1
    expected = {"episodes": 1, "calls": 1, "actions": 2, "verdicts": 1, "outcomes": 1, "failures": 1, "trained": 1}
    assert store.counts() == expected and store.trained() == {"e1"}
    assert store.call("e1-c0") is not None and store.call("e2-c0") is None


def test_failures_are_counted_by_kind_and_type(store: TraceStore) -> None:
    for kind, type in (("coach", "A"), ("coach", "A"), ("sandbox", "B")):
        store.add_failure(Failure(kind, type, "m"))
    assert store.failures() == {"coach:A": 2, "sandbox:B": 1}
    assert [f.kind for f in store.failure_list(2)] == ["sandbox", "coach"]


def test_meta_values_come_back(store: TraceStore) -> None:
    store.put_meta("schema", {"a": [1, None]})
    assert store.get_meta("schema") == {"a": [1, None]} and store.get_meta("nope", 3) == 3
    store.close()
    with TraceStore(store.path) as again:
        assert again.get_meta("schema") == {"a": [1, None]}


def test_redaction_reaches_every_text_and_drops_the_tokens_that_spell_it(tmp_path: Path) -> None:
    def redact(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("secret", "***")
        if isinstance(value, dict):
            return {k: redact(v) for k, v in value.items()}
        return [redact(v) for v in value] if isinstance(value, list) else value

    with TraceStore(tmp_path / "t.db", redact=redact) as store:
        store.add_calls([call("a", text="my secret"), call("b")])
        store.save_episode(replace(trace(), episode=Episode("e1", task="secret"), verdicts={"e1-a0": Verdict(1.0, "secret")}))
        store.add_failure(Failure("x", "y", "secret"))
        told, untold = store.call("a"), store.call("b")
        assert told is not None and told.text == "my ***" and told.completion_ids == () and told.prompt_ids == ()
        assert untold == call("b")
    assert b"secret" not in (tmp_path / "t.db").read_bytes()


async def test_concurrent_awaiters_share_a_transaction(store: TraceStore) -> None:
    await store.aadd_calls([call("first")])
    seen: list[str] = []
    assert store._writer._quick is not None
    store._writer._quick.set_trace_callback(seen.append)
    await asyncio.gather(*(store.aadd_calls([call(f"c{i}")]) for i in range(200)))
    assert store.counts()["calls"] == 201
    assert sum(s == "COMMIT" for s in seen) == 1


async def test_a_file_that_another_writes_to_makes_calls_wait_and_not_the_loop(store: TraceStore) -> None:
    other = sqlite3.connect(store.path)
    other.execute("BEGIN IMMEDIATE")
    waiting = asyncio.gather(*(store.aadd_calls([call(f"c{i}")]) for i in range(5)))
    for _ in range(50):
        # The loop turns on while the lock is held.
        await asyncio.sleep(0.001)
        assert not waiting.done()
    other.rollback()
    await waiting
    assert store.counts()["calls"] == 5


async def test_a_call_that_can_not_be_written_down_fails_alone(store: TraceStore) -> None:
    results = await asyncio.gather(
        store.aadd_calls([call("good")]),
        store.aadd_calls([replace(call("bad"), prompt_ids=(1 << 40,))]),
        store.aadd_calls([call("also")]),
        return_exceptions=True,
    )
    assert [type(r) is type(None) for r in results] == [True, False, True]
    assert {c.id for c in store.orphan_calls()} == {"good", "also"}


async def test_an_awaiter_that_is_cancelled_does_not_disturb_its_group(store: TraceStore) -> None:
    tasks = [asyncio.ensure_future(store.aadd_calls([call(f"c{i}")])) for i in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError) and results[0] is None and results[2] is None
    assert store.counts()["calls"] >= 2


async def test_a_redaction_hook_never_runs_on_the_loop(tmp_path: Path) -> None:
    threads: set[int] = set()

    def hook(payload: Any) -> Any:
        threads.add(threading.get_ident())
        return payload

    with TraceStore(tmp_path / "t.db", redact=hook) as store:
        await store.aadd_calls([call()])
        assert store.counts()["calls"] == 1
    assert threads and threading.get_ident() not in threads


async def test_loops_in_several_threads_share_a_store(store: TraceStore) -> None:
    async def work(k: int) -> None:
        for i in range(40):
            await asyncio.gather(*(store.aadd_calls([call(f"{k}-{i}-{j}")]) for j in range(3)))

    await asyncio.gather(work(0), *(asyncio.to_thread(asyncio.run, work(k)) for k in (1, 2, 3)))
    assert store.counts()["calls"] == 4 * 40 * 3


async def test_the_log_begins_anew_however_long_calls_come(store: TraceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CHECKPOINT", "_ANEW", "_MOST"):
        monkeypatch.setattr(writer, name, getattr(writer, name) // 4)
    big = call(prompt_ids=tuple(range(20_000)))
    for i in range(1000):
        await asyncio.gather(*(store.aadd_calls([replace(big, id=f"c{i}-{j}")]) for j in range(2)))
    size = Path(f"{store.path}-wal").stat().st_size  # noqa: ASYNC240
    assert size < 110e6, f"{2000 * 80e3 / 1e6:.0f} MB of calls left a log of {size / 1e6:.0f} MB"
    assert store.counts()["calls"] == 2000


async def test_a_failed_group_tells_every_awaiter(store: TraceStore) -> None:
    other = sqlite3.connect(store.path)
    store._db.execute("PRAGMA busy_timeout = 50")
    other.execute("BEGIN IMMEDIATE")
    results = await asyncio.gather(*(store.aadd_calls([call(f"c{i}")]) for i in range(5)), return_exceptions=True)
    assert all(isinstance(r, StoreError) and "another process" in str(r) for r in results)
    other.rollback()
    await store.aadd_calls([call("after")])
    assert store.counts()["calls"] == 1


async def test_close_commits_what_waits(tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "t.db")
    waiting = asyncio.gather(*(store.aadd_calls([call(f"c{i}")]) for i in range(50)))
    await asyncio.sleep(0)
    await asyncio.to_thread(store.close)
    await waiting
    with TraceStore(tmp_path / "t.db", read_only=True) as again:
        assert again.counts()["calls"] == 50


def test_a_closed_store_says_so(store: TraceStore) -> None:
    store.close()
    store.close()
    for use in (store.counts, lambda: store.add_call(call())):
        with pytest.raises(StoreError, match="is closed"):
            use()


def test_threads_may_write_at_once(store: TraceStore) -> None:
    def work(k: int) -> None:
        for i in range(50):
            store.add_call(call(f"{k}-{i}"))
            store.save_episode(trace(f"{k}-{i}", actions=1))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.counts()["calls"] == store.counts()["episodes"] == 300


def test_a_foreign_a_newer_and_a_broken_file_are_refused_and_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.db"
    db = sqlite3.connect(foreign)
    db.execute("CREATE TABLE mine (x)")
    db.commit()
    db.close()
    with pytest.raises(StoreError, match="is not a trace store"):
        TraceStore(foreign)
    assert sqlite3.connect(foreign).execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]

    newer = tmp_path / "newer.db"
    TraceStore(newer).close()
    db = sqlite3.connect(newer)
    db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    db.commit()
    db.close()
    with pytest.raises(StoreError, match="schema 99"):
        TraceStore(newer)

    text = tmp_path / "notes.txt"
    text.write_text("not a database " * 100)
    with pytest.raises(StoreError, match="give another path"):
        TraceStore(text)
    assert text.read_text().startswith("not a database")
    with pytest.raises(StoreError, match="open"):
        TraceStore(tmp_path)
    with pytest.raises(StoreError, match="does not exist"):
        TraceStore(tmp_path / "none.db", read_only=True)


def test_a_full_disk_is_a_store_error_and_leaves_no_half_record(store: TraceStore) -> None:
    store.save_episode(trace("e0"))
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="free some space"):
        store.save_episode(replace(trace("e1"), transitions=(Transition("t", "n", "n", 1, output=os.urandom(200_000).hex()),)))
    store._db.execute("PRAGMA max_page_count = 1000000")
    assert store.episode("e1") is None and store.counts()["actions"] == 2


def test_a_reader_may_not_write_and_sees_what_is_written_meanwhile(store: TraceStore) -> None:
    with TraceStore(store.path, read_only=True) as reader:
        with pytest.raises(StoreError, match="read-only"):
            reader.add_call(call())
        store.add_call(call())
        assert reader.call("c1") == call()


def test_ten_thousand_episodes_are_listed_in_flat_memory(store: TraceStore) -> None:
    for i in range(100):
        store.save_episode(trace(f"e{i}", actions=1))
    # The other 9,900 are copies made inside SQLite: what is measured is reading them.
    db = store._db
    for table, columns in (("episodes", "id, split, iteration, status, payload"), ("bodies", "episode, payload")):
        key, _, others = columns.partition(", ")
        db.execute(f"CREATE TEMP TABLE seed AS SELECT {columns} FROM {table}")
        for k in range(1, 100):
            db.execute(f"INSERT INTO {table} ({columns}) SELECT {key} || '-{k}', {others} FROM seed")
        db.execute("DROP TABLE seed")
    assert store.counts()["episodes"] == 10_000

    def peak(read: Iterator[Any], wanted: int) -> int:
        tracemalloc.start()
        assert sum(1 for _ in read) == wanted
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(store.traces(limit=50), 50)
    assert peak(store.episodes(), 10_000) < 1.5 * peak(store.episodes(limit=500), 500) + 200_000
    assert peak(store.traces(limit=1_500), 1_500) < 1.5 * peak(store.traces(limit=100), 100) + 200_000


def test_saving_episodes_keeps_nothing_of_them_in_memory(store: TraceStore) -> None:
    def save(first: int, n: int) -> int:
        for i in range(first, first + n):
            store.add_call(call(f"e{i}-c0"))
            store.save_episode(trace(f"e{i}", actions=1))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    save(0, 30)
    before = save(30, 30)
    after = save(60, 200)
    tracemalloc.stop()
    assert after - before < 100_000, "two hundred episodes of about 2 kB each left more than 500 bytes an episode behind"

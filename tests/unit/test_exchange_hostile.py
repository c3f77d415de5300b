"""Hostile rows in an import, and keys on the way in and out: one bad row costs itself, and no key is on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mappa_graph import TraceStore
from mappa_graph.agent import Agent
from mappa_graph.exchange import files as files_module
from mappa_graph.exchange.export import export
from mappa_graph.exchange.files import FileSource
from mappa_graph.exchange.importer import Imported, import_traces
from mappa_graph.exchange.ledger import Ledger
from mappa_graph.exchange.options import Options
from mappa_graph.exchange.pairs import Pairs
from mappa_graph.exchange.redact import Redactor
from mappa_graph.exchange.spans import Notes, safe_name
from mappa_graph.exchange.spool import Spool, sweep
from mappa_graph.record import EpisodeTrace
from tests.fakes.exported import episode, run_of

KEY = "sk-proj-abcdEFGH1234567890abcdEFGH1234567890"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(id: Any, answer: str = "Four.", **more: Any) -> dict[str, Any]:
    return {"id": id, "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}], **more}


def take(path: Path, run: Path, **options: Any) -> Imported:
    again = options.pop("again", False)
    return import_traces(FileSource(path, run), run, again=again, **options)


def stored(run: Path) -> list[EpisodeTrace]:
    with TraceStore(run / "trace.db", read_only=True) as store:
        return list(store.traces())


def disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_one_bad_row_costs_itself_and_the_import_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = files_module.chat.trace_of

    def breaking(row: Any, agent: str | None, notes: Notes) -> Any:
        if row.get("id") == "breaks":
            raise ZeroDivisionError("hostile")
        return read(row, agent, notes)

    monkeypatch.setattr(files_module.chat, "trace_of", breaking)
    rows = [
        chat("first"), chat("late", timestamp=10**400), chat("sur\ud800"), chat("who", agent="a\ud800"), chat("breaks"),
        chat("rated", score=10**400), chat("odd", thread_id="t\ud800"), chat("last"),
    ]  # fmt: skip
    done = take(write(tmp_path / "x.jsonl", rows), tmp_path / "run")
    assert (done.traces, done.failed) == (7, 0)
    assert done.problems["row that can't be read: ZeroDivisionError"] == 1
    ids = {t.episode.id for t in stored(tmp_path / "run")}
    assert ids == {"first", "late", "sur\\ud800", "who", "rated", "odd", "last"}
    assert take(tmp_path / "x.jsonl", tmp_path / "run", again=True).known == 7


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("../../etc/x", "x______etc_x"), ("..", "unnamed"), (".", "unnamed"), ("", "unnamed"), ("solver", "solver"), ("a b/c", "a_b_c"),
        ("sur\ud800", "sur_ud800"), ("_hidden", "x_hidden"), ("-rf", "x-rf"), ("a" * 300, "a" * 100), ("é", "unnamed"), ("a\n", "a_"),
    ],
)  # fmt: skip
def test_names_from_data_are_fit_for_folders(name: str, safe: str) -> None:
    notes = Notes(strict=True)
    assert safe_name(name, notes) == safe
    assert Agent(safe).name not in (".", "..") and len(safe) <= 100
    assert sum(notes.counts.values()) == (name != safe)


def test_agents_and_policies_of_imported_traces_have_safe_names(tmp_path: Path) -> None:
    marks = {"mappa_agent": "../agent", "mappa_policy": "../../policy"}
    spans = [
        {"id": "r", "trace_id": "t", "name": "run", "kind": "chain", "start": 1, "end": 4},
        {
            "id": "m",
            "trace_id": "t",
            "parent_id": "r",
            "name": "c",
            "kind": "llm",
            "start": 2,
            "end": 3,
            "outputs": "hi",
            "metadata": marks,
        },
    ]
    chats = [chat("a", agent="../../x"), chat("b", model="../../model"), chat("c", agent="/abs")]
    chats[1]["messages"][1]["name"] = "Ann Lee"
    first = take(write(tmp_path / "spans.jsonl", spans), tmp_path / "run")
    second = take(write(tmp_path / "chats.jsonl", chats), tmp_path / "run")
    actions = [a for t in stored(tmp_path / "run") for a in t.actions]
    assert {a.agent for a in actions} == {"x___agent", "x______x", "Ann_Lee", "x_abs"}
    assert all(Agent(a.agent, policy=a.policy) for a in actions)
    problem = "name of an agent or policy that can't be one (mended)"
    assert first.problems[problem] >= 2 and second.problems[problem] >= 3 and problem in second.examples


def test_an_edited_chat_of_as_many_messages_is_updated(tmp_path: Path) -> None:
    path, run = write(tmp_path / "x.jsonl", [chat("a"), chat("b")]), tmp_path / "run"
    assert take(path, run).traces == 2
    write(path, [chat("a", "Five."), chat("b")])
    done = take(path, run, again=True)
    assert (done.updated, done.known, done.traces) == (1, 1, 0)
    assert {a.output for t in stored(run) for a in t.actions} == {"Five.", "Four."}


def test_no_key_of_feedback_ids_or_threads_is_in_the_run(tmp_path: Path) -> None:
    rows = [
        chat("a", label=f"good {KEY}", thread_id=f"thread {KEY}"), chat(f"id {KEY}"),
        chat("c", agent=f"agent {KEY}", model=KEY),
    ]  # fmt: skip
    feedback = [{"id": f"f {KEY}", "key": f"k {KEY}", "score": 1, "value": KEY, "comment": f"use {KEY}"}]
    spans = [
        {"id": "r", "trace_id": "t", "name": "run", "kind": "chain", "start": 1, "end": 4, "session": f"s {KEY}"},
        {"id": "m", "trace_id": "t", "parent_id": "r", "kind": "llm", "start": 2, "end": 3, "outputs": "hi", "feedback": feedback},
    ]
    take(write(tmp_path / "chats.jsonl", rows), tmp_path / "run", redact=Redactor())
    take(write(tmp_path / "spans.jsonl", spans), tmp_path / "run", redact=Redactor())
    assert KEY.encode() not in disk(tmp_path / "run")
    with Ledger(tmp_path / "run") as ledger:
        (found,) = [f for f in ledger.feedback() if f.action == "m"]
        known = ledger.known("t")
    assert (found.value, found.comment, found.score) == ("[KEY]", "use [KEY]", 1.0)
    assert known is not None and known.session is not None and known.session.startswith("s [KEY]-")
    assert len(stored(tmp_path / "run")) == 4
    assert take(tmp_path / "chats.jsonl", tmp_path / "run", redact=Redactor(), again=True).known == 3


MIXED = """
import sys, time
from pathlib import Path
from mappa_graph.exchange.files import FileSource
from mappa_graph.exchange.redact import Redactor
from mappa_graph.exchange.spans import Notes
source = FileSource(sys.argv[1], Path(sys.argv[2]))
source.redact = Redactor()
traces = source.traces(None, Notes())
next(traces)
print("open", flush=True)
time.sleep(60)
"""


def test_a_spool_is_its_owners_alone_and_redacted_and_one_of_a_killed_import_goes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rows = [
        {"id": f"{t}{i}", "trace_id": t, "parent_id": f"{t}0" if i else None, "kind": "llm" if i else "chain", "name": "n", "start": i + 1,
         "end": 9, "outputs": f"say {KEY}", "metadata": {"openaiApiKey": KEY}}
        for i in range(2) for t in ("a", "b")
    ]  # fmt: skip
    path = write(tmp_path / "mixed.jsonl", rows)
    with subprocess.Popen([sys.executable, "-c", MIXED, str(path), str(run)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        process.send_signal(signal.SIGKILL)
    left = list(run.glob("import-*"))
    assert left and all(p.stat().st_mode & 0o077 == 0 for p in left)
    spools = [p for p in left if p.suffix == ".spool"]
    assert KEY.encode() not in disk(run)
    spool = Spool(spools[0])
    assert [(id, [s["outputs"] for s in spans]) for id, spans in spool.traces()] == [("a", ["say [KEY]"] * 2), ("b", ["say [KEY]"] * 2)]
    spool.close()
    assert take(write(tmp_path / "other.jsonl", [chat("c")]), run).traces == 1
    assert not list(run.glob("import-*"))


def test_a_services_spool_is_kept_to_go_on_with_for_a_week(tmp_path: Path) -> None:
    for name, age in (("import-new.spool", 0.0), ("import-old.spool", 8 * 86_400.0)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["import-new.spool"]


def keyed(name: str, **more: Any) -> EpisodeTrace:
    """Sibling answers whose names and ids all hold a key."""
    base = episode(1, 0 if name == "a" else 2)
    solved = base.actions[0]
    ids = {solved.id: f"{name} {KEY}"}
    action = replace(solved, id=ids[solved.id], output=f"answer {name}", policy=f"policy {KEY}", call_id=None, **more)
    verdict = replace(base.verdicts[solved.id], score=9.0 if name == "a" else 1.0)
    head = replace(base.episode, id=f"e-{name}", environment=f"env {KEY}", stratum="s")
    return EpisodeTrace(head, base.transitions, (action,), (), {action.id: verdict})


@pytest.mark.parametrize("format", ["sft", "dpo", "kto", "reward"])
def test_no_key_of_names_or_ids_is_in_exported_files_or_cards(format: Any, tmp_path: Path) -> None:
    extra = [keyed("a", agent=f"agent {KEY}"), keyed("b", agent=f"agent {KEY}")]
    options = Options() if format == "sft" else Options(pairs=Pairs(sources=("siblings", "scores") if format == "kto" else ("siblings",)))
    with TraceStore(run_of(tmp_path / "run", tasks=0, extra=extra) / "trace.db") as store:
        made = export(store, format, tmp_path / "out" / "x.jsonl", options=options)
    assert made.rows
    assert KEY.encode() not in disk(tmp_path / "out")
    assert made.card["source"]["policies"] == ["policy [KEY]"] and made.card["source"]["environments"] == ["env [KEY]"]
    assert made.card["text_only"] == {"agent [KEY]": 2}


@pytest.mark.parametrize("format", ["sft", "dpo"])
def test_a_lone_surrogate_in_a_name_breaks_no_export(format: Any, tmp_path: Path) -> None:
    trace = [keyed("a", agent="sur\ud800"), keyed("b", agent="sur\ud800")]
    trace = [replace(t, episode=replace(t.episode, environment="env\ud800", stratum="s\ud800")) for t in trace]

    class Memory:
        path = tmp_path / "trace.db"

        def episodes(self, **_: Any) -> Any:
            return (t.episode for t in trace)

        def episode(self, id: str) -> EpisodeTrace | None:
            return next((t for t in trace if t.episode.id == id), None)

        def counts(self) -> dict[str, int]:
            return {"episodes": 2, "actions": 2}

    balance = None if format == "dpo" else "agent"
    made = export(Memory(), format, tmp_path / "x.jsonl", options=Options(balance=balance) if balance else Options())
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["agent"] for row in rows} == {"sur\ufffd"} and made.card["by"]["agent"] == {"sur\ufffd": len(rows)}

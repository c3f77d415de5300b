"""An export killed with SIGKILL goes on, memory does not grow with the store, and imported traces go all the way to training data."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import pytest

from mappa_graph.exchange import export as module
from mappa_graph.exchange.export import export
from mappa_graph.exchange.files import FileSource
from mappa_graph.exchange.importer import import_traces
from mappa_graph.exchange.options import Options
from mappa_graph.exchange.redact import Redactor, redactor
from mappa_graph.store import TraceStore
from tests.benchmarks.exchange import trace
from tests.fakes.exported import run_of

ROOT = Path(__file__).parents[2]
KILLED = """
    import os, signal, sys
    from mappa_graph.exchange import export as module
    from mappa_graph.exchange.options import Options
    from mappa_graph.store import TraceStore

    run, out, format, stage, at = sys.argv[1:]
    module._COMMIT_EVERY = 10
    calls = 0

    def progress(name, done, total):
        global calls
        calls += name == stage
        if calls == int(at):
            os.kill(os.getpid(), signal.SIGKILL)

    with TraceStore(run + "/trace.db", read_only=True) as store:
        module.export(store, format, out, options=Options(heldout=0.3), progress=progress)
"""


@pytest.mark.parametrize(
    ("format", "name", "stage", "at"),
    [("sft", "x.parquet", "read", 2), ("dpo", "x.jsonl", "read", 4), ("kto", "x.jsonl", "write", 1), ("messages", "x", "write", 1)],
)
def test_an_export_killed_at_any_moment_ends_as_one_that_was_not(tmp_path, format, name, stage, at):
    run = run_of(tmp_path / "run", tasks=20)
    args = [str(run), str(tmp_path / "b" / name), format, stage, str(at)]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), *args], cwd=ROOT, env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "b" / name).exists()
    with TraceStore(run / "trace.db", read_only=True) as store:
        again = export(store, format, tmp_path / "b" / name, options=Options(heldout=0.3))
        export(store, format, tmp_path / "a" / name, options=Options(heldout=0.3))
    assert again.resumed
    files = [{p.relative_to(tmp_path / side): p.read_bytes() for p in (tmp_path / side).rglob("*") if p.is_file()} for side in "ab"]
    assert files[0] == files[1]


@pytest.mark.parametrize(("format", "name"), [("sft", "x.jsonl"), ("dpo", "x.parquet")])
def test_memory_does_not_grow_with_the_store(tmp_path, monkeypatch, format, name):
    monkeypatch.setattr("mappa_graph.exchange.redact._CACHED", 32)
    monkeypatch.setattr("mappa_graph.exchange.writers._GROUP_ROWS", 25)
    monkeypatch.setattr(module, "_COMMIT_EVERY", 25)
    peaks = []
    for tasks in (15, 120):
        run = run_of(tmp_path / f"run{tasks}", tasks=tasks)
        with TraceStore(run / "trace.db", read_only=True) as store:
            export(store, format, tmp_path / f"warm{tasks}" / name)  # imports and caches of the process
            tracemalloc.start()
            made = export(store, format, tmp_path / f"out{tasks}" / name, redactor=Redactor())
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert made.rows >= tasks
    assert peaks[1] < 1.5 * peaks[0] + 200_000


KEY = "sk-proj-abcdEFGH1234567890abcdEFGH1234567890"


def test_a_key_in_an_imported_trace_reaches_neither_the_run_nor_the_export(tmp_path):
    runs = list(trace(7))
    text = json.dumps(runs).replace("You keep the books", f"The key is {KEY}, mail ann@x.org. You keep the books")
    runs = json.loads(text.replace("Error: no such item", f"401 for {KEY}"))
    for run in runs:
        if run["run_type"] == "tool":
            run["outputs"]["output"]["data"]["content"] = f"Authorization: Bearer {KEY}"
        if run["run_type"] == "llm":
            run["outputs"]["generations"][0][0]["message"]["data"]["content"] += f" with {KEY}"
            run["extra"]["invocation_params"]["api_key"] = "plain-looking-secret"
    runs[0]["error"] = f"AuthError({KEY!r})"
    source = tmp_path / "traces.jsonl"
    source.write_text("".join(json.dumps(run) + "\n" for run in runs))
    run = tmp_path / "run"
    done = import_traces(FileSource(source, run), run, redact=redactor("email"))
    assert done.actions == 4
    with TraceStore(run / "trace.db", read_only=True) as store:
        kept = str(list(store.traces()))
        made = export(store, "messages", tmp_path / "out" / "x.jsonl")
    assert kept.count("[KEY]") > 4
    for secret in (KEY, "plain-looking-secret", "ann@x.org"):
        assert secret not in kept
        for path in (p for folder in (run, tmp_path / "out") for p in folder.rglob("*") if p.is_file()):
            assert secret.encode() not in path.read_bytes(), path
    assert "[KEY]" in (tmp_path / "out" / "x.jsonl").read_text()
    assert made.card["text_only"] == {"clerk": 2, "planner": 2}


def test_the_benchmark_imports_coaches_and_exports(tmp_path):
    script = ROOT / "tests" / "benchmarks" / "exchange.py"
    command = [sys.executable, str(script), "--actions", "40", "--run", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stages = [line.split() for line in done.stdout.splitlines()[2:5]]
    assert [stage[:2] for stage in stages] == [["import", "40"], ["coach", "40"], ["export", "40"]]
    assert all(float(stage[5].replace(",", "")) < 2000 for stage in stages)
    assert not (tmp_path / "run").exists()

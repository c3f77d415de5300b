"""Production traces at scale: import, coach, export, each in a process of its own, with its rate and its peak memory.

    python tests/benchmarks/exchange.py --actions 50000                # minutes
    python tests/benchmarks/exchange.py --actions 1000000 --run /tmp/million --keep

The traces are LangSmith-like JSON lines, generated (four model calls a trace, two agents, one with a tool); what is measured is what
`mappa-graph import`, `coach --coach evidence` and `export --format sft` do. Peak memory is the operating system's figure for the whole
process. With --interrupt each stage is first killed half-way (SIGKILL), and the resumed stage must end with the same counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

CALLS = 4
STAGES = ("import", "coach", "export")
WORDS = ("sum", "total", "order", "item", "price", "stock", "week", "plan", "table", "count", "ship", "parcel", "store", "note", "sold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actions", type=int, default=50_000)
    parser.add_argument("--run", type=Path, help="folder to work in; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="leave the folder's files")
    parser.add_argument("--interrupt", action="store_true", help="kill each stage half-way first")
    parser.add_argument("--format", default="sft", choices=("sft", "messages", "dpo", "kto", "reward"))
    parser.add_argument("--profile", action="store_true", help="print where each stage spends its time (it takes longer then)")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.stage:
        print(json.dumps(measured(asked)), flush=True)
        return
    folder = asked.run or Path(tempfile.mkdtemp(prefix="mappa-exchange-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        traces = folder / "traces.jsonl"
        if not traces.exists():
            started = time.perf_counter()
            generate(traces, asked.actions)
            print(f"generated {traces.stat().st_size / 2**20:,.0f} MB in {time.perf_counter() - started:.0f} s")
        print(f"{'stage':8} {'actions':>10} {'seconds':>9} {'CPU s':>8} {'actions/s':>10} {'peak MB':>8}   result")
        for stage in STAGES:
            if asked.interrupt:
                print(f"{stage:8} killed after {interrupted(stage, asked, folder):.1f} s")
            found = child(stage, asked, folder)
            rate = asked.actions / found["seconds"]
            numbers = f"{found['seconds']:>9.1f} {found['cpu']:>8.1f} {rate:>10,.0f} {found['peak_mb']:>8,.0f}"
            print(f"{stage:8} {asked.actions:>10,} {numbers}   {found['result']}", flush=True)
        print(f"files: {', '.join(f'{p.name} {p.stat().st_size / 2**20:,.0f} MB' for p in sorted(folder.rglob('*')) if p.is_file())}")
    finally:
        if not asked.keep:
            shutil.rmtree(folder, ignore_errors=True)


def command(stage: str, asked: argparse.Namespace, folder: Path) -> list[str]:
    more = ["--profile"] if asked.profile else []
    return [
        sys.executable,
        __file__,
        "--stage",
        stage,
        "--actions",
        str(asked.actions),
        "--run",
        str(folder),
        "--format",
        asked.format,
        *more,
    ]


def child(stage: str, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    done = subprocess.run(command(stage, asked, folder), stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def interrupted(stage: str, asked: argparse.Namespace, folder: Path) -> float:
    """Kills a stage after about half of what it takes: when its database has grown no more than that."""
    started = time.perf_counter()
    process = subprocess.Popen(command(stage, asked, folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        share = line.split(" of ")
        if len(share) == 2 and int(share[0].split()[-1]) * 2 >= int(share[1].split()[0]):
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    return time.perf_counter() - started


def measured(asked: argparse.Namespace) -> dict[str, Any]:
    stage = {"import": import_stage, "coach": coach_stage, "export": export_stage}[asked.stage]
    started = time.perf_counter()
    if asked.profile:
        import cProfile
        import pstats

        with cProfile.Profile() as profile:
            result = stage(asked)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(35)
    else:
        result = stage(asked)
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = {"seconds": time.perf_counter() - started, "cpu": used.ru_utime + used.ru_stime}
    return {**spent, "peak_mb": used.ru_maxrss / 1024, "result": result}


class Shown:
    """Progress, a line now and then."""

    def __init__(self, what: str) -> None:
        self.what, self.next = what, 0.0

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self.next:
            print(f"  {self.what} {done} of {total}", file=sys.stderr, flush=True)
            self.next = time.monotonic() + 2.0


def import_stage(asked: argparse.Namespace) -> str:
    from mappa_graph.exchange.files import FileSource
    from mappa_graph.exchange.importer import import_traces
    from mappa_graph.exchange.redact import Redactor
    from mappa_graph.store import TraceStore

    shown = Shown("imported")
    done = import_traces(
        FileSource(asked.run / "traces.jsonl", asked.run),
        asked.run,
        redact=Redactor(),
        environment="orders",
        progress=lambda found: shown(found.actions, asked.actions),
    )
    with TraceStore(asked.run / "trace.db", read_only=True) as store:
        total = store.counts()
    return f"{done.actions:,} actions imported, {total['actions']:,} in the store, of {total['episodes']:,} traces"


def coach_stage(asked: argparse.Namespace) -> str:
    from mappa_graph.coach import AgentCard, EvidenceCoach
    from mappa_graph.coach.pending import score_pending
    from mappa_graph.store import TraceStore

    shown, seen = Shown("coached"), 0

    def progress(verdict: Any) -> None:
        nonlocal seen
        seen += 1
        if seen % 256 == 0:
            shown(seen, asked.actions)

    with TraceStore(asked.run / "trace.db") as store:
        team = [AgentCard("planner", writes=()), AgentCard("clerk")]
        done = asyncio.run(score_pending(store, EvidenceCoach(), team, progress=progress))
        return f"{done.scored:,} scored, {store.counts()['verdicts']:,} verdicts"


def export_stage(asked: argparse.Namespace) -> str:
    from mappa_graph.exchange.export import export
    from mappa_graph.exchange.options import Options
    from mappa_graph.store import TraceStore

    shown = Shown("exported")

    def progress(stage: str, done: int, total: int) -> None:
        shown(done, total)

    with TraceStore(asked.run / "trace.db", read_only=True) as store:
        made = export(store, asked.format, asked.run / "data.parquet", options=Options(heldout=0.05), progress=progress)
    return f"{made.rows:,} rows, resumed {made.resumed}, left out {made.card['left_out']}"


def generate(path: Path, actions: int) -> None:
    with path.with_suffix(".part").open("w", encoding="utf-8") as file:
        for number in range(actions // CALLS):
            for run in trace(number):
                file.write(json.dumps(run) + "\n")
    path.with_suffix(".part").replace(path)


def trace(number: int) -> Iterator[dict[str, Any]]:
    """A trace as LangSmith exports its runs: a graph of two agents, four model calls, a tool; about 1 KB of text an action."""
    rng = random.Random(number)
    start = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number)
    root = _id(number, 0)
    steps: list[dict[str, Any]] = []

    def run(kind: str, name: str, parent: str | None, inputs: Any, outputs: Any, **metadata: Any) -> str:
        id = _id(number, len(steps))
        at = start + timedelta(milliseconds=100 * len(steps))
        ended = (at + timedelta(milliseconds=90)).isoformat()
        about = {"metadata": metadata, "invocation_params": {"model": name}}
        steps.append(
            {
                "id": id, "trace_id": root, "parent_run_id": parent, "run_type": kind, "name": name, "inputs": inputs, "outputs": outputs,
                "start_time": at.isoformat(), "end_time": ended, "error": None, "extra": about,
            }
        )  # fmt: skip
        return id

    question = f"Order {number}: {' '.join(rng.choices(WORDS, k=40))}?"
    said: list[dict[str, Any]] = [
        {"role": "system", "content": "You keep the books of a small shop. " * 4},
        {"role": "user", "content": question},
    ]
    run("chain", "LangGraph", None, {"messages": said}, {}, thread_id=f"t{number % 1000}")
    for turn in range(CALLS):
        agent = ("planner", "clerk")[turn % 2]
        node = run("chain", agent, root, {"messages": said}, {}, langgraph_node=agent, langgraph_step=turn + 1)
        text = " ".join(rng.choices(WORDS, k=60))
        calls = [{"id": f"call-{number}-{turn}", "name": "add", "args": {"a": turn, "b": number}, "type": "tool_call"}] if turn == 1 else []
        finish = {"finish_reason": "tool_calls" if calls else "stop", "model_name": agent}
        reply = {"content": text, "tool_calls": calls, "id": f"run-{_id(number, len(steps))}", "response_metadata": finish}
        told = {"messages": [[{"type": _TYPE[message["role"]], "data": message} for message in said]]}
        generation = {"text": text, "message": {"type": "ai", "data": reply}}
        run("llm", agent, node, told, {"generations": [[generation]]}, langgraph_node=agent, mappa_agent=agent)
        said = [*said, {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})]
        for call in calls:
            good = rng.random() < 0.6
            answer = {"content": str(turn + number) if good else "Error: no such item", "tool_call_id": call["id"]}
            status = {"status": "success" if good else "error"}
            run("tool", "add", node, {"input": json.dumps(call["args"])}, {"output": {"type": "tool", "data": answer | status}})
            said = [*said, {"role": "tool", **answer}]
    steps[0]["outputs"] = {"messages": said[-1:]}
    steps[0]["end_time"] = steps[-1]["end_time"]
    yield from steps


_TYPE = {"system": "system", "user": "human", "assistant": "ai", "tool": "tool"}


def _id(number: int, place: int) -> str:
    return f"{number:08x}-0000-4000-8000-{place:012x}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

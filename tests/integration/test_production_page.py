"""The shell blocks of docs/production.md run as they stand, one after another, with a LangSmith of our own.

Fences: ```sh runs, ```sh norun is shown only; a block of any kind whose first line is `# NAME` is a file of that name.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.langsmith import LangSmith
from tests.fakes.openinference import spans

PAGE = Path(__file__).parents[2] / "docs" / "production.md"
FENCE = re.compile(r"^```(?P<kind>\w+)(?P<how>[^\n]*)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"# (\w+\.\w+)\n")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "bin").mkdir()
    for name, does in (("python", ""), ("mappa-graph", "-m mappa_graph.cli ")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {does}"$@"\n')
        command.chmod(0o755)
    yield tmp_path
    control = tmp_path / "runs" / "live" / "control.json"
    if control.is_file():
        pid = json.loads(control.read_text())["pid"]
        os.kill(pid, signal.SIGTERM)
        for _ in range(600):
            if not control.is_file():
                return
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(850)  # the tiny model may have to be built
def test_the_commands_of_the_page_run_in_their_order(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page = PAGE.read_text(encoding="utf-8").replace("8000", str(port))
    blocks = [(m["kind"], m["how"].strip(), m["code"]) for m in FENCE.finditer(page)]
    for _, _, code in blocks:
        if named := NAMED.match(code):
            (folder / named[1]).write_text(code)
    said = ""
    with LangSmith() as service:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LANGSMITH_", "LANGCHAIN_", "MAPPA_DEPLOYMENT"))}
        env |= {"LANGSMITH_ENDPOINT": service.url, "LANGSMITH_API_KEY": "x", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        env |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "COLUMNS": "200"}
        for number, (kind, how, code) in enumerate(blocks):
            if kind != "sh" or how == "norun":
                continue
            assert how == "", f"unknown fence mode {how!r}"
            if "spans.jsonl" in code:
                rows = spans(list(service.runs.values()))
                (folder / "spans.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            log = folder / f"block-{number}.log"
            with log.open("w") as out:  # a file: what a block leaves running would hold a pipe open
                done = subprocess.run(["bash", "-e", "-c", code], cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=800)
            said += log.read_text()
            assert done.returncode == 0, f"{code}\n---\n{log.read_text()[-4000:]}"
        keys = {f["key"] for f in service.feedback.values()}
    # What the page promises of these commands.
    assert "96 actions have the gateway's tokens; 0 are text only" in said
    assert "mlflow:desk: 8 traces in" in said and "8 actions have the gateway's tokens; 0 are text only" in said
    assert "spans.jsonl: 96 traces in" in said and "chats.jsonl: 1 traces in" in said
    assert keys == {"mappa_score"} and len(service.feedback) == 96
    assert {p.name for p in (folder / "data").glob("*") if p.suffix in (".parquet", ".jsonl")} >= {"sft.parquet", "kto.jsonl", "rl.jsonl"}
    assert "solver@v1 serves 30% of the calls (checked by its canary)" in said
    measured = {int(v): float(mean) for v, mean in re.findall(r"^v(\d): mean score ([\d.]+) over", said, re.MULTILINE)}
    assert measured[1] > measured[0] + 0.5, measured
    assert "solver@v1 serves all calls" in said and "solver: v2 serves: back to the first weights" in said
    summary = json.loads((folder / "runs" / "better" / "summary.json").read_text())
    assert summary["policies"]["solver"]["weight_mean"] == pytest.approx(1.0, abs=0.02) and summary["tokens"]["retokenised"] == 0
    assert (folder / "runs" / "watched" / "report.html").is_file()

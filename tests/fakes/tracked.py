"""A process that logs made-up rows to one tracker, as a run and its continuations do, and prints what each would be told of it.

`python -m tests.fakes.tracked NAME RUN 3 4`: the first three rows, and then, as a run that is continued, all of its four. Trackers keep
state in their process and read their environment when they are imported, so tests give each a process of its own.
"""

from __future__ import annotations

import json
import sys

from mappa_graph.config import make_config
from mappa_graph.trainers.trackers import Trackers


def main(name: str, run: str, *parts: str) -> None:
    config = make_config({"run": run, "seed": 7, "loop": {"trackers": [name], "project": "tests"}, "train": {"lr": 0.25}})
    said = []
    for rows in parts:
        notes: list[str] = []
        trackers = Trackers(config, notes.append)
        for iteration in range(int(rows)):
            agents = {"solver": {"kl": iteration / 4, "errors": {"Name Error": 2}, "score_mean": None}}
            trackers.log({"iteration": iteration, "agents": agents, "heldout": {"accuracy": 0.5, "ci95": [0.25, 0.75], "mode": "greedy"}})
        trackers.close()
        said.append({"counts": trackers.counts()[name], "notes": notes})
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])

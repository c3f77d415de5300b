"""The demo's promise, read from its summary: 30 points or more on held-out tasks, and not one retokenised token."""

import json
import sys
from pathlib import Path

summary = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
gain = summary["after"]["accuracy"] - summary["before"]["accuracy"]
problems = []
if gain < 0.30:
    problems.append(f"held-out accuracy went from {summary['before']['accuracy']:.1%} to {summary['after']['accuracy']:.1%}")
if summary["tokens"]["retokenised"]:
    problems.append(f"{summary['tokens']['retokenised']} retokenised tokens")
if not summary["tokens"]["trained"]:
    problems.append("no token was trained on")
sys.stdout.write(f"demo: {gain:+.1%} on {summary['after']['n']} held-out tasks in {summary['wall_s']['total']:.0f} s\n")
sys.exit("\n".join(problems) or 0)

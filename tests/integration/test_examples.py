"""The examples run, and learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.timeout(850)  # may have to build the tiny model
def test_the_minimal_loop_is_short_and_trains_both_agents():
    path = EXAMPLES / "minimal_loop.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150
    done = subprocess.run([sys.executable, str(path), "--iterations", "5", "--size", "24"], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    means = [tuple(map(float, re.findall(r"(?:planner|writer) ([\d.]+)", line))) for line in done.stdout.splitlines()]
    assert len(means) == 5
    for first, last in zip(means[0], means[-1], strict=True):
        assert last > first + 0.2, done.stdout

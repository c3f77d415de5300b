"""Every Python block of README and docs runs, in its own process, in the order of the page.

A fence's info string says how: ```python runs, ```python continue runs after the block before it in the same process,
and ```python norun is shown only (it needs what a test machine has not, such as an API key).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python(?P<how>[^\n]*)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)


def programs(page: Path) -> list[str]:
    found: list[str] = []
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        how, code = match["how"].strip(), match["code"]
        assert how in ("", "continue", "norun"), f"{page.name}: unknown fence mode {how!r}"
        if how == "continue":
            found[-1] += code
        elif how == "":
            found.append(code)
    return found


CASES = [pytest.param(page, i, id=f"{page.stem}-{i}") for page in PAGES if page.exists() for i in range(len(programs(page)))]


def test_the_readme_has_code_that_runs():
    assert programs(ROOT / "README.md")


@pytest.mark.timeout(850)  # the first block that trains may have to build the tiny model
@pytest.mark.parametrize(("page", "index"), CASES)
def test_code_blocks_run(page, index, tmp_path):
    code = programs(page)[index]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{code}\n---\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_between_pages_lead_somewhere(page):
    if not page.exists():
        pytest.fail(f"{page.name} is missing")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"

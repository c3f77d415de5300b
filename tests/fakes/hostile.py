"""A small pool for hostile cells, and the check that the session after each one is unharmed. Import the fixtures `pool` and `box`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mappa_graph.sandboxes import Box, Limits, SandboxPool

LIMITS = Limits(
    memory_mb=256,
    cpu_s=20,
    processes=40,
    open_files=256,
    file_mb=8,
    workspace_mb=16,
    workspace_files=300,
    tmp_mb=16,
    output_chars=4000,
    output_mb=4,
    cell_s=15,
    grace_s=1,
)
SECRET = "tr4ce-st0re-s3cret"


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    os.environ["MAPPA_TEST_SECRET"] = SECRET
    try:
        with SandboxPool(size=1, limits=LIMITS, preload=("numpy",)) as opened:
            yield opened
    finally:
        del os.environ["MAPPA_TEST_SECRET"]


@pytest.fixture
def box(pool: SandboxPool) -> Iterator[Box]:
    with pool.session() as opened:
        yield opened
        opened.close_sync()
    with pool.session() as after:
        ran = after.run_sync("import numpy\nopen('f', 'w').write('x')\nprint(int(numpy.arange(4).sum()))", timeout_s=30)
        assert (ran.status, ran.stdout, [f.path for f in ran.files]) == ("ok", "6\n", ["f"]), ran


def shows(box: Box, code: str, timeout_s: float | None = None) -> str:
    ran = box.run_sync(code, timeout_s)
    assert ran.status == "ok", ran
    return ran.stdout + (ran.result or "")


def refused(box: Box, code: str) -> str:
    ran = box.run_sync(code)
    assert ran.status == "error", ran
    assert ran.error is not None
    return ran.error.type

"""The suite that every engine passes, over vLLM: one that runs already and is given by its address, shared with the other tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mappa_graph.gateway import Engine, Gateway
from mappa_graph.gateway.vllm import VllmEngine
from mappa_graph.sections.engine import VllmConfig
from tests.conformance.test_engines import *  # noqa: F403 - its tests are collected here, with the fixtures below


@pytest.fixture
def folder(base: Path) -> Path:
    return base


@pytest.fixture
async def engine(folder: Path, lora: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    running = lora.engine
    assert isinstance(running, VllmEngine)
    process = running.server("solver").process
    assert process is not None
    monkeypatch.setenv("SERVER_KEY", process.key)
    options = VllmConfig(base_url=f"{process.url}/v1", api_key_env="SERVER_KEY")
    engine = VllmEngine({"solver": folder}, options, mode="lora", folder=tmp_path)
    await engine.start()
    yield engine
    await engine.stop()

"""A real vLLM: one server of adapters and one of whole weights for the whole session, over tiny random models.

These tests run when they are asked for (`make test-vllm`, or pytest with this folder or `-m vllm`), and are skipped where vLLM has
no environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from mappa_graph.errors import EngineError
from mappa_graph.gateway import Gateway
from mappa_graph.gateway.vllm import VllmEngine
from mappa_graph.gateway.vllm.environment import find
from mappa_graph.sections.engine import VllmConfig
from mappa_graph.store import TraceStore
from tests.vllm.models import make_adapter, make_model

HERE = Path(__file__).parent
RUNNING: list[Gateway] = []
T = TypeVar("T")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vllm: needs vLLM's environment (make vllm)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = any(HERE.is_relative_to(path) or path.is_relative_to(HERE) for path in map(_place, config.args) if path != HERE.parent)
    return None if named or "vllm" in config.option.markexpr else True


def _place(argument: str) -> Path:
    return Path(argument.partition("::")[0]).absolute()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    try:
        if ours:
            find()
        missing = None
    except EngineError as error:
        missing = pytest.mark.skip(reason=str(error))
    # One server at a time is enough for a small machine: who shares one comes together, who needs one of its own in between.
    items.sort(key=_turn)
    for item in ours:
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.timeout(600))
        if missing is not None:
            item.add_marker(missing)


def _turn(item: pytest.Item) -> tuple[bool, bool, bool]:
    uses = getattr(item, "fixturenames", ())
    return "full" in uses, "alone" in uses, "stopped" in item.name


def on(gateway: Gateway, work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the gateway's loop, which the engine belongs to."""
    assert gateway._loop is not None
    return asyncio.run_coroutine_threadsafe(work, gateway._loop).result(timeout=280)


async def aon(gateway: Gateway, work: Coroutine[Any, Any, T]) -> T:
    """The same, from a test's own loop."""
    assert gateway._loop is not None
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, gateway._loop))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three whole models of one shape, the head tied to the embedding; the last one in several files."""
    root = tmp_path_factory.mktemp("models")
    return [make_model(root / f"m{seed}", seed, tied=True, shards=seed == 2) for seed in range(3)]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "base", 7, tied=False)


@pytest.fixture(scope="session")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of several ranks and targets on the base, each with its merged model in `merged` beside its files."""
    root = tmp_path_factory.mktemp("adapters")
    kinds: list[tuple[int, Any]] = [(4, "all-linear"), (8, ["q_proj", "v_proj"]), (16, ["gate_proj", "up_proj", "down_proj"])]
    return [make_adapter(root / f"a{i}", base, i, rank, targets) for i, (rank, targets) in enumerate(kinds)]


@pytest.fixture
def alone() -> None:
    """No server of the session runs any more."""
    _stop_all()


def _stop_all() -> None:
    while RUNNING:
        RUNNING.pop().stop()


def _options(**more: Any) -> VllmConfig:
    return VllmConfig(kv_cache_gib=1, start_timeout_s=280, **more)


@pytest.fixture(scope="session")
def lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway over three policies that are adapters on one base."""
    root = tmp_path_factory.mktemp("lora")
    engine = VllmEngine(dict.fromkeys(("solver", "critic", "verifier"), base), _options(), mode="lora", folder=root / "engine", ranks=[16])
    with TraceStore(root / "trace.db") as store, Gateway(engine, store) as gateway:
        RUNNING.append(gateway)
        yield gateway


@pytest.fixture(scope="session")
def full(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway over one policy of whole weights."""
    _stop_all()
    root = tmp_path_factory.mktemp("full")
    engine = VllmEngine({"solver": models[0]}, _options(), mode="full", folder=root / "engine")
    with TraceStore(root / "trace.db") as store, Gateway(engine, store) as gateway:
        RUNNING.append(gateway)
        yield gateway

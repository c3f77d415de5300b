"""One run of vLLM's API server as a process of ours: what it is started with, when it is ready, and how it ends.

It has a port that was free, a key that nobody else has, and serves its model under a name that nobody else could guess: a server that
answers on that port without the name is not ours. The one thing to know: a watchdog process stands between us and it
(`watchdog.py`); whatever happens to us, to it or to its workers, nothing of it is left running. The log is a file; no key is ever in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import EngineError
from .environment import Environment
from .replies import MOST_ALTERNATIVES

PLUGIN = Path(__file__).with_name("plugin")
BACKEND = "mappa_shared"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE")
_ENTRY_POINTS = "[vllm.general_plugins]\nmappa = mappa_vllm:register\n"
_METADATA = "Metadata-Version: 2.1\nName: mappa-vllm\nVersion: 1\n"


@dataclass(frozen=True)
class Launch:
    """What a server is started with."""

    environment: Environment
    model: Path
    log: Path
    dtype: str = "float32"
    threads: int | None = None
    lora: tuple[int, int, int] | None = None
    """Adapters in one step, adapters loaded, largest rank."""
    transfer: str | None = None
    """Weight-transfer backend: shared, nccl, ipc; None = none."""
    tensor_parallel: int = 1
    gpu_memory_utilization: float | None = None
    kv_cache_gib: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    extra_args: tuple[str, ...] = ()
    grace_s: float = 10.0

    def arguments(self, name: str, port: int) -> list[str]:
        """The command line; it holds no secret, as other users can read it."""
        cpu = self.environment.cpu
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        made = {
            "--model": str(self.model),
            "--served-model-name": name,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": self.dtype,
            "--logprobs-mode": "processed_logprobs",
            "--max-logprobs": str(MOST_ALTERNATIVES),
            # A model folder's own sampling defaults would change the distribution behind the trainer's back.
            "--override-generation-config": json.dumps(neutral),
            "--middleware": "mappa_vllm.Guard",
        }
        length = self.max_model_len if self.max_model_len is not None or not cpu else min(2048, _context(self.model))
        optional = {
            "--max-model-len": length,
            "--max-num-seqs": self.max_num_seqs if self.max_num_seqs is not None or not cpu else 64,
            "--tensor-parallel-size": self.tensor_parallel if self.tensor_parallel > 1 else None,
            "--gpu-memory-utilization": self.gpu_memory_utilization,
            "--kv-cache-memory-bytes": None if cpu or self.kv_cache_gib is None else self.kv_cache_gib << 30,
        }
        if self.lora is not None:
            step, loaded, rank = self.lora
            optional |= {"--max-loras": step, "--max-cpu-loras": loaded, "--max-lora-rank": rank}
        if self.transfer is not None:
            backend = BACKEND if self.transfer == "shared" else self.transfer
            made["--weight-transfer-config"] = json.dumps({"backend": backend})
        made |= {flag: str(value) for flag, value in optional.items() if value is not None}
        switches = ["--enable-prefix-caching", "--disable-uvicorn-access-log", *(["--enable-lora"] if self.lora else [])]
        if cpu:
            # A prompt that is cut over several steps ends a CPU server where its request has a seed ("CPU Generator does not use offset").
            made["--max-num-batched-tokens"] = str(max(4096, length or 0))
            switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
        return [word for pair in made.items() for word in pair] + switches + list(self.extra_args)

    def variables(self, key: str, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The server's environment: ours without secrets, and its own settings."""
        env = {name: value for name, value in base.items() if name not in _OURS and not _SECRET.search(name)}
        env |= {
            "PYTHONPATH": f"{self.log.parent / 'plugin'}{os.pathsep}{PLUGIN}",
            "VLLM_API_KEY": key,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.transfer is not None:
            env["VLLM_SERVER_DEV_MODE"] = "1"  # pause, resume and the weight updates; the guard asks for the key there too
        if self.transfer == "ipc":
            env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of device memory come pickled, from us alone
        if self.environment.cpu:
            env["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_cache_gib or 2)
            env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # several servers on one machine would all be bound to the same cores
            env["OMP_NUM_THREADS"] = str(self.threads or os.cpu_count() or 1)
        elif self.threads is not None:
            env["OMP_NUM_THREADS"] = str(self.threads)
        return env


@dataclass
class Process:
    """A server that was started. Made by `spawn`."""

    popen: subprocess.Popen[bytes]
    port: int
    key: str = field(repr=False)
    name: str
    log: Path
    begins: int
    """Where in the log this run begins, bytes."""
    exited: asyncio.Event
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        """The address without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    def tail(self, size: int = 3000) -> str:
        """The end of this run's log, made short."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.begins, self.log.stat().st_size - 64 * 1024))
                text = file.read().decode("utf-8", "replace").strip()
        except OSError as error:
            return f"(the log can't be read: {error})"
        return text[-size:] if text else "(nothing was logged)"

    async def stop(self, wait_s: float) -> None:
        """Ends the server and all it started; on return nothing is left of it."""
        if not self.exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                self.popen.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(wait_s + 10):
                    await self.exited.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.popen.pid, signal.SIGKILL)
                await self.exited.wait()
        if self.popen.stdin is not None:
            self.popen.stdin.close()


def spawn(launch: Launch) -> Process:
    """Starts a server; returns at once. Raises `EngineError` where that can't be done."""
    log = launch.log
    port, key, name = _free_port(), secrets.token_urlsafe(32), f"mappa-{secrets.token_hex(16)}"
    command = [str(launch.environment.python), "-m", "vllm.entrypoints.openai.api_server", *launch.arguments(name, port)]
    watchdog = [sys.executable, "-I", str(Path(__file__).with_name("watchdog.py")), str(launch.grace_s), *command]
    try:
        metadata = log.parent / "plugin" / "mappa_vllm-1.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (metadata / "METADATA").write_text(_METADATA, encoding="utf-8")
        (metadata / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")
        with log.open("ab") as out:
            begins = out.tell()
            popen = subprocess.Popen(
                watchdog, stdin=subprocess.PIPE, stdout=out, stderr=out, env=launch.variables(key), cwd=log.parent, start_new_session=True
            )
    except OSError as error:
        raise EngineError(f"vLLM can't be started: {error}") from error
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()

    def bury() -> None:
        # Not reaped yet, so its number is still its own: what the group holds is ours to kill, even if the watchdog was killed.
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(exited.set)

    threading.Thread(target=bury, name=f"vllm-{popen.pid}", daemon=True).start()
    return Process(popen, port, key, name, log, begins, exited, loop)


def lora_table(policies: int, ranks: Sequence[int], *, adapters: int | None, rank: int | None) -> tuple[int, int, int]:
    """`Launch.lora`: for each policy a version that serves, one that is new, one on trial and one that still ends."""
    allowed = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    largest = rank or max(ranks, default=16)
    fits = next((size for size in allowed if size >= largest), None)
    if fits is None:
        raise EngineError(f"an adapter of rank {largest} can't be served by vLLM, whose largest is {allowed[-1]}")
    loaded = adapters or 4 * policies
    return min(loaded, 3 * policies), loaded, fits


def _context(model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{model} is not a model folder: its config.json can't be read ({error})") from error
    return int(config.get("max_position_embeddings") or 2048)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Weights from the trainer's GPUs straight into vLLM's: vLLM's own NCCL or CUDA IPC, driven by its own trainer side.

The control plane stays ours: `SyncClient` has the four methods that vLLM's trainer engines call, and speaks to the server with its key.
The one thing to know: this needs vLLM importable in the training process too (the same version, GPU build) and can't run without GPUs;
its request bodies and vLLM's own arguments are tested, the transfer itself is not.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import httpx

from ...errors import EngineError
from .control import Control


class Sender(Protocol):
    """Sends a policy's present weights into a server that is paused."""

    async def send(self, control: Control, label: str) -> None:
        """Start, transfer, finish under `label`. Raises `EngineError`."""


class SyncClient:
    """vLLM's `VLLMWeightSyncClient`, with the server's key and the label of the version that is under way."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float = 600.0) -> None:
        self._client = httpx.Client(base_url=url, headers=dict(headers), timeout=timeout_s, trust_env=False)
        self.label: str | None = None

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            reply = self._client.post(path, json=body)
        except httpx.TransportError as error:
            raise EngineError(f"{self._client.base_url} can't be reached: {error}") from error
        if reply.status_code != 200:
            raise EngineError(f"{self._client.base_url}{path} answered {reply.status_code}: {reply.text[:600]}")
        return reply.json()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        self._post("/update_weights", {"update_info": _plain(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version or self.label})

    def world_size(self) -> int:
        """How many workers the server has."""
        reply = self._client.get("/get_world_size")
        if reply.status_code != 200:
            raise EngineError(f"{self._client.base_url} does not say how many workers it has: {reply.text[:300]}")
        return int(reply.json()["world_size"])

    def close(self) -> None:
        self._client.close()


def _plain(info: Any) -> Any:
    """Device memory handles as JSON: pickled and in base64, as vLLM's worker reads them (`ipc_handles_pickled`)."""
    if isinstance(info, list | tuple):
        return [_plain(part) for part in info]
    if info.get("ipc_handles") is None:
        return {key: value for key, value in info.items() if key not in ("ipc_handles", "ipc_handles_pickled")}
    import base64
    import pickle

    rest = {key: value for key, value in info.items() if key != "ipc_handles"}
    return {**rest, "ipc_handles_pickled": base64.b64encode(pickle.dumps(info["ipc_handles"])).decode("ascii")}


def init_arguments(kind: Literal["nccl", "ipc"], workers: int, *, host: str, port: int, rank: int = 0) -> dict[str, Any]:
    """Keyword arguments of vLLM's `NCCLTrainerInitInfo` or `IPCTrainerInitInfo`. The NCCL group is this process and all workers."""
    if kind == "ipc":
        return {"rank": rank, "packed": True}
    return {"rank": rank, "master_address": host, "master_port": port, "world_size": workers + 1, "packed": True}


class TrainerSender:
    """Sends the parameters of a module of this process; `module` gives it, as it is at that moment.

    Args:
        kind: `nccl` (any GPUs that reach each other) or `ipc` (trainer and server on the same GPU).
        host: the address of this machine that the server's workers reach (nccl).
    """

    def __init__(self, kind: Literal["nccl", "ipc"], module: Callable[[], Any], *, host: str = "127.0.0.1") -> None:
        self.kind: Literal["nccl", "ipc"] = kind
        self._module = module
        self._host = host
        self._open: tuple[str, SyncClient, Any] | None = None
        """The server that the engine was opened with (a restarted one has another address), its client, vLLM's trainer engine."""

    async def send(self, control: Control, label: str) -> None:
        await asyncio.to_thread(self._send, control.url, control.headers, label)

    def _send(self, url: str, headers: Mapping[str, str], label: str) -> None:
        try:
            if self._open is None or self._open[0] != url:
                self.close()
                client = SyncClient(url, headers)
                self._open = (url, client, self._trainer_side(client))
            _, client, engine = self._open
            client.label = label
            engine.send_weights()
        except EngineError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise EngineError(f"the weights of {label} could not be sent by {self.kind}: {type(error).__name__}: {error}") from error

    def _trainer_side(self, client: SyncClient) -> Any:
        try:
            from vllm.distributed.weight_transfer.base import ModuleSource  # type: ignore[import-not-found]
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # type: ignore[import-not-found]
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo  # type: ignore[import-not-found]
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo  # type: ignore[import-not-found]
        except ImportError as error:
            raise EngineError(
                f"engine.vllm.transfer {self.kind!r} needs vLLM in the training environment too: {error}",
                hint="install the server's version of vLLM there, or set engine.vllm.transfer to 'shared'",
            ) from error
        arguments = init_arguments(self.kind, client.world_size(), host=self._host, port=_free_port(self._host))
        info = (IPCTrainerInitInfo if self.kind == "ipc" else NCCLTrainerInitInfo)(**arguments)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(self._module()))

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened[1].close()
            opened[2].shutdown()


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])

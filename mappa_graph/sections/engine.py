"""Settings of what generates tokens, and of the server in front of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from .base import Section


class VllmConfig(Section):
    """A vLLM server: one for all policies where they are LoRA adapters, one a policy where they are whole weights.

    It's started and watched over by us, or given by its address; settings from `python` on are those of a server that we start.
    """

    mode: Literal["lora", "full"] | None = None
    """lora: adapters on one base, a version beside the other. full: whole weights, swapped in place. None: as `train.lora` says."""
    transfer: Literal["shared", "nccl", "ipc"] = "shared"
    """How whole weights get into the server: a folder that both see, or vLLM's own NCCL or CUDA IPC (GPUs; vLLM in our environment too)."""
    base_url: str | dict[str, str] | None = None
    """Address of a server that runs already, `/v1` included; or one a policy, by policy name."""
    api_key_env: str | None = None
    """Environment variable with that server's key."""
    max_adapters: int | None = Field(default=None, ge=1)
    """Most adapters that are loaded at once (lora). None: 4 a policy."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for an answer's head, and then for each piece of it."""
    python: Path | None = None
    """Interpreter that has vLLM. None: $MAPPA_VLLM_PYTHON, else the environment that `make vllm` makes."""
    max_lora_rank: int | None = Field(default=None, ge=1)
    """Largest rank of an adapter (lora). None: what `train.lora` needs."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs a server."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory. None: vLLM's default."""
    kv_cache_gib: int | None = Field(default=None, ge=1)
    """Memory for keys and values. None: 2 on a CPU; on a GPU what `gpu_memory_utilization` leaves."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Longest prompt and completion together. None: the model's own limit, on a CPU 2048 at most."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Most completions in one step. None: 64 on a CPU, vLLM's default on a GPU."""
    extra_args: tuple[str, ...] = ()
    """More arguments of vLLM's API server, as on its command line."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    stop_timeout_s: float = Field(default=10.0, gt=0)
    restart_wait_s: float = Field(default=300.0, ge=0)
    """How long a call waits for a server that restarts, before it is told to come back."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts after crashes that follow each other within ten minutes; one more is an error."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.base_url is None:
            if self.api_key_env is not None:
                raise ValueError(
                    "engine.vllm.api_key_env has no effect without engine.vllm.base_url; a server that we start has a key of its own"
                )
        else:
            idle = _changed(self, _OF_OURS)
            if idle:
                raise ValueError(f"engine.vllm.{idle[0]} has no effect on a server that runs already (engine.vllm.base_url)")
        if self.mode == "lora" and self.transfer != "shared":
            raise ValueError(
                f"engine.vllm.transfer {self.transfer!r} has no effect with mode 'lora': adapters are loaded from their folder"
            )
        if self.mode == "full" and (idle := _changed(self, ("max_adapters", "max_lora_rank"))):
            raise ValueError(f"engine.vllm.{idle[0]} has no effect with mode 'full'; drop it, or set mode 'lora'")
        taken = [a for a in self.extra_args if a.split("=")[0] in _OWN_ARGS]
        if taken:
            raise ValueError(f"engine.vllm.extra_args: {taken[0]} is set by the engine itself; see the settings of engine.vllm")
        return self


_OF_OURS = (
    *("python", "max_lora_rank", "tensor_parallel", "gpu_memory_utilization", "kv_cache_gib", "max_model_len", "max_num_seqs"),
    *("extra_args", "start_timeout_s", "stop_timeout_s", "max_restarts"),
)
_OWN_ARGS = frozenset(
    {
        *("--model", "--tokenizer", "--served-model-name", "--host", "--port", "--uds", "--api-key", "--dtype", "--logprobs-mode"),
        *("--enable-lora", "--max-loras", "--max-cpu-loras", "--max-lora-rank", "--tensor-parallel-size", "-tp"),
        *("--gpu-memory-utilization", "--max-model-len", "--max-num-seqs", "--weight-transfer-config", "--kv-cache-memory-bytes"),
        *("--generation-config", "--override-generation-config"),
    }
)


class UpstreamConfig(Section):
    """An OpenAI-compatible server by its address, whose models are served and recorded as they are."""

    base_url: str
    """`/v1` included."""
    models: str | dict[str, str]
    """The name that the server knows the weights by; or one a policy, by policy name."""
    api_key_env: str | None = None
    timeout_s: float = Field(default=600.0, gt=0)


class EngineConfig(Section):
    """What generates tokens. `local` runs the models in this process and needs no server."""

    kind: Literal["local", "vllm", "upstream"] = "local"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    """Of the trainer, and of a local engine."""
    threads: int | None = Field(default=None, ge=1)
    max_batch_tokens: int = Field(default=65_536, ge=64)
    """Most tokens (prompts and room for completions) that a local engine decodes at once."""
    vllm: VllmConfig | None = None
    upstream: UpstreamConfig | None = None

    @model_validator(mode="after")
    def _effective(self) -> Self:
        for kind in ("vllm", "upstream"):
            if getattr(self, kind) is not None and self.kind != kind:
                raise ValueError(f"engine.{kind} has no effect with engine.kind {self.kind!r}; set engine.kind to {kind!r}, or drop it")
        if self.kind == "upstream" and self.upstream is None:
            raise ValueError("engine.kind 'upstream' needs engine.upstream: {base_url, models}")
        if self.kind != "local" and (idle := _changed(self, ("max_batch_tokens",))):
            raise ValueError(f"engine.{idle[0]} has no effect with engine.kind {self.kind!r}; it's the local engine's")
        elsewhere = self.kind == "upstream" or (self.vllm is not None and self.vllm.base_url is not None)
        if elsewhere and (idle := _changed(self, ("threads",))):
            raise ValueError(f"engine.{idle[0]} has no effect on a server that runs already")
        return self


def _changed(section: Section, names: tuple[str, ...]) -> list[str]:
    """Those of the named settings that differ from their defaults."""
    fields = type(section).model_fields
    return [n for n in names if getattr(section, n) != fields[n].get_default(call_default_factory=True)]


class GatewayConfig(Section):
    """Where the OpenAI-compatible server listens. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65_535)
    keep_releases: int = Field(default=5, ge=1)
    """How many steps back `mappa-graph serve` keeps the weights that it served, for `rollback`. The first weights always stay."""

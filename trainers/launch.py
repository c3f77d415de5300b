"""Several processes train together: started by `accelerate launch` (or `torchrun`), and nothing in the loop knows of it.

The first process runs everything there is to a run (rollouts, gateway, coach, checkpoints) and holds a `LeadTrainer`, which has the
methods of a `ReinforceTrainer`; the others sit in `serve_rank` and do with their shares of the samples what the first one says.
`train()` sends each process where it belongs:

    accelerate launch --num_processes 4 $(which mappa-graph) train --config my.yaml
    accelerate launch --use_fsdp --fsdp_version 2 --num_processes 4 $(which mappa-graph) train --config my.yaml

Without `--use_fsdp` each process has whole models and gradients are summed; with it models are sharded. `--mixed_precision bf16` is
heeded. Where there is no GPU, accelerate starts several processes with `--multi_gpu` or `--use_fsdp` only; gloo is used then. Commands go
over a group of their own that may wait for days, work over another with a deadline: a rank that fails or hangs ends them all, with an
error.

All of it was tried on CPUs with gloo; the paths of CUDA and NCCL are the same calls, untried.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mappa_graph.errors import ConfigError, MappaError, TrainerError
from mappa_graph.gateway.engine import Canary

from .batch import Sample
from .ranks import Ranks
from .settings import TrainerSettings
from .sharding import Sharding
from .shares import shares
from .trainer import ReinforceTrainer, Update

log = logging.getLogger(__name__)

_IDLE = timedelta(days=7)
"""How long a rank waits for the next command: a rollout, an evaluation."""
_TOLD = frozenset({"update", "canary", "probe", "save", "save_weights", "load"})
_HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
_HIDDEN_PREFIXES = ("TORCHELASTIC_", "FSDP_", "ACCELERATE_")
_LINGER_S = 3.0


@dataclass(frozen=True)
class Launched:
    """What the launcher said of this process."""

    count: int = 1
    local_rank: int = 0
    mixed_precision: str = "no"
    sharding: Mapping[str, Any] | None = None
    """Fields of `Sharding`; None = models are whole."""


@cache
def launched() -> Launched:
    """What the environment says of the launch; read once, before `join` hides it from the libraries that this process uses for itself."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Launched()
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") or "no"
    if precision not in ("no", "bf16"):
        raise ConfigError(f"accelerate launch --mixed_precision {precision}: only no and bf16 can be trained with here")
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return Launched(count, int(os.environ.get("LOCAL_RANK", "0")), precision, _sharding() if sharded else None)


def _sharding() -> dict[str, Any]:
    """`accelerate`'s FSDP settings, as far as they say how models are sharded. Raises ConfigError for what can't take effect."""
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    if int(os.environ.get("FSDP_VERSION", "1")) != 2:
        raise ConfigError("accelerate launch --use_fsdp: only FSDP2 is trained with here", hint="add --fsdp_version 2")
    if os.environ.setdefault("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP") != "TRANSFORMER_BASED_WRAP":
        raise ConfigError("models are sharded layer by layer", hint="use --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP, or leave it out")
    os.environ["FSDP_SYNC_MODULE_STATES"] = "false"  # every process reads the model's folder; the plugin would want a GPU for it
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    if plugin.activation_checkpointing:
        raise ConfigError("--fsdp_activation_checkpointing has no effect here", hint="set train.gradient_checkpointing")
    return {
        "reshard_after_forward": bool(plugin.reshard_after_forward),
        "cpu_offload": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "layers": tuple(plugin.transformer_cls_names_to_wrap or ()),
    }


def join() -> int:
    """Meet the other processes of the launch, if there are any, and return this one's rank. Meeting again does nothing."""
    if launched().count == 1:
        return 0
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_IDLE)
        atexit.register(_leave)
        # A Trainer or a server that this process runs for itself must not take the other processes for its own.
        for name in [n for n in os.environ if n in _HIDDEN or n.startswith(_HIDDEN_PREFIXES)]:
            del os.environ[name]
    return dist.get_rank()


def _leave() -> None:
    """Ends what talks to the other processes while the interpreter is whole: its threads must not be found running at the very end."""
    with contextlib.suppress(RuntimeError, ValueError):
        if dist.is_initialized():
            dist.destroy_process_group()


def serves() -> bool:
    """Whether this process is one that the first one commands. Then it has done all that it had to when this returns.

    The first thing a program has to ask that may be started by `accelerate launch`; `train()` does.
    """
    if join() == 0:
        return False
    serve_rank()
    return True


def make_trainer(
    models: Mapping[str, Path | str],
    settings: TrainerSettings | None = None,
    *,
    device: str = "cpu",
    seed: int = 0,
    timeout_s: float = 1800.0,
) -> ReinforceTrainer:
    """The trainer of this process: an ordinary one, or under `accelerate launch`, in the first process, one that leads the others.

    Args:
        timeout_s: the longest that a rank waits for another inside an update.
    """
    settings = settings or TrainerSettings()
    if launched().count == 1:
        return ReinforceTrainer(models, settings, device=device, seed=seed)
    if join() != 0:
        raise TrainerError(f"rank {dist.get_rank()} has no trainer of its own", hint="ask launch.serves() first")
    if launched().mixed_precision == "bf16":
        settings = settings.model_copy(update={"dtype": "bfloat16"})
    plan = _Plan({p: str(f) for p, f in models.items()}, settings.model_dump(), torch.device(device).type, seed, timeout_s)
    return LeadTrainer(plan)


@dataclass(frozen=True)
class _Plan:
    """What every rank makes its trainer of."""

    models: Mapping[str, str]
    settings: Mapping[str, Any]
    device: str
    seed: int
    timeout_s: float
    sharding: Mapping[str, Any] | None = field(default_factory=lambda: launched().sharding)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = self.device
        if device == "cuda":
            torch.cuda.set_device(launched().local_rank)
            device = f"cuda:{launched().local_rank}"
        backend = "nccl" if self.device == "cuda" else "gloo"
        if self.device == "cuda" and self.sharding is not None and self.sharding["cpu_offload"]:
            backend = "cpu:gloo,cuda:nccl"  # shards in the CPU's memory meet there
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=self.timeout_s))
        sharding = None if self.sharding is None else Sharding(group=group, device=self.device, **self.sharding)
        keywords = {"device": device, "seed": self.seed, "ranks": Ranks(group), "sharding": sharding}
        return (dict(self.models), TrainerSettings(**self.settings)), keywords


class LeadTrainer(ReinforceTrainer):
    """The first rank's trainer: what it does all ranks do, each with its share of the samples."""

    def __init__(self, plan: _Plan) -> None:
        self._lock = threading.RLock()
        self._broken = False
        with self._together("build", plan):
            positional, keywords = plan.arguments()
            super().__init__(*positional, **keywords)
        self._width = max(learner.model.config.hidden_size for learner in self.learners.values())
        self._sharded = plan.sharding is not None

    @contextmanager
    def _together(self, command: str, *arguments: Any) -> Iterator[None]:
        """Tells the other ranks what to do, for the caller to do the same; says whose fault it was where that fails."""
        with self._lock:
            if self._broken:
                raise TrainerError("the ranks have parted after an error", hint="start again; the last checkpoint is continued from")
            try:
                dist.broadcast_object_list([(command, arguments)], src=0)
                yield
            except BaseException as error:
                self._broken = True
                if isinstance(error, MappaError) or not isinstance(error, Exception):
                    raise  # this rank's own; what comes of another's failure is an error of torch's
                cause = first_failure() or f"{type(error).__name__}: {error}"
                raise TrainerError(
                    f"{cause} (while all ranks were to {command})", hint="where a rank ended without a word, its own output may say why"
                ) from error

    def update(self, samples: Sequence[Sample]) -> Update:
        usable = [s for s in samples if s.ret is not None]
        for policy in {s.policy for s in samples}:
            self.learner(policy).check([s for s in usable if s.policy == policy])
        with self._together("update"):
            mine: list[list[Sample]] = [[]]
            dist.scatter_object_list(mine, shares(usable, self.ranks.count, width=self._width), src=0)
            done = super().update(mine[0])
        return replace(done, without_return=len(samples) - len(usable))

    def canary(self, policy: str, *, probe: bool = False) -> Canary | None:
        if not self._sharded:
            return super().canary(policy, probe=probe)
        with self._together("probe" if probe else "canary", policy):
            return super().canary(policy, probe=probe)

    def save_weights(self, policy: str, folder: Path | str, *, durable: bool = True) -> Path:
        if not self._sharded:
            return super().save_weights(policy, folder, durable=durable)
        self.learner(policy)
        with self._together("save_weights", policy, str(folder)):
            return super().save_weights(policy, folder, durable=durable)

    def save(self, folder: Path | str) -> None:
        if not self._sharded:
            super().save(folder)
            return
        with self._together("save", str(folder)):
            super().save(folder)

    def load(self, folder: Path | str) -> None:
        with self._together("load", str(folder)):
            super().load(folder)

    def close(self) -> None:
        """Lets the other ranks go."""
        if not self._broken:
            with self._together("stop"):
                self._broken = True


def serve_rank() -> None:
    """Do what the first rank says until it says stop. Raises TrainerError after telling the first rank what went wrong."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a wait for the next command hears no Python signal handler
    trainer: ReinforceTrainer | None = None
    rank = dist.get_rank()
    try:
        while True:
            received: list[Any] = [None]
            dist.broadcast_object_list(received, src=0)
            command, arguments = received[0]
            if command == "stop":
                return
            if command == "build":
                positional, keywords = arguments[0].arguments()
                trainer = ReinforceTrainer(*positional, **keywords)
                continue
            if command not in _TOLD or trainer is None:
                raise TrainerError(f"rank {rank} was told to {command!r}")
            if command == "update":
                mine: list[Any] = [None]
                dist.scatter_object_list(mine, None, src=0)
                arguments = (mine[0],)
            if command == "probe":
                trainer.canary(*arguments, probe=True)
            else:
                getattr(trainer, command)(*arguments)
    except Exception as error:
        text = f"rank {rank} failed: {type(error).__name__}: {error}"
        _report(text)
        raise TrainerError(text) from error


def _report(text: str) -> None:
    """Leaves word for the first rank, and hangs up, so that no rank waits for this one; then gives the first time to end in order."""
    log.error("%s", text)
    try:
        store = _get_default_store()
        store.set(f"mappa/failure/{store.add('mappa/failures', 1)}", text)
        dist.destroy_process_group()
        time.sleep(_LINGER_S)
    except (RuntimeError, ValueError) as error:
        log.error("and the first rank could not be told: %s", error)


def first_failure() -> str | None:
    """What the first rank to fail left word of."""
    try:
        store = _get_default_store()
        return store.get("mappa/failure/1").decode() if store.check(["mappa/failure/1"]) else None
    except (RuntimeError, ValueError):
        return None


def main() -> None:
    """`accelerate launch … -m mappa_graph.trainers.launch train --config my.yaml`: the command line in the first process."""
    if not serves():
        from mappa_graph.cli import main as command_line

        command_line(sys.argv[1:])
        return
    # Nothing is left to do but to end, which now and then aborts: C++ threads of the process group that nobody has joined.
    _leave()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    from mappa_graph.trainers import launch  # not this copy of it, which has read the environment for itself alone

    launch.main()

"""Where a policy's weights are: whole ones of its own here, an adapter on a shared base in `lora`.

A body gives the learner something to compute with, as the policy (`policy`) and as the policy's first weights (`reference`), and writes
and reads what is trained. The one thing to know: what `policy` and `reference` return may be one and the same module in two
states, so it is good until the other is asked for, and a backward pass needs the state of its forward pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from mappa_graph.errors import TrainerError

from .kernels import use_kernels
from .learner import prepare
from .settings import TrainerSettings
from .sharding import Scorer, Sharding, gathered, put
from .weights import load_model, save_model


class Body(Protocol):
    """The weights of one policy."""

    folder: Path
    """The model that it started from, in Hugging Face format."""
    model: PreTrainedModel
    tree: bool
    """Whether it takes attention over rows."""
    sharded: bool
    """Whether every forward is a collective act of all ranks."""
    names: list[str]
    parameters: list[torch.nn.Parameter]
    """What is trained, and how it is called."""
    frozen: PreTrainedModel | None
    """What the reference is computed with; None where there is none."""

    def policy(self) -> PreTrainedModel | Scorer: ...

    def reference(self) -> PreTrainedModel | Scorer: ...

    def save(self, folder: Path, *, write: bool = True, durable: bool = True) -> None:
        """Write the present weights, all at once. A rank that doesn't write still takes part in the gathering of shards.

        `durable`: they are on disk on return.
        """

    def load(self, folder: Path) -> None:
        """Take the weights that `save` wrote."""


class Whole:
    """All weights of a model, trained. The arithmetic may be bfloat16, they are float32."""

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: TrainerSettings,
        device: torch.device,
        reference: Frozen | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self.folder = folder
        self.model = load_model(folder, torch.float32, device if sharding is None else "cpu")
        self.tree = settings.tree and prepare(self.model, name)
        use_kernels(self.model, settings, device, rows=self.tree)
        if settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        self.sharded = sharding is not None
        self._runs: PreTrainedModel | Scorer = self.model if sharding is None else sharding.shard(self.model)
        self._reference = reference
        self.frozen = None if reference is None else reference.model
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.names, self.parameters = list(trained), list(trained.values())

    def policy(self) -> PreTrainedModel | Scorer:
        return self._runs

    def reference(self) -> PreTrainedModel | Scorer:
        if self._reference is None:
            raise TrainerError("this policy was opened without a reference model")
        return self._reference.runs

    def save(self, folder: Path, *, write: bool = True, durable: bool = True) -> None:
        state = {n: gathered(p, keep=write) for n, p in self.model.named_parameters()} if self.sharded else None
        if write:
            save_model(self.model, self.folder, folder, state, durable=durable)

    def load(self, folder: Path) -> None:
        if (folder / "adapter_config.json").is_file():
            raise TrainerError(f"{folder} holds an adapter, and whole weights are trained here", hint="continue with train.lora as it was")
        read = load_model(folder, torch.float32, "cpu").state_dict()
        put(dict(self.model.named_parameters()), read, folder)


class Frozen:
    """First weights, for the KL of the policies that start from them."""

    def __init__(self, folder: Path, settings: TrainerSettings, device: torch.device, sharding: Sharding | None = None) -> None:
        dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        self.model = load_model(folder, dtype, device if sharding is None else "cpu")
        self.model.requires_grad_(False)
        tree = settings.tree and prepare(self.model, f"reference {folder.name}")
        use_kernels(self.model, settings, device, rows=tree)
        self.runs: PreTrainedModel | Scorer = self.model if sharding is None else sharding.shard(self.model)

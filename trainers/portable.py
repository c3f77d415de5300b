"""Trained weights as folders that other tools read: Hugging Face's, or PEFT's for adapters."""

from __future__ import annotations

import shutil
from pathlib import Path

from mappa_graph.errors import ConfigError
from mappa_graph.gateway.deployment import CANARY

from .weights import atomic_folder

ADAPTER = "adapter_config.json"


def copy_weights(folder: Path, out: Path, *, merge: bool = False) -> Path:
    """Writes the weights of a checkpoint's policy to `out`, all at once; what is of use to this package only stays behind.

    Args:
        merge: put an adapter into the weights of its base; the result is a whole model.

    Raises `ConfigError` where `out` exists or there is no adapter to merge, `TrainerError` where the base can't be loaded.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already", hint="give another folder, or move it away")
    adapter = (folder / ADAPTER).is_file()
    if merge and not adapter:
        raise ConfigError(f"{folder} holds whole weights: there is no adapter to merge", hint="leave --merge out")
    if merge:
        from .lora import merge as merged

        merged(folder, out)
    else:
        with atomic_folder(out) as aside:
            shutil.copytree(folder, aside, dirs_exist_ok=True, ignore=shutil.ignore_patterns(CANARY))
    return out

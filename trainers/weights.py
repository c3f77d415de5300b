"""Model folders: read one, and write one so that nobody ever sees half of it.

A folder is an ordinary Hugging Face one (config, safetensors, tokenizer). It is written beside its final place, flushed to disk, and
renamed; files that aren't weights are copied from the folder that the policy started from.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from mappa_graph.errors import TrainerError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def load_model(folder: Path | str, dtype: torch.dtype | Literal["auto"], device: torch.device | str) -> PreTrainedModel:
    """The causal language model in a folder, in evaluation mode, dropout off. Raises TrainerError naming the folder."""
    if not (Path(folder) / "config.json").is_file():
        raise TrainerError(f"{str(folder)!r} is not a model folder: it has no config.json", hint="give a folder in Hugging Face format")
    try:
        with _no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise TrainerError(f"the model in {str(folder)!r} can't be loaded: {error}") from error
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # SDPA would leave the cap out without a word
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model.to(device).eval()


def save_model(
    model: PreTrainedModel, source: Path, folder: Path, state: Mapping[str, torch.Tensor] | None = None, *, durable: bool = True
) -> Path:
    """Write `model` (with the tensors of `state`, if given), with the tokenizer files of `source`, as `folder`, replacing an older one."""
    with atomic_folder(folder, durable=durable) as aside:
        with _no_progress_bar():
            model.save_pretrained(str(aside), **({} if state is None else {"state_dict": dict(state)}))
        for file in sorted(source.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHTS) and not (aside / file.name).exists():
                shutil.copyfile(file, aside / file.name)
    return folder


@contextmanager
def atomic_folder(folder: Path, *, durable: bool = True) -> Iterator[Path]:
    """An empty folder to fill, which becomes `folder` when the block ends well and vanishes when it fails.

    Every file is on disk before the rename, unless the folder need not outlive the machine's sudden end (`durable`): that wait can be most
    of what writing takes. A folder already there stays, as `NAME.old`, until the new one has its name.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    aside.mkdir()
    try:
        yield aside
        if durable:
            sync_tree(aside)
        old = folder.with_name(folder.name + ".old")
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        aside.rename(folder)
        if durable:
            sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise TrainerError(f"can't write {folder}: {error}", hint="is the disk full? what was there before is untouched") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder` to disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()

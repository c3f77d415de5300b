"""Fused kernels: on GPUs used when they are installed, never required; on a CPU RMSNorm alone (`norms`).

Liger's RMSNorm and SwiGLU replace a model's own (its rotary embedding can be had for a whole process only, which may hold other
models); flash attention takes over where rows are padded. Attention over rows and the chunked head stay what they are: they compute less,
which no kernel makes up for. What is for GPUs could not be tried without one: tests hold which kernels are chosen when, not what they
compute.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging

import torch
from transformers import PreTrainedModel

from mappa_graph.errors import TrainerError

from .norms import quicken_norms
from .settings import TrainerSettings

log = logging.getLogger(__name__)


def use_kernels(model: PreTrainedModel, settings: TrainerSettings, device: torch.device, *, rows: bool) -> list[str]:
    """Switch on what is there for the device; returns the names of what was.

    Args:
        rows: the model is on attention over rows, which stays.
    """
    if settings.kernels == "none":
        return []
    if device.type == "cpu":
        return ["norms"] if quicken_norms(model) else []
    if device.type != "cuda":
        return []
    used = []
    attention = model.config._attn_implementation
    if _present("liger_kernel") and _liger(model):
        used.append("liger")
    if not rows and attention == "sdpa" and settings.dtype == "bfloat16" and _present("flash_attn"):
        try:
            model.set_attn_implementation("flash_attention_2")
            used.append("flash_attention_2")
        except (ImportError, ValueError) as error:
            log.warning("flash attention is installed and can't be used: %s", error)
    if rows and model.config._attn_implementation != attention:
        raise TrainerError(
            f"a fused kernel took the attention over rows away from {type(model).__name__}", hint="set train.kernels to none"
        )
    if used:
        log.info("%s: fused kernels %s", type(model).__name__, ", ".join(used))
    return used


def _present(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _liger(model: PreTrainedModel) -> bool:
    try:
        liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except (ImportError, RuntimeError) as error:
        log.warning("liger-kernel is installed and can't be used: %s", error)
        return False
    if model.config.model_type not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        return False
    liger._apply_liger_kernel_to_instance(model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
    return True

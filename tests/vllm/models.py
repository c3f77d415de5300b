"""Tiny models that vLLM serves, adapters of them, and what they really answer, by transformers alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mappa_graph.gateway import Canary
from tests.fakes.tinymodel import make_tiny_model

POSITIONS = 256


def make_model(folder: Path, seed: int, *, tied: bool, shards: bool = False) -> Path:
    """A random Llama whose heads are wide enough for vLLM's CPU kernels."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tiny_model(folder, seed, hidden=64, max_positions=POSITIONS)
    if tied:
        config = LlamaConfig.from_pretrained(folder)
        config.tie_word_embeddings = True
        (folder / "model.safetensors").unlink()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="100KB" if shards else "5GB")
    return folder


def make_adapter(folder: Path, base: Path, seed: int, rank: int, targets: Any) -> Path:
    """A PEFT folder whose B is not zero, and `folder/merged`, the model that it amounts to."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    model.merge_and_unload().save_pretrained(folder / "merged")
    return folder


@cache
def _loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def truth(folder: Path, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of a completion under a whole model."""
    import torch

    ids = torch.tensor([[*prompt, *completion]])
    with torch.inference_mode():
        logits = _loaded(folder)(ids).logits[0, len(prompt) - 1 : -1]
    values: list[float] = (logits / temperature).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return values


def canary(folder: Path, temperature: float = 1.0, tolerance: float = 2e-3) -> Canary:
    """What a trainer with those weights would ask for."""
    prompt, completion = [5, 6, 7, 40, 41], [9, 10, 11, 12, 90, 14, 30, 77]
    return Canary(prompt, completion, truth(folder, prompt, completion, temperature), temperature, tolerance)

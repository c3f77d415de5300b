"""SFT, DPO and KTO by TRL's own trainers, one policy after another, on rows that the export wrote.

The one thing to know: no row is cut. One that is longer than the model's context is left out and counted, where TRL would train on its
beginning without a word.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mappa_graph.errors import ConfigError, TrainerError
from mappa_graph.exchange.options import HELDOUT, TRAIN
from mappa_graph.gateway.deployment import write_canary
from mappa_graph.gateway.engine import Canary
from mappa_graph.sections.offline import OfflineConfig
from mappa_graph.sections.train import LoraConfig

from ..trainer import CANARY_TOKENS, CANARY_TOLERANCE
from ..warmstart import quiet
from ..weights import atomic_folder, load_model, save_model

Told = Callable[[str, int, int], Any]
_ENDS = {"sft": ("completion",), "kto": ("completion",), "dpo": ("chosen", "rejected")}


@dataclass(frozen=True)
class Fitted:
    """What the training of a policy did."""

    losses: dict[str, dict[str, float | None]]
    """When ("before", "after") -> side -> loss; None where the side has no row."""
    rows: dict[str, int]
    """By side."""
    too_long: int
    history: list[dict[str, Any]]
    """TRL's log, a row now and then."""

    def to_json(self) -> dict[str, Any]:
        return {"losses": self.losses, "rows": self.rows, "too_long": self.too_long, "history": self.history}


def fit(policy: str, model: Path, data: Path, config: OfflineConfig, out: Path, told: Told) -> Fitted:
    """Trains a policy and writes its weights to `out`, a canary with them.

    Args:
        model: folder of the first weights.
        data: the export's `datasets` folder.

    Raises `ConfigError` where the model has no chat template or no row fits, `TrainerError` where the training diverged.
    """
    import datasets
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    if not tokenizer.chat_template:
        raise ConfigError(f"the model {model} of policy {policy!r} has no chat template", hint="start from a chat model")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    network = load_model(model, torch.float32, "cpu")
    loaded = datasets.load_from_disk(str(data))
    sides = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {TRAIN: loaded}
    limit = getattr(network.config, "max_position_embeddings", None) or math.inf
    whole = sum(len(part) for part in sides.values())
    with _quiet_datasets():
        sides = {side: part.select(_fitting(part, tokenizer, config.method, limit)) for side, part in sides.items()}
    too_long = whole - sum(len(part) for part in sides.values())
    train, heldout = sides[TRAIN], sides.get(HELDOUT)
    least = 2 if config.method == "kto" else 1  # KTO's KL is estimated from other rows of a batch
    if len(train) < least:
        raise ConfigError(
            f"{len(train)} rows are left to train policy {policy!r} on by {config.method}"
            + (f": {too_long} are longer than the {limit} tokens of {model}" if too_long else ""),
            hint=f"give more traces: {config.method} takes at least {least}",
        )
    losses: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []

    class Follow(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            losses.append({"step": state.global_step, **{k: v for k, v in (logs or {}).items() if isinstance(v, int | float)}})
            told(f"{config.method} of {policy}", state.global_step, state.max_steps)

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            last.append(dict(metrics or {}))

    sized = {TRAIN: train.select(range(min(config.measure, len(train))))}
    if heldout is not None and len(heldout) >= least:
        sized[HELDOUT] = heldout.select(range(min(config.measure, len(heldout))))

    with tempfile.TemporaryDirectory(prefix="mappa-offline-") as scratch, quiet(), _quiet_datasets():
        trainer = _trainer(network, train, sized, tokenizer, config, scratch, Follow())
        trainer.remove_callback(PrinterCallback)
        before = _measured(trainer, last, sized)
        losses.clear()
        trainer.train()
        history = list(losses)
        after = _measured(trainer, last, sized)
        if not all(math.isfinite(v) for v in after.values() if v is not None):
            raise TrainerError(
                f"the training of policy {policy!r} diverged: its loss is {after}", hint=f"lower the learning rate (now {config.rate:g})"
            )
        _save(trainer.accelerator.unwrap_model(trainer.model), model, out, adapter=config.lora is not None)
    _leave_canary(out, model, tokenizer, train, config)
    for leftover in data.rglob("cache-*.arrow"):  # what TRL tokenised
        leftover.unlink()
    rows = {TRAIN: len(train), HELDOUT: 0 if heldout is None else len(heldout)}
    return Fitted({"before": before, "after": after}, rows, too_long, history)


def _fitting(rows: Any, tokenizer: Any, method: str, limit: float) -> list[int]:
    """Positions of the rows that the model's context holds."""
    return [at for at, row in enumerate(rows) if all(len(_ids(tokenizer, row, row[end])) <= limit for end in _ENDS[method])]


def _ids(tokenizer: Any, row: Mapping[str, Any], completion: Any) -> list[int]:
    tools = json.loads(row["tools"]) if row.get("tools") else None
    text = tokenizer.apply_chat_template([*row["prompt"], *completion], tools=tools, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _trainer(network: Any, train: Any, sized: Mapping[str, Any], tokenizer: Any, config: OfflineConfig, scratch: str, follow: Any) -> Any:
    import trl

    kinds = {
        "sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig), "kto": (trl.KTOTrainer, trl.KTOConfig),
    }  # fmt: skip
    trainer_class, config_class = kinds[config.method]
    own: dict[str, Any] = {} if config.method == "sft" else {"beta": config.beta}
    if config.method == "kto":  # the rarer label counts for as much as the other
        good = sum(train["label"])
        bad = len(train) - good
        own |= {"desirable_weight": max(1.0, bad / max(1, good)), "undesirable_weight": max(1.0, good / max(1, bad))}
    batch = max(2, min(config.batch, len(train))) if config.method == "kto" else min(config.batch, len(train))
    settings = config_class(
        output_dir=scratch,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        learning_rate=config.rate,
        max_length=None,
        gradient_checkpointing=False,
        bf16=config.dtype == "bfloat16",
        use_cpu=config.device == "cpu",
        dataloader_pin_memory=False,
        report_to="none",
        save_strategy="no",
        logging_steps=max(1, math.ceil(len(train) / batch) * config.epochs // 20),
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        seed=config.seed,
        **own,
    )
    options: dict[str, Any] = {} if config.lora is None else {"peft_config": _peft(config.lora)}
    return trainer_class(
        model=network,
        args=settings,
        train_dataset=train,
        eval_dataset=dict(sized),
        processing_class=tokenizer,
        callbacks=[follow],
        **options,
    )


def _peft(lora: LoraConfig) -> Any:
    from peft import LoraConfig as Peft

    targets: Any = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    return Peft(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM")


def _measured(trainer: Any, last: list[dict[str, Any]], sized: Mapping[str, Any]) -> dict[str, float | None]:
    """Loss by side."""
    last.clear()
    found: dict[str, Any] = {}
    trainer.evaluate()
    for metrics in last:
        found.update(metrics)
    return {side: float(found[f"eval_{side}_loss"]) if side in sized else None for side in (TRAIN, HELDOUT)}


def _save(network: Any, source: Path, out: Path, *, adapter: bool) -> None:
    network.config.use_cache = True
    if not adapter:
        save_model(network, source, out)
        return
    with atomic_folder(out) as aside:
        network.peft_config["default"].base_model_name_or_path = str(source)
        network.save_pretrained(str(aside))


def _leave_canary(out: Path, model: Path, tokenizer: Any, train: Any, config: OfflineConfig) -> None:
    """A few tokens of the shortest row beside the weights, with their log-probs under what was written, read again from the folder."""
    end = _ENDS[config.method][0]
    row = min(train, key=lambda one: len(str(one["prompt"])) + len(str(one[end])))
    tools = json.loads(row["tools"]) if row.get("tools") else None
    text = tokenizer.apply_chat_template(row["prompt"], tools=tools, tokenize=False, add_generation_prompt=True)
    prompt = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    completion = list(tokenizer(row[end][0]["content"] or " ", add_special_tokens=False)["input_ids"])[:CANARY_TOKENS]
    network = load_model(model if config.lora is not None else out, torch.float32, "cpu")
    if config.lora is not None:
        from peft import PeftModel

        network = PeftModel.from_pretrained(network, str(out)).eval()
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)
    write_canary(out, Canary(prompt, completion, logprobs.tolist(), tolerance=CANARY_TOLERANCE[config.dtype]))


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Without the progress bars of `datasets`."""
    from datasets.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

"""Supervised warm starts: a small chat model from nothing (`build_tiny`), or any causal language model (`warm_start`).

Reinforcement learning needs a policy that sometimes succeeds. `build_tiny` makes one, tokenizer and Llama-style network included, in
under a minute on a laptop's CPU from demonstrations that are imperfect on purpose, so that the model knows the team's formats and its
trade half-way, and what is left to learn is left to the coach. The one thing to know: a model is trained on exactly the token ids that
an engine will feed it later, `apply_chat_template(messages, add_generation_prompt=True)` and then the completion up to and including
end-of-turn, so no prompt at rollout time looks different from those of the warm start.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mappa_graph.errors import ConfigError, TrainerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Demonstration = Mapping[str, Any]
"""`{"agent": str, "messages": [{"role", "content"}, ...], "completion": str}`: what an agent saw, and what it answered."""

Progress = Callable[[str, int, int], None]
"""`progress(what, done, of)`, called from the thread that works; `of` is 0 where the end is not known."""

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
LENGTH_GROUPS = 4
CONTEXT = 1024
"""Positions the network is built for; far more than the demonstrations use."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('this model knows the roles system, user, assistant and tool, not ' ~ message.role) -}}"
    "{%- endif -%}"
    "{%- if message.content is string -%}{%- set text = message.content -%}"
    "{%- else -%}{%- set text = (message.content or []) | map(attribute='text') | join('') -%}{%- endif -%}"
    "{{- '<|' ~ message.role ~ '|>' ~ text ~ '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the tiny model becomes, its demonstrations aside. About 0.9M parameters by default."""

    vocab_size: int = 512
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    steps: int = 240
    batch: int = 64
    lr: float = 3e-3
    prompt_weight: float = 0.5
    """Weight of the loss over all tokens beside that over the completions. A network this small learns to copy numbers from its
    prompt much sooner where it must also predict the prompt's own repetitions."""
    seed: int = 0

    def __post_init__(self) -> None:
        smallest = 256 + 2 + len(ROLES)
        if self.vocab_size < smallest:
            raise ConfigError(f"vocab_size {self.vocab_size} is too small", hint=f"bytes and special tokens alone take {smallest}")
        if self.heads < 1 or self.hidden % (2 * self.heads):
            raise ConfigError(f"hidden {self.hidden} can't be split over {self.heads} heads", hint="hidden must be a multiple of 2 * heads")
        for name in ("layers", "steps", "batch", "lr"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.prompt_weight < 0:
            raise ConfigError(f"prompt_weight must not be below 0, and is {self.prompt_weight}")


def build_tiny(
    folder: str | os.PathLike[str],
    demonstrations: Sequence[Demonstration],
    *,
    vocab_size: int = Recipe.vocab_size,
    hidden: int = Recipe.hidden,
    layers: int = Recipe.layers,
    heads: int = Recipe.heads,
    steps: int = Recipe.steps,
    batch: int = Recipe.batch,
    lr: float = Recipe.lr,
    prompt_weight: float = Recipe.prompt_weight,
    seed: int = Recipe.seed,
    progress: Progress | None = None,
) -> Path:
    """Trains the tiny model and writes it to `folder` as an ordinary Hugging Face checkpoint; returns the folder.

    `steps` optimizer steps of `batch` demonstrations each, drawn without replacement (epochs as needed), with the mean loss of the
    completions' tokens plus `prompt_weight` times that of all tokens. `warmstart.json` beside the weights keeps the recipe and the
    completions' loss over its last steps (nats per token).
    The process's random states are left as they were. Raises `ConfigError` for settings or demonstrations that can't work and
    `TrainerError` where the training diverged.
    """
    recipe = Recipe(vocab_size, hidden, layers, heads, steps, batch, lr, prompt_weight, seed)
    folder = Path(folder)
    return _made(lambda: _from_nothing(recipe, demonstrations), folder, demonstrations, recipe, progress)


def warm_start(
    model: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    demonstrations: Sequence[Demonstration],
    *,
    steps: int,
    batch: int = 8,
    lr: float = 5e-5,
    prompt_weight: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Trains all weights of the checkpoint in the folder `model` and writes the outcome to `folder`, as `build_tiny` does its own.

    One model for all agents that the demonstrations name: each meets it under its own prompt. Raises as `build_tiny`.
    """
    recipe = Recipe(steps=steps, batch=batch, lr=lr, prompt_weight=prompt_weight, seed=seed)
    return _made(lambda: _from_folder(Path(model)), Path(folder), demonstrations, recipe, progress)


def _from_nothing(recipe: Recipe, demonstrations: Sequence[Demonstration]) -> tuple[Any, PreTrainedTokenizerFast]:
    tokenizer = train_tokenizer(demonstrations, recipe.vocab_size)
    return _network(recipe, tokenizer), tokenizer


def _from_folder(folder: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        try:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"there is no model to warm-start in {folder}: {error}") from error


def _made(
    begin: Callable[[], tuple[Any, Any]],
    folder: Path,
    demonstrations: Sequence[Demonstration],
    recipe: Recipe,
    progress: Progress | None,
) -> Path:
    if not demonstrations:
        raise ConfigError("there are no demonstrations to warm-start a model on")
    for _ in _texts(demonstrations):
        pass  # what is none is said before anything is loaded
    report = progress or (lambda what, done, of: None)
    report("warm start", 0, recipe.steps)
    with _random_states_kept():
        model, tokenizer = begin()
        rows = encode(tokenizer, demonstrations)
        loss = _fit(model, tokenizer, rows, recipe, report)
    if not loss < float("inf"):
        raise TrainerError(f"the warm start diverged: its loss is {loss}", hint=f"lower the learning rate (now {recipe.lr:g})")
    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    summary = {"recipe": asdict(recipe), "demonstrations": len(rows), "loss": loss, "parameters": model.num_parameters()}
    (folder / "warmstart.json").write_text(json.dumps(summary, indent=2) + "\n")
    return folder


def train_tokenizer(demonstrations: Sequence[Demonstration], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every text can be written and read back, digits stand alone, `<|end|>` ends a turn.

    Raises `ConfigError` where the demonstrations are empty or one of them is not in the shape of `Demonstration`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers import trainers as bpe
    from transformers import PreTrainedTokenizerFast

    if not demonstrations:
        raise ConfigError("there are no demonstrations to warm-start a model on")
    special = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = bpe.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_texts(demonstrations), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=special[2:],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def encode(tokenizer: Any, demonstrations: Sequence[Demonstration]) -> list[dict[str, list[int]]]:
    """`input_ids` and `labels` (-100 where the loss does not count: on the prompt) of each demonstration.

    The prompt's ids and the completion's are made apart, as they are at rollout time: a pair of them is never merged over the
    border.
    """
    prompts = [
        tokenizer.apply_chat_template(list(d["messages"]), tokenize=False, add_generation_prompt=True)  # as text: one batch is quicker
        for d in demonstrations
    ]
    before = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    after = tokenizer([d["completion"] + tokenizer.eos_token for d in demonstrations], add_special_tokens=False)["input_ids"]
    rows = []
    for index, (p, c) in enumerate(zip(before, after, strict=True)):
        if len(p) + len(c) > tokenizer.model_max_length:
            raise ConfigError(
                f"demonstration {index} has {len(p) + len(c)} tokens", hint=f"the model's context holds {tokenizer.model_max_length}"
            )
        rows.append({"input_ids": p + c, "labels": [-100] * len(p) + c})
    return rows


def _texts(demonstrations: Sequence[Demonstration]) -> Iterator[str]:
    for index, d in enumerate(demonstrations):
        try:
            texts = [*(m["content"] for m in d["messages"]), d["completion"]]
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"demonstration {index} is not one: {type(error).__name__} {error}",
                hint='a demonstration is {"agent": ..., "messages": [{"role": ..., "content": ...}], "completion": ...}',
            ) from error
        yield from texts


def _network(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Any:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=3 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.06,  # 0.02, made for wide networks, would waste the first hundred steps
        dtype="float32",
        **ends,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


def _fit(model: Any, tokenizer: Any, rows: list[dict[str, list[int]]], recipe: Recipe, report: Progress) -> float:
    """The supervised training, by TRL's `SFTTrainer` on the CPU. Returns the completions' mean loss over the last tenth of the steps."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []

    class BothLosses(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            """Both losses. Rows go in by length, a few at a time, so that short ones are not computed at the longest one's length."""
            lengths = inputs["attention_mask"].sum(-1)
            answer: Any = 0.0
            every: Any = 0.0
            for rows in lengths.argsort().chunk(LENGTH_GROUPS):
                ids, mask, labels = (inputs[k][rows, : lengths[rows].max()] for k in ("input_ids", "attention_mask", "labels"))
                logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]  # [rows, length - 1, vocabulary]
                logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
                answer = answer - logprobs[labels[:, 1:] != -100].sum()
                every = every - logprobs[mask[:, 1:] == 1].sum()
            answer = answer / (inputs["labels"] != -100).sum()
            losses.append(answer.detach().item())
            loss = answer + recipe.prompt_weight * every / (lengths - 1).sum()
            return (loss, {}) if return_outputs else loss

    class Follow(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            report("warm start", state.global_step, recipe.steps)

    with tempfile.TemporaryDirectory(prefix="mappa-warmstart-") as scratch:
        settings = SFTConfig(
            output_dir=scratch,
            max_steps=recipe.steps,
            per_device_train_batch_size=recipe.batch,
            learning_rate=recipe.lr,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, recipe.steps // 20),
            weight_decay=0.01,
            adam_beta2=0.99,
            max_length=None,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            report_to="none",
            save_strategy="no",
            logging_steps=max(1, recipe.steps // 50),
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            seed=recipe.seed,
        )
        trainer = BothLosses(
            model=model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Follow()]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.config.use_cache = True
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """The trainer below seeds every generator of the process; the caller's own runs go on as if it had not."""
    import numpy as np
    import torch

    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.random.set_rng_state(cpu)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and notices of transformers, which would break into the caller's own display."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()

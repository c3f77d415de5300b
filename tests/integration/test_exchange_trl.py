"""Each exported format is read by TRL's own trainer and takes a training step; rows with tokens go through the on-policy trainer."""

import json
import math
from functools import partial

import pytest

from mappa_graph.exchange.export import export
from mappa_graph.exchange.filters import Filters
from mappa_graph.exchange.formats import FORMATS, plain_render, template_render
from mappa_graph.exchange.options import Options
from mappa_graph.exchange.pairs import Pairs
from mappa_graph.store import TraceStore
from mappa_graph.trainers import ReinforceTrainer
from mappa_graph.trainers.batch import Sample, samples_from_trace
from mappa_graph.trainers.settings import TrainerSettings
from tests.fakes.exported import run_of
from tests.fakes.tinymodel import make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ("jsonl", "parquet", "datasets")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_positions=2048)


@pytest.fixture(scope="module")
def tokenizer(model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with TraceStore(run_of(tmp_path_factory.mktemp("run")) / "trace.db", read_only=True) as store:
        yield store


@pytest.fixture
def load(store, tmp_path):
    """Exports and loads again with `datasets`, by the line that the card gives."""
    import datasets

    def go(format, kind, **more):
        out = tmp_path / f"{format}.{kind}" if kind != "datasets" else tmp_path / format
        made = export(store, format, out, **more)
        if kind == "datasets":
            found = datasets.load_from_disk(str(out))
        else:
            builder = "json" if kind == "jsonl" else "parquet"
            found = datasets.load_dataset(builder, data_files=str(out), cache_dir=str(tmp_path / "cache"), split="train")
        assert len(found) == made.card["rows"]["train"]
        return found

    return go


@pytest.fixture
def step(tmp_path, model, tokenizer):
    """One step of a TRL trainer; returns its loss. Fails unless weights have moved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    def go(trainer_class, config_class, data, *, head=False, **options):
        kind = AutoModelForSequenceClassification if head else AutoModelForCausalLM
        torch.manual_seed(0)
        made = kind.from_pretrained(model, num_labels=1) if head else kind.from_pretrained(model)
        before = [p.detach().clone() for p in made.parameters()]
        config = config_class(
            output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none",
            use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True, max_length=1024, bf16=False, **options,
        )  # fmt: skip
        trainer = trainer_class(model=made, args=config, train_dataset=data, processing_class=tokenizer)
        loss = trainer.train().training_loss
        assert math.isfinite(loss)
        assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
        return trainer, loss

    return go


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["sft", "messages"])
def test_sft_trainer_takes_a_step_and_sees_tool_calls_and_tools(load, step, tokenizer, format, kind):
    from trl import SFTConfig, SFTTrainer

    data = load(format, kind, filters=Filters(agents=("solver",)))
    trainer, loss = step(SFTTrainer, SFTConfig, data)
    assert loss > 0
    texts = [tokenizer.decode(ids) for ids in trainer.train_dataset["input_ids"]]
    assert all('"name": "run"' in text.split("<|im_end|>")[0] for text in texts)  # the tools it was offered
    called = next(text for text in texts if "What is 3 + 3?" in text and "<tool_call>" in text)
    assert '{"name": "run", "arguments": {"code": "3+3"}}' in called
    assert "None" not in called and "null" not in called
    if format == "sft":
        for ids, labels in zip(trainer.train_dataset["input_ids"], trainer.train_dataset["labels"], strict=True):
            learned = tokenizer.decode([i for i, label in zip(ids, labels, strict=True) if label != -100])
            assert learned.startswith("<think>")
            assert learned.count("<|im_end|>") == 1


def test_sft_trainer_takes_a_step_on_conversations_with_tool_answers(load, step, tokenizer):
    from trl import SFTConfig, SFTTrainer

    data = load("messages", "parquet", filters=Filters(agents=("writer",)))
    trainer, _ = step(SFTTrainer, SFTConfig, data)
    text = tokenizer.decode(trainer.train_dataset["input_ids"][0])
    assert "<|im_start|>tool\n0<|im_end|>" in text
    assert "The sum, written by sample 0, is 0." in text


@pytest.mark.parametrize("kind", KINDS)
def test_sft_trainer_takes_a_step_on_texts(load, step, tokenizer, kind):
    from trl import SFTConfig, SFTTrainer

    data = load("sft", kind, render=template_render(tokenizer))
    whole = data[0]["prompt"] + data[0]["completion"]
    assert whole.endswith("<|im_end|>\n")
    assert data[0]["prompt"].endswith("<|im_start|>assistant\n")
    step(SFTTrainer, SFTConfig, data)


def test_sft_trainer_takes_a_step_on_plain_text(load, step):
    from trl import SFTConfig, SFTTrainer

    step(SFTTrainer, SFTConfig, load("messages", "jsonl", render=plain_render))


def test_dpo_trainer_takes_a_step(load, step, tokenizer):
    from trl import DPOConfig, DPOTrainer

    data = load("dpo", "parquet")
    assert set(data["source"]) == {"siblings", "coach"}
    trainer, _ = step(DPOTrainer, DPOConfig, data)
    row = trainer.train_dataset[list(data["source"]).index("siblings")]
    assert "hm 2" in tokenizer.decode(row["chosen_ids"])
    assert "hm 0" in tokenizer.decode(row["rejected_ids"])


def test_dpo_trainer_takes_a_step_on_texts(load, step, tokenizer):
    from trl import DPOConfig, DPOTrainer

    step(DPOTrainer, DPOConfig, load("dpo", "jsonl", render=template_render(tokenizer)))


def test_kto_trainer_takes_a_step(load, step):
    from trl import KTOConfig, KTOTrainer

    data = load("kto", "jsonl", options=Options(pairs=Pairs(sources=("siblings", "coach", "scores"))))
    assert set(data["label"]) == {True, False}
    step(KTOTrainer, KTOConfig, data)


def test_reward_trainer_takes_a_step(load, step):
    from trl import RewardConfig, RewardTrainer

    data = load("reward", "datasets")
    trainer, _ = step(RewardTrainer, RewardConfig, data, head=True)
    assert "margin" in trainer.train_dataset.column_names


@pytest.mark.parametrize("format", FORMATS)
def test_a_loaded_export_is_the_same_from_every_kind(load, format):
    more = {"samples": partial(samples_from_trace, gamma=0.5)} if format == "rl" else {}
    jsonl, parquet, folder = (load(format, kind, **more) for kind in KINDS)
    for one, two, three in zip(jsonl, parquet, folder, strict=True):
        assert one == two == three
    assert parquet.features == folder.features


def test_a_held_out_split_loads_as_two(store, tmp_path):
    import datasets

    made = export(store, "sft", tmp_path / "both", options=Options(heldout=0.4))
    found = datasets.load_from_disk(str(tmp_path / "both"))
    assert {side: len(data) for side, data in found.items()} == made.card["rows"]
    assert set(found["train"]["task_id"]).isdisjoint(found["heldout"]["task_id"])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rl_rows_take_a_step_of_the_on_policy_trainer(load, model, kind):
    data = load("rl", kind, samples=partial(samples_from_trace, gamma=0.5))
    samples = [
        Sample(
            agent=row["agent"], policy=row["policy"], episode=row["episode"], action_id=row["action"], prompt_ids=tuple(row["prompt_ids"]),
            completion_ids=tuple(row["completion_ids"]), engine_logprobs=tuple(row["logprobs"]), temperature=row["temperature"],
            ret=row["return"], truncated=row["truncated"], stratum=row["stratum"],
        )
        for row in data
    ]  # fmt: skip
    trainer = ReinforceTrainer({"solver": model, "writer": model}, TrainerSettings(lr=1e-3, beta=0.0))
    update = trainer.update(samples)
    assert not update.refused
    assert update.tokens == sum(len(row["completion_ids"]) for row in data)
    assert update.policies["solver"]["grad_norm"] > 0


def test_a_rows_json_is_what_the_card_says(load, tmp_path):
    load("kto", "jsonl")
    card = json.loads((tmp_path / "kto.jsonl.card.json").read_text())
    first = json.loads((tmp_path / "kto.jsonl").read_text().splitlines()[0])
    assert list(first) == [column["name"] for column in card["columns"]]

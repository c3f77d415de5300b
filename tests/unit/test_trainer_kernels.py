"""Which fused kernels are chosen when, with packages and GPUs pretended; optimizer state that moves between devices."""

import importlib.machinery
import logging
import sys
import types

import pytest
import torch

from mappa_graph.errors import ConfigError, TrainerError
from mappa_graph.trainers import ReinforceTrainer, TrainerSettings
from mappa_graph.trainers import kernels as kernels_module
from mappa_graph.trainers.attention import NAME
from mappa_graph.trainers.kernels import use_kernels
from mappa_graph.trainers.learner import move_state, prepare
from mappa_graph.trainers.sharding import Sharding
from mappa_graph.trainers.weights import load_model
from tests.fakes.batches import random_samples
from tests.fakes.tinymodel import make_tiny_model

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model", seed=1)


@pytest.fixture
def model(base):
    return load_model(base, torch.float32, "cpu")


def install(monkeypatch, name, **contents):
    """A package that the import system finds, and that holds what is given."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        module = types.ModuleType(path)
        module.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=True)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, path, module)
    for key, value in contents.items():
        setattr(module, key, value)


@pytest.fixture
def liger(monkeypatch):
    """Records how it was applied."""
    applied = []
    install(
        monkeypatch,
        "liger_kernel.transformers.monkey_patch",
        MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None},
        _apply_liger_kernel_to_instance=lambda model, **options: applied.append((model, options)),
    )
    return applied


@pytest.fixture
def flash(monkeypatch, model):
    """Flash attention that can be chosen here."""
    install(monkeypatch, "flash_attn")
    chosen = []
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda self, name: chosen.append(name))
    return chosen


def test_nothing_made_for_gpus_happens_on_a_cpu_or_where_it_is_not_wanted_or_not_there(model, liger, flash):
    half = TrainerSettings(dtype="bfloat16")
    assert use_kernels(model, half, torch.device("cpu"), rows=False) == ["norms"]
    assert use_kernels(model, half.model_copy(update={"kernels": "none"}), CUDA, rows=False) == []
    assert liger == [] and flash == []


def test_without_packages_a_gpu_trains_plainly(model, monkeypatch):
    monkeypatch.setattr(kernels_module.importlib.util, "find_spec", lambda name: None)
    assert use_kernels(model, TrainerSettings(dtype="bfloat16"), CUDA, rows=False) == []


def test_liger_is_applied_to_the_instance_alone_and_its_loss_is_not(model, liger):
    assert use_kernels(model, TrainerSettings(), CUDA, rows=True) == ["liger"]
    assert liger == [(model, {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False})]
    model.config.model_type = "unheard_of"
    assert use_kernels(model, TrainerSettings(), CUDA, rows=True) == [] and len(liger) == 1


def test_a_liger_that_cannot_be_loaded_is_said_and_done_without(model, monkeypatch, caplog):
    install(monkeypatch, "liger_kernel")
    with caplog.at_level(logging.WARNING):
        assert use_kernels(model, TrainerSettings(), CUDA, rows=True) == []
    assert "liger-kernel is installed and can't be used" in caplog.text


def test_flash_attention_takes_padded_rows_in_bfloat16_only(model, flash):
    assert use_kernels(model, TrainerSettings(), CUDA, rows=False) == []
    assert use_kernels(model, TrainerSettings(dtype="bfloat16"), CUDA, rows=False) == ["flash_attention_2"]
    assert flash == ["flash_attention_2"]


def test_attention_over_rows_is_kept(model, liger, flash, monkeypatch):
    monkeypatch.undo()
    assert prepare(model, "p") and model.config._attn_implementation == NAME
    assert use_kernels(model, TrainerSettings(dtype="bfloat16"), CUDA, rows=True) == []
    assert model.config._attn_implementation == NAME


def test_a_kernel_that_takes_attention_over_rows_away_is_refused(model, monkeypatch):
    prepare(model, "p")
    install(
        monkeypatch,
        "liger_kernel.transformers.monkey_patch",
        MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None},
        _apply_liger_kernel_to_instance=lambda model, **options: model.set_attn_implementation("sdpa"),
    )
    with pytest.raises(TrainerError, match=r"took the attention over rows away.*\n.*kernels to none"):
        use_kernels(model, TrainerSettings(), CUDA, rows=True)


def test_offloading_on_a_cpu_has_no_effect_and_is_refused(base):
    with pytest.raises(ConfigError, match="no effect on a CPU"):
        ReinforceTrainer({"a": base}, TrainerSettings(offload="optimizer"))
    with pytest.raises(ConfigError, match=r"can't be had where models are sharded\n.*fsdp_offload_params"):
        ReinforceTrainer({"a": base}, TrainerSettings(offload="optimizer"), device="cuda", sharding=Sharding(group=None))


def test_a_model_without_the_layers_it_is_to_be_sharded_by_is_refused(model):
    with pytest.raises(TrainerError, match=r"no layers of \['Nope'\].*\n.*fsdp_transformer_layer_cls_to_wrap"):
        Sharding(group=None, layers=("Nope",)).shard(model)


def test_optimizer_state_goes_to_the_device_for_the_step_and_back(base, monkeypatch):
    """With the moves recorded instead of made, as there is one device only; steps and results are those without."""
    samples = random_samples(5, agents={"a": "a"})
    plain = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.0, lr=1e-2))
    offloaded = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.0, lr=1e-2))
    learner = offloaded.learner("a")
    learner.settings = learner.settings.model_copy(update={"offload": "optimizer"})
    moves = []
    monkeypatch.setattr("mappa_graph.trainers.learner.move_state", lambda optimizer, device: moves.append(str(device)))
    learner.device = torch.device("cpu", 0)
    for _ in range(2):
        plain.update(samples)
        offloaded.update(samples)
    assert moves == ["cpu:0", "cpu"] * 2
    for a, b in zip(plain.learner("a").parameters, learner.parameters, strict=True):
        assert torch.equal(a, b)


def test_moving_state_moves_the_moments_and_keeps_what_they_are(base):
    trainer = ReinforceTrainer({"a": base}, TrainerSettings(beta=0.0, lr=1e-2))
    trainer.update(random_samples(5, agents={"a": "a"}))
    optimizer = trainer.learner("a").optimizer
    before = {p: dict(entry) for p, entry in optimizer.state.items()}
    move_state(optimizer, torch.device("meta"))
    for parameter, entry in optimizer.state.items():
        assert {k: v.device.type for k, v in entry.items()} == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}
        assert all(entry[k].shape == v.shape and entry[k].dtype == v.dtype for k, v in before[parameter].items())

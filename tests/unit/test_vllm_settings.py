"""The engine's settings: what can't take effect is an error, and each kind gives the engine it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mappa_graph.config import load_config, make_config
from mappa_graph.errors import ConfigError
from mappa_graph.gateway.upstream import UpstreamEngine
from mappa_graph.gateway.vllm import VllmEngine
from mappa_graph.trainers.engines import make_engine


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"vllm": {}}, "no effect with engine.kind 'local'"),
        ({"kind": "upstream"}, "needs engine.upstream"),
        ({"kind": "vllm", "max_batch_tokens": 100}, "the local engine's"),
        ({"kind": "vllm", "vllm": {"base_url": "http://a/v1", "python": "x"}}, "python has no effect on a server that runs"),
        ({"kind": "vllm", "vllm": {"base_url": "http://a/v1"}, "threads": 2}, "threads has no effect"),
        ({"kind": "vllm", "vllm": {"api_key_env": "KEY"}}, "no effect without engine.vllm.base_url"),
        ({"kind": "vllm", "vllm": {"mode": "lora", "transfer": "nccl"}}, "no effect with mode 'lora'"),
        ({"kind": "vllm", "vllm": {"mode": "full", "max_adapters": 3}}, "no effect with mode 'full'"),
        ({"kind": "vllm", "vllm": {"extra_args": ["--api-key=x"]}}, "--api-key=x is set by the engine itself"),
        ({"kind": "vllm", "vllm": {"gpu_memory_utilization": 1.5}}, "less than or equal to 1"),
        ({"kind": "vllm", "vllm": {"max_model_length": 5}}, "did you mean 'max_model_len'"),
    ],
)
def test_a_setting_without_effect_or_out_of_range_is_an_error(engine: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_config({"engine": engine})


def test_settings_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    config = make_config({"engine": {"kind": "vllm", "vllm": {"mode": "lora", "max_adapters": 9, "extra_args": ["--seed", "1"]}}})
    (tmp_path / "config.yaml").write_text(config.dump(), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return {"a": tmp_path, "b": tmp_path}


def test_the_mode_follows_what_is_trained_unless_it_is_named(models: dict[str, Path]) -> None:
    def mode(train: dict[str, Any], vllm: dict[str, Any] | None = None) -> str:
        engine = make_engine(make_config({"engine": {"kind": "vllm", "vllm": vllm}, "train": train}), models)
        assert isinstance(engine, VllmEngine)
        return engine.mode

    assert mode({}) == "full" and mode({"lora": {}}) == "lora"
    assert mode({"lora": {}}, {"mode": "full"}) == "full"  # merged weights are published then
    with pytest.raises(ConfigError, match="sends whole weights"):
        mode({"lora": {}}, {"mode": "full", "transfer": "nccl"})
    with pytest.raises(ConfigError, match="no effect without adapters"):
        mode({}, {"max_adapters": 3})


def test_an_upstream_is_named_with_its_models_and_key(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    upstream: dict[str, Any] = {"base_url": "http://127.0.0.1:1/v1", "models": "served", "api_key_env": "THE_KEY"}
    with pytest.raises(ConfigError, match="THE_KEY"):
        make_engine(make_config({"engine": {"kind": "upstream", "upstream": upstream}}), models)
    monkeypatch.setenv("THE_KEY", "x")
    engine = make_engine(make_config({"engine": {"kind": "upstream", "upstream": upstream}}), models)
    assert isinstance(engine, UpstreamEngine) and engine.served == {"a": "served", "b": "served"}
    with pytest.raises(ConfigError, match="name each policy once"):
        make_engine(make_config({"engine": {"kind": "upstream", "upstream": {**upstream, "models": {"a": "x"}}}}), models)

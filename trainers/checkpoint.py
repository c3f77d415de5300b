"""Checkpoints: one folder per step, complete or not there at all.

`step-00000012/` holds what the trainer saved, and `manifest.json` with the size and SHA-256 of every file and the caller's own state.
It is written aside, flushed, and renamed, so a crash at any moment leaves the last good one; reading checks every byte and falls
back to the newest that is whole, saying so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mappa_graph.errors import TrainerError
from mappa_graph.gateway.deployment import read_canary, write_canary

from .weights import atomic_folder

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
POLICIES = "policies"
"""Folder of a checkpoint that holds a model folder per policy."""
FORMAT = 1
_NAME = re.compile(r"step-(\d{8})(\.old)?")


class Saveable(Protocol):
    """Anything that can put its whole state into a folder."""

    def save(self, folder: Path) -> None: ...


def save_checkpoint(root: Path | str, step: int, trainer: Saveable, extra: Mapping[str, Any] | None = None) -> Path:
    """Write the checkpoint of `step` under `root` and return its folder. `extra` is JSON: data cursor, versions, config, best score.

    A checkpoint of the same step is replaced. Raises TrainerError (disk full, not JSON); what was there before is untouched.
    """
    if step < 0:
        raise TrainerError(f"step {step} of a checkpoint is negative")
    try:
        state = json.loads(json.dumps(dict(extra or {})))
    except (TypeError, ValueError) as error:
        raise TrainerError(f"the checkpoint's extra state is not JSON: {error}") from error
    folder = Path(root) / f"step-{step:08d}"
    with atomic_folder(folder) as aside:
        trainer.save(aside)
        files = {str(p.relative_to(aside)): _fingerprint(p) for p in sorted(aside.rglob("*")) if p.is_file()}
        manifest = {"format": FORMAT, "step": step, "extra": state, "files": files}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return folder


def load_latest(root: Path | str) -> tuple[Path, dict[str, Any]] | None:
    """Folder and `extra` of the newest checkpoint that is whole, or None. Damaged ones are skipped with a warning.

    `trainer.load(folder)` then restores it; `extra` gains the key `step`.
    """
    for folder in _newest_first(Path(root)):
        try:
            manifest = verify(folder)
        except TrainerError as error:
            log.warning("skipping checkpoint %s: %s", folder, error)
            continue
        return folder, {**manifest["extra"], "step": manifest["step"]}
    return None


def trained_weights(run: Path | str, step: str | int = "last", *, merged: bool = True) -> dict[str, Path]:
    """Policy -> model folder, from the checkpoints of a run's folder.

    Args:
        step: "last", "best" (the iteration that the newest checkpoint's own state calls the best), or a number.
        merged: adapters come merged into their base, as ordinary model folders (made when first asked for, in the run's `merged/`);
            False gives their own PEFT folders.
    """
    root = Path(run) / "checkpoints"
    found = load_latest(root)
    if found is None:
        raise TrainerError(f"there is no whole checkpoint in {root}", hint="is it the folder of a run that has trained?")
    folder, extra = found
    if step == "best":
        best = extra.get("best") or {}
        if "iteration" not in best:
            raise TrainerError(f"the run {run} has no best checkpoint yet", hint='it was not evaluated; use "last" or a number')
        step = best["iteration"]
    if step != "last":
        if not str(step).isdigit():
            raise TrainerError(f"checkpoint {step!r} of run {run} is not known", hint='use "best", "last", or a number')
        folder = root / f"step-{int(step):08d}"
        try:
            verify(folder)
        except TrainerError as error:
            kept = ", ".join(str(int(f.name[5:13])) for f in reversed(_newest_first(root)))
            raise TrainerError(f"checkpoint {step} of run {run} can't be used: {error}", hint=f"kept are: {kept}") from error
    found_folders = {p.name: p for p in sorted((folder / POLICIES).iterdir()) if p.is_dir()}
    return {p: _merged(Path(run), p, f) if merged else f for p, f in found_folders.items()}


def _merged(run: Path, policy: str, folder: Path) -> Path:
    adapter = folder / "adapter_model.safetensors"
    if not adapter.is_file():
        return folder
    target = run / "merged" / policy / _fingerprint(adapter)["sha256"][:16]
    if not target.is_dir():
        from .lora import merge

        merge(folder, target)
        if (canary := read_canary(folder)) is not None:
            write_canary(target, canary)
    return target


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is as it was written. Raises TrainerError naming the first that isn't."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, files, _, _ = manifest["format"], manifest["files"], manifest["step"], manifest["extra"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"its manifest can't be read: {type(error).__name__}: {error}") from error
    if version != FORMAT:
        raise TrainerError(f"its format is {version!r}; this version reads {FORMAT}")
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise TrainerError(f"{name} is missing")
        if path.stat().st_size != expected["size"] or _fingerprint(path) != expected:
            raise TrainerError(f"{name} is damaged")
    return dict(manifest)


def prune(root: Path | str, keep_last: int, keep: Sequence[Path | str | int] = ()) -> list[Path]:
    """Delete all but the newest `keep_last` checkpoints and those in `keep` (folders or steps: the best one); returns the deleted.

    What a crash left half-written, or half-deleted, goes too. Damaged checkpoints don't count among the kept.
    """
    if keep_last < 1:
        raise TrainerError(f"keep_last is {keep_last}", hint="keep at least one checkpoint")
    root = Path(root)
    wanted = {f"step-{k:08d}" if isinstance(k, int) else Path(k).name for k in keep}
    found = _newest_first(root)
    whole = [f for f in found if f.name in wanted or _is_whole(f)]
    wanted |= {f.name for f in whole[:keep_last]}
    gone = [f for f in found if f.name not in wanted] if whole else []
    for folder in gone:
        trash = root / f".{folder.name}.gone.tmp"
        folder.rename(trash)
    for leftover in root.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    return gone


def _is_whole(folder: Path) -> bool:
    """Whether every file of the manifest is there with its size (contents are checked on reading)."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == expected["size"] for name, expected in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _newest_first(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    found = [(int(m[1]), m[2] is None, p) for p in root.iterdir() if p.is_dir() and (m := _NAME.fullmatch(p.name))]
    return [p for _, _, p in sorted(found, reverse=True)]


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

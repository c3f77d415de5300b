"""`Deployment`: a gateway that serves an app in production, and the history of what it has served.

Each release is kept: its weights as files of the deployment's own folder (a training run may prune its checkpoints), where they came
from, whether a canary was answered. The one thing to know: version numbers only go up. Going back makes a new version with the weights
of an old one, so a number in the record of calls always means the same weights; and a deployment that is started again serves what it
served before, under the same numbers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import EngineError, GatewayError
from .engine import Canary
from .server import Gateway
from .versions import Trial

HISTORY = "deployment.json"
CANARY = "canary.json"
"""In a folder of weights: what they must answer, from who trained them."""
KEPT = 5
"""How many steps back the weights are kept for, where nothing else is said; what serves is always kept."""
_TOLD = 10


@dataclass(frozen=True, slots=True)
class Release:
    """Weights that were given a version number."""

    policy: str
    version: int
    weights: str
    """Folder."""
    source: str
    """Where they came from, in words."""
    at: float
    """Unix time."""
    verified: bool
    """Whether a canary was answered."""
    of: int
    """The version whose weights these are: its own, or, after going back, an older one's."""
    before: int
    """The version whose weights served when these came: where going back leads. 0 = the first weights."""
    digest: str
    """SHA-256 over the weight files."""


class Deployment:
    """What is served and how it came to be.

    Args:
        gateway: started, with version 0 of every policy.
        folder: keeps `deployment.json` and the weights of the releases.
        first: policy -> folder of version 0.
        sources: policy -> where version 0 came from, in words; default: its folder.
        keep: how many steps back releases are kept for (`gateway.keep_releases`), at least 1. The first weights are not copied: they stay
            where they lie, and are the last that can be gone back to.
    """

    def __init__(
        self, gateway: Gateway, folder: Path, first: Mapping[str, Path], *, sources: Mapping[str, str] | None = None, keep: int = KEPT
    ) -> None:
        if keep < 1:
            raise GatewayError(f"{keep} releases can't be kept to go back to", hint="keep 1 or more")
        self.gateway = gateway
        self.folder = folder
        self.first = dict(first)
        self.sources = {policy: (sources or {}).get(policy) or str(path) for policy, path in self.first.items()}
        self.keep = keep
        self.releases: list[Release] = []
        self._given: dict[str, int] = {}
        self._lost: dict[str, tuple[int, Trial | None]] = {}
        """What this start could not serve again, by policy."""
        self._first: dict[str, str] = {}
        self._started = time.time()

    async def restore(self) -> dict[str, str]:
        """Serves again what an earlier start of this deployment served; returns policy -> why it could not, where it could not.

        What could not be served again stays in the history, for a start that can.

        Raises `GatewayError` for a history that can't be read, or first weights that are not those of the earlier start: version 0
        would then mean two things in the record.
        """
        await asyncio.to_thread(self.folder.mkdir, parents=True, exist_ok=True)
        digests = {policy: await asyncio.to_thread(_digest, Path(folder)) for policy, folder in self.first.items()}
        path = self.folder / HISTORY
        if not path.exists():
            self._first = digests
            self._write()
            return {}
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.releases = [Release(**{**row, "weights": str(self._place(row["weights"]))}) for row in kept["releases"]]
            current = {str(policy): int(version) for policy, version in kept["current"].items()}
            trials = {str(policy): Trial(int(version), float(share)) for policy, (version, share) in kept["trials"].items()}
            first = {str(policy): str(digest) for policy, digest in kept["first_digests"].items()}
            self._given = {str(policy): int(version) for policy, version in kept["given"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise GatewayError(f"{path} can't be read: {type(error).__name__}: {error}", hint="move it away to start afresh") from error
        other = [policy for policy, digest in first.items() if policy in digests and digests[policy] != digest]
        if other:
            raise GatewayError(
                f"{self.folder} served other first weights of {', '.join(other)} before, and its record calls them version 0",
                hint="start it as before and publish the new weights, or give another folder: --run FOLDER",
            )
        self._first = {**first, **digests}
        await asyncio.to_thread(self._sweep)
        failed: dict[str, str] = {}
        for policy, version in current.items():
            trial = trials.get(policy)
            wanted = [(version, 1.0)] if version else []
            for number, share in sorted([*wanted, *([(trial.version, trial.share)] if trial else [])]):
                release = self._release(policy, number)
                try:
                    if policy not in self.first:
                        raise GatewayError(f"there is no policy {policy!r} any more")
                    if release is None or await asyncio.to_thread(_digest, Path(release.weights)) != release.digest:
                        raise EngineError(f"the weights of {policy}@v{number} are gone or were changed")
                    folder = Path(release.weights)
                    await self.gateway.publish(policy, folder, version=number, canary=read_canary(folder), share=share)
                except (EngineError, GatewayError) as error:
                    failed[policy] = str(error)
                    self._lost[policy] = (version, trial)
        self._write()
        return failed

    def _place(self, weights: str) -> Path:
        """Where a release's weights lie: those inside the deployment's folder are written down relative to it, so that it may move."""
        return Path(weights) if Path(weights).is_absolute() else self.folder / weights

    def _sweep(self) -> None:
        """Deletes what a crash left of a publish that never served."""
        known = {(r.policy, r.of) for r in self.releases}
        for folder in (self.folder / "releases").glob("*/*"):
            number = folder.name[1:]
            if not number.isdigit() or (folder.parent.name, int(number)) not in known:
                shutil.rmtree(folder, ignore_errors=True)

    async def publish(self, policy: str, weights: Path, *, share: float = 1.0, source: str = "") -> Release:
        """Serves new weights: to all calls, or to a share of them.

        Raises `EngineError` or `GatewayError` (see `Gateway.publish`); what was served before goes on.
        """
        if policy not in self.first:
            raise GatewayError(f"there is no policy {policy!r} to publish", hint=f"there are: {', '.join(sorted(self.first))}")
        if not await asyncio.to_thread(weights.is_dir):
            raise GatewayError(f"{weights} is no folder of weights", hint="the server must see the same path")
        version = self._next(policy)
        own = self.folder / "releases" / policy / f"v{version}"
        await asyncio.to_thread(_copy, weights, own)
        try:
            source = source.encode("utf-8", "replace").decode()
            return await self._serve(policy, version, own, share, source or str(weights), of=version, before=self._serving(policy))
        except BaseException:
            if version not in self.gateway.loaded().get(policy, {}):  # what serves keeps its files, whatever failed after
                shutil.rmtree(own, ignore_errors=True)
            raise

    async def promote(self, policy: str) -> Release:
        """Gives all calls to the version on trial. Raises `GatewayError` where none is."""
        version = await self.gateway.promote(policy)
        self._write()
        release = self._release(policy, version)
        assert release is not None
        return release

    async def rollback(self, policy: str) -> Release | None:
        """Goes back: ends a trial (None is returned), or serves the weights before the current ones, as a new version.

        Called again it goes back further, release by release, and at last to the first weights. `Release.source` names what it went to,
        and what it passed over since its weights are no longer kept.

        Raises `GatewayError` where there is nothing to go back to.
        """
        if policy not in self.first:
            raise GatewayError(f"there is no policy {policy!r}", hint=f"there are: {', '.join(sorted(self.first))}")
        if policy in self.gateway.trials():
            await self.gateway.withdraw(policy)
            self._write()
            return None
        release = self._release(policy, self.gateway.versions()[policy])
        if release is None or release.of == 0:
            raise GatewayError(f"{policy!r} serves its first weights ({self.sources[policy]}): there is nothing older to go back to")
        gone: list[int] = []
        for kept in self._before(release):
            weights = Path(kept.weights)
            if await asyncio.to_thread(_digest, weights) == kept.digest:
                source = f"back to v{kept.version}: {kept.source}{self._passed(gone)}"
                return await self._serve(policy, self._next(policy), weights, 1.0, source, of=kept.version, before=kept.before)
            gone.append(kept.version)
        first = self.first[policy]
        digest = await asyncio.to_thread(_digest, first)
        if digest != self._first.get(policy, digest):
            raise GatewayError(
                f"{policy!r} can't go back: nothing older than v{release.of} is kept, and the first weights in {first} are gone or changed",
                hint=f"v{release.version} goes on; publish the weights that you want: mappa-graph publish FOLDER --agent {policy}",
            )
        source = f"back to the first weights: {self.sources[policy]}{self._passed(gone)}"
        return await self._serve(policy, self._next(policy), first, 1.0, source, of=0, before=0)

    def _before(self, release: Release) -> Iterator[Release]:
        """The releases that going back from one leads to, the nearest first; the first weights are none."""
        while (older := self._release(release.policy, release.before)) is not None:
            yield older
            release = older

    def _passed(self, gone: Sequence[int]) -> str:
        """What going back passed over, in words."""
        if not gone:
            return ""
        which = f"v{gone[0]}" if len(gone) == 1 else f"v{gone[0]} to v{gone[-1]}" if len(gone) > 2 else f"v{gone[0]} and v{gone[1]}"
        return f" (the weights of {which} are gone or were changed; gateway.keep_releases: {self.keep})"

    async def _serve(self, policy: str, version: int, weights: Path, share: float, source: str, *, of: int, before: int) -> Release:
        canary = read_canary(weights)
        digest = await asyncio.to_thread(_digest, weights)
        release = Release(policy, version, str(weights), source, time.time(), canary is not None, of, before, digest)
        self.releases.append(release)
        try:
            self._write()  # before the version can serve: a number in the record is never without its weights in the history
            await self.gateway.publish(policy, weights, version=version, canary=canary, share=share)
        except BaseException:
            if version not in self.gateway.loaded().get(policy, {}):
                self.releases.remove(release)
            raise
        self._lost.pop(policy, None)
        self._write()
        await asyncio.to_thread(self._prune, policy)
        return release

    def status(self) -> dict[str, Any]:
        """What serves now, as JSON: per policy the current version, the version on trial, calls in flight and served, where version 0 came
        from, the latest releases and those of all that serves, and what can be gone back to (`back`: versions, the nearest first; 0 = the
        first weights)."""
        metrics, trials, loaded = self.gateway.metrics, self.gateway.trials(), self.gateway.loaded()
        calls: dict[str, dict[str, int]] = {}
        for (policy, version, _), n in metrics.calls.items():
            served = calls.setdefault(policy, {})
            served[str(version)] = served.get(str(version), 0) + n
        tokens = {policy: {kind: n for (p, kind), n in metrics.tokens.items() if p == policy} for policy in self.first}
        return {
            "url": self.gateway.url,
            "engine": self.gateway.engine.name,
            "adapters": self.gateway.engine.name == "vllm" and not getattr(self.gateway.engine, "swaps_in_place", False),
            "since": self._started,
            "at": time.time(),
            "policies": {
                policy: {
                    "version": version,
                    "trial": asdict(trials[policy]) if policy in trials else None,
                    "inflight": {str(v): n for v, n in loaded[policy].items()},
                    "calls": calls.get(policy, {}),
                    "tokens": tokens[policy],
                    "first": {"source": self.sources[policy], "weights": str(self.first[policy])},
                    "releases": self._told(policy, {version, *loaded[policy]}),
                    "back": self._back(policy, version),
                }
                for policy, version in self.gateway.versions().items()
            },
            "errors": {str(status): n for status, n in metrics.errors.items()},
        }

    def _told(self, policy: str, serving: Set[int]) -> list[dict[str, Any]]:
        """The latest releases of a policy, and all that serve, in order."""
        own = [r for r in self.releases if r.policy == policy]
        return [asdict(r) for i, r in enumerate(own) if i >= len(own) - _TOLD or r.version in serving]

    def _back(self, policy: str, version: int) -> list[int]:
        """The versions that going back leads to one after another."""
        release = self._release(policy, version)
        if release is None or release.of == 0:
            return []
        return [*(older.version for older in self._before(release) if Path(older.weights).is_dir()), 0]

    def _release(self, policy: str, version: int) -> Release | None:
        return next((r for r in self.releases if r.policy == policy and r.version == version), None)

    def _serving(self, policy: str) -> int:
        """The version whose weights all but a trial's calls meet."""
        release = self._release(policy, self.gateway.versions()[policy])
        return 0 if release is None else release.of

    def _next(self, policy: str) -> int:
        """A number that was never given out: not by an earlier start, and not to a publish that failed."""
        known = [r.version for r in self.releases if r.policy == policy]
        self._given[policy] = max(*known, *self.gateway.loaded()[policy], self._given.get(policy, 0), 0) + 1
        return self._given[policy]

    def _prune(self, policy: str) -> None:
        """Deletes weights that neither serve nor can be gone back to."""
        trial = self.gateway.trials().get(policy)
        needed: set[int] = set()
        for serving in (self.gateway.versions()[policy], *([trial.version] if trial else [])):
            if (release := self._release(policy, serving)) is not None:
                needed |= {release.of, *(older.version for older in islice(self._before(release), self.keep))}
        for folder in (self.folder / "releases" / policy).glob("v*"):
            if folder.name[1:].isdigit() and int(folder.name[1:]) not in needed:
                shutil.rmtree(folder, ignore_errors=True)

    def _write(self) -> None:
        current, trials = self.gateway.versions(), self.gateway.trials()
        for policy, (version, trial) in self._lost.items():
            current[policy] = version
            trials.pop(policy, None)
            if trial is not None:
                trials[policy] = trial
        data = {
            "first": {policy: str(Path(folder).absolute()) for policy, folder in self.first.items()},
            "first_digests": self._first,
            "releases": [{**asdict(r), "weights": self._written(r.weights)} for r in self.releases],
            "current": current,
            "trials": {policy: [t.version, t.share] for policy, t in trials.items()},
            "given": self._given,
        }
        write_aside(self.folder / HISTORY, json.dumps(data, indent=1) + "\n")

    def _written(self, weights: str) -> str:
        path = Path(weights).absolute()
        folder = self.folder.absolute()
        return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def read_canary(weights: Path) -> Canary | None:
    """What weights must answer, where who wrote them said so."""
    path = weights / CANARY
    if not path.is_file():
        return None
    try:
        canary = Canary(**json.loads(path.read_text(encoding="utf-8")))
        if not all(isinstance(p, int | float) for p in (*canary.logprobs, canary.tolerance, canary.temperature)):
            raise TypeError("a number is none")
        if not all(isinstance(i, int) for i in (*canary.prompt_ids, *canary.completion_ids)):
            raise TypeError("a token id is none")
        return canary
    except (ValueError, TypeError, RecursionError) as error:
        raise GatewayError(f"{path} is no canary: {error}", hint="write it again with the weights, or delete it") from error


def write_canary(weights: Path, canary: Canary) -> None:
    """Puts a canary beside weights, for whoever publishes them."""
    write_aside(weights / CANARY, json.dumps(asdict(canary)))


def write_aside(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Writes a file so that nobody sees half of it, and a crash leaves the old one or the new one."""
    aside = path.with_name(f".{path.name}.tmp")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _digest(weights: Path) -> str:
    whole = hashlib.sha256()
    wanted = (*weights.glob("*.safetensors"), *weights.glob("adapter_config.json")) if weights.is_dir() else ()
    for path in sorted(wanted):
        with path.open("rb") as file:
            whole.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def _copy(weights: Path, own: Path) -> None:
    """A copy that shares no bytes with the original, and has its name only once it is whole."""
    aside = own.with_name(f".{own.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(weights, aside)
        aside.rename(own)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise GatewayError(f"the weights in {weights} can't be copied to {own}: {error.strerror or error}") from error

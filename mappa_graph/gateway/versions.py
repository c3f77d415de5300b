"""Which version of each policy is current, which others still serve, and how many calls run on each.

All of it is touched on the gateway's loop only. A call holds a `Lease` from the moment its version is chosen until its reply is
out; a version that is neither current nor on trial is unloaded when its last lease ends, and its number is never given to other weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import GatewayError
from .engine import RequestRefused


@dataclass(frozen=True, slots=True)
class Trial:
    """A version that is served to a share of a policy's calls, beside the current one."""

    version: int
    share: float
    """In 0..1, both excluded."""


class Versions:
    """The table of versions. `unload(policy, version)` is called when a retired version's last call has ended.

    Args:
        in_place: the engine holds one version of a policy at a time: an old one can't be asked for once a new one is current.
    """

    def __init__(self, loaded: Mapping[str, Sequence[int]], unload: Callable[[str, int], None], *, in_place: bool = False) -> None:
        self._current = {policy: max(versions) for policy, versions in loaded.items()}
        self._loaded = {policy: set(versions) for policy, versions in loaded.items()}
        """What can be asked for."""
        self._known = {policy: set(versions) for policy, versions in loaded.items()}
        """What has not been unloaded yet."""
        self._highest = dict(self._current)
        self._trials: dict[str, Trial] = {}
        self._running: Counter[tuple[str, int]] = Counter()
        self._unload = unload
        self._random = random.Random()
        self._in_place = in_place
        self.held: dict[str, asyncio.Event] = {}
        """By policy whose weights are being replaced; what is called meanwhile waits in `open`."""

    @property
    def current(self) -> dict[str, int]:
        return dict(self._current)

    @property
    def trials(self) -> dict[str, Trial]:
        return dict(self._trials)

    @property
    def running(self) -> dict[str, int]:
        """Calls in flight by policy."""
        counts = dict.fromkeys(self._current, 0)
        for (policy, _), n in list(self._running.items()):
            counts[policy] += n
        return counts

    @property
    def loaded(self) -> dict[str, dict[int, int]]:
        """Calls in flight by policy and version, of every version that can be asked for."""
        return {policy: {v: self._running[policy, v] for v in sorted(versions)} for policy, versions in self._loaded.items()}

    def names(self) -> list[str]:
        """Every name that can be asked for."""
        return [name for p, vs in sorted(self._loaded.items()) for name in (p, *(f"{p}@v{v}" for v in sorted(vs)))]

    def resolve(self, model: str, episode: str = "") -> tuple[str, int]:
        """`solver` -> its current version, `solver@v3` -> that one. Raises `RequestRefused` (404).

        While a version is on trial, its share of the calls goes to it: of calls that name an episode, whole episodes (by a hash of the
        name, so that all calls of an episode meet the same version), of others each by a draw.
        """
        current = self._current.get(model)
        if current is not None:
            trial = self._trials.get(model) if self._trials else None
            if trial is not None and self._draw(model, trial.version, episode) < trial.share:
                return model, trial.version
            return model, current
        policy, _, number = model.partition("@v")
        if number.isdecimal() and int(number) in self._loaded.get(policy, ()):
            return policy, int(number)
        raise RequestRefused(
            f"The model {model!r} does not exist here. There are: {', '.join(self.names())}",
            status=404,
            code="model_not_found",
            param="model",
        )

    def _draw(self, policy: str, version: int, episode: str) -> float:
        if not episode:
            return self._random.random()
        digest = hashlib.sha256(f"{policy}\0{version}\0{episode}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    @contextmanager
    def lease(self, policy: str, version: int) -> Iterator[None]:
        key = (policy, version)
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1
            self._retire(*key)

    @contextmanager
    def hold(self, policy: str) -> Iterator[None]:
        """Lets new calls to a policy wait while it is open: those in flight go on."""
        self.held[policy] = event = asyncio.Event()
        try:
            yield
        finally:
            del self.held[policy]
            event.set()

    async def open(self, model: str) -> None:
        """Waits while the policy that a name asks for is held."""
        while (event := self.held.get(model.partition("@v")[0])) is not None:
            await event.wait()

    def reserve(self, policy: str, wanted: int | None) -> int:
        """The number of the next version. A number that was given out once, even to a publish that failed, is gone."""
        highest = self._highest.get(policy)
        if highest is None:
            raise GatewayError(f"there is no policy {policy!r} to publish", hint=f"there are: {', '.join(sorted(self._current))}")
        if wanted is not None and wanted <= highest:
            raise GatewayError(
                f"version {wanted} of {policy!r} can't be published: numbers are never used again, and {highest} was the last",
                hint=f"take {highest + 1} or more, or leave the number to the gateway",
            )
        self._highest[policy] = number = highest + 1 if wanted is None else wanted
        return number

    def flip(self, policy: str, version: int) -> None:
        """Makes a loaded version the current one; the old one, and one on trial, go when their last call has ended."""
        old, trial = self._current[policy], self._trials.pop(policy, None)
        self._add(policy, version)
        self._current[policy] = version
        if self._in_place:
            self._loaded[policy].discard(old)
        self._retire(policy, old)
        if trial is not None:
            self._retire(policy, trial.version)

    def try_out(self, policy: str, version: int, share: float) -> None:
        """Gives a loaded version a share of the calls; one that was on trial before goes."""
        before = self._trials.get(policy)
        self._add(policy, version)
        self._trials[policy] = Trial(version, share)
        if before is not None:
            self._retire(policy, before.version)

    def _add(self, policy: str, version: int) -> None:
        self._loaded[policy].add(version)
        self._known[policy].add(version)

    def withdraw(self, policy: str) -> Trial:
        """Ends a trial: all calls to come go to the current version. Raises `GatewayError` where none is on trial."""
        trial = self._trials.pop(policy, None)
        if trial is None:
            raise GatewayError(f"no version of {policy!r} is on trial", hint="one is after a publish with a share below 1")
        self._retire(policy, trial.version)
        return trial

    def _retire(self, policy: str, version: int) -> None:
        """Unloads a version that no call runs on, if it is neither current nor on trial."""
        if self._running[policy, version] > 0:
            return
        del self._running[policy, version]
        trial = self._trials.get(policy)
        if version == self._current[policy] or (trial is not None and trial.version == version) or version not in self._known[policy]:
            return
        self._known[policy].remove(version)
        self._loaded[policy].discard(version)
        self._unload(policy, version)

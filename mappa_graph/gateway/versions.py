"""Which version of each policy is current, which others still serve, and how many calls run on each.

All of it is touched on the gateway's loop only. A call holds a `Lease` from the moment its version is chosen until its reply is
out; a version that is no longer current is unloaded when its last lease ends, and its number is never given to other weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..errors import GatewayError
from .engine import RequestRefused


class Versions:
    """The table of versions. `unload(policy, version)` is called when a retired version's last call has ended."""

    def __init__(self, loaded: Mapping[str, Sequence[int]], unload: Callable[[str, int], None]) -> None:
        self._current = {policy: max(versions) for policy, versions in loaded.items()}
        self._loaded = {policy: set(versions) for policy, versions in loaded.items()}
        self._highest = dict(self._current)
        self._running: Counter[tuple[str, int]] = Counter()
        self._unload = unload

    @property
    def current(self) -> dict[str, int]:
        return dict(self._current)

    @property
    def running(self) -> dict[str, int]:
        """Calls in flight by policy."""
        counts = dict.fromkeys(self._current, 0)
        for (policy, _), n in list(self._running.items()):
            counts[policy] += n
        return counts

    def names(self) -> list[str]:
        """Every name that can be asked for."""
        return [name for p, vs in sorted(self._loaded.items()) for name in (p, *(f"{p}@v{v}" for v in sorted(vs)))]

    def resolve(self, model: str) -> tuple[str, int]:
        """`solver` -> its current version, `solver@v3` -> that one. Raises `RequestRefused` (404)."""
        policy, at, number = model.partition("@v")
        current = self._current.get(policy)
        if current is not None:
            if not at:
                return policy, current
            if number.isdecimal() and int(number) in self._loaded[policy]:
                return policy, int(number)
        raise RequestRefused(
            f"The model {model!r} does not exist here. There are: {', '.join(self.names())}",
            status=404,
            code="model_not_found",
            param="model",
        )

    @contextmanager
    def lease(self, policy: str, version: int) -> Iterator[None]:
        key = (policy, version)
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1
            self._retire(*key)

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
        """Makes a loaded version the current one; the old one goes when its last call has ended."""
        old = self._current[policy]
        self._loaded[policy].add(version)
        self._current[policy] = version
        self._retire(policy, old)

    def _retire(self, policy: str, version: int) -> None:
        if self._running[policy, version] > 0:
            return
        del self._running[policy, version]
        if version != self._current[policy] and version in self._loaded[policy]:
            self._loaded[policy].remove(version)
            self._unload(policy, version)

"""Which episodes a report shows, and which stand side by side.

The choice rests on the task and its stratum, never on how an episode ended, so that a reader sees what is typical. An early and a
late episode of the same training task are best; where no task was met twice, episodes of equal difficulty, and held-out tasks that
were evaluated before and after, stand in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..record import Episode, EpisodeTrace

Load = Callable[[str], EpisodeTrace | None]


@dataclass(frozen=True)
class Pair:
    """An early episode and, where there is one, a late one to set beside it."""

    early: EpisodeTrace
    late: EpisodeTrace | None
    same_task: bool


def choose_pairs(index: Sequence[Episode], load: Load, count: int) -> tuple[Pair, ...]:
    """At most `count` pairs, spread over strata. With one iteration only, single episodes."""
    train = [e for e in index if e.split == "train" and e.status == "done"]
    tested = [e for e in index if e.split != "train" and e.status == "done"]
    early, late = _ends(train)
    same = _same_task(early, late)
    alike = _same_stratum(early, late) if len(same) < count else []
    held = _held_out(tested) if len(same) < count else []
    spare = max(count - len(same), 0)
    from_held = min(len(held), spare // 3 if len(alike) >= spare - spare // 3 else spare - len(alike))
    chosen = (same + alike[: spare - from_held] + held[:from_held])[:count]
    if not chosen:
        chosen = [(e, None) for e in _spread({e.task_id or e.id: (e, None) for e in train or tested}, count)]
    pairs: list[Pair] = []
    for first, last in chosen:
        one, two = load(first.id), load(last.id) if last else None
        if one is not None:
            pairs.append(Pair(one, two, two is not None and one.episode.task_id == two.episode.task_id))
    return tuple(pairs)


def choose_failed(index: Iterable[Episode], load: Load, count: int) -> tuple[EpisodeTrace, ...]:
    """The latest episodes that did not run to their end."""
    broken = sorted((e for e in index if e.status in ("failed", "interrupted", "cancelled")), key=lambda e: e.started)
    return tuple(t for t in (load(e.id) for e in broken[::-1][:count]) if t is not None)


def _ends(train: Sequence[Episode]) -> tuple[list[Episode], list[Episode]]:
    """Episodes of the first and of the last quarter of the iterations."""
    iterations = sorted({e.iteration for e in train})
    if len(iterations) < 2:
        return [], []
    quarter = max(1, len(iterations) // 4)
    first, last = set(iterations[:quarter]), set(iterations[-quarter:])
    return [e for e in train if e.iteration in first], [e for e in train if e.iteration in last]


def _same_task(early: Sequence[Episode], late: Sequence[Episode]) -> list[tuple[Episode, Episode | None]]:
    before = {e.task_id: e for e in sorted(early, key=lambda e: (-e.iteration, -e.sample))}
    after = {e.task_id: e for e in sorted(late, key=lambda e: (e.iteration, -e.sample))}
    return _order({task: (e, after[task]) for task, e in before.items() if task and task in after})


def _same_stratum(early: Sequence[Episode], late: Sequence[Episode]) -> list[tuple[Episode, Episode | None]]:
    after: dict[str, list[Episode]] = {}
    for e in sorted(late, key=lambda e: _rank(e.task_id or e.id)):
        after.setdefault(e.stratum, []).append(e)
    pairs: dict[str, tuple[Episode, Episode | None]] = {}
    for e in sorted(early, key=lambda e: _rank(e.task_id or e.id)):
        if after.get(e.stratum):
            pairs[e.id] = (e, after[e.stratum].pop(0))
    return _order(pairs)


def _held_out(tested: Sequence[Episode]) -> list[tuple[Episode, Episode | None]]:
    """The same held-out task in the first and in the last evaluation of one kind ("heldout/greedy@0", "heldout/greedy@12")."""
    kinds: dict[str, list[Episode]] = {}
    for e in tested:
        kinds.setdefault(e.split.removesuffix(f"@{e.iteration}"), []).append(e)
    pairs: dict[str, tuple[Episode, Episode | None]] = {}
    for episodes in kinds.values():
        first, last = min(e.iteration for e in episodes), max(e.iteration for e in episodes)
        if first == last:
            continue
        after = {e.task_id: e for e in episodes if e.iteration == last}
        pairs.update({e.task_id: (e, after[e.task_id]) for e in episodes if e.iteration == first and e.task_id in after})
    return _order(pairs)


def _order(pairs: dict[str, tuple[Episode, Episode | None]]) -> list[tuple[Episode, Episode | None]]:
    """Strata by turns, and within one by a hash of the task."""
    strata: dict[str, list[tuple[Episode, Episode | None]]] = {}
    for key in sorted(pairs, key=_rank):
        strata.setdefault(pairs[key][0].stratum, []).append(pairs[key])
    ordered: list[tuple[Episode, Episode | None]] = []
    while any(strata.values()):
        ordered += [strata[s].pop(0) for s in sorted(strata) if strata[s]]
    return ordered


def _spread(singles: dict[str, tuple[Episode, Episode | None]], count: int) -> list[Episode]:
    return [first for first, _ in _order(singles)[:count]]


def _rank(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()

"""What people said of actions, as labels for a coach's validation; and what a coach said, written back to where the traces live.

A source's scores are on any scale: thumbs, stars, percent. How each key is mapped to 0..10 is decided from all its values together,
or said by the user, and reported; a key whose scale can't be told is left out rather than guessed. Feedback on a step that is not a
model's call is about the one action in that step, if there is just one; feedback on a whole trace of many actions labels none of them.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..record import EpisodeTrace
from .ledger import Ledger, Rated
from .spans import Notes, Span, name_of, walk

OURS = "mappa-graph"
"""The mark in the source information of feedback that this package wrote: never read back as a person's."""
_WORDS = {
    "good": 1.0, "bad": 0.0, "yes": 1.0, "no": 0.0, "up": 1.0, "down": 0.0, "thumbs_up": 1.0, "thumbs_down": 0.0, "correct": 1.0,
    "incorrect": 0.0, "right": 1.0, "wrong": 0.0, "true": 1.0, "false": 0.0, "pass": 1.0, "fail": 0.0, "positive": 1.0, "negative": 0.0,
    "like": 1.0, "dislike": 0.0, "👍": 1.0, "👎": 0.0,
}  # fmt: skip
_SCALES = ((0.0, 1.0), (-1.0, 1.0), (1.0, 5.0), (0.0, 5.0), (0.0, 10.0), (0.0, 100.0))


def as_number(feedback: Mapping[str, Any]) -> float | None:
    """A feedback's score as a number: its score, else a number or a word of praise or blame in its value."""
    for raw in (feedback.get("score"), feedback.get("value")):
        if isinstance(raw, bool):
            return float(raw)
        if isinstance(raw, int | float):
            try:
                number = float(raw)
            except OverflowError:
                continue
            if math.isfinite(number):
                return number
        if isinstance(raw, str):
            if raw.strip().lower() in _WORDS:
                return _WORDS[raw.strip().lower()]
            try:
                number = float(raw)
            except ValueError:
                continue
            return number if math.isfinite(number) else None
    return None


def rated(root: Span, trace: EpisodeTrace, notes: Notes) -> list[Rated]:
    """The feedback in a trace, on the actions that it is about."""
    spans = [s for s in walk(root) if s.feedback]
    if not spans:
        return []
    by_id = {a.id: a for a in trace.actions}
    out = []
    for span in spans:
        within = [by_id[s.id] for s in walk(span) if s.id in by_id]
        for one in span.feedback:
            source = str(one.get("source") or "human")
            if source == OURS:
                continue
            if len(within) != 1:
                notes.counts["feedback on a step of no one action (labels none)"] += 1
                continue
            action = within[0]
            key = name_of(one.get("key") or "feedback")
            value = one.get("value")
            out.append(
                Rated(
                    action.id,
                    name_of(one.get("id") or f"{span.id}/{key}"),
                    trace.episode.id,
                    action.agent,
                    key,
                    as_number(one),
                    None if value is None else name_of(value)[:2000],
                    None if one.get("comment") is None else name_of(one["comment"])[:4000],
                    name_of(source),
                )
            )
    return out


def scale_of(low: float, high: float) -> tuple[float, float] | None:
    """The narrowest of the usual scales that holds values from `low` to `high`; None where none does."""
    return next((s for s in _SCALES if s[0] <= low and high <= s[1]), None)


def write_labels(
    path: Path,
    ledger: Ledger,
    scales: Mapping[str, tuple[float, float]],
    keys: frozenset[str] | None,
    redact: Callable[[Any], Any] | None,
) -> tuple[int, dict[str, str]]:
    """Writes all human feedback as `{"action", "score": 0..10, "keys", "comment", "agent", "episode"}` lines, one an action.

    Several keys on one action are averaged, each mapped first. Returns how many labels there are and how each key was mapped. The file
    is written anew each time, and only where there is human feedback.
    """
    span: dict[str, tuple[float, float]] = {}
    for one in _human(ledger, keys):
        if one.score is not None:
            low, high = span.get(one.key, (one.score, one.score))
            span[one.key] = (min(low, one.score), max(high, one.score))
    chosen = {key: scales.get(key) or scale_of(*ends) for key, ends in span.items()}
    said = {
        key: f"{scale[0]:g}..{scale[1]:g} -> 0..10" + (" (given)" if key in scales else " (from its values)")
        if (scale := chosen[key])
        else f"left out: values from {span[key][0]:g} to {span[key][1]:g} are on no usual scale; give it: --scale {key}=LOW..HIGH"
        for key in sorted(span)
    }
    if not any(chosen.values()):
        return 0, said
    count = 0
    aside = path.with_name(path.name + ".new")
    try:
        with aside.open("w", encoding="utf-8") as file:
            for group in _by_action(_human(ledger, keys)):
                row = _label(group, chosen)
                if row is not None:
                    file.write(json.dumps(row if redact is None else _cleaned(row, redact), ensure_ascii=False) + "\n")
                    count += 1
        os.replace(aside, path)
    except OSError as error:
        raise StoreError(f"can't write the labels {path}: {error.strerror or error}") from error
    return count, said


def _cleaned(row: dict[str, Any], redact: Callable[[Any], Any]) -> dict[str, Any]:
    out = redact({"comment": row["comment"]})
    return {**row, "comment": out.get("comment") if isinstance(out, Mapping) else None}


def _human(ledger: Ledger, keys: frozenset[str] | None) -> Iterator[Rated]:
    return (f for f in ledger.feedback() if f.source == "human" and (keys is None or f.key in keys))


def _by_action(found: Iterator[Rated]) -> Iterator[list[Rated]]:
    held: list[Rated] = []
    for one in found:
        if held and held[0].action != one.action:
            yield held
            held = []
        held.append(one)
    if held:
        yield held


def _label(group: list[Rated], scales: Mapping[str, tuple[float, float] | None]) -> dict[str, Any] | None:
    scores: dict[str, list[float]] = defaultdict(list)
    for one in group:
        scale = scales.get(one.key)
        if one.score is not None and scale is not None:
            low, high = scale
            scores[one.key].append(min(10.0, max(0.0, 10.0 * (one.score - low) / (high - low))))
    if not scores:
        return None
    each = {key: sum(values) / len(values) for key, values in scores.items()}
    comments = Counter(f.comment for f in group if f.comment)
    return {
        "action": group[0].action,
        "score": round(sum(each.values()) / len(each), 4),
        "keys": {key: round(value, 4) for key, value in each.items()},
        "comment": " / ".join(comments) or None,
        "agent": group[0].agent,
        "episode": group[0].episode,
    }

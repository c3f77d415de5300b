"""The section on training health: alarms and refused steps in words, then a curve by agent for each number of the updates."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from . import charts
from .data import Run, number, section
from .svg import esc, percent, short

SPECS: tuple[tuple[str, str, str, float | None], ...] = (
    ("Return", "Mean discounted score of the trained actions, 0 to 1.", "return_mean", None),
    ("Advantage", "Mean of the normalised advantages; all agents together have 0.", "advantage_mean", 0.0),
    ("Advantage, spread", "Standard deviation of the normalised advantages. Zero: nothing to learn from.", "advantage_std", None),
    ("Loss", "REINFORCE++ surrogate; near zero by construction.", "loss", 0.0),
    ("Entropy", "Nats a token. A fall to zero means that sampling explores no more.", "entropy", None),
    ("KL from the start", "Of the policy from its first weights, a token.", "kl", 0.0),
    ("Ratio", "Mean of new over old probability; 1 is on policy.", "ratio_mean", 1.0),
    ("Largest ratio", "Of any token.", "ratio_max", 1.0),
    ("Clipped", "Share of tokens whose ratio was clipped.", "clip_share", 0.0),
    ("Gradient norm", "Before clipping.", "grad_norm", None),
    ("Learning rate", "Of the last optimizer step.", "lr", None),
    ("Engine mismatch", "KL between the engine’s and the trainer’s log-probs of the same tokens.", "mismatch_kl", 0.0),
    ("Engine mismatch, size", "Mean absolute difference of the two, in nats a token.", "mismatch_abs", 0.0),
    ("Importance weight", "Mean of the trainer’s over the engine’s probability, capped; 1 is on policy.", "weight_mean", 1.0),
    ("Staleness", "Versions between the weights that acted and those that were trained.", "staleness_mean", 0.0),
)
ONLY_IF_ANY = {"staleness_mean"}
"""Not shown where it is zero all along."""


def health(run: Run, css: Mapping[str, str]) -> str:
    """The section's body."""
    blocks = [
        charts.small(
            run, css, title, hint, functools.partial(charts.of, key=key), percent if key == "clip_share" else short, None, base, 310
        )
        for title, hint, key, base in SPECS
        if key not in ONLY_IF_ANY or any(number(a, key) for row in run.rows for a in section(row, "agents").values())
    ]
    notes = [f"<b>Iteration {at}, alarm {esc(name)}.</b> {esc(message)}" for at, name, message in alarms(run)]
    notes += [f"<b>Iteration {at}, {esc(policy)}: a step was refused.</b> {esc(why)}" for at, policy, why in refused(run)]
    said = "".join(f'<p class="note">{note}</p>' for note in notes)
    return said + charts.grid(blocks, "grid", "No update has been made yet.")


def alarms(run: Run) -> list[tuple[int, str, str]]:
    """`(iteration, alarm, message)` of each alarm and agent, the first time it went off."""
    seen: dict[tuple[str, str], tuple[int, str, str]] = {}
    for row in run.rows:
        found = row.get("alarms")
        for alarm in found if isinstance(found, list) else ():
            if isinstance(alarm, Mapping):
                name, agent = str(alarm.get("name")), str(alarm.get("agent"))
                seen.setdefault((name, agent), (int(number(row, "iteration") or 0), name, str(alarm.get("message"))))
    return list(seen.values())


def refused(run: Run, most: int = 5) -> list[tuple[int, str, str]]:
    """`(iteration, policy, why)` of the latest refused steps, oldest first."""
    found = [(int(number(row, "iteration") or 0), str(p), str(why)) for row in run.rows for p, why in section(row, "refused").items()]
    return found[-most:]


def ended(run: Run) -> str:
    """Why the run ended before its last iteration; empty where it didn't."""
    last: Mapping[str, Any] = run.rows[-1] if run.rows else {}
    return str(section(last, "stop").get("message") or "")

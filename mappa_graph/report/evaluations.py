"""What held-out evaluations say beside accuracy: pass@k, the majority's vote, and the environment's own metrics by stratum.

A metric whose name has a slash ("classification/fair_f1") is one of a stratum: all of one metric share a chart.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import charts
from .data import Run, number, section
from .svg import Series, esc, line_chart, percent, short

MOST = 12
"""Metrics with a chart of their own."""


def evaluations(run: Run) -> str:
    """The figures; empty where no evaluation has any of it."""
    blocks = [_samples(run), *_metrics(run)]
    return f'<div class="grid wide-grid">{"".join(blocks)}</div>' if any(blocks) else ""


def chosen_by(run: Run) -> str:
    """What the best checkpoint is chosen by, where that is not accuracy."""
    by = str(section(run.summary, "best").get("by") or "accuracy")
    return "" if by == "accuracy" else by


def _samples(run: Run) -> str:
    """pass@k and the majority's vote over the iterations, with intervals."""
    names = sorted({str(k) for row in run.rows for k in section(row, "heldout", "pass_at")}, key=charts.natural)
    paths = [(f"pass@{k}", ("pass_at", k)) for k in names] + [("majority", ("majority",))]
    series = [_line(run, name, f"s{i % 8}", path) for i, (name, path) in enumerate(paths)]
    series = [s for s in series if s.points]
    if not series:
        return ""
    chart = line_chart(series, label="held-out pass@k and majority vote by iteration", y=(0.0, 1.0), form=percent, ends=True)
    return charts.figure(
        "Of several samples", "Held-out tasks: chance that one of k is right, and the majority’s vote; 95% intervals.", chart
    )


def _line(run: Run, name: str, css: str, path: tuple[str, ...]) -> Series:
    rows = [(r, number(r, "heldout", *path, "value")) for r in run.rows]
    known = [(r, v) for r, v in rows if v is not None]
    return Series(
        name,
        css,
        [(number(r, "iteration") or 0.0, v) for r, v in known],
        [charts.interval(section(r, "heldout", *path)) for r, _ in known],
        mark=True,
    )


def _metrics(run: Run) -> list[str]:
    """One chart a metric, a line a stratum."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for row in run.rows:
        for full in map(str, section(row, "heldout", "metrics")):
            stratum, _, name = full.rpartition("/")
            lines = groups.setdefault(name, [])
            if (stratum, full) not in lines:
                lines.append((stratum, full))
    by = chosen_by(run).rpartition("/")[2]
    out = []
    for name in sorted(groups, key=lambda n: (n != by, n))[:MOST]:
        series = [
            Series(stratum or "all", f"s{k % 8}", _points(run, full), mark=True)
            for k, (stratum, full) in enumerate(sorted(groups[name])[:8])
        ]
        chart = line_chart(series, label=f"{name} by iteration", form=short, ends=True, width=420, height=200)
        strata = "".join(f'<span><i class="agent-dot {s.css}-bg"></i>{esc(s.name)}</span>' for s in series) if len(series) > 1 else ""
        hint = f'held-out{" · chooses the best checkpoint" if name == by else ""}<span class="legend">{strata}</span>'
        out.append(charts.figure(name, hint, chart, raw=True))
    return out


def _points(run: Run, metric: str) -> list[tuple[float, float | None]]:
    found = [(number(r, "iteration") or 0.0, number(section(r, "heldout", "metrics"), metric)) for r in run.rows]
    return [(x, v) for x, v in found if v is not None]


def best_tile(best: Mapping[str, object]) -> tuple[str, str, str] | None:
    """The tile of the best checkpoint: name, value, iteration."""
    at = number(best, "iteration")
    by, value, accuracy = str(best.get("by") or "accuracy"), number(best, "value"), number(best, "accuracy")
    shown = accuracy if by == "accuracy" or value is None else value
    if shown is None or at is None:
        return None
    share = by in ("accuracy", "score", "majority") or by.startswith("pass@") or value is None
    name = "best held-out" if by == "accuracy" else f"best {by}"
    return name, percent(shown) if share else short(shown), f"at iteration {at:.0f}"

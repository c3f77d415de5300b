"""The section on the coach: what its scores cost, how they lie by stratum and agent, and what is suspicious in them.

Costs stand in one table, a line for the training and one for each later pass (`mappa-graph coach`), so that the times of scoring can be
compared: what hindsight costs an episode beside what scoring each action does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import charts
from .data import Run, number, section
from .svg import Series, esc, line_chart, short

_HEAD = ("scored", "coach", "an episode: calls", "tokens", "USD", "time", "episodes")


def coaching(run: Run, css: Mapping[str, str]) -> str:
    """The section; empty where no row tells of a coach and no pass was made."""
    rows = [row for row in run.rows if section(row, "coach")]
    blocks = [_costs(run, rows), _by_stratum(rows), _effects(rows)]
    if not any(blocks):
        return ""
    return f'{_alarms(rows)}<div class="grid wide-grid">{"".join(blocks)}</div>'


def alarms(run: Run) -> list[tuple[int, str]]:
    """`(iteration, message)` of each kind of alarm the first time it went off."""
    seen: dict[str, tuple[int, str]] = {}
    for row in run.rows:
        found = section(row, "coach").get("alarms")
        for alarm in found if isinstance(found, list) else ():
            if isinstance(alarm, Mapping):
                seen.setdefault(str(alarm.get("kind")), (int(number(row, "iteration") or 0), str(alarm.get("message"))))
    return list(seen.values())


def _alarms(rows: Sequence[Mapping[str, Any]]) -> str:
    """Alarms, and the strata that the last iteration warns of."""
    found = alarms(Run("", rows))
    items = [f"<b>Iteration {at}.</b> {esc(message)}" for at, message in found]
    for name, part in section(rows[-1] if rows else {}, "coach", "by_stratum").items():
        if isinstance(part, Mapping) and part.get("warning"):
            items.append(f"<b>Last iteration, {esc(name) or 'no stratum'}.</b> {esc(str(part['warning']))}")
    notes = "".join(f'<p class="note">{item}</p>' for item in items)
    calm = '<p class="aside">Scores and outcomes move together as far as can be seen, and no stratum stands out.</p>'
    return notes or (calm if rows else "")


def _costs(run: Run, rows: Sequence[Mapping[str, Any]]) -> str:
    lines: list[tuple[str, str, Mapping[str, Any], float]] = []
    if rows:
        summary = section(run.summary, "coach")
        each = section(summary, "per_episode") or _mean_cost(rows)
        episodes = sum(number(row, "coach", "episodes") or 0.0 for row in rows)
        lines.append((f"while training, {summary.get('when') or 'now'}", str(summary.get("name") or ""), each, episodes))
    for one in run.passes:
        what = f"later, {one.get('when')}" + (", by transition" if one.get("unit") == "transition" else "")
        lines.append((what, str(one.get("coach") or ""), section(one, "per_episode"), number(one, "episodes") or 0.0))
    if not lines:
        return ""
    body = "".join(
        f"<tr><td>{esc(what)}</td><td>{esc(coach)}</td>"
        + "".join(f'<td class="num">{cell}</td>' for cell in (*_cost_cells(each), f"{episodes:,.0f}"))
        + "</tr>"
        for what, coach, each, episodes in lines
    )
    head = "".join(f"<th{' class=num' if k > 1 else ''}>{name}</th>" for k, name in enumerate(_HEAD))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    hint = "For one episode. Time is that of all requests added up; they overlap."
    return f"<figure><figcaption><b>What scoring costs</b><small>{hint}</small></figcaption>{table}</figure>"


def _cost_cells(each: Mapping[str, Any]) -> tuple[str, str, str, str]:
    calls, tokens, usd, spent = (number(each, key) or 0.0 for key in ("calls", "tokens", "usd", "seconds"))
    return f"{calls:.3g}", short(tokens), f"{usd:.4f}" if usd else "–", f"{spent:.2f} s"


def _mean_cost(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of a run that is going on, and has no summary yet."""
    episodes = max(1.0, sum(number(row, "coach", "episodes") or 0.0 for row in rows))
    total = {
        key: sum(number(row, "coach", key) or 0.0 for row in rows)
        for key in ("calls", "prompt_tokens", "completion_tokens", "usd", "seconds")
    }
    total["tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    return {key: value / episodes for key, value in total.items()}


def _by_stratum(rows: Sequence[Mapping[str, Any]]) -> str:
    names = sorted({str(name) for row in rows for name in section(row, "coach", "by_stratum")}, key=charts.natural)
    if len(names) < 2:
        return ""
    series = [
        Series(name, f"s{k % 8}", [(number(r, "iteration") or 0.0, number(r, "coach", "by_stratum", name, "mean")) for r in rows])
        for k, name in enumerate(names[:8])
    ]
    chart = line_chart(series, label="mean coach score by stratum and iteration", y=(0.0, 10.0), form=lambda v: f"{v:.1f}", ends=True)
    if not chart:
        return ""
    key = "".join(f'<span><i class="agent-dot {s.css}-bg"></i>{esc(s.name)}</span>' for s in series)
    return f'<figure><figcaption><b>Coach score by stratum</b><small><span class="legend">{key}</span></small></figcaption>{chart}</figure>'


def _effects(rows: Sequence[Mapping[str, Any]]) -> str:
    """The last iteration's scores by stratum and by agent, with the sizes of the differences."""
    if not rows:
        return ""
    lines = []
    for kind in ("by_stratum", "by_agent"):
        parts = section(rows[-1], "coach", kind)
        for name in sorted(map(str, parts), key=charts.natural):
            part = parts[name]
            cells = [number(part, key) for key in ("n", "mean", "effect", "outcome", "excess")]
            forms = ("{:.0f}", "{:.1f}", "{:+.2f}", "{:.1f}", "{:+.1f}")
            shown = "".join(f'<td class="num">{"–" if v is None else f.format(v)}</td>' for v, f in zip(cells, forms, strict=True))
            lines.append(f"<tr><td>{'stratum' if kind == 'by_stratum' else 'agent'}</td><td>{esc(name) or '–'}</td>{shown}</tr>")
    if not lines:
        return ""
    names = ("", "", "scores", "mean", "effect", "outcome", "excess")
    head = "".join(f"<th{' class=num' if k > 1 else ''}>{name}</th>" for k, name in enumerate(names))
    hint = (
        "Effect: Cohen’s d against all others. Outcome: mean, times ten. Excess: points above the others beyond what the outcomes explain."
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<figure><figcaption><b>Scores of the last iteration</b><small>{hint}</small></figcaption>{table}</figure>"

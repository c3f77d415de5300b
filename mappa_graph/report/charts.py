"""The sections that are made of charts: learning, behaviour, and time; and the pieces that other sections make theirs of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .data import Run, number, section
from .flow import Flow
from .svg import Format, Series, dumbbells, esc, line_chart, percent, seconds, short, stacked_bars

PHASES = ("rollout", "coach", "train", "publish", "evaluate")
PHASE_CSS = {"rollout": "s0", "coach": "s3", "train": "s1", "publish": "s4", "evaluate": "s2"}
ERROR_KINDS = 5
"""Error types with a colour of their own; the others are added up."""

Value = Callable[[Mapping[str, Any]], float | None]


def interval(part: Mapping[str, Any]) -> tuple[float, float] | None:
    """The 95% interval of an evaluation; None where it has none."""
    bounds = part.get("ci95")
    if isinstance(bounds, list | tuple) and len(bounds) == 2:
        low, high = number({"v": bounds[0]}, "v"), number({"v": bounds[1]}, "v")
        if low is not None and high is not None:
            return low, high
    return None


def last_versions(run: Run) -> Mapping[str, float]:
    """The weight version of each agent in the latest row that names one."""
    found: dict[str, float] = {}
    for row in run.rows:
        for agent, values in section(row, "agents").items():
            version = number(values, "version")
            if version is not None:
                found[agent] = version
    return found


def left_out(run: Run) -> dict[str, float]:
    """How many actions were left out of the updates, by reason, most first."""
    counts: Counter[str] = Counter()
    for part in [section(run.summary, "left_out")] if run.summary else [section(r, "rollout", "left_out") for r in run.rows]:
        for reason, count in part.items():
            counts[str(reason)] += int(number({"v": count}, "v") or 0)
    return {reason: count for reason, count in counts.most_common() if count}


def graph_states(run: Run) -> list[tuple[str, Flow, dict[str, float]]]:
    """`(name, flow, mean score by node)` of the first and the last training iteration.

    A node's own mean, from the store; where the store has no verdict for it, its agent's mean from the metrics.
    """
    scored = [r for r in run.rows if any(number(a, "score_mean") is not None for a in section(r, "agents").values())]
    keys = ("mean_by_agent_first", "mean_by_agent_last")
    ends = [section(run.summary, "coach", key) for key in keys]
    if scored:
        ends = [
            end or {a: v.get("score_mean") for a, v in section(r, "agents").items()}
            for end, r in zip(ends, (scored[0], scored[-1]), strict=True)
        ]
    flows = list(run.flows)
    if not flows and scored:
        flows = [(int(number(scored[k], "iteration") or 0), Flow()) for k in ((0, -1) if len(scored) > 1 else (0,))]
    states = []
    for k, (iteration, flow) in enumerate(flows):
        scores = dict(flow.scores)
        for node, agent in run.shape.agent_of_node.items():
            mean = number(ends[k], agent)
            if node not in scores and mean is not None and not flow.scores:
                scores[node] = mean
        name = f"iteration {iteration}"
        if len(flows) > 1:
            name = f"{'first' if k == 0 else 'last'} training iteration ({iteration})"
        states.append((name, flow, scores))
    return states or [("not run yet", Flow(), {})]


def learning(run: Run, css: Mapping[str, str]) -> str:
    """Accuracy over the iterations, mean coach score of each agent, and held-out accuracy by stratum."""
    accuracy = [
        Series("rollout", "s5", _points(run, lambda r: number(r, "rollout", "accuracy"))),
        Series(
            "held-out",
            "s0",
            [(x, v) for x, v in _points(run, lambda r: number(r, "heldout", "accuracy")) if v is not None],
            [interval(section(r, "heldout")) for r in run.rows if number(r, "heldout", "accuracy") is not None],
            mark=True,
        ),
    ]
    scores = [
        Series(agent, css[agent], _points(run, of(agent, "score_mean")), [_score_interval(section(r, "agents", agent)) for r in run.rows])
        for agent in run.agents
    ]
    first, last, when = _strata(run)
    sizes = _sizes(run.rows)
    many = f" ({min(sizes)} to {max(sizes)} of them)" if len(sizes) > 1 else ""
    blocks = [
        figure("Accuracy", f"Share of tasks solved: training rollouts, and held-out tasks{many} with 95% intervals.",
                line_chart(accuracy, label="accuracy by iteration", y=(0.0, 1.0), form=percent, ends=True)),
        figure("Coach score by agent", "Mean over the iteration’s scored actions, 0 to 10, with the mean’s 95% interval.",
                line_chart(scores, label="mean coach score by agent and iteration", y=(0.0, 10.0), form=_one, ends=True)),
        figure("Accuracy by stratum", f"{when}: hollow first, filled last.",
                dumbbells([(n, first.get(n), last.get(n)) for n in sorted({*first, *last}, key=natural)], label="accuracy by stratum")),
    ]  # fmt: skip
    shown = "".join(blocks)
    return f'<div class="learn">{shown}</div>' if shown else '<p class="aside">No iteration has ended yet.</p>'


def behaviour(run: Run, css: Mapping[str, str]) -> str:
    """What the agents did differently: tools, length, truncation, and how their code failed."""
    specs: list[tuple[str, str, Callable[[str], Value], Format, tuple[float, float] | None]] = [
        ("Tool use", "Share of actions that ran code or called a tool.", lambda a: of(a, "tool_use"), percent, (0.0, 1.0)),
        ("Executions that failed", "Share of an agent’s runs that ended in an error, a timeout or a kill.", _failing, percent, (0.0, 1.0)),
        ("Completion length", "Mean tokens of an action.", lambda a: of(a, "length_mean"), short, None),
        ("Truncated", "Share of actions cut off by the token limit.", lambda a: _share(a, "truncated"), percent, None),
        ("Unscored", "Share of actions that the coach gave no verdict: left out of the loss.", _unscored, percent, None),
    ]
    blocks = [small(run, css, *spec) for spec in specs]
    blocks.append(_errors(run))
    return grid(blocks, "grid wide-grid", "No behaviour was measured yet.")


def time_spent(run: Run) -> str:
    """Seconds by phase: in all, and by iteration; and tokens trained."""
    by_row = [(number(r, "iteration") or 0.0, {k: number(r, "wall_s", k) or 0.0 for k in PHASES}) for r in run.rows]
    totals = {k: number(run.summary, "wall_s", k) for k in PHASES}
    if all(v is None for v in totals.values()):
        totals = {k: sum(parts[k] for _, parts in by_row) for k in PHASES}
    known = {k: v for k, v in totals.items() if v}
    if not known:
        return ""
    whole = sum(known.values())
    rows = "".join(
        f'<tr><td><i class="agent-dot {PHASE_CSS[k]}-bg"></i>{k}</td>'
        f'<td class="num">{esc(seconds(v))}</td><td class="num">{v / whole:.0%}</td></tr>'
        for k, v in sorted(known.items(), key=lambda item: -item[1])
    )
    total = number(run.summary, "wall_s", "total")
    foot = f'<tr class="foot"><td>whole run</td><td class="num">{esc(seconds(total))}</td><td></td></tr>' if total else ""
    table = f"<table><tbody>{rows}{foot}</tbody></table>"
    bars = stacked_bars(
        [(k, PHASE_CSS[k]) for k in PHASES], by_row, label="seconds by phase and iteration", form=_secs, width=500, height=200
    )
    tokens = [(number(r, "iteration") or 0.0, {"tokens": number(r, "tokens", "trained") or 0.0}) for r in run.rows]
    trained = stacked_bars([("tokens", "s0")], tokens, label="tokens trained by iteration", width=380, height=200)
    return '<div class="spent">' + "".join(
        (
            figure("In all", "Scoring overlaps the rollouts; it counts apart only where it was waited for.", table),
            figure("By iteration", "Seconds.", bars),
            figure("Tokens trained", "By iteration.", trained),
        )
    ) + "</div>"  # fmt: skip


def _points(run: Run, value: Value) -> list[tuple[float, float | None]]:
    return [(number(r, "iteration") or 0.0, value(r)) for r in run.rows]


def of(agent: str, key: str) -> Value:
    """Reads an agent's number from a row."""
    return lambda row: number(row, "agents", agent, key)


def _share(agent: str, key: str) -> Value:
    def value(row: Mapping[str, Any]) -> float | None:
        count, actions = number(row, "agents", agent, key), number(row, "agents", agent, "actions")
        return count / actions if count is not None and actions else None

    return value


def _unscored(agent: str) -> Value:
    return _share(agent, "unscored")


def _failing(agent: str) -> Value:
    def value(row: Mapping[str, Any]) -> float | None:
        counts = {k: v for k, v in section(row, "agents", agent, "executions").items() if number({"v": v}, "v") is not None}
        total = sum(counts.values())
        return 1.0 - counts.get("ok", 0) / total if total else None

    return value


def _score_interval(values: Mapping[str, Any]) -> tuple[float, float] | None:
    mean, deviation, count = (number(values, k) for k in ("score_mean", "score_std", "scored"))
    if mean is None or deviation is None or not count:
        return None
    half = 1.96 * deviation / math.sqrt(count)
    return max(mean - half, 0.0), min(mean + half, 10.0)


def _strata(run: Run) -> tuple[dict[str, float], dict[str, float], str]:
    if run.common is not None and (last := _rates(section(run.common[1], "by_stratum"))):
        shared = f"The {number(run.common[1], 'n') or 0:.0f} held-out tasks that the first and the last evaluation share"
        return _rates(section(run.common[0], "by_stratum")), last, shared
    for part, name in (("heldout", "Held-out tasks"), ("rollout", "Training rollouts")):
        rows = [r for r in run.rows if _rates(section(r, part, "by_stratum"))]
        if not rows:
            continue
        if part == "heldout" and len(sizes := _sizes([rows[0], rows[-1]])) > 1:
            name = f"{name}, of different numbers ({' and '.join(map(str, sizes))})"
        first, last = (_rates(section(r, part, "by_stratum")) for r in (rows[0], rows[-1]))
        return (first, last, name) if len(rows) > 1 else ({}, last, name)
    return {}, {}, ""


def _sizes(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many tasks held-out evaluations were of: each number once, in order."""
    return list(dict.fromkeys(int(n) for row in rows if (n := number(row, "heldout", "n")) is not None))


def _rates(by_stratum: Mapping[str, Any]) -> dict[str, float]:
    rates: dict[str, float] = {}
    for name, value in by_stratum.items():
        rate = number(value, "accuracy") if isinstance(value, Mapping) else number(by_stratum, name)
        if rate is not None:
            rates[str(name)] = rate
    return rates


def _errors(run: Run) -> str:
    by_row: list[tuple[float, Counter[str]]] = []
    for row in run.rows:
        counts: Counter[str] = Counter()
        for values in section(row, "agents").values():
            for kind, count in section(values, "errors").items():
                known = number({"v": count}, "v")
                counts[str(kind)] += int(known or 0)
        by_row.append((number(row, "iteration") or 0.0, counts))
    total: Counter[str] = Counter()
    for _, counts in by_row:
        total.update(counts)
    top = [kind for kind, count in total.most_common(ERROR_KINDS) if count]
    names = [(kind, f"s{(k + 1) % 8}") for k, kind in enumerate(top)]
    rows = []
    for x, counts in by_row:
        parts = {kind: float(counts[kind]) for kind in top}
        parts["other"] = float(sum(counts.values())) - sum(parts.values())
        rows.append((x, parts))
    if len(total) > len(top):
        names.append(("other", "s5"))
    chart = stacked_bars(names, rows, label="errors by kind and iteration", width=420, height=165)
    key = "".join(f'<span><i class="agent-dot {css}-bg"></i>{esc(kind[:28])}</span>' for kind, css in names)
    return figure("Kinds of error", f'<span class="legend">{key}</span>', chart, raw=True)


def small(
    run: Run,
    css: Mapping[str, str],
    title: str,
    hint: str,
    value_of: Callable[[str], Value],
    form: Format,
    span: tuple[float, float] | None = None,
    baseline: float | None = None,
    wide: int = 420,
) -> str:
    """A small chart with a line an agent."""
    lines: Sequence[Series] = [Series(agent, css[agent], _points(run, value_of(agent))) for agent in run.agents]
    if form is percent and span is None and all(not v for s in lines for _, v in s.points):
        lines = [s for s in lines if any(v is not None for _, v in s.points)]
        span = (0.0, 0.1)
    chart = line_chart(lines, label=f"{title} by agent and iteration", width=wide, height=165, y=span, form=form, baseline=baseline)
    return figure(title, hint, chart)


def figure(title: str, hint: str, body: str, *, raw: bool = False) -> str:
    """A chart under its title; empty where there is no chart. `raw`: the hint is HTML already."""
    if not body:
        return ""
    return f"<figure><figcaption><b>{esc(title)}</b><small>{hint if raw else esc(hint)}</small></figcaption>{body}</figure>"


def grid(blocks: Sequence[str], css: str, nothing: str) -> str:
    """Figures side by side, or a sentence where there is none."""
    shown = "".join(blocks)
    return f'<div class="{css}">{shown}</div>' if shown else f'<p class="aside">{nothing}</p>'


def natural(text: str) -> tuple[int, float, str]:
    """Sorts numbers as numbers, and before words."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


def _one(value: float) -> str:
    return f"{value:.1f}"


def _secs(value: float) -> str:
    return f"{value:.3g}"

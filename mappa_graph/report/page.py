"""The page: its sections in order, each a function from a `Run` to HTML, and the frame around them.

A section that has nothing to show says so in a sentence or is left out; it never shows an empty chart.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ..inspect import light, score_rgb
from . import charts, coaching
from . import health as healths
from .browser import episode_pairs, single_episodes
from .data import Run, before_after, evaluated, number, section
from .evaluations import best_tile, evaluations
from .picture import draw, layout
from .svg import esc, interval_rule, percent, seconds, short

COLOURS = 8
SECTIONS = (
    ("learning", "Learning"),
    ("graph", "The graph"),
    ("coach", "The coach"),
    ("behaviour", "Behaviour"),
    ("episodes", "Episodes"),
    ("health", "Training health"),
    ("time", "Time"),
    ("failures", "Failures"),
    ("settings", "Settings"),
)


def render(run: Run) -> str:
    """The whole page as HTML text."""
    css = {agent: f"s{k % COLOURS}" for k, agent in enumerate(run.agents)}
    style = _resource("style.css") + _score_styles()
    script = _resource("script.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src 'none'; connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    bodies = {
        "learning": charts.learning(run, css) + evaluations(run),
        "graph": _graph(run, css),
        "coach": coaching.coaching(run, css),
        "behaviour": charts.behaviour(run, css),
        "episodes": _episodes(run, css),
        "health": healths.health(run, css),
        "time": charts.time_spent(run),
        "failures": _failures(run, css),
        "settings": _settings(run),
    }
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name in SECTIONS if bodies[key])
    legend = _legend(css)
    sections = "".join(f'<section id="{key}"><h2>{name}</h2>{bodies[key]}</section>' for key, name in SECTIONS if bodies[key])
    environment = str(run.summary.get("environment") or run.name)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{esc(environment)} · MAPPA-Graph</title><style>{style}</style></head><body>"
        f'<nav><div class="wide"><b>MAPPA-Graph</b><span class="links">{links}</span>{legend}</div></nav><main class="wide">'
        f"{_headline(run, environment)}{sections}</main>"
        f"<script>{script}</script></body></html>\n"
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _score_styles() -> str:
    """Classes of the score scale: `k0` to `k10` as grounds, with ink that can be read on them; `-edge` as a rule beside a text."""
    rules = []
    for k in range(11):
        red, green, blue = score_rgb(k)
        ink = "#1b1a17" if light(red, green, blue) else "#fff"
        rules.append(f".k{k}{{background:rgb({red},{green},{blue});color:{ink}}}.k{k}-edge{{border-left-color:rgb({red},{green},{blue})}}")
    return "".join(rules)


def _legend(css: Mapping[str, str]) -> str:
    items = "".join(f'<span><i class="agent-dot {name}-bg"></i>{esc(agent)}</span>' for agent, name in css.items())
    return f'<span class="legend">{items}</span>' if items else ""


def _headline(run: Run, environment: str) -> str:
    facts = [str(run.summary[key]) for key in ("engine", "model") if run.summary.get(key)]
    facts += [f"seed {run.summary['seed']}"] if run.summary.get("seed") is not None else []
    facts += [f"run {run.name}"]
    state = '<span class="state done">finished</span>' if run.finished else '<span class="state going">in progress</span>'
    notes = "".join(f'<p class="note">{esc(note)}</p>' for note in run.notes)
    notes += "".join(f'<p class="note">{esc(note)}</p>' for note in _summary_notes(run.summary))
    notes += f'<p class="note">The run ended early. {esc(healths.ended(run))}</p>' if healths.ended(run) else ""
    notes += "".join(f'<p class="note">Iteration {at}, alarm {esc(name)}: {esc(text)}</p>' for at, name, text in healths.alarms(run)[:3])
    notes += "".join(f'<p class="note">Iteration {at}: {esc(text)}</p>' for at, text in coaching.alarms(run)[:1])
    return (
        f'<header class="head"><div class="who"><h1>{esc(environment)}</h1>{state}<span class="facts">{esc(" · ".join(facts))}</span></div>'
        f'<div class="hero">{_hero(run)}{_tiles(run)}</div>{notes}</header>'
    )


def _hero(run: Run) -> str:
    before, after, alike = before_after(run)
    first, last = number(before, "accuracy"), number(after, "accuracy")
    if first is None and last is None:
        return '<div class="result"><p class="lead">Held-out accuracy</p><p class="big quiet">not evaluated yet</p></div>'
    gain = ""
    if first is not None and last is not None and alike:
        points = (last - first) * 100
        gain = f'<span class="gain {"up" if points > 0 else "down"}">{points:+.1f} points</span>'
    numbers = '<span class="to">→</span>'.join(f"<span>{percent(v)}</span>" for v in (first, last) if v is not None)
    counts = list(dict.fromkeys(int(n) for n in (number(before, "n"), number(after, "n")) if n is not None))
    of = f", {' and '.join(map(str, counts))} tasks" if counts else ""
    rule = interval_rule(_interval(before), _interval(after), label="held-out accuracy before and after, with 95% intervals")
    when = "before training" if last is None else "before → after training" if run.finished else "before training → so far"
    return (
        f'<div class="result"><p class="lead">Held-out accuracy, {when}{of}</p><p class="big">{numbers}{gain}</p>'
        f'{rule}<p class="aside">Bars are 95% intervals.{esc(_apart(run, alike))}</p></div>'
    )


def _apart(run: Run, alike: bool) -> str:
    """What has to be said where the first and the last evaluation are not of the same tasks."""
    if not alike:
        return " The two are of different numbers of tasks, and their difference says nothing."
    rows = evaluated(run)
    if run.finished or run.common is None:
        return ""
    sizes = [int(number(row, "heldout", "n") or 0) for row in (rows[0], rows[-1])]
    return f" The evaluations were of {sizes[0]} and of {sizes[1]} tasks; both are shown on those that they share."


def _interval(part: Mapping[str, Any]) -> tuple[float, float, float] | None:
    value = number(part, "accuracy")
    if value is None:
        return None
    low, high = charts.interval(part) or (value, value)
    return value, low, high


def _tiles(run: Run) -> str:
    summary = run.summary
    done = [r for r in run.rows if section(r, "agents")]
    scored = number(summary, "coach", "scored")
    unscored = number(summary, "coach", "unscored")
    if scored is None and done:
        scored = sum(number(a, "scored") or 0 for r in done for a in section(r, "agents").values())
        unscored = sum(number(a, "unscored") or 0 for r in done for a in section(r, "agents").values())
    trained = number(summary, "tokens", "trained")
    again = number(summary, "tokens", "retokenised")
    if trained is None and done:
        trained = sum(number(r, "tokens", "trained") or 0 for r in done)
        again = sum(number(r, "tokens", "retokenised") or 0 for r in done)
    wall = number(summary, "wall_s", "total")
    if wall is None and run.rows:
        wall = sum(v for r in run.rows for v in (number(r, "wall_s", k) for k in charts.PHASES) if v is not None)
    versions = section(summary, "versions") or charts.last_versions(run)
    tiles: list[tuple[str, str, str]] = []
    iterations = number(summary, "iterations")
    iterations = float(max((int(number(r, "iteration") or 0) for r in run.rows), default=0)) if iterations is None else iterations
    tiles.append(("iterations", f"{iterations:.0f}", ""))
    best = best_tile(section(summary, "best"))
    tiles += [best] if best is not None else []
    episodes = number(summary, "episodes")
    tiles.append(("episodes", f"{run.episodes if episodes is None else int(episodes):,}", "in the trace store"))
    if scored is not None:
        tiles.append(("actions scored", f"{scored:,.0f}", f"{unscored or 0:,.0f} left unscored"))
    if trained is not None:
        tiles.append(("tokens trained", short(trained), f"{again or 0:.0f} re-tokenised"))
    if wall is not None:
        tiles.append(("wall time", seconds(wall), ""))
    if versions:
        served = [number(versions, k) or 0.0 for k in versions]
        spread = f"v{min(served):.0f}" if min(served) == max(served) else f"v{min(served):.0f} to v{max(served):.0f}"
        tiles.append(("weights served", spread, ", ".join(map(str, versions))))
    cells = "".join(f"<div><dt>{esc(n)}</dt><dd>{esc(v)}</dd><small>{esc(s)}</small></div>" for n, v, s in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def _summary_notes(summary: Mapping[str, Any]) -> list[str]:
    notes = []
    if summary.get("isolation") in ("none", False):
        notes.append("Agents' code ran without isolation (isolation: none).")
    more = summary.get("notes")
    if isinstance(more, str):
        notes.append(more)
    elif isinstance(more, list):
        notes += [str(note) for note in more]
    elif isinstance(more, Mapping):
        notes += [f"{key}: {value}" for key, value in more.items()]
    return notes


def _graph(run: Run, css: Mapping[str, str]) -> str:
    if not run.shape:
        return ""
    figures = []
    for k, (name, flow, scores) in enumerate(charts.graph_states(run)):
        picture = draw(run.shape, flow, scores, css, label=f"the graph, {name}", key=str(k))
        share = f'<span class="facts">{flow.episodes} episodes</span>' if flow.episodes else ""
        figures.append(f"<figure><figcaption><b>{esc(name)}</b>{share}</figcaption>{picture}</figure>")
    scale = "".join(f'<i class="k{k}"></i>' for k in range(11))
    beside = len(figures) > 1 and layout(run.shape).width <= 760
    return (
        '<p class="lead">A node’s colour is the mean score the coach gave to what was done in it. Dashed edges are conditional; '
        "their numbers say how often an episode takes them.</p>"
        f'<p class="scale"><span>0</span>{scale}<span>10</span><i class="hatch"></i><span>not scored</span></p>'
        f'<div class="graphs{" beside" if beside else ""}">{"".join(figures)}</div>'
    )


def _episodes(run: Run, css: Mapping[str, str]) -> str:
    if not run.pairs:
        return '<p class="aside">No finished episode is in the trace store.</p>'
    late = any(pair.late for pair in run.pairs)
    lead = (
        "Early episodes beside late ones, chosen by task across strata, not by result."
        if late
        else "Episodes, chosen by task, not by result."
    )
    hint = "Each square is an action in its coach score’s colour; open a line to read it."
    return f'<p class="lead">{lead} {hint}</p>{episode_pairs(run.pairs, css)}'


def _failures(run: Run, css: Mapping[str, str]) -> str:
    total = sum(run.failures.values())
    aside = _left_out(run)
    if not total and not run.failed:
        return f'<p class="aside">Nothing failed.</p>{aside}' if run.episodes or run.finished else aside
    rows = "".join(
        f'<tr><td>{esc(kind)}</td><td class="num">{count:,}</td><td class="num">{count / total:.0%}</td></tr>'
        for kind, count in sorted(run.failures.items(), key=lambda item: -item[1])
        if count
    )
    head = '<tr><th>boundary : type</th><th class="num">count</th><th class="num">share</th></tr>'
    table = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>" if rows else ""
    items = "".join(f"<li><b>{esc(f.kind)}:{esc(f.type)}</b> {esc(f.message[:400])}</li>" for f in run.latest_failures[:8])
    latest = f'<div><h3>Latest</h3><ul class="plain">{items}</ul></div>' if items else ""
    broken = f"<h3>Episodes that did not finish</h3>{single_episodes(run.failed, css)}" if run.failed else ""
    return (
        '<p class="lead">A failed episode is recorded once, counted here, and left out of training.</p>'
        f'<div class="halves">{table}{latest}</div>{broken}{aside}'
    )


def _left_out(run: Run) -> str:
    """Actions that no update was made from, by reason."""
    counts = charts.left_out(run)
    if not counts:
        return ""
    rows = "".join(f'<tr><td>{esc(reason)}</td><td class="num">{count:,.0f}</td></tr>' for reason, count in counts.items())
    return f'<h3>Actions left out of training</h3><div class="halves"><table><tbody>{rows}</tbody></table></div>'


def _settings(run: Run) -> str:
    if not run.config.strip():
        return ""
    return f'<details class="saw"><summary><b>config.yaml</b></summary><pre class="code">{esc(run.config)}</pre></details>'

"""Charts as inline SVG, made by hand: no plotting library, no script, no external resource.

Colours are classes (`s0` to `s7`), so that the style sheet can change them with the reader's colour scheme. Every chart has, for each
x, an invisible column with a `<title>` that names all values there. A value of None is a gap, never a zero.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..inspect import printable

Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One line: points by x, each with an optional interval; `mark` draws the points themselves."""

    name: str
    css: str
    points: Sequence[tuple[float, float | None]]
    spread: Sequence[tuple[float, float] | None] = ()
    """Interval of each point, same order; drawn as a band, or as whiskers where `mark` is set."""
    mark: bool = False


def esc(text: object) -> str:
    """Text as HTML content or as a quoted attribute: control characters out, markup characters as entities."""
    return html.escape(printable(text), quote=True)


def percent(value: float) -> str:
    return f"{value * 100:.1f}%"


def short(value: float) -> str:
    """A number in at most about six characters: 0.0123, 1.23e-05, 9.8k."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 1e-3:
        return f"{value:.3g}" if size < 1000 else f"{value:.0f}"
    return f"{value:.1e}"


def seconds(value: float) -> str:
    """0.42 s, 12 s, 3 min 04 s, 2 h 10 min."""
    if value < 10:
        return f"{value:.2g} s" if value else "0 s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """At most about `count` round values that lie in low..high."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / max(count, 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    width: int = 500,
    height: int = 290,
    y: tuple[float, float] | None = None,
    form: Format = short,
    ends: bool = False,
    baseline: float | None = None,
) -> str:
    """Lines over iterations; an empty string where no series has a value.

    `y` fixes the range (None: that of the data, zero included where it is near); `ends` names each line at its right end;
    `baseline` is a dashed reference line.
    """
    values = [v for s in series for _, v in s.points if v is not None]
    if not values:
        return ""
    low, high = y or _range(values, baseline)
    xs = sorted({x for s in series for x, v in s.points if v is not None})
    plot = _Plot(width, height, xs[0], xs[-1], low, high, right=78 if ends else 12)
    out = [plot.open(label), plot.grid(form)]
    if baseline is not None and low <= baseline <= high:
        out.append(f'<line class="base" x1="{plot.left}" x2="{plot.end}" y1="{plot.y(baseline):.1f}" y2="{plot.y(baseline):.1f}"/>')
    for s in series:
        out.append(_spread(plot, s))
    for s in series:
        out.append(_line(plot, s))
    if ends:
        out.append(_end_labels(plot, series, form))
    out.append(_columns(plot, series, xs, form))
    return "".join([*out, "</svg>"])


def stacked_bars(
    names: Sequence[tuple[str, str]],
    rows: Sequence[tuple[float, Mapping[str, float]]],
    *,
    label: str,
    width: int = 600,
    height: int = 200,
    form: Format = short,
) -> str:
    """A bar for each x, the parts `names` (name, css) one on another; an empty string where all are zero."""
    totals = [sum(parts.get(n, 0.0) for n, _ in names) for _, parts in rows]
    if not rows or max(totals) <= 0:
        return ""
    first, last = rows[0][0], rows[-1][0]
    plot = _Plot(width, height, first - 0.5, last + 0.5, 0.0, max(totals) * 1.06)
    bar = max((plot.end - plot.left) / max(last - first + 1, 1) * 0.78, 1.0)
    out = [plot.open(label), plot.grid(form)]
    for (x, parts), total in zip(rows, totals, strict=True):
        base = 0.0
        lines = [f"iteration {x:g}: {form(total)}"]
        shapes = []
        for name, css in names:
            part = parts.get(name, 0.0)
            if part > 0:
                top, bottom = plot.y(base + part), plot.y(base)
                at = f'x="{plot.x(x) - bar / 2:.1f}" width="{bar:.1f}" y="{top:.1f}" height="{max(bottom - top, 0.4):.1f}"'
                shapes.append(f'<rect class="{css} fill" {at}/>')
                lines.append(f"{name} {form(part)}")
                base += part
        out.append(f'<g class="hit">{"".join(shapes)}{plot.cover(x, bar)}<title>{esc(chr(10).join(lines))}</title></g>')
    return "".join([*out, "</svg>"])


def dumbbells(rows: Sequence[tuple[str, float | None, float | None]], *, label: str, width: int = 290, form: Format = percent) -> str:
    """A line for each row from its first value (hollow) to its last (filled), on a scale of 0..1."""
    shown = [r for r in rows if r[1] is not None or r[2] is not None]
    if not shown:
        return ""
    step, top, left, right = min(max(240 // len(shown), 26), 56), 8, 70, 42
    height = top + step * len(shown) + 22
    span = width - left - right
    out = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{esc(label)}">']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + span * tick
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 20}"/>')
        if tick in (0.0, 0.5, 1.0):
            out.append(f'<text class="tick mid" x="{x:.1f}" y="{height - 6}">{tick * 100:.0f}%</text>')
    for k, (name, first, last) in enumerate(shown):
        y = top + step * (k + 0.5)
        values = " to ".join(form(v) for v in (first, last) if v is not None)
        out.append(f'<g><title>{esc(name)}: {values}</title><text class="name end" x="{left - 12}" y="{y + 4}">{esc(name[:12])}</text>')
        if first is not None and last is not None:
            out.append(f'<line class="rail" x1="{left + span * first:.1f}" x2="{left + span * last:.1f}" y1="{y}" y2="{y}"/>')
        if first is not None:
            out.append(f'<circle class="hollow" cx="{left + span * first:.1f}" cy="{y}" r="5"/>')
        if last is not None:
            out.append(f'<circle class="s0 dot" cx="{left + span * last:.1f}" cy="{y}" r="5.5"/>')
            out.append(f'<text class="value end" x="{width - 2}" y="{y + 4}">{last * 100:.0f}%</text>')
        out.append("</g>")
    return "".join([*out, "</svg>"])


def interval_rule(before: tuple[float, float, float] | None, after: tuple[float, float, float] | None, *, label: str) -> str:
    """Before and after on one rule of 0..1, each `(value, low, high)` of its 95% interval."""
    width, left, right = 460, 52, 16
    span = width - left - right
    at = [(b, css, name, y) for b, css, name, y in ((before, "s5", "before", 22), (after, "s0", "after", 54)) if b is not None]
    if not at:
        return ""
    out = [f'<svg class="chart" viewBox="0 0 {width} 92" role="img" aria-label="{esc(label)}">']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + span * tick
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="6" y2="70"/>')
        out.append(f'<text class="tick mid" x="{x:.1f}" y="86">{tick * 100:.0f}%</text>')
    for (value, low, high), css, name, y in at:
        a, b, c = (left + span * v for v in (low, value, high))
        out.append(
            f"<g><title>{name}: {percent(value)}, 95% interval {percent(low)} to {percent(high)}</title>"
            f'<text class="name end" x="{left - 10}" y="{y + 4}">{name}</text>'
            f'<rect class="{css} fill faint" x="{a:.1f}" width="{max(c - a, 1):.1f}" y="{y - 9}" height="18" rx="9"/>'
            f'<circle class="{css} dot" cx="{b:.1f}" cy="{y}" r="6.5"/></g>'
        )
    return "".join([*out, "</svg>"])


@dataclass(frozen=True)
class _Plot:
    """The frame of a chart: data to pixels."""

    width: int
    height: int
    x0: float
    x1: float
    y0: float
    y1: float
    right: int = 12
    left: int = 44
    top: int = 10
    bottom: int = 24

    @property
    def end(self) -> float:
        return self.width - self.right

    def x(self, value: float) -> float:
        if self.x1 == self.x0:
            return (self.left + self.end) / 2
        return self.left + (self.end - self.left) * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        span = (self.y1 - self.y0) or 1.0
        share = min(max((value - self.y0) / span, -0.02), 1.02)
        return self.height - self.bottom - (self.height - self.bottom - self.top) * share

    def open(self, label: str) -> str:
        return f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{esc(label)}">'

    def grid(self, form: Format) -> str:
        out = []
        marks = ticks(self.y0, self.y1, 5 if self.height > 180 else 4)
        for tick in marks:
            at = self.y(tick)
            out.append(f'<line class="grid" x1="{self.left}" x2="{self.end:.0f}" y1="{at:.1f}" y2="{at:.1f}"/>')
            name = f"{tick * 100:g}%" if form is percent else _tick_name(tick, marks, form)
            out.append(f'<text class="tick end" x="{self.left - 7}" y="{at + 3.5:.1f}">{esc(name)}</text>')
        for tick in ticks(self.x0, self.x1, 8 if self.width > 400 else 5):
            if tick == round(tick):
                out.append(f'<text class="tick mid" x="{self.x(tick):.1f}" y="{self.height - 6}">{tick:g}</text>')
        return "".join(out)

    def cover(self, x: float, width: float) -> str:
        """The invisible part of a column that takes the pointer."""
        low, high = max(self.x(x) - width / 2, self.left - 8), min(self.x(x) + width / 2, self.end + 8)
        tall = self.height - self.bottom - self.top
        return f'<rect class="cover" x="{low:.1f}" width="{high - low:.1f}" y="{self.top}" height="{tall}"/>'


def _tick_name(tick: float, marks: Sequence[float], form: Format) -> str:
    """A tick with as many decimals as its distance to the next one needs, where `form` would round them away."""
    if tick and len(marks) > 1 and 1e-4 < (step := marks[1] - marks[0]) < 1:
        decimals = len(f"{step:.8f}".rstrip("0").split(".")[1])
        return f"{tick:.{decimals}f}"
    return form(tick)


def _range(values: Sequence[float], baseline: float | None) -> tuple[float, float]:
    low, high = min(values), max(values)
    if baseline is not None:
        low, high = min(low, baseline), max(high, baseline)
    if 0 < low < 0.6 * high:
        low = 0.0
    if high == low:
        pad = abs(high) * 0.2 or 1.0
        return (0.0, high + pad) if low == 0 else (low - pad, high + pad)
    pad = (high - low) * 0.08
    return (low if low == 0 else low - pad), high + pad


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((x, value))
    return [run for run in runs if run]


def _line(plot: _Plot, s: Series) -> str:
    out = []
    for run in _runs(s.points):
        if len(run) > 1:
            path = "L".join(f"{plot.x(x):.1f} {plot.y(v):.1f}" for x, v in run)
            out.append(f'<path class="{s.css} line" d="M{path}"/>')
        if s.mark or len(run) == 1:
            out += [f'<circle class="{s.css} dot" cx="{plot.x(x):.1f}" cy="{plot.y(v):.1f}" r="4"/>' for x, v in run]
    return "".join(out)


def _spread(plot: _Plot, s: Series) -> str:
    known = [(x, band) for (x, v), band in zip(s.points, s.spread, strict=False) if band is not None and v is not None]
    if not known:
        return ""
    if s.mark:
        return "".join(
            f'<line class="{s.css} whisker" x1="{plot.x(x):.1f}" x2="{plot.x(x):.1f}" y1="{plot.y(low):.1f}" y2="{plot.y(high):.1f}"/>'
            for x, (low, high) in known
        )
    upper = [f"{plot.x(x):.1f} {plot.y(high):.1f}" for x, (_, high) in known]
    lower = [f"{plot.x(x):.1f} {plot.y(low):.1f}" for x, (low, _) in reversed(known)]
    return f'<path class="{s.css} band" d="M{"L".join(upper + lower)}Z"/>'


def _end_labels(plot: _Plot, series: Sequence[Series], form: Format) -> str:
    """Names at the right ends, moved apart where they would touch."""
    last = [(plot.y(known[-1]), s, known[-1]) for s in series if (known := [v for _, v in s.points if v is not None])]
    last.sort(key=lambda entry: entry[0])
    gap, floor = 30.0, plot.height - plot.bottom - 8.0
    heights = [y for y, _, _ in last]
    for k in range(1, len(heights)):
        heights[k] = max(heights[k], heights[k - 1] + gap)
    for k in range(len(heights) - 1, -1, -1):
        heights[k] = min(heights[k], floor if k == len(heights) - 1 else heights[k + 1] - gap)
    x = plot.end + 10
    return "".join(
        f'<text class="{s.css} ink strong" x="{x:.0f}" y="{y:.1f}">{esc(form(value))}</text>'
        f'<text class="{s.css} ink" x="{x:.0f}" y="{y + 13:.1f}">{esc(s.name[:12])}</text>'
        for y, (_, s, value) in zip(heights, last, strict=True)
    )


def _columns(plot: _Plot, series: Sequence[Series], xs: Sequence[float], form: Format) -> str:
    step = min((b - a for a, b in itertools.pairwise(xs)), default=1.0)
    wide = abs(plot.x(xs[0] + step) - plot.x(xs[0])) if plot.x1 > plot.x0 else 40.0
    lookup = [(s, dict(s.points), {x: band for (x, _), band in zip(s.points, s.spread, strict=False)}) for s in series]
    out = []
    for x in xs:
        lines, dots = [f"iteration {x:g}"], []
        for s, values, bands in lookup:
            value = values.get(x)
            if value is None:
                continue
            band = bands.get(x)
            lines.append(f"{s.name} {form(value)}" + (f"  ({form(band[0])} to {form(band[1])})" if band else ""))
            dots.append(f'<circle class="{s.css} dot" cx="{plot.x(x):.1f}" cy="{plot.y(value):.1f}" r="3.5"/>')
        at = f"{plot.x(x):.1f}"
        cross = f'<line class="cross" x1="{at}" x2="{at}" y1="{plot.top}" y2="{plot.height - plot.bottom}"/>'
        shown = f'<g class="shy">{cross}{"".join(dots)}</g>'
        out.append(f'<g class="hit">{plot.cover(x, max(wide, 3))}{shown}<title>{esc(chr(10).join(lines))}</title></g>')
    return "".join(out)

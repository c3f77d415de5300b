"""Live progress of a run in a terminal: a table that grows by one line an iteration, and below it what is being awaited.

On a terminal the table is drawn in place; anywhere else (a log file, CI) each iteration is one plain line, and what is awaited is said
now and then. The display only ever shows: it never raises for a value that is missing, and never shows a missing score as a number.
Columns that don't fit the width are left out, the least telling ones first; of more iterations than fit the height, the last are shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from .inspect import one_line, score_text
from .report.data import number, section

PHASES = (("rollout", "blue"), ("coach", "magenta"), ("train", "yellow"), ("publish", "red"), ("evaluate", "green"))
_SPARK = "▁▂▃▄▅▆▇█"
_BAR = 12
_PLAIN_EVERY_S = 15.0


class Display:
    """Shows a run while it goes on.

    Args:
        console: where to draw; default standard output.
        title: shown above the table.
        quiet: nothing is drawn but the one line of `before_after`.
        clock: seconds that only grow, for what has been awaited how long.

    Use it as a context manager; every method may be called from any thread. Rows are those of `metrics.jsonl`.
    """

    def __init__(
        self, *, console: Console | None = None, title: str = "", quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console()
        self.quiet = quiet
        self._title = title
        self._lock = threading.RLock()
        self._rows: list[Mapping[str, Any]] = []
        self._status = ""
        self._clock = clock
        self._since = self._said = clock()
        self._progress: tuple[float, float, str] | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self.quiet:
            return self
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(_Frame(self), console=self.console, refresh_per_second=8, vertical_overflow="crop")
            self._live.start()
        elif self._title:
            self.console.print(Text(one_line(self._title, 200)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            live, self._live = self._live, None
            self._status, self._progress = "", None
        if live is not None:
            live.stop()

    def iteration(self, row: Mapping[str, Any]) -> None:
        """Adds an iteration's row; one with the same iteration takes its place."""
        at = number(row, "iteration")
        with self._lock:
            self._rows = [r for r in self._rows if at is None or number(r, "iteration") != at] + [row]
            self._progress = None
        self._show(_plain_row(row), at_once=True)

    def status(self, text: str) -> None:
        """Says what is being awaited."""
        with self._lock:
            changed = text != self._status
            self._status, self._progress = text, None
            if changed:
                self._since = self._clock()
            early = not self._rows
        if changed and text:
            self._show(f"… {one_line(text, 200)}", at_once=early)

    def progress(self, done: float, total: float, what: str) -> None:
        """Says how far `what` has come."""
        with self._lock:
            self._progress = (done, total, what)
        self._show(f"  {one_line(what, 80)}: {done:g} of {total:g}", at_once=False)

    def note(self, text: str) -> None:
        """A lasting line above the table: a warning, or where something was written."""
        if not self.quiet:
            self.console.print(Text(one_line(text, 1000), style="yellow"))

    def before_after(self, summary: Mapping[str, Any]) -> None:
        """The result: accuracy before and after, each agent's coach score first and last."""
        if self.quiet:
            self.console.print(Text(_result_line(summary)))
            return
        self.console.print(before_after_table(summary))

    def _show(self, line: str, *, at_once: bool) -> None:
        """Draws anew on a terminal. Elsewhere prints `line`: at once, or only when nothing was said for a while."""
        if self.quiet:
            return
        with self._lock:
            live, now = self._live, self._clock()
            due = at_once or now - self._said >= _PLAIN_EVERY_S
            if live is None and due:
                self._said = now
        if live is not None:
            live.refresh()
        elif due:
            self.console.print(Text(line), soft_wrap=True)

    def _parts(self, options: ConsoleOptions) -> RenderableType:
        with self._lock:
            rows, status, progress, since = list(self._rows), self._status, self._progress, self._since
        height = max(3, (options.height or self.console.height) - 8)
        parts: list[RenderableType] = []
        if rows:
            parts.append(iteration_table(rows, options.max_width, height, self._title))
        if status or progress:
            parts.append(self._footer(status, progress, since, options.max_width))
        return Group(*parts)

    def _footer(self, status: str, progress: tuple[float, float, str] | None, since: float, width: int) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [self._spinner]
        words = [status] if status else []
        if progress is not None:
            done, total, what = progress
            words.append(f"{what} {done:g}/{total:g}")
            if width >= 50 and total > 0:
                cells.append(ProgressBar(total=total, completed=min(done, total), width=min(24, width // 4)))
        cells.append(Text(one_line(", ".join(words), max(width - 40, 20)), no_wrap=True, overflow="ellipsis"))
        cells.append(Text(f"{self._clock() - since:.0f} s", style="dim"))
        grid.add_row(*cells)
        return grid


class _Frame:
    """Drawn anew at each refresh, from what the display knows then."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._display._parts(options)


def iteration_table(rows: Sequence[Mapping[str, Any]], width: int, height: int, title: str = "") -> Table:
    """The table of iterations for a terminal `width` columns wide, its last `height` rows; the footer holds sparklines."""
    agents = list(dict.fromkeys(str(a) for r in rows for a in section(r, "agents")))
    tested = any(number(r, "heldout", "accuracy") is not None for r in rows)
    needed = 5 + sum(max(len(a[:10]), 6) + 2 for a in agents) + 9 + 18
    wide = [name for name, size in (("time", 22), ("tokens", 9), ("version", 10)) if (needed := needed + size) <= width]
    table = Table(box=None, pad_edge=False, header_style="bold", show_footer=len(rows) > 1 and width >= 60, footer_style="dim")
    if title:
        table.title, table.title_justify, table.title_style = Text(one_line(title, max(width - 2, 8))), "left", "bold"
    table.add_column("iter", justify="right", no_wrap=True)
    for agent in agents:
        trend = spark([number(r, "agents", agent, "score_mean") for r in rows], 0.0, 10.0)
        table.add_column(Text(one_line(agent, 10)), trend, justify="right", no_wrap=True)
    table.add_column("rollout", spark([number(r, "rollout", "accuracy") for r in rows], 0.0, 1.0), justify="right", no_wrap=True)
    if tested:
        table.add_column("held-out", justify="right", no_wrap=True)
    if "tokens" in wide:
        table.add_column("tokens", justify="right", no_wrap=True, style="dim")
    if "version" in wide:
        table.add_column("weights", justify="right", no_wrap=True, style="dim")
    if "time" in wide:
        legend = Text("").join([Text(name[0] + " ", style=colour) for name, colour in PHASES])
        table.add_column(Text.assemble("time ", legend), no_wrap=True)
    for row in rows[-height:]:
        at = number(row, "iteration")
        cells: list[RenderableType] = [Text("" if at is None else f"{at:.0f}")]
        cells += [score_text(number(row, "agents", agent, "score_mean")) for agent in agents]
        cells.append(Text(_share(number(row, "rollout", "accuracy"))))
        if tested:
            cells.append(_tested(row))
        if "tokens" in wide:
            cells.append(Text(_count(number(row, "tokens", "trained"))))
        if "version" in wide:
            cells.append(Text(_versions(row)))
        if "time" in wide:
            cells.append(_time_bar(row))
        table.add_row(*cells)
    if len(rows) > height:
        table.caption = Text(f"{len(rows) - height} earlier iterations not shown", style="dim")
    return table


def before_after_table(summary: Mapping[str, Any]) -> Group:
    """What training changed, as a table; what a summary does not hold is a dash."""
    table = Table(box=None, pad_edge=False, header_style="bold", title="Before and after", title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    before, after = number(summary, "before", "accuracy"), number(summary, "after", "accuracy")
    change = Text("–", style="dim")
    if before is not None and after is not None:
        change = Text(f"{(after - before) * 100:+.1f} points", style="bold green" if after > before else "bold red")
    table.add_row(Text("held-out accuracy", style="bold"), Text(_share(before)), Text(_share(after), style="bold"), change)
    table.add_row(Text("  95% interval", style="dim"), _interval(summary, "before"), _interval(summary, "after"), "")
    tasks = [number(summary, part, "n") for part in ("before", "after")]
    table.add_row(Text("  tasks", style="dim"), *(Text("–" if n is None else f"{n:.0f}", style="dim") for n in tasks), "")
    for line in _metric_rows(summary):
        table.add_row(*line)
    firsts, lasts = section(summary, "coach", "mean_by_agent_first"), section(summary, "coach", "mean_by_agent_last")
    for agent in dict.fromkeys([*firsts, *lasts]):
        first, last = number(firsts, agent), number(lasts, agent)
        moved = "–" if first is None or last is None else f"{last - first:+.1f}"
        table.add_row(Text(f"coach score, {one_line(agent, 24)}"), score_text(first), score_text(last), Text(moved))
    facts = [
        f"{label} {_count(value)}"
        for label, value in (
            ("episodes", number(summary, "episodes")),
            ("tokens trained", number(summary, "tokens", "trained")),
            ("re-tokenised", number(summary, "tokens", "retokenised")),
        )
        if value is not None
    ]
    wall = number(summary, "wall_s", "total")
    facts += [f"wall time {wall:.0f} s"] if wall is not None else []
    parts: list[RenderableType] = [table, Text(", ".join(facts), style="dim")]
    ended = section(summary, "stopped").get("message")
    if ended:
        parts.append(Text(f"ended early: {one_line(str(ended), 1000)}", style="yellow"))
    return Group(*parts)


def _metric_rows(summary: Mapping[str, Any]) -> list[tuple[Text, Text, Text, Text]]:
    """pass@k and majority where several samples a task were evaluated, and the metric that the best checkpoint is chosen by."""
    by = str(section(summary, "best").get("by") or "accuracy")
    paths: dict[str, tuple[str, ...]] = {
        f"pass@{k}": ("pass_at", str(k), "value") for k in section(summary, "after", "pass_at") or section(summary, "before", "pass_at")
    }
    if section(summary, "after", "majority") or section(summary, "before", "majority"):
        paths["majority"] = ("majority", "value")
    if by not in ("accuracy", *paths):
        paths[by] = ("score", "value") if by == "score" else ("metrics", by)
    rows = []
    for name, path in paths.items():
        first, last = number(summary, "before", *path), number(summary, "after", *path)
        shown = [("–" if v is None else f"{v:.4g}") if path[0] == "metrics" else _share(v) for v in (first, last)]
        moved = "–"
        if first is not None and last is not None:
            moved = f"{last - first:+.4g}" if path[0] == "metrics" else f"{(last - first) * 100:+.1f} points"
        best = " (chooses the best)" if name == by else ""
        rows.append((Text(f"held-out {one_line(name, 30)}{best}"), Text(shown[0]), Text(shown[1]), Text(moved)))
    return rows


def spark(values: Sequence[float | None], low: float, high: float, width: int = 8) -> Text:
    """The last `width` values as block characters between `low` and `high`; a gap where there is none."""
    marks = []
    for value in list(values)[-width:]:
        share = None if value is None else min(max((value - low) / (high - low), 0.0), 1.0)
        marks.append(" " if share is None else _SPARK[round(share * (len(_SPARK) - 1))])
    return Text("".join(marks))


def _plain_row(row: Mapping[str, Any]) -> str:
    at = number(row, "iteration")
    parts = [f"iteration {at:.0f}" if at is not None else "iteration ?"]
    for agent in section(row, "agents"):
        score = number(row, "agents", agent, "score_mean")
        parts.append(f"{one_line(agent, 20)} {'–' if score is None else f'{score:.1f}'}")
    for name, part in (("rollout", "rollout"), ("held-out", "heldout")):
        value = number(row, part, "accuracy")
        parts += [f"{name} {_share(value)}"] if value is not None else []
    tokens = number(row, "tokens", "trained")
    parts += [f"tokens {_count(tokens)}"] if tokens is not None else []
    parts += [f"weights {_versions(row)}"] if _versions(row) else []
    spent = [(name, number(row, "wall_s", name)) for name, _ in PHASES]
    parts += [" ".join(f"{name} {value:.1f}s" for name, value in spent if value)] if any(v for _, v in spent) else []
    return " | ".join(parts)


def _result_line(summary: Mapping[str, Any]) -> str:
    before, after = number(summary, "before", "accuracy"), number(summary, "after", "accuracy")
    change = f" ({(after - before) * 100:+.1f} points)" if before is not None and after is not None else ""
    return f"held-out accuracy {_share(before)} -> {_share(after)}{change}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:.1f}%"


def _count(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:,.0f}"


def _tested(row: Mapping[str, Any]) -> Text:
    value = number(row, "heldout", "accuracy")
    if value is None:
        return Text("")
    bounds = _bounds(section(row, "heldout"))
    return Text.assemble((_share(value), "bold"), ("" if bounds is None else f" ±{(bounds[1] - bounds[0]) * 50:.0f}", "dim"))


def _interval(summary: Mapping[str, Any], part: str) -> Text:
    bounds = _bounds(section(summary, part))
    return Text("–" if bounds is None else f"{bounds[0] * 100:.1f} to {bounds[1] * 100:.1f}%", style="dim")


def _bounds(part: Mapping[str, Any]) -> tuple[float, float] | None:
    ends = part.get("ci95")
    if not isinstance(ends, Sequence) or len(ends) != 2:
        return None
    low, high = number({"v": ends[0]}, "v"), number({"v": ends[1]}, "v")
    return None if low is None or high is None else (low, high)


def _versions(row: Mapping[str, Any]) -> str:
    known = [v for a in section(row, "agents") if (v := number(row, "agents", a, "version")) is not None]
    if not known:
        return ""
    return f"v{min(known):.0f}" if min(known) == max(known) else f"v{min(known):.0f}–{max(known):.0f}"


def _time_bar(row: Mapping[str, Any]) -> Text:
    """The phases' shares as a bar of `_BAR` cells, and their sum."""
    spent = [(colour, number(row, "wall_s", name) or 0.0) for name, colour in PHASES]
    total = sum(value for _, value in spent)
    bar = Text()
    if total <= 0:
        return bar
    reached, cells = 0.0, 0
    for colour, value in spent:
        reached += value
        upto = round(_BAR * reached / total)
        bar.append("█" * (upto - cells), style=colour)
        cells = upto
    return bar.append(f" {total:.1f} s", style="dim")

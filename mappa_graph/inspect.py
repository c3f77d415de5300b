"""Episodes in a terminal: what `mappa-graph traces list` and `traces show` print.

Everything an agent wrote is hostile here: it may hold terminal escapes, rich markup, or bidirectional controls that make code read
otherwise than it runs. So every such text passes `printable` and then enters rich as a `Text`, which is never parsed as markup.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from .record import Action, Episode, EpisodeStatus, EpisodeTrace, Execution, Transition, Verdict
from .store import TraceStore

_ANSI = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: titles, links, clipboard
    r"|[PX^_][^\x1b]*(?:\x1b\\)?"  # DCS, SOS, PM, APC
    r"|[ -/]*[0-~])"
)
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_TASK = 14
"""The least columns that a task's beginning is shown in."""
_DECEIVING = re.compile("[\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")

SCORE_STOPS = ((0.0, (178, 64, 40)), (2.5, (226, 148, 92)), (5.0, (238, 226, 194)), (7.5, (118, 190, 172)), (10.0, (12, 112, 101)))
"""The scale of coach scores, rust over sand to teal: told apart by people with any of the common colour deficiencies."""


def printable(text: object) -> str:
    """`text` with terminal escapes and control characters removed, and invisible or direction-changing characters made visible.

    Newlines and tabs stay; a lone surrogate (which can't be encoded) is shown as its code as well.
    """
    plain = _ANSI.sub("", str(text)).replace("\r\n", "\n").replace("\r", "\n")
    return _DECEIVING.sub(lambda m: f"\\u{ord(m.group()):04x}", _CONTROL.sub("", plain))


def clip(text: str, limit: int) -> str:
    """At most about `limit` characters: the head and the tail, so that a traceback's last line survives."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]}\n… {len(text) - limit:,} characters left out …\n{text[-tail:]}"


def one_line(text: object, limit: int) -> str:
    """The text on one line, cut at `limit` characters."""
    flat = " ".join(printable(text).split())
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"


def content_text(content: object) -> str:
    """The text of an OpenAI-style message content: a string, or a list of parts of which the text parts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [str(p.get("text", f"[{p.get('type', 'part')}]")) if isinstance(p, Mapping) else str(p) for p in content]
        return "\n".join(parts)
    return str(content)


def tool_call_text(call: Mapping[str, Any]) -> tuple[str, str]:
    """`(name, arguments)` of a tool call, in OpenAI's or LangChain's shape."""
    inner = call.get("function")
    source = inner if isinstance(inner, Mapping) else call
    arguments = source.get("arguments", source.get("args", ""))
    return str(source.get("name", "tool")), arguments if isinstance(arguments, str) else str(arguments)


def score_rgb(score: float) -> tuple[int, int, int]:
    """The colour of a score in 0..10, interpolated over `SCORE_STOPS`; values outside are clamped."""
    score = min(max(score, 0.0), 10.0)
    for (low, a), (high, b) in itertools.pairwise(SCORE_STOPS):
        if score <= high:
            share = (score - low) / (high - low)
            red, green, blue = (round(x + (y - x) * share) for x, y in zip(a, b, strict=True))
            return red, green, blue
    return SCORE_STOPS[-1][1]


def light(red: int, green: int, blue: int) -> bool:
    """Whether dark ink reads better than white on a colour, by its luma (ITU-R BT.601)."""
    return 0.299 * red + 0.587 * green + 0.114 * blue > 125


def score_text(score: float | None, missing: str = "–") -> Text:
    """A score on its colour; an action without a verdict is a dash, never a zero."""
    if score is None:
        return Text(missing, style="dim")
    red, green, blue = score_rgb(score)
    ink = "#1b1a17" if light(red, green, blue) else "#ffffff"
    return Text(f" {score:.1f} ", style=f"{ink} on rgb({red},{green},{blue})")


def verdict_text(episode: Episode) -> Text:
    """Whether the episode solved its task, from its outcome; otherwise how it ended."""
    if episode.outcome is not None:
        return Text("✓ solved", style="green") if episode.outcome.success else Text("✗ not solved", style="red")
    return Text(episode.status, style="yellow" if episode.status == "running" else "red")


def render_list(
    store: TraceStore,
    *,
    split: str | None = None,
    iteration: int | None = None,
    status: EpisodeStatus | None = None,
    limit: int = 50,
    newest_first: bool = True,
) -> RenderableType:
    """A table of at most `limit` episodes, one a line, newest first; it says so when there is nothing to show.

    Ids are always whole, since they are what `traces show` is given; the task and then other columns give way on a narrow terminal.
    """
    found = list(store.episodes(split=split, iteration=iteration, status=status, limit=limit, newest_first=newest_first))
    shown = _EpisodeList(found) if found else Text("no episodes match", style="dim")
    orphans = store.orphan_counts()
    return Group(shown, orphans_text(orphans)) if orphans else shown


def orphans_text(counts: Mapping[str, int]) -> Text:
    """A line on the calls that reached the gateway and that no callback saw, by agent."""
    number = sum(counts.values())
    by = ", ".join(f"{one_line(who, 40)} {n}" for who, n in sorted(counts.items()))
    return Text(f"{number} orphan call{'s' if number != 1 else ''} (kept by the gateway, in no episode's graph): {by}", style="yellow")


class _EpisodeList:
    """Laid out when it is drawn, because what is left out hangs on the terminal's width."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self._episodes = episodes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns: list[tuple[str, Callable[[Episode], Text]]] = [
            ("outcome", verdict_text),
            ("iter", lambda e: Text(str(e.iteration))),
            ("split", lambda e: Text(one_line(e.split, 24), style="dim")),
            ("answer", lambda e: Text(one_line(e.outcome.answer, 18) if e.outcome and e.outcome.answer is not None else "")),
            ("seconds", lambda e: Text(f"{e.ended - e.started:.2f}" if e.ended else "", style="dim")),
        ]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        cells = [[Text(one_line(e.id, 64)) for e in self._episodes]]
        table.add_column("episode", overflow="fold")
        left = options.max_width - max(len("episode"), *(c.cell_len for c in cells[0])) - 2
        for name, cell in columns:
            made = [cell(e) for e in self._episodes]
            width = max(len(name), *(c.cell_len for c in made)) + 2
            if width <= left - (0 if name in ("outcome", "iter") else _TASK):
                left -= width
                cells.append(made)
                table.add_column(name, no_wrap=True, justify="right" if name in ("iter", "seconds") else "left")
        if left >= _TASK:
            cells.append([Text(one_line(e.task or e.task_id, left - 2)) for e in self._episodes])
            table.add_column("task", no_wrap=True, overflow="ellipsis")
        for row in zip(*cells, strict=True):
            table.add_row(*row)
        yield table


def render_episode(trace: EpisodeTrace, *, messages: bool = False, limit: int = 2000, orphans: Mapping[str, int] | None = None) -> Tree:
    """One episode as a tree: node attempts in order of time, their actions, what the tools answered, and what the coach said.

    `messages` adds what each agent saw; `limit` is the most characters shown of any one text; `orphans` are the counts of calls that
    named this episode and are in none of its actions (`TraceStore.orphan_counts`).
    """
    episode = trace.episode
    root = Tree(_headline(episode), guide_style="dim")
    root.add(_labelled("task", episode.task or episode.task_id, limit))
    if episode.reference is not None:
        root.add(_labelled("reference", episode.reference, limit))
    if episode.error:
        root.add(_labelled("error", episode.error, limit, "red"))
    names = action_names(trace)
    by_transition: dict[str, list[Action]] = {}
    for action in sorted(trace.actions, key=lambda a: a.order):
        by_transition.setdefault(action.transition_id, []).append(action)
    for transition in trace.transitions:
        branch = root.add(_transition_line(transition))
        if transition.error:
            branch.add(_labelled("error", transition.error, limit, "red"))
        for action in by_transition.pop(transition.id, []):
            _add_action(branch, trace, action, names, messages, limit)
    for placeless in by_transition.values():
        for action in placeless:
            _add_action(root, trace, action, names, messages, limit)
    if orphans:
        root.add(orphans_text(orphans))
    if episode.outcome is not None:
        root.add(Group(verdict_text(episode), Text(clip(printable(episode.outcome.reason), limit), style="dim")))
    return root


def action_names(trace: EpisodeTrace) -> dict[str, str]:
    """What actions are called in a page or a terminal, by id: the agent's name, numbered where it acted more than once."""
    acted: dict[str, int] = {}
    for action in trace.actions:
        acted[action.agent] = acted.get(action.agent, 0) + 1
    turn: dict[str, int] = {}
    names: dict[str, str] = {}
    for action in sorted(trace.actions, key=lambda a: a.order):
        turn[action.agent] = turn.get(action.agent, 0) + 1
        names[action.id] = action.agent if acted[action.agent] == 1 else f"{action.agent} {turn[action.agent]}"
    return names


def blamed(verdict: Verdict, names: Mapping[str, str]) -> list[str]:
    """Who a verdict blames, action ids turned into names."""
    return [names.get(entry, entry) for entry in verdict.blame]


def _headline(episode: Episode) -> Text:
    parts = [Text(printable(episode.id), style="bold"), Text(f"{printable(episode.environment)} · {printable(episode.split)}", style="dim")]
    parts += [Text(f"iteration {episode.iteration}", style="dim"), verdict_text(episode)]
    if episode.outcome is not None and episode.outcome.answer is not None:
        parts.append(Text(f"answer {one_line(episode.outcome.answer, 60)}"))
    if episode.ended:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(episode.started))
        parts.append(Text(f"{started}, {episode.ended - episode.started:.2f} s", style="dim"))
    return Text("  ").join(parts)


def _transition_line(transition: Transition) -> Text:
    line = Text(printable(transition.path or transition.node), style="bold cyan")
    if transition.attempt > 1:
        line.append(f"  attempt {transition.attempt}", style="yellow")
    if transition.status != "done":
        line.append(f"  {transition.status}", style="red")
    return line


def _add_action(branch: Tree, trace: EpisodeTrace, action: Action, names: Mapping[str, str], messages: bool, limit: int) -> None:
    verdict = trace.verdicts.get(action.id)
    call = trace.calls.get(action.id)
    line = Text.assemble(
        (printable(names.get(action.id, action.agent)), "bold"), "  ", score_text(verdict.score if verdict else None, "no score")
    )
    facts = [f"{call.policy}@v{call.version}, {len(call.completion_ids)} tokens"] if call else ["no tokens captured"]
    facts += [action.finish_reason] if action.finish_reason else []
    facts += [] if action.kept else ["discarded"]
    line.append("  " + printable(" · ".join(facts)), style="dim")
    node = branch.add(line)
    if messages:
        seen = node.add(Text("saw", style="dim"))
        for message in action.messages:
            seen.add(_labelled(str(message.get("role", "?")), content_text(message.get("content")), limit))
    if action.error:
        node.add(_labelled("error", action.error, limit, "red"))
    if action.output:
        node.add(_labelled("said", action.output, limit))
    for call_made in action.tool_calls:
        name, arguments = tool_call_text(call_made)
        node.add(_labelled(f"called {name}", arguments, limit))
    for execution in action.executions:
        node.add(_execution(execution, limit))
    if verdict is not None:
        node.add(_verdict(verdict, names, limit))


def _execution(execution: Execution, limit: int) -> RenderableType:
    style = "green" if execution.status == "ok" else "red"
    head = Text.assemble(
        (printable(execution.name), "bold"), " ", (execution.status, style), (f"  {execution.duration_s * 1000:.0f} ms", "dim")
    )
    body: list[RenderableType] = [head]
    texts: Iterable[tuple[str | None, str]] = (
        (execution.code, "cyan"),
        (execution.stdout, ""),
        (execution.result, ""),
        (execution.stderr, "yellow"),
        (_error_text(execution), "red"),
        (execution.note, "dim"),
    )
    for text, colour in texts:
        if text and text.strip():
            body.append(Padding(Text(clip(printable(text.rstrip()), limit), style=colour), (0, 0, 0, 2)))
    return Group(*body)


def _error_text(execution: Execution) -> str:
    error = execution.error
    if error is None:
        return ""
    return error.traceback or f"{error.type}: {error.message}"


def _verdict(verdict: Verdict, names: Mapping[str, str], limit: int) -> RenderableType:
    line = Text.assemble((printable(verdict.coach or "coach"), "magenta"), " ", score_text(verdict.score, "no score"), " ")
    line.append(clip(printable(verdict.reason or verdict.error or ""), limit))
    if verdict.blame:
        line.append(f"  blames {printable(', '.join(blamed(verdict, names)))}", style="yellow")
    if verdict.better_action:
        return Group(line, _labelled("better", verdict.better_action, limit))
    return line


def _labelled(label: str, text: str, limit: int, style: str = "") -> Text:
    shown = clip(printable(text.strip("\n")), limit)
    joint = "\n" if "\n" in shown else " "
    return Text.assemble((printable(label), "dim"), joint, (shown, style))

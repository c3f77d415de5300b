"""Episodes as HTML, action by action: what an agent saw, what it did, what the sandbox answered, what the coach said.

Every text here was written by a model, a program it wrote, or a task file: it is shown through `esc` only, never in an attribute that a
browser would follow or run, and cut in the middle where it is long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..inspect import action_names, blamed, clip, content_text, one_line, printable, tool_call_text
from ..record import Action, EpisodeTrace, Execution, Transition, Verdict
from .choose import Pair
from .svg import esc, seconds

LIMIT = 6000
"""Characters shown of one text."""
MESSAGES = 40
"""Messages shown of one prompt: the latest."""


def score_css(score: float | None) -> str:
    """The class that colours a score: `k0` to `k10`, `kx` for none."""
    return "kx" if score is None else f"k{round(score)}"


def chip(score: float | None, hint: str = "") -> str:
    """A score on its colour; without a verdict a dash."""
    title = f' title="{esc(hint)}"' if hint else ""
    return f'<span class="chip {score_css(score)}"{title}>{"–" if score is None else f"{score:.1f}"}</span>'


def episode_pairs(pairs: Sequence[Pair], css_of_agent: Mapping[str, str]) -> str:
    """A list that opens: one line a pair, its two episodes side by side inside; the first one is open."""
    return "".join(_pair(pair, css_of_agent, opened=k == 0) for k, pair in enumerate(pairs))


def single_episodes(traces: Sequence[EpisodeTrace], css_of_agent: Mapping[str, str]) -> str:
    """The same list for episodes that stand alone."""
    return "".join(_pair(Pair(trace, None, False), css_of_agent, opened=False) for trace in traces)


def _pair(pair: Pair, css_of_agent: Mapping[str, str], *, opened: bool) -> str:
    first, last = pair.early, pair.late
    episode = first.episode
    stratum = f'<span class="pill">{esc(one_line(episode.stratum, 14))}</span>' if episode.stratum else "<span></span>"
    marks = _strip(first, css_of_agent) + (f'<span class="arrow-to">→</span>{_strip(last, css_of_agent)}' if last else "")
    columns = _episode(first, css_of_agent) + (_episode(last, css_of_agent) if last else "")
    task = esc(one_line(episode.task or episode.task_id or episode.id, 220))
    both = (
        "" if last is None or pair.same_task else '<p class="aside">Two tasks of equal difficulty: no task was met both early and late.</p>'
    )
    return (
        f'<details class="pair"{" open" if opened else ""}><summary>{stratum}<span class="task-line">{task}</span>'
        f'<span class="strips">{marks}</span></summary>{both}<div class="{"two" if last else "one"}">{columns}</div></details>'
    )


def _strip(trace: EpisodeTrace, css_of_agent: Mapping[str, str]) -> str:
    """One square an action, coloured by score, and whether the task was solved."""
    names = action_names(trace)
    cells = []
    for action in _ordered(trace):
        verdict = trace.verdicts.get(action.id)
        score = verdict.score if verdict else None
        hint = f"{names[action.id]}: {'no score' if score is None else f'{score:.1f}'}"
        cells.append(f'<i class="cell {score_css(score)}" title="{esc(hint)}"></i>')
    return f'<span class="strip">{_mark(trace)}<small>iteration {trace.episode.iteration}</small>{"".join(cells[:12])}</span>'


def _mark(trace: EpisodeTrace) -> str:
    outcome = trace.episode.outcome
    if outcome is None:
        return f'<b class="mark none" title="{esc(trace.episode.status)}">·</b>'
    return '<b class="mark yes" title="solved">✓</b>' if outcome.success else '<b class="mark no" title="not solved">✗</b>'


def _episode(trace: EpisodeTrace, css_of_agent: Mapping[str, str]) -> str:
    episode = trace.episode
    names = action_names(trace)
    where = {t.id: t for t in trace.transitions}
    facts = [f"iteration {episode.iteration}", episode.split]
    facts += [seconds(episode.ended - episode.started)] if episode.ended > episode.started else []
    facts += [episode.status] if episode.status != "done" else []
    outcome = episode.outcome
    verdict = "not graded" if outcome is None else "solved" if outcome.success else "not solved"
    css = "none" if outcome is None else "yes" if outcome.success else "no"
    rows = [("task", episode.task or episode.task_id)]
    rows += [("answer", outcome.answer)] if outcome is not None and outcome.answer is not None else []
    rows += [("reference", episode.reference)] if episode.reference is not None else []
    rows += [("grade", outcome.reason)] if outcome is not None and outcome.reason else []
    table = "".join(f"<dt>{name}</dt><dd>{_inline(text)}</dd>" for name, text in rows)
    failed = f'<div class="stream bad">{_text(episode.error)}</div>' if episode.error else ""
    steps = "".join(_action(trace, action, where.get(action.transition_id), names, css_of_agent) for action in _ordered(trace))
    return (
        f'<section class="episode"><header><b class="{css}">{verdict}</b><span>{esc(" · ".join(facts))}</span></header>'
        f"<dl>{table}</dl>{failed}{steps or '<p class=aside>No action was recorded.</p>'}</section>"
    )


def _ordered(trace: EpisodeTrace) -> list[Action]:
    return sorted(trace.actions, key=lambda a: a.order)


def _action(
    trace: EpisodeTrace, action: Action, transition: Transition | None, names: Mapping[str, str], css_of_agent: Mapping[str, str]
) -> str:
    verdict = trace.verdicts.get(action.id)
    call = trace.calls.get(action.id)
    facts = [transition.path or transition.node] if transition and transition.node != action.agent else []
    facts += [f"attempt {transition.attempt}"] if transition and transition.attempt > 1 else []
    facts += [f"v{call.version}", f"{len(call.completion_ids)} tokens"] if call else ["no tokens captured"]
    facts += ["cut off" if action.finish_reason == "length" else action.finish_reason] if action.finish_reason else []
    facts += [] if action.kept else ["discarded"]
    dot = f'<i class="agent-dot {css_of_agent[action.agent]}-bg"></i>' if action.agent in css_of_agent else ""
    body = [_seen(action)]
    body += [f'<div class="stream bad">{_text(action.error)}</div>'] if action.error else []
    body += [f'<pre class="said">{_text(action.output)}</pre>'] if action.output.strip() else []
    for call_made in action.tool_calls:
        name, arguments = tool_call_text(call_made)
        body.append(f'<div class="ran"><b>called {esc(name)}</b></div><pre class="code">{_text(arguments)}</pre>')
    body += [_execution(execution, action.output) for execution in action.executions]
    body.append(_coach(verdict, names))
    return (
        f'<article class="action"><header>{dot}<b>{esc(names.get(action.id, action.agent))}</b>'
        f'<span class="facts">{esc(" · ".join(facts))}</span>{chip(verdict.score if verdict else None)}</header>{"".join(body)}</article>'
    )


def _seen(action: Action) -> str:
    if not action.messages:
        return ""
    shown = list(action.messages)[-MESSAGES:]
    items = []
    for message in shown:
        calls = message.get("tool_calls")
        called = [" ".join(tool_call_text(c)) for c in calls if isinstance(c, Mapping)] if isinstance(calls, list | tuple) else []
        text = "\n".join(part for part in (content_text(message.get("content")), *called) if part)
        items.append(f'<div class="message"><b>{esc(message.get("role", "?"))}</b><pre>{_text(text)}</pre></div>')
    left_out = len(action.messages) - len(shown)
    more = f'<p class="aside">{left_out} earlier messages are left out.</p>' if left_out else ""
    count = "1 message" if len(action.messages) == 1 else f"{len(action.messages)} messages"
    preview = esc(one_line(content_text(shown[-1].get("content")), 90))
    return f'<details class="saw"><summary><b>saw {count}</b> <span>… {preview}</span></summary>{more}{"".join(items)}</details>'


def _execution(execution: Execution, output: str) -> str:
    css = "ok" if execution.status == "ok" else "bad"
    parts = [
        f'<div class="ran"><b>{esc(execution.name)}</b> <span class="{css}">{esc(execution.status)}</span>'
        f'<span class="facts">{execution.duration_s * 1000:.0f} ms</span></div>'
    ]
    code = execution.code.strip()
    if code and code in output:
        parts.append(f'<details class="saw"><summary><b>the code as it ran</b></summary><pre class="code">{_text(code)}</pre></details>')
    elif code:
        parts.append(f'<pre class="code">{_text(code)}</pre>')
    for label, text, kind in (("stdout", execution.stdout, ""), ("result", execution.result, ""), ("stderr", execution.stderr, "warn")):
        if text and text.strip():
            parts.append(f'<div class="stream {kind}"><b>{label}</b>{_text(text.rstrip())}</div>')
    if execution.error is not None:
        error = execution.error
        text = error.traceback or f"{error.type}: {error.message}"
        parts.append(f'<div class="stream bad"><b>{esc(error.type)}</b>{_text(text)}</div>')
    if execution.files:
        files = ", ".join(f"{f.path} {f.change}" for f in execution.files[:12])
        parts.append(f'<div class="stream"><b>files</b>{esc(files)}</div>')
    if execution.note:
        parts.append(f'<div class="stream warn"><b>note</b>{_text(execution.note)}</div>')
    if len(parts) == 1 + bool(code) and execution.status == "ok":
        parts.append('<div class="stream"><b>no output</b></div>')
    return "".join(parts)


def _coach(verdict: Verdict | None, names: Mapping[str, str]) -> str:
    if verdict is None:
        return '<div class="coach none">No verdict was recorded.</div>'
    if verdict.score is None:
        why = verdict.error or verdict.reason or "no reason given"
        return f'<div class="coach none"><b>No score.</b> {_inline(why)}</div>'
    blame = f'<div class="blame">blames {esc(", ".join(blamed(verdict, names)))}</div>' if verdict.blame else ""
    better = (
        f'<details class="saw"><summary><b>a better action</b></summary><pre>{_text(verdict.better_action)}</pre></details>'
        if verdict.better_action
        else ""
    )
    who = f'<span class="facts">{esc(verdict.coach)}</span>' if verdict.coach else ""
    return f'<div class="coach {score_css(verdict.score)}-edge">{_inline(verdict.reason)} {who}{blame}{better}</div>'


def _text(text: str) -> str:
    return esc(clip(printable(text), LIMIT))


def _inline(text: str | None) -> str:
    return esc(clip(printable(text or "").strip(), LIMIT))

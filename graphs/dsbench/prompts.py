"""What each agent is told and shown, as plain chat messages: the one place where prompts are made.

The graph and the warm-start demonstrations both call `messages`, so that a model trained on the one meets exactly the same text in the
other. Two styles: "standard" for language models that write code, and "compact", a handful of tokens, for a model of about a million
parameters that names a recipe of the catalogue (`catalogue.py`). Two visibilities: "full" shows an agent the summaries of all before it,
"previous" only that of the agent right before it. Files are there for everyone to see in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from mappa_graph.agent import Agent
from mappa_graph.errors import ConfigError
from mappa_graph.record import Execution

from .facts import Facts, columns_due
from .state import FileNote, Summary, Turn
from .text import DONE, cap, neutral, quoted

Prompts = Literal["standard", "compact"]
Visibility = Literal["full", "previous"]
Style = Literal["blocks", "tools"]
Message = dict[str, str]

TASK_LIMIT, TEXT_LIMIT, OBSERVATION_LIMIT, FILE_LIMIT = 12_000, 4000, 2000, 700
"""Characters of the task, of a summary or message, of stdout (and of stderr with the error), and of what a file holds, in a prompt."""
_FILES = 24

TITLES = {"data_engineer": "Data Engineer", "modeler": "Modeler", "analyst": "Analyst"}
TEAM: tuple[Agent, ...] = (
    Agent(
        "data_engineer",
        role="Data Engineer: reads train.csv and test.csv and writes X_train.pkl, y_train.pkl and X_test.pkl (pandas pickles): numeric "
        "features without the id and without any target, the same columns in X_train and X_test, rows of X_test in the order of test.csv.",
        reads=("train.csv", "test.csv"),
        writes=("X_train.pkl", "y_train.pkl", "X_test.pkl"),
    ),
    Agent(
        "modeler",
        role="Modeler: loads X_train.pkl and y_train.pkl, fits a model that suits the task and writes it to model.pkl; it has `predict`.",
        reads=("X_train.pkl", "y_train.pkl"),
        writes=("model.pkl",),
    ),
    Agent(
        "analyst",
        role="Analyst: loads model.pkl and X_test.pkl, predicts, and writes submission.csv with the columns that the task asks for, one "
        "row for each row of test.csv.",
        reads=("model.pkl", "X_test.pkl", "test.csv"),
        writes=("submission.csv",),
    ),
)
AGENTS = tuple(agent.name for agent in TEAM)
_CODE = {
    "blocks": "Write Python code in blocks that start with ```python and end with ```. They run in one Jupyter kernel that the whole team "
    "shares; you then see what they printed, or the error. You have {turns} turns. Your part is over as soon as what you owe "
    f"is there, or when you write {DONE} alone on a line. Write one or two sentences beside your code: they are what the next agent reads.",
    "tools": "Run Python code with the tool; it runs in one Jupyter kernel that the whole team shares. You may ask for it {turns} times. "
    "When what you owe is there, say in one or two sentences what you did: that is what the next agent reads.",
}
_COMPACT = {"data_engineer": "data", "modeler": "model", "analyst": "submit"}


def check_style(prompts: str, visibility: str, style: str) -> None:
    """Raises `ConfigError` for a choice that does not exist."""
    for what, value, known in (
        ("prompts", prompts, get_args(Prompts)),
        ("visibility", visibility, get_args(Visibility)),
        ("style", style, get_args(Style)),
    ):
        if value not in known:
            raise ConfigError(f"{what} is {value!r}", hint=f"choose from: {', '.join(known)}")
    if prompts == "compact" and style == "tools":
        raise ConfigError("prompts='compact' has no tools: the model names recipes", hint="use style='blocks'")


def system_message(agent: Agent, style: Style = "blocks", *, turns: int = 4, prompts: Prompts = "standard") -> Message:
    if prompts == "compact":
        return {"role": "system", "content": _COMPACT.get(agent.name, agent.name)}
    title = title_of(agent.name)
    role = agent.role.removeprefix(f"{title}: ")
    return {"role": "system", "content": f"You are the {title} of a team: {role}\n{_CODE[style].format(turns=turns)}"}


def briefing(
    agent: Agent,
    task: str,
    facts: Facts,
    files: Sequence[FileNote],
    summaries: Sequence[Summary],
    *,
    visibility: Visibility = "full",
    missing: Sequence[str] = (),
) -> str:
    """What an agent is told when its part begins: the task, what is due, the files there are, and what those before it said."""
    parts = [f"Task:\n{cap(neutral(task), TASK_LIMIT)}"]
    due = _due(facts)
    if due:
        parts.append(due)
    parts.append("Files in the current folder:\n" + "\n".join(_file_line(note) for note in files[:_FILES]))
    if len(files) > _FILES:
        parts[-1] += f"\n({len(files) - _FILES} more)"
    if missing:
        parts.append(f"Missing, though you need it: {', '.join(missing)}. Do what you can, and say plainly what is missing.")
    for summary in summaries if visibility == "full" else summaries[-1:]:
        parts.append(f"The {title_of(summary['agent'])} said:\n{quoted(summary['text'], TEXT_LIMIT) or '(nothing)'}")
    if agent.writes:
        parts.append(f"You owe: {', '.join(agent.writes)}")
    return "\n\n".join(parts)


def messages(
    agent: Agent,
    task: str,
    facts: Facts,
    files: Sequence[FileNote],
    summaries: Sequence[Summary] = (),
    turns: Sequence[Turn] = (),
    *,
    prompts: Prompts = "standard",
    visibility: Visibility = "full",
    missing: Sequence[str] = (),
    most_turns: int = 4,
) -> list[Message]:
    """The prompt of the turn after `turns`; its own earlier turns follow as a conversation.

    `files` and `missing` are as they were when the agent's part began.
    """
    if prompts == "compact":
        content = " ".join(compact_facts(facts, files, missing))
    else:
        content = briefing(agent, task, facts, files, summaries, visibility=visibility, missing=missing)
    out = [system_message(agent, turns=most_turns, prompts=prompts), {"role": "user", "content": content}]
    for turn in turns:
        seen = turn["observation"] or ("no code" if prompts == "compact" else _no_code(agent))
        out.append({"role": "assistant", "content": quoted(turn["text"], TEXT_LIMIT)})
        out.append({"role": "user", "content": seen if prompts == "compact" or not turn["observation"] else f"Your code gave:\n{seen}"})
    return out


def compact_facts(facts: Facts, files: Sequence[FileNote], missing: Sequence[str]) -> list[str]:
    """The words of a compact prompt: the kind of task, what a prediction is, and which inputs are missing."""
    words = [facts.get("kind", "task"), facts.get("form", "")]
    return [*(word for word in words if word), *(f"no {name}" for name in missing)]


def observe(executions: Sequence[Execution], owed: Sequence[str] = (), *, prompts: Prompts = "standard") -> str:
    """What an agent is shown of its runs: output, value, error, and what it still owes; capped, neutral."""
    if prompts == "compact":
        last = executions[-1] if executions else None
        if last is not None and last.status != "ok":
            return f"error: {cap(neutral(last.error.type if last.error else last.status), 40)}"
        return f"no {' '.join(owed)}" if owed else "ok"
    shown = [_long(execution) for execution in executions]
    if executions and owed:
        shown.append(f"Not there yet: {', '.join(owed)}")
    return "\n".join(shown)


def title_of(agent: str) -> str:
    return TITLES.get(agent, agent.replace("_", " ").title())


def _due(facts: Facts) -> str:
    lines = []
    if facts.get("kind"):
        many = f", one of: {', '.join(facts['labels'][:30])}" if facts.get("labels") else ""
        lines.append(f"Predict {', '.join(facts.get('targets', [])) or 'the target'} ({facts['kind']}{many}).")
    if facts.get("form"):
        of = f" of {facts['positive']}" if facts["form"] == "probability" and facts.get("positive") else ""
        lines.append(f"Each prediction is a {facts['form']}{of}.")
    columns = columns_due(facts)
    if columns:
        rows = f", one row for each of the {facts['test_rows']} rows of test.csv" if "test_rows" in facts else ""
        lines.append(f"submission.csv has the columns {','.join(columns)}{rows}.")
    if facts.get("metric"):
        lines.append(f"It is graded by {facts['metric']}.")
    return neutral("\n".join(lines))


def _file_line(note: FileNote) -> str:
    by = f"written by the {title_of(note['by'])}" if note["by"] else "comes with the task"
    first, _, rest = cap(neutral(note["shows"]), FILE_LIMIT).partition("\n")
    line = f"- {neutral(note['name'])[:200]} ({by}, {note['size']} bytes)" + (f": {first}" if first else "")
    return line + ("\n  " + rest.replace("\n", "\n  ") if rest else "")


def _no_code(agent: Agent) -> str:
    owed = f" You owe {', '.join(agent.writes)}." if agent.writes else ""
    return f"There was no ```python block in your message, so nothing was run.{owed} Write one, or {DONE} alone on a line."


def _long(execution: Execution) -> str:
    parts: list[str] = []
    stdout, value = execution.stdout.rstrip(), (execution.result or "").rstrip()
    shown = "\n".join(text for text in (stdout, value) if text)
    if shown:
        parts.append(cap(neutral(shown), OBSERVATION_LIMIT))
    error = execution.error
    failed = "" if error is None else (error.traceback or f"{error.type}: {error.message}").rstrip()
    stderr = "\n".join(text for text in (execution.stderr.rstrip(), failed) if text)
    if stderr:
        parts.append("[stderr]\n" + cap(neutral(stderr), OBSERVATION_LIMIT))
    if execution.status not in ("ok", "error"):
        parts.append(f"[{execution.status}] the code was stopped")
    changed = [f"{change.change} {neutral(change.path)[:200]}" for change in execution.files[:20]]
    if changed:
        parts.append(f"[files] {', '.join(changed)}")
    notes = [line for line in execution.note.splitlines() if line and not line.startswith("[")]
    if notes:
        parts.append(f"[note] {cap(neutral(' '.join(notes)), 300)}")
    return "\n".join(parts) or "[no output: print() what you want to see]"

"""`mappa-graph import` and `mappa-graph feedback`: traces of production apps in, verdicts back to them.

A key for a service is taken from its environment variable (`LANGSMITH_API_KEY`, …), never from an option, which a shell would keep.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import ConfigError
from .options import RunArgument, interruptible

if TYPE_CHECKING:
    from ..agent import Agent
    from ..exchange.importer import Imported, Source
    from ..exchange.writeback import WrittenBack

_AGO = re.compile(r"(\d+)([mhdw])\Z")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SHOWN = 12


def register(app: typer.Typer) -> None:
    app.command("import")(import_)
    app.command("feedback")(feedback)


def import_(
    source: Annotated[
        list[str], typer.Argument(help="langsmith:PROJECT, mlflow:EXPERIMENT, or files and folders (.jsonl, .json, .gz, .parquet).")
    ],
    into: Annotated[Path, typer.Option("--into", help="Folder of a run, new or old.")],
    agent: Annotated[
        list[str] | None, typer.Option("--agent", help='Who acts: NAME, or "node/path/**=NAME" for models without a mark. May be repeated.')
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="Of files: chat, langsmith, otel or spans; default: told from the rows.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Of services: only traces from then on: 2026-01-31, or 7d, 12h, 30m ago.")] = None,
    until: Annotated[str | None, typer.Option(help="Of services: only traces up to then.")] = None,
    filter: Annotated[
        str | None, typer.Option(help="Of services, in their own language: 'eq(feedback_key, \"user_score\")', \"status = 'OK'\".")
    ] = None,
    uri: Annotated[str | None, typer.Option(help="MLflow's tracking URI; default: MLFLOW_TRACKING_URI.")] = None,
    calls: Annotated[Path | None, typer.Option(help="trace.db of the gateway that the app spoke to: its tokens are joined by id.")] = None,
    environment: Annotated[str, typer.Option(help="The name that episodes are stored with.")] = "",
    split: Annotated[str, typer.Option(help="The split that episodes are stored with.")] = "train",
    graph: Annotated[
        str | None, typer.Option(help="The compiled graph, package.module:object, for exact parents of parallel nodes.")
    ] = None,
    outcome: Annotated[str | None, typer.Option(help="The feedback key that says whether a trace was a success.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", help="Only this feedback key becomes labels. May be repeated.")] = None,
    scale: Annotated[
        list[str] | None, typer.Option("--scale", help="The range of a feedback key, where its values don't tell: stars=1..5.")
    ] = None,
    redact: Annotated[
        str | None, typer.Option("--redact", help="Rules besides keys, which are always taken out: email,phone,card,ip, or all.")
    ] = None,
    redact_pattern: Annotated[
        list[str] | None, typer.Option("--redact-pattern", help="A rule of your own: NAME=REGEX. May be repeated.")
    ] = None,
    again: Annotated[bool, typer.Option(help="Read from the beginning, for feedback that came since; nothing is added twice.")] = False,
    strict: Annotated[bool, typer.Option(help="End at the first record that can't be read.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Import traces of an app in production; the same command again adds what is new, and goes on where it was stopped.

    Example: `mappa-graph import langsmith:my-app --since 7d --into runs/production --agent "planner/**=planner"`
    """
    from ..exchange.importer import Importer
    from ..exchange.redact import redactor

    console = Console()
    shown = 0

    def progress(done: Imported) -> None:
        nonlocal shown
        if not quiet and done.actions - shown >= 5000:
            shown = done.actions
            console.print(
                f"{done.traces + done.updated} traces, {done.actions} actions, {done.actions / max(done.seconds, 1e-9):.0f} a second"
            )

    with (
        interruptible(),
        Importer(
            into,
            agents=agents_of(agent),
            environment=environment,
            split=split,
            redact=redactor(redact, redact_pattern),
            calls=calls,
            graph=_graph(graph),
            outcome_key=outcome,
            scales=scales_of(scale),
            label_keys=label,
            strict=strict,
        ) as importer,
    ):
        for name in source:
            found = _source(name, into, format, _time(since), _time(until), filter, uri, not agent)
            _report(console, importer.take(found, progress=progress, again=again), into)


def feedback(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="langsmith or mlflow.")],
    key: Annotated[str, typer.Option(help="The name of the feedback.")] = "mappa_score",
    split: Annotated[str, typer.Option(help="Which episodes: train, an evaluation's name, or all.")] = "all",
    project: Annotated[str | None, typer.Option(help="LangSmith: the project of runs that were recorded live.")] = None,
    uri: Annotated[str | None, typer.Option(help="MLflow's tracking URI; default: MLFLOW_TRACKING_URI.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Write a coach's verdicts back to where the traces live; the same command again sends only what changed.

    Example: `mappa-graph feedback runs/production --to langsmith`
    """
    from ..exchange.writeback import LangSmithTarget, MlflowTarget, write_back

    console = Console()
    if to not in ("langsmith", "mlflow"):
        raise ConfigError(f"--to {to!r} is no place to write to", hint="langsmith or mlflow")
    if to == "mlflow" and project is not None:
        raise ConfigError("--project can't take effect with --to mlflow", hint="leave it out; a span's trace names its experiment")
    if to == "langsmith" and uri is not None:
        raise ConfigError("--uri can't take effect with --to langsmith", hint="set LANGSMITH_ENDPOINT")
    target = LangSmithTarget(project=project) if to == "langsmith" else MlflowTarget(uri=uri)

    def progress(done: WrittenBack) -> None:
        if not quiet:
            console.print(f"{done.written} written")

    with interruptible():
        done = write_back(run, target, key=key, split=None if split == "all" else split, progress=progress)
    console.print(
        f"{done.written} verdicts written to {to} as {key!r} ({done.changed} of them changed), {done.unchanged} were there", markup=False
    )
    if done.unscored:
        console.print(f"{done.unscored} verdicts have no score, and are not sent")
    if done.foreign:
        console.print(f"{done.foreign} are of actions that are not {to}'s")
    for cause, count in done.failed.most_common():
        console.print(f"{count} x {cause}", style="yellow", markup=False)


def agents_of(given: Sequence[str] | None) -> dict[str, Agent] | list[Agent] | None:
    """Agents from `NAME` and `GLOB=NAME` options: a list, or a mapping where one has a glob."""
    from ..agent import Agent

    if not given:
        return None
    if not any("=" in one for one in given):
        return [Agent(name) for name in dict.fromkeys(given)]
    out: dict[str, Agent] = {}
    made: dict[str, Agent] = {}
    for one in given:
        path, found, name = one.rpartition("=")
        agent = made.setdefault(name, Agent(name))
        # A bare name is looked for by the team itself; its glob is one that no node path has.
        out[path if found else f"\0{name}"] = agent
    return out


def scales_of(given: Sequence[str] | None) -> dict[str, tuple[float, float]]:
    """Ranges from `KEY=LOW..HIGH` options."""
    out = {}
    for one in given or ():
        key, _, span = one.rpartition("=")
        low, found, high = span.partition("..")
        try:
            ends = float(low), float(high)
        except ValueError:
            ends = (0.0, 0.0)
        if not key or not found or not ends[0] < ends[1]:
            raise ConfigError(f"--scale {one!r} is no range", hint="KEY=LOW..HIGH, e.g. stars=1..5")
        out[key] = ends
    return out


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    ago = _AGO.match(text)
    if ago is not None:
        return datetime.now(UTC) - timedelta(**{_UNITS[ago.group(2)]: int(ago.group(1))})
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no time", hint="an ISO date or time, or 7d, 12h, 30m ago") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _graph(name: str | None) -> Any:
    if name is None:
        return None
    import sys

    from ..coach.make import import_object

    sys.path.insert(0, "")
    return import_object(name, "--graph")


def _source(
    name: str,
    into: Path,
    format: str | None,
    since: datetime | None,
    until: datetime | None,
    filter: str | None,
    uri: str | None,
    nameless: bool,
) -> Source:
    from ..exchange.files import FileSource

    service, found, rest = name.partition(":")
    if found and service in ("langsmith", "mlflow"):
        if not rest:
            raise ConfigError(f"{name!r} names no {'project' if service == 'langsmith' else 'experiment'}", hint=f"{service}:NAME")
        if format is not None:
            raise ConfigError(f"--format can't take effect with {name!r}", hint="leave it out")
        if service == "langsmith":
            from ..exchange.langsmith import LangSmithSource

            if uri is not None:
                raise ConfigError("--uri can't take effect with LangSmith", hint="set LANGSMITH_ENDPOINT")
            return LangSmithSource(rest, into, since=since, until=until, filter=filter)
        from ..exchange.mlflow import MlflowSource

        return MlflowSource(rest, uri=uri, since=since, until=until, filter=filter)
    if since or until or filter or uri:
        raise ConfigError("--since, --until, --filter and --uri can't take effect with a file", hint="filter when you export or train")
    return FileSource(name, into, format=format, agent="assistant" if nameless else None)


def _report(console: Console, done: Imported, into: Path) -> None:
    rate = done.actions / done.seconds if done.seconds else 0.0
    console.print(
        f"{done.source}: {done.traces} traces in, {done.updated} updated, {done.known} known, {done.live} recorded live, "
        f"{done.empty} without a model call, {done.failed} unreadable",
        markup=False,
    )
    console.print(f"{done.actions} actions, {done.executions} executions, {rate:.0f} actions a second")
    if done.unscored:
        console.print(
            f"{done.unscored} verdicts were taken away: what they judged has changed. Score those actions again: mappa-graph coach {into}",
            markup=False,
        )
    if done.actions:
        console.print(
            f"{done.exact} actions have the gateway's tokens; {done.text_only} are text only: for SFT, preferences and coaching, "
            "not for on-policy training"
        )
    _table(console, "agent", "actions", done.agents)
    _table(console, "lost by the source", "times", done.lost)
    if done.problems:
        table = Table("mended or left out", "times", "for example")
        for what, count in done.problems.most_common():
            table.add_row(_plain(what), str(count), _plain(done.examples.get(what, ""))[:100])
        console.print(table)
    if done.unknown:
        _table(console, "calls of no known agent", "times", done.unknown)
        console.print("name them to have them coached and trained: --agent 'path/**=NAME'", markup=False)
    for key, said in done.scales.items():
        console.print(f"feedback {key}: {said}", markup=False)
    if done.labels:
        console.print(
            f"{done.labels} actions have human labels: mappa-graph coach validate {into} --labels {into / 'labels.jsonl'}", markup=False
        )


def _table(console: Console, what: str, number: str, counts: Counter[str]) -> None:
    if not counts:
        return
    table = Table(what, number)
    for name, count in counts.most_common(_SHOWN):
        table.add_row(_plain(name), str(count))
    if len(counts) > _SHOWN:
        table.add_row(f"… {len(counts) - _SHOWN} more", "")
    console.print(table)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "�" for c in text))

"""`mappa-graph traces`, `report` and `doctor`: looking at what there is."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError
from .options import RunArgument, open_store

traces_app = typer.Typer(help="Look at recorded episodes.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(traces_app, name="traces")
    for command in (report, doctor):
        app.command()(command)


@traces_app.command("list")
def traces_list(
    run: RunArgument,
    split: Annotated[str | None, typer.Option(help="train, or an evaluation's name.")] = None,
    iteration: Annotated[int | None, typer.Option(help="Only this iteration.")] = None,
    limit: Annotated[int, typer.Option(min=1)] = 30,
) -> None:
    """List episodes.

    Example: `mappa-graph traces list runs/demo --iteration 3`
    """
    from ..inspect import render_list

    with open_store(run) as store:
        Console().print(render_list(store, split=split, iteration=iteration, limit=limit))


@traces_app.command("show")
def traces_show(run: RunArgument, episode: Annotated[str, typer.Argument(help="Episode id, or the start of one.")]) -> None:
    """Show one episode, action by action.

    Example: `mappa-graph traces show runs/demo 3f2a`
    """
    from ..inspect import render_episode

    with open_store(run) as store:
        trace = store.episode(episode)
        if trace is None and episode:
            near = [e.id for e in islice((e for e in store.episodes() if e.id.startswith(episode)), 3)]
            if len(near) > 1:
                raise ConfigError(f"{run} has several episodes that begin with {episode!r}: {', '.join(near)}", hint="give more of the id")
            trace = next(store.traces(ids=near), None)
        if trace is None:
            raise ConfigError(f"{run} has no episode {episode!r}", hint=f"see: mappa-graph traces list {run}")
        Console().print(render_episode(trace, orphans=store.orphan_counts(trace.episode.id)))


def report(run: RunArgument) -> None:
    """Write a run's report.html again; works while the run is going on.

    Example: `mappa-graph report runs/demo`
    """
    from ..report import write_report

    with open_store(run):
        pass
    Console().print(f"the report: [bold]{escape(str(write_report(run)))}[/]")


def doctor() -> None:
    """Say what this machine has of what is needed: packages, sandbox isolation, models.

    Example: `mappa-graph doctor`
    """
    from ..doctor import Check, examine, examine_sandbox

    checks = examine()
    try:
        from ..sandboxes import describe_isolation
    except ImportError as error:
        checks.append(Check("sandbox", "optional", f"{error}; pip install 'mappa-graph[sandbox]'"))
    else:
        checks += examine_sandbox(describe_isolation())  # tries it out, which takes a second or two
    table = Table("part", "state", "detail")
    missing = False
    for check in checks:
        missing |= check.state == "missing"
        colour = {"ok": "green", "optional": "yellow", "missing": "red"}[check.state]
        table.add_row(escape(check.part), f"[{colour}]{check.state}[/]", escape(check.detail))
    Console().print(table)
    if missing:
        raise typer.Exit(1)

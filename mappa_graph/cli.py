"""The command line. Each command is a thin wrapper: settings in, one library call, a message out.

A user's mistake ends with a message and exit code 1, never a traceback; Ctrl-C ends with 130 and says what was kept.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import json
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .commands import coach_app
from .config import RunConfig, load_config
from .configs import find, names
from .errors import ConfigError, MappaError

if TYPE_CHECKING:
    from .environment import Environment

app = typer.Typer(
    name="mappa-graph",
    help="Train the agents of a LangGraph app: a coach scores every action, each agent's own weights learn from it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
traces_app = typer.Typer(help="Look at recorded episodes.", no_args_is_help=True)
app.add_typer(traces_app, name="traces")

ConfigOption = Annotated[str, typer.Option("--config", "-c", help=f"A YAML file, or one of: {', '.join(names())}.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", "-s", help="Change a setting: train.iterations=5. May be repeated.")]
RunOption = Annotated[Path | None, typer.Option("--run", help="Folder of the run.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of tasks, sampling and training.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print the final table only.")]
RunArgument = Annotated[Path, typer.Argument(help="Folder of a run.")]


def _settings(config: str, overrides: Sequence[str] | None, run: Path | None, seed: int | None) -> RunConfig:
    extra = [*(overrides or [])]
    if run is not None:
        extra.append(f"run={json.dumps(str(run))}")
    if seed is not None:
        extra.append(f"seed={seed}")
    return load_config(find(config), extra)


def load_environment(config: RunConfig) -> Environment:
    """The environment a config names: a built-in one, or `package.module:object` (an `Environment`, or a function making one)."""
    from .environment import Environment

    name, options = config.environment.name, config.environment.options
    if ":" in name:
        from .coach.make import import_object

        sys.path.insert(0, "")
        made = import_object(name, "environment.name")
        if isinstance(made, Environment):
            if options:
                raise ConfigError(f"environment.options can't take effect: {name!r} is an Environment, not a function that makes one")
            return made
        factory = made
    else:
        from . import graphs

        if name not in graphs.__all__:
            raise ConfigError(
                f"there is no environment {name!r}", hint=f"use one of: {', '.join(graphs.__all__)}; or package.module:object"
            )
        factory = importlib.import_module(f"mappa_graph.graphs.{name}").environment
    try:
        made = factory(**options)
    except TypeError as error:
        raise ConfigError(f"environment.options don't fit {name!r}: {error}") from error
    if not isinstance(made, Environment):
        raise ConfigError(f"environment.name {name!r} made a {type(made).__name__}, not an Environment")
    return made


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends a command with a message; what it had recorded stays."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; what was recorded is kept, and the same command continues")
        raise typer.Exit(130) from None


def _train(config: RunConfig, quiet: bool) -> dict[str, Any]:
    from .display import Display
    from .trainers.run import train

    with _interruptible():
        return train(load_environment(config), config, display=Display(quiet=quiet))


@app.command()
def demo(seed: SeedOption = None, run: RunOption = None, overrides: SetOption = None, quiet: QuietOption = False) -> None:
    """Train the MathChat team on this machine, with real parts all the way, in a few minutes.

    Example: `mappa-graph demo --seed 1 --run runs/demo1`
    """
    config = _settings("demo", overrides, run, seed)
    _train(config, quiet)
    Console().print(f"the report: [bold]{escape(str(config.run / 'report.html'))}[/]")


@app.command()
def train(
    config: ConfigOption = "demo", overrides: SetOption = None, run: RunOption = None, seed: SeedOption = None, quiet: QuietOption = False
) -> None:
    """Train an environment's agents; the same command again continues an interrupted run.

    Example: `mappa-graph train --config my.yaml --run runs/mine --set train.iterations=50`
    """
    settings = _settings(config, overrides, run, seed)
    _train(settings, quiet)
    Console().print(f"the report: [bold]{escape(str(settings.run / 'report.html'))}[/]")


@app.command()
def evaluate(
    config: ConfigOption = "demo",
    tasks: Annotated[Path | None, typer.Option(help="A JSON or JSONL file of problems, instead of the environment's own.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many tasks.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Episodes a task.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    trained: Annotated[Path | None, typer.Option("--from", help="Use the weights of this run instead of the first ones.")] = None,
    step: Annotated[str, typer.Option(help="Which checkpoint of it: best, last, or a number.")] = "last",
    on_bad_row: Annotated[str, typer.Option(help="What to do with a row that is not a task: error or skip.")] = "error",
    run: Annotated[Path | None, typer.Option("--run", help="Folder for episodes and results.")] = None,
    overrides: SetOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run a team on held-out tasks or on a file of problems, and report accuracy, behaviour and failures.

    Example: `mappa-graph evaluate --config smollm2 --tasks problems.json --limit 8`
    """
    from .display import Display
    from .trainers.run import evaluate_team

    extra = [*(overrides or [])]
    if tasks is not None:
        extra += [
            f"environment.options.tasks_file={json.dumps(str(tasks))}",
            f"environment.options.on_bad_row={on_bad_row}",
            "evaluate.split=all",
        ]
    settings = _settings(config, extra, run, None)
    if run is None:
        settings = settings.model_copy(update={"run": settings.run.with_name(f"{settings.run.name}-evaluate")})
    with _interruptible():
        result = asyncio.run(
            evaluate_team(
                load_environment(settings),
                settings,
                limit=limit,
                samples=samples,
                temperature=temperature,
                trained=trained,
                step=step,
                display=Display(quiet=quiet),
            )
        )
    _print_evaluation(result, settings.run)


def _print_evaluation(result: dict[str, Any], folder: Path) -> None:
    console = Console()
    low, high = result["ci95"]
    console.print(
        f"accuracy [bold]{result['accuracy']:.1%}[/] (95% interval {low:.1%} to {high:.1%}) on {result['n']} tasks, {result['mode']}"
    )
    table = Table("agent", "actions", "mean tokens", "truncated", "used a tool", "executions", "errors")
    for name, row in result["agents"].items():
        length = "-" if row["length_mean"] is None else f"{row['length_mean']:.1f}"
        table.add_row(
            escape(name),
            str(row["actions"]),
            length,
            str(row["truncated"]),
            f"{row['tool_use']:.0%}",
            escape(json.dumps(row["executions"])),
            escape(json.dumps(row["errors"])),
        )
    console.print(table)
    failures = ", ".join(f"{k} x {v}" for k, v in result["failures"].items()) or "none"
    console.print(f"failed episodes: {escape(failures)}")
    skipped = result.get("rows_skipped", ())
    if skipped:
        console.print(f"rows that are not tasks, skipped: {len(skipped)}")
        for message in skipped[:5]:
            console.print(f"  {escape(message)}")
    console.print(f"episodes and results: {escape(str(folder))}")


@app.command()
def rollout(
    config: ConfigOption = "demo",
    limit: Annotated[int, typer.Option(min=1, help="How many tasks of the train split.")] = 8,
    run: RunOption = None,
    overrides: SetOption = None,
    seed: SeedOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run and coach episodes without training, and print what the coach thought.

    Example: `mappa-graph rollout --config demo --limit 4 --run runs/look`
    """
    from .display import Display
    from .inspect import render_list
    from .store import TraceStore
    from .trainers.run import roll_out

    settings = _settings(config, overrides, run, seed)
    if run is None:
        settings = settings.model_copy(update={"run": settings.run.with_name(f"{settings.run.name}-rollout")})
    with _interruptible():
        asyncio.run(roll_out(load_environment(settings), settings, limit=limit, display=Display(quiet=quiet)))
    with TraceStore(settings.run / "trace.db", read_only=True) as store:
        Console().print(render_list(store, limit=limit))
    Console().print(f"one in full: mappa-graph traces show {escape(str(settings.run))} EPISODE")


@app.command()
def serve(
    config: ConfigOption = "demo",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")] = 8000,
    trained: Annotated[Path | None, typer.Option("--from", help="Serve the weights of this run instead of the first ones.")] = None,
    step: Annotated[str, typer.Option(help="Which checkpoint of it: best, last, or a number.")] = "last",
    run: Annotated[Path | None, typer.Option("--run", help="Folder whose trace.db keeps the calls.")] = None,
    overrides: SetOption = None,
) -> None:
    """Serve an environment's policies to a LangGraph app, and keep every call, until Ctrl-C.

    Example: `mappa-graph serve --config demo --from runs/demo --step best --port 8000`
    """
    from .display import Display
    from .gateway import Gateway
    from .store import TraceStore
    from .trainers.checkpoint import trained_weights
    from .trainers.run import make_engine, prepare_folder, resolve_models

    settings = _settings(config, overrides, run, None)
    if run is None:
        settings = settings.model_copy(update={"run": settings.run.with_name(f"{settings.run.name}-serve")})
    with _interruptible():
        prepare_folder(settings)
        models = resolve_models(load_environment(settings), settings, Display())
        if trained is not None:
            models.update({p: w for p, w in trained_weights(trained, step).items() if p in models})
        with TraceStore(settings.run / "trace.db") as store:
            with Gateway(make_engine(settings, models), store, host=settings.gateway.host, port=port) as gateway:
                names = ", ".join(gateway.versions())
                Console().print(
                    f"serving {escape(names)} at [bold]{gateway.url}[/]; calls are kept in {escape(str(store.path))}; Ctrl-C ends"
                )
                threading.Event().wait()


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
    from .inspect import render_list

    with _store(run) as store:
        Console().print(render_list(store, split=split, iteration=iteration, limit=limit))


@traces_app.command("show")
def traces_show(run: RunArgument, episode: Annotated[str, typer.Argument(help="Episode id, or the start of one.")]) -> None:
    """Show one episode, action by action.

    Example: `mappa-graph traces show runs/demo 3f2a`
    """
    from .inspect import render_episode

    with _store(run) as store:
        trace = store.episode(episode) or next((store.episode(e.id) for e in store.episodes() if e.id.startswith(episode)), None)
        if trace is None:
            raise ConfigError(f"{run} has no episode {episode!r}", hint=f"see: mappa-graph traces list {run}")
        Console().print(render_episode(trace, orphans=store.orphan_counts(trace.episode.id)))


app.add_typer(coach_app(load_environment), name="coach")


def _store(run: Path) -> Any:
    from .store import TraceStore

    path = run if run.is_file() else run / "trace.db"
    if not path.is_file():
        raise ConfigError(f"{run} holds no recorded run (no {path.name})", hint="give a run's folder, e.g. runs/demo")
    return TraceStore(path, read_only=True)


@app.command()
def report(run: RunArgument) -> None:
    """Write a run's report.html again; works while the run is going on.

    Example: `mappa-graph report runs/demo`
    """
    from .report import write_report

    with _store(run):
        pass
    Console().print(f"the report: [bold]{escape(str(write_report(run)))}[/]")


@app.command()
def doctor() -> None:
    """Say what this machine has of what is needed: packages, sandbox isolation, models.

    Example: `mappa-graph doctor`
    """
    from .doctor import Check, examine, examine_sandbox

    checks = examine()
    try:
        from .sandboxes import describe_isolation
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


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    errors = Console(stderr=True)
    try:
        app(args=list(argv) if argv is not None else None, standalone_mode=True)
    except MappaError as error:
        errors.print(f"[bold red]{error.kind} error[/]: {escape(str(error))}", highlight=False)
        sys.exit(1)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            errors.print(f"[bold red]disk full[/]: {escape(str(error))}\n  make room; the same command continues from what was recorded")
            sys.exit(1)
        raise


if __name__ == "__main__":
    main()

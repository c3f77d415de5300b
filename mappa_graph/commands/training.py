"""`mappa-graph train`, `evaluate` and `rollout`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .options import (
    ConfigOption,
    QuietOption,
    RunOption,
    SeedOption,
    SetOption,
    interruptible,
    load_environment,
    run_training,
    settings_of,
)


def register(app: typer.Typer) -> None:
    for command in (train, evaluate, rollout):
        app.command()(command)


def train(
    config: ConfigOption = "demo", overrides: SetOption = None, run: RunOption = None, seed: SeedOption = None, quiet: QuietOption = False
) -> None:
    """Train an environment's agents; the same command again continues an interrupted run.

    Example: `mappa-graph train --config my.yaml --run runs/mine --set train.iterations=50`
    """
    settings = settings_of(config, overrides, run, seed)
    run_training(settings, quiet)
    Console().print(f"the report: [bold]{escape(str(settings.run / 'report.html'))}[/]")


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
    from ..display import Display
    from ..trainers.run import evaluate_team

    extra = [*(overrides or [])]
    if tasks is not None:
        extra += [
            f"environment.options.tasks_file={json.dumps(str(tasks))}",
            f"environment.options.on_bad_row={on_bad_row}",
            "evaluate.split=all",
        ]
    settings = settings_of(config, extra, run, None)
    if run is None:
        settings = settings.model_copy(update={"run": settings.run.with_name(f"{settings.run.name}-evaluate")})
    with interruptible():
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
    from ..display import Display
    from ..inspect import render_list
    from ..store import TraceStore
    from ..trainers.run import roll_out

    settings = settings_of(config, overrides, run, seed)
    if run is None:
        settings = settings.model_copy(update={"run": settings.run.with_name(f"{settings.run.name}-rollout")})
    with interruptible():
        asyncio.run(roll_out(load_environment(settings), settings, limit=limit, display=Display(quiet=quiet)))
    with TraceStore(settings.run / "trace.db", read_only=True) as store:
        Console().print(render_list(store, limit=limit))
    Console().print(f"one in full: mappa-graph traces show {escape(str(settings.run))} EPISODE")

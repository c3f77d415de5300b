"""`mappa-graph train`, `evaluate` and `rollout`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..configs import names
from ..errors import ConfigError
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

if TYPE_CHECKING:
    from ..sections.offline import OfflineConfig

_TRACES = "From recorded traces"


def register(app: typer.Typer) -> None:
    for command in (train, evaluate, rollout):
        app.command()(command)


def train(
    config: Annotated[
        str | None, typer.Option("--config", "-c", help=f"A YAML file, or one of: {', '.join(names())}. Default: demo; none with --from.")
    ] = None,
    overrides: SetOption = None,
    run: RunOption = None,
    seed: SeedOption = None,
    quiet: QuietOption = False,
    source: Annotated[
        Path | None, typer.Option("--from", help="Train from the coached traces of this run (or trace.db).", rich_help_panel=_TRACES)
    ] = None,
    method: Annotated[
        Literal["sft", "dpo", "kto", "reinforce"] | None, typer.Option(help="Default: reinforce.", rich_help_panel=_TRACES)
    ] = None,
    agent: Annotated[
        list[str] | None, typer.Option("--agent", "-a", help="Only this agent. May be repeated.", rich_help_panel=_TRACES)
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="What to start from: tiny, smollm2, a folder (of a model, a training run, a deployment), or a Hugging Face name; "
            "POLICY=... for one policy. Default: the config's.",
            rich_help_panel=_TRACES,
        ),
    ] = None,
    retokenise: Annotated[
        bool, typer.Option("--retokenise", help="reinforce: make tokens of actions that have text only.", rich_help_panel=_TRACES)
    ] = False,
) -> None:
    """Train an environment's agents; the same command again continues an interrupted run.

    With --from, train from traces that were recorded or imported, and coached; --set then changes the settings of that training, e.g.
    `--set epochs=2 --set lr=1e-5`.

    Examples: `mappa-graph train --config my.yaml --run runs/mine --set train.iterations=50`,
    `mappa-graph train --from runs/production --model runs/live --run runs/better`
    """
    if source is not None:
        _train_from(source, config, overrides, run, seed, quiet, method, agent, model, retokenise)
        return
    given = {"--method": method, "--agent": agent, "--model": model, "--retokenise": retokenise or None}
    idle = [name for name, value in given.items() if value is not None]
    if idle:
        raise ConfigError(f"{', '.join(idle)}: no effect without --from", hint="name the traces: --from RUN; or use --set")
    settings = settings_of(config or "demo", overrides, run, seed)
    run_training(settings, quiet)
    Console().print(f"the report: [bold]{escape(str(settings.run / 'report.html'))}[/]")


def _train_from(
    source: Path,
    config: str | None,
    overrides: Sequence[str] | None,
    run: Path | None,
    seed: int | None,
    quiet: bool,
    method: str | None,
    agents: list[str] | None,
    models: Sequence[str] | None,
    retokenise: bool,
) -> None:
    from ..display import Display
    from ..trainers.offline import train_offline

    if run is None:
        raise ConfigError("a training from traces needs a folder of its own", hint="--run runs/NAME")
    given: dict[str, Any] = {"method": method, "seed": seed, "retokenise": retokenise or None}
    settings = _offline_settings(overrides or (), {name: value for name, value in given.items() if value is not None})
    named = settings_of(config, None, None, None) if config is not None else None
    environment = load_environment(named) if named is not None else None
    start = _models(models) if models else named.model if named is not None else None
    if start is None:
        raise ConfigError(
            "nothing says which weights to start from", hint="--model FOLDER (a model, a training run, a deployment), or --config FILE"
        )
    with interruptible():
        summary = train_offline(
            source, run, settings, models=start, agents=agents, environment=environment, display=Display(quiet=quiet, title="from traces")
        )
    _print_offline(summary, run)


def _offline_settings(overrides: Sequence[str], options: dict[str, Any]) -> OfflineConfig:
    import yaml

    from ..trainers.offline import make_offline_config

    data: dict[str, Any] = dict(options)
    for override in overrides:
        key, sep, text = override.partition("=")
        if not sep or not key:
            raise ConfigError(f"override {override!r} is not of the form key=value", hint="for example: epochs=2, lora.rank=8")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error
        *path, last = key.split(".")
        place = data
        for part in path:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        if key in options:
            raise ConfigError(f"{key} is given twice: as an option and by --set", hint="leave one of the two out")
        # Pydantic reads "1e-3", which YAML takes for a text, as the number it is; a date stays the text it was.
        place[last] = text if not isinstance(value, str | int | float | bool | list | dict | None) else value
    return make_offline_config(data)


def _models(given: Sequence[str]) -> str | dict[str, str]:
    """One model for all, or one by policy."""
    by_policy = {}
    for one in given:
        name, sep, spec = one.partition("=")
        if not sep:
            if len(given) > 1:
                raise ConfigError(f"--model {one!r} is for all policies, and not the only one", hint="write POLICY=MODEL for each")
            return one
        by_policy[name] = spec
    return by_policy


def _print_offline(summary: dict[str, Any], folder: Path) -> None:
    console = Console()
    table = Table(
        "policy", "trained on", "held out", "loss before", "after", "held-out before", "after", title=f"{summary['method']} from traces"
    )

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    for policy, one in summary["policies"].items():
        losses = [shown(one[when].get(side)) for side in ("train", "heldout") for when in ("before", "after")]
        table.add_row(escape(policy), str(one["rows"]["train"]), str(one["rows"]["heldout"]), *losses)
    console.print(table)
    for text in summary["warnings"]:
        console.print(f"note: {text}", style="yellow", markup=False)
    if summary["left_out"]:
        from ..trainers.batch import REASONS

        for reason, count in summary["left_out"].items():
            console.print(f"left out: {count} ({REASONS.get(reason, reason)})", markup=False)
    console.print(f"the weights: mappa-graph publish {folder} --share 0.1, or mappa-graph weights {folder} --out FOLDER", markup=False)


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
    parts = {f"pass@{k}": v for k, v in result["pass_at"].items()}
    if result["majority"]:
        parts["majority"] = result["majority"]
    for name, part in parts.items():
        console.print(f"{name} {part['value']:.1%} (95% interval {part['ci95'][0]:.1%} to {part['ci95'][1]:.1%})")
    for name, value in result["metrics"].items():
        console.print(f"{escape(name)} {'-' if value is None else f'{value:.4g}'}")
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
    """Run and coach episodes without training; `traces show` then prints what each action did, and what the coach thought of it.

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

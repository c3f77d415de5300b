"""What commands share: their options, the settings and the environment they name, Ctrl-C, a run's store."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..config import RunConfig, load_config
from ..configs import find, names
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..environment import Environment
    from ..store import TraceStore

ConfigOption = Annotated[str, typer.Option("--config", "-c", help=f"A YAML file, or one of: {', '.join(names())}.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", "-s", help="Change a setting: train.iterations=5. May be repeated.")]
RunOption = Annotated[Path | None, typer.Option("--run", help="Folder of the run.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of tasks, sampling and training.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print the final table only.")]
RunArgument = Annotated[Path, typer.Argument(help="Folder of a run.")]


def settings_of(config: str, overrides: Sequence[str] | None, run: Path | None, seed: int | None) -> RunConfig:
    extra = [*(overrides or [])]
    if run is not None:
        extra.append(f"run={json.dumps(str(run))}")
    if seed is not None:
        extra.append(f"seed={seed}")
    return load_config(find(config), extra)


def load_environment(config: RunConfig) -> Environment:
    """The environment a config names: a built-in one, or `package.module:object` (an `Environment`, or a function making one)."""
    from ..environment import Environment

    name, options = config.environment.name, config.environment.options
    if ":" in name:
        from ..coach.make import import_object

        sys.path.insert(0, "")
        made = import_object(name, "environment.name")
        if isinstance(made, Environment):
            if options:
                raise ConfigError(f"environment.options can't take effect: {name!r} is an Environment, not a function that makes one")
            return made
        factory = made
    else:
        from .. import graphs

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
def interruptible() -> Iterator[None]:
    """Ctrl-C ends a command with a message; what it had recorded stays."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; what was recorded is kept, and the same command continues")
        raise typer.Exit(130) from None


def open_store(run: Path) -> TraceStore:
    from ..store import TraceStore

    path = run if run.is_file() else run / "trace.db"
    if not path.is_file():
        raise ConfigError(f"{run} holds no recorded run (no {path.name})", hint="give a run's folder, e.g. runs/demo")
    return TraceStore(path, read_only=True)


def run_training(config: RunConfig, quiet: bool) -> dict[str, Any]:
    from ..display import Display
    from ..trainers.run import train

    with interruptible():
        summary = train(load_environment(config), config, display=Display(quiet=quiet))
    if not summary:  # one of several processes, which the first one commanded: it says what came of it
        raise typer.Exit(0)
    return summary

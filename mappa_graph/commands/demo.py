"""`mappa-graph demo`."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape

from .options import QuietOption, RunOption, SeedOption, SetOption, run_training, settings_of


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(seed: SeedOption = None, run: RunOption = None, overrides: SetOption = None, quiet: QuietOption = False) -> None:
    """Train the MathChat team on this machine, with real parts all the way, in a few minutes.

    Example: `mappa-graph demo --seed 1 --run runs/demo1`
    """
    config = settings_of("demo", overrides, run, seed)
    run_training(config, quiet)
    Console().print(f"the report: [bold]{escape(str(config.run / 'report.html'))}[/]")

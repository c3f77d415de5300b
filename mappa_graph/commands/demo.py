"""`mappa-graph demo`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .options import QuietOption, RunOption, SeedOption, SetOption, run_training, settings_of


class Team(StrEnum):
    mathchat = "mathchat"
    dsbench = "dsbench"


_CONFIGS = {Team.mathchat: "demo", Team.dsbench: "dsbench"}


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    team: Annotated[Team, typer.Argument(help="mathchat solves word problems; dsbench hands files on, from data to a submission.")] = (
        Team.mathchat
    ),
    seed: SeedOption = None,
    run: RunOption = None,
    overrides: SetOption = None,
    quiet: QuietOption = False,
) -> None:
    """Train a team on this machine, with real parts all the way, in a few minutes.

    Example: `mappa-graph demo --seed 1 --run runs/demo1`, or `mappa-graph demo dsbench`
    """
    config = settings_of(_CONFIGS[team], overrides, run, seed)
    run_training(config, quiet)
    Console().print(f"the report: [bold]{escape(str(config.run / 'report.html'))}[/]")

"""The command line. Each command is a thin wrapper: settings in, one library call, a message out.

The commands are in `commands/`. A user's mistake ends with a message and exit code 1, never a traceback; Ctrl-C ends with 130 and
says what was kept.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.markup import escape

from .commands import demo, exporting, importing, looking, replay, serving, training
from .commands.coach import coach_app
from .commands.options import load_environment
from .errors import MappaError

app = typer.Typer(
    name="mappa-graph",
    help="Train the agents of a LangGraph app: a coach scores every action, each agent's own weights learn from it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for _module in (demo, training, serving, looking, replay, importing, exporting):
    _module.register(app)
app.add_typer(coach_app(load_environment), name="coach")


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

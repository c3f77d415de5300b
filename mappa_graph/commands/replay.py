"""`mappa-graph replay`: a refused update, run again."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .options import RunArgument, interruptible


def register(app: typer.Typer) -> None:
    app.command()(replay)


def replay(
    run: RunArgument,
    iteration: Annotated[int | None, typer.Option(min=1, help="Of which iteration; default the latest that was refused.")] = None,
) -> None:
    """Run a refused update again on the batch that was kept, and say what is not finite and where; changes nothing in the run.

    Example: `mappa-graph replay runs/demo --iteration 7`
    """
    from ..trainers.replay import replay as run_again

    with interruptible():
        done = run_again(run, iteration)
    console = Console()
    console.print(f"iteration {done.iteration}: {done.samples} samples, weights {escape(done.state)}")
    for policy in sorted({*done.then, *done.now}):
        then, now = done.then.get(policy, "not refused"), done.now.get(policy, "not refused")
        console.print(f"[bold]{escape(policy)}[/]: in the run: {escape(then)}; now: {escape(now)}")
    if not done.findings:
        console.print("nothing that is not finite was found: what went wrong doesn't happen again on this machine")
        return
    table = Table("policy", "not finite", "agent", "tokens", "episode", "action")
    for f in done.findings:
        tokens = "" if f.tokens is None else f"{f.tokens[0]} to {f.tokens[1]}"
        table.add_row(*(escape(cell) for cell in (f.policy, f.what, f.agent, tokens, f.episode, f.action)))
    console.print(table)
    if done.more:
        console.print(f"and {done.more} more")

"""`mappa-graph export`: a run's actions as training data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import ConfigError
from .options import interruptible, open_store

if TYPE_CHECKING:
    from ..exchange.export import Exported
    from ..exchange.export import Progress as Told
    from ..exchange.formats import Render

_SCORES, _PAIRS, _TOKENS = "Which actions", "Preferences (dpo, kto, reward)", "Tokens (rl)"
_ROWS, _REDACTION = "Rows and files", "Redaction"


def register(app: typer.Typer) -> None:
    app.command()(export)


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or a trace.db.")],
    format: Annotated[
        Literal["sft", "messages", "dpo", "kto", "reward", "rl"], typer.Option("--format", "-f", help="What the rows are for.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file: NAME.jsonl or NAME.parquet; or a folder, for datasets.")],
    kind: Annotated[
        Literal["jsonl", "parquet", "datasets"] | None, typer.Option("--as", help="What to write, where the path doesn't say.")
    ] = None,
    agent: Annotated[list[str] | None, typer.Option(help="Only this agent. May be repeated.", rich_help_panel=_SCORES)] = None,
    min_score: Annotated[float | None, typer.Option(min=0, max=10, help="0 to 10.", rich_help_panel=_SCORES)] = None,
    max_score: Annotated[float | None, typer.Option(min=0, max=10, help="0 to 10.", rich_help_panel=_SCORES)] = None,
    outcome: Annotated[
        Literal["success", "failure", "graded"] | None, typer.Option(help="Of the episode.", rich_help_panel=_SCORES)
    ] = None,
    since: Annotated[str | None, typer.Option(help="Episodes from this date or time on, ISO 8601, UTC.", rich_help_panel=_SCORES)] = None,
    until: Annotated[str | None, typer.Option(help="Episodes up to this date (included) or time.", rich_help_panel=_SCORES)] = None,
    min_length: Annotated[int | None, typer.Option(help="Of the completion: characters; tokens for rl.", rich_help_panel=_SCORES)] = None,
    max_length: Annotated[int | None, typer.Option(help="The same.", rich_help_panel=_SCORES)] = None,
    max_prompt: Annotated[int | None, typer.Option(help="Of the prompt, in the same unit.", rich_help_panel=_SCORES)] = None,
    split: Annotated[str, typer.Option(help="train, an evaluation's name, or all.", rich_help_panel=_SCORES)] = "train",
    iteration: Annotated[int | None, typer.Option(help="Only this iteration.", rich_help_panel=_SCORES)] = None,
    stratum: Annotated[list[str] | None, typer.Option(help="Only tasks of this stratum. May be repeated.", rich_help_panel=_SCORES)] = None,
    truncated: Annotated[bool, typer.Option("--truncated", help="Also completions cut off at the limit.", rich_help_panel=_SCORES)] = False,
    discarded: Annotated[
        bool, typer.Option("--discarded", help="Also completions that the graph never used.", rich_help_panel=_SCORES)
    ] = False,
    dedupe: Annotated[
        bool | None, typer.Option("--dedupe/--no-dedupe", help="Equal rows once; the default, but for rl.", rich_help_panel=_ROWS)
    ] = None,
    balance: Annotated[
        Literal["stratum", "agent", "task_id"] | None, typer.Option(help="As many rows of each as of the rarest.", rich_help_panel=_ROWS)
    ] = None,
    heldout: Annotated[float, typer.Option(help="Share of tasks whose rows go to NAME-heldout.", rich_help_panel=_ROWS)] = 0.0,
    salt: Annotated[str, typer.Option(help="Another text, another choice of held-out tasks.", rich_help_panel=_ROWS)] = "",
    thinking: Annotated[
        Literal["keep", "strip"], typer.Option(help="Whether thinking stays in completions.", rich_help_panel=_ROWS)
    ] = "keep",
    text: Annotated[bool, typer.Option("--text", help="Plain texts instead of messages.", rich_help_panel=_ROWS)] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="Texts, as this model's chat template prints them: a folder or a name.", rich_help_panel=_ROWS)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that no export wrote.", rich_help_panel=_ROWS)] = False,
    resume: Annotated[bool, typer.Option(help="Go on with an export that was interrupted.", rich_help_panel=_ROWS)] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.", rich_help_panel=_ROWS)] = False,
    pairs_from: Annotated[
        str | None, typer.Option(help="Some of siblings,coach,scores; default siblings,coach.", rich_help_panel=_PAIRS)
    ] = None,
    min_margin: Annotated[float | None, typer.Option(help="Points between siblings; default 1.", rich_help_panel=_PAIRS)] = None,
    pairs_per_state: Annotated[int | None, typer.Option(help="Most pairs of one prompt; default 1.", rich_help_panel=_PAIRS)] = None,
    good: Annotated[float | None, typer.Option(help="kto from scores: good from here; default 7.", rich_help_panel=_PAIRS)] = None,
    bad: Annotated[float | None, typer.Option(help="kto from scores: bad down from here; default 3.", rich_help_panel=_PAIRS)] = None,
    gamma: Annotated[float | None, typer.Option(help="Discount per action; default 0.5.", rich_help_panel=_TOKENS)] = None,
    credit: Annotated[Literal["discounted", "own"] | None, typer.Option(help="Of returns.", rich_help_panel=_TOKENS)] = None,
    outcome_weight: Annotated[float | None, typer.Option(help="Weight of the episode's grade.", rich_help_panel=_TOKENS)] = None,
    normalise: Annotated[
        Literal["batch", "agent", "stratum"] | None, typer.Option(help="What advantages are normalised over.", rich_help_panel=_TOKENS)
    ] = None,
    std_floor: Annotated[float | None, typer.Option(help="Least divisor of advantages; default 0.05.", rich_help_panel=_TOKENS)] = None,
    redact: Annotated[
        str | None, typer.Option(help="Besides keys, always: some of email,phone,card,ip; or all.", rich_help_panel=_REDACTION)
    ] = None,
    redact_pattern: Annotated[list[str] | None, typer.Option(help="name=REGEX (RE2). May be repeated.", rich_help_panel=_REDACTION)] = None,
) -> None:
    """Write a run's actions as training data, with a data card: for TRL's trainers (sft, messages, dpo, kto, reward) or with tokens (rl).

    Example: `mappa-graph export runs/mine --format sft --min-score 7 --heldout 0.1 --redact email,phone --out data/sft.parquet`
    """
    from ..exchange.export import export as write
    from ..exchange.filters import Filters, seconds
    from ..exchange.options import Options
    from ..exchange.redact import redactor

    filters = Filters(
        agents=tuple(agent or ()), min_score=min_score, max_score=max_score, outcome=outcome,
        since=None if since is None else seconds(since), until=None if until is None else seconds(until, end=True),
        min_length=min_length, max_length=max_length, max_prompt=max_prompt, split=None if split == "all" else split,
        iteration=iteration, strata=tuple(stratum or ()), truncated=truncated, discarded=discarded,
    )  # fmt: skip
    pairs = _pairs(format, sources=pairs_from, min_margin=min_margin, per_state=pairs_per_state, good=good, bad=bad)
    more: dict[str, Any] = {name: value for name, value in (("normalise", normalise), ("std_floor", std_floor)) if value is not None}
    options = Options(dedupe=dedupe, balance=balance, heldout=heldout, salt=salt, thinking=thinking, pairs=pairs, **more)
    returns = {"gamma": gamma, "credit": credit, "outcome_weight": outcome_weight}
    with open_store(run) as store, interruptible(), _shown(quiet) as told:
        made = write(
            store, format, out, kind=kind, filters=filters, options=options, redactor=redactor(redact, redact_pattern),
            samples=_samples(format, truncated, {name: value for name, value in returns.items() if value is not None}),
            render=_render(text, tokenizer), force=force, resume=resume, progress=told,
        )  # fmt: skip
    Console().print(_table(made))


def _pairs(format: str, *, sources: str | None, **given: Any) -> Any:
    from ..exchange.formats import PAIRED
    from ..exchange.pairs import Pairs

    chosen = {name: value for name, value in given.items() if value is not None}
    if sources is not None:
        chosen["sources"] = tuple(name.strip() for name in sources.split(",") if name.strip())
    if chosen and format not in PAIRED:
        raise ConfigError(f"options of preferences have no effect on the format {format!r}", hint=f"use them with {', '.join(PAIRED)}")
    return Pairs(**chosen)


def _samples(format: str, truncated: bool, returns: dict[str, Any]) -> Any:
    if format != "rl":
        if returns:
            raise ConfigError(f"{', '.join(returns)}: returns are of the format rl, not of {format!r}", hint="leave them out")
        return None
    from ..sections.train import TrainConfig
    from ..trainers.batch import samples_from_trace

    if returns.get("credit") == "own" and "gamma" in returns:
        raise ConfigError("gamma has no effect with credit 'own'", hint="leave one of the two out")
    plain = TrainConfig()
    defaults = {"gamma": plain.gamma, "credit": plain.credit, "outcome_weight": plain.outcome_weight}
    return partial(samples_from_trace, truncated="train" if truncated else "mask", **{**defaults, **returns})


def _render(text: bool, tokenizer: str | None) -> Render | None:
    if tokenizer is None:
        from ..exchange.formats import plain_render

        return plain_render if text else None
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"--tokenizer needs transformers: {error}", hint="pip install 'mappa-graph[train]', or --text") from error
    from ..exchange.formats import template_render

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer can be loaded from {tokenizer!r}: {error}", hint="give a model's folder or name") from error
    return template_render(loaded)


@contextmanager
def _shown(quiet: bool) -> Iterator[Told]:
    stages = {"read": "reading episodes", "pair": "pairing states", "write": "writing rows"}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def told(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stages[stage], total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield told


def _table(made: Exported) -> Table:
    card = made.card
    table = Table("", "", title=f"Exported as {card['format']}", show_header=False)
    for file in card["files"]:
        if file["rows"]:
            table.add_row(escape(file["side"]), f"{file['rows']:,} rows  {escape(file['name'])}")
    table.add_row("card", escape(made.card_path.with_suffix(".md").name))
    for reason, count in card["left_out"].items():
        table.add_row("left out", f"{count:,} {escape(reason)}")
    for name, count in card["text_only"].items():
        table.add_row("text only", f"{count:,} of {escape(name)}: without tokens")
    for rule in card["redaction"]:
        table.add_row("redacted", f"{rule['found']:,} {escape(rule['rule'])}")
    if made.resumed:
        table.add_row("", "went on with an export that was interrupted")
    return table

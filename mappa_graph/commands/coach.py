"""`mappa-graph coach`: scores what is pending in a run, validates a coach on it, and gives out the better actions it proposed.

The settings are those of the run's own `config.yaml`, changed by what is given. The one thing to know: a run's folder that holds no
config (an app that only records), or whose environment can't be named in one, is coached all the same, with the agents that its
episodes show and without their roles; this is said.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from ..config import CoachConfig, RunConfig, load_config
from ..configs import find
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..coach import AgentCard, Case, Coach
    from ..environment import Environment
    from ..record import EpisodeTrace
    from ..store import TraceStore

Loader = Callable[[RunConfig], "Environment"]

RunArgument = Annotated[Path, typer.Argument(help="Folder of a run, or a trace.db.")]
ConfigOption = Annotated[str | None, typer.Option("--config", "-c", help="Take the settings from this file, not from the run.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", "-s", help="Change a setting: coach.when=episode. May be repeated.")]
KindOption = Annotated[str | None, typer.Option("--coach", help="evidence, outcome, or package.module:object.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="An LLM as the coach: provider:model.")]
SplitOption = Annotated[str, typer.Option(help="Which episodes: train, an evaluation's name, or all.")]
OutOption = Annotated[Path | None, typer.Option(help="A file to write; else they are printed.")]
IterationOption = Annotated[int | None, typer.Option(help="Only the episodes of this iteration.")]


class RunFirst(TyperGroup):
    """A group whose first word may be a run: `coach RUN` is `coach score RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["score", *args]
        return list(super().parse_args(ctx, args))


@dataclass(frozen=True)
class Judging:
    """What a coach needs to judge a run's episodes."""

    config: CoachConfig
    coach: Coach
    team: Sequence[AgentCard]
    environment: str
    reveal: bool


def coach_app(load_environment: Loader) -> typer.Typer:
    """The `coach` commands; `load_environment` finds the environment that a config names."""
    app = typer.Typer(
        cls=RunFirst,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        help="Score what is pending in a run (`coach RUN` is `coach score RUN`), and see whether its coach is to be trusted.\n\n"
        "Example: `mappa-graph coach runs/mine`",
    )

    @app.command()
    def score(
        run: RunArgument,
        config: ConfigOption = None,
        coach: KindOption = None,
        model: ModelOption = None,
        overrides: SetOption = None,
        split: SplitOption = "train",
        iteration: IterationOption = None,
        again: Annotated[bool, typer.Option(help="Also actions that have a score already.")] = False,
        nodes: Annotated[bool, typer.Option(help="Also nodes without an agent, for the record; they are never trained on.")] = False,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
    ) -> None:
        """Score the actions of a run that have no score; the same command again goes on where it stopped.

        Example: `mappa-graph coach runs/mine --model openai:gpt-5-mini --set coach.when=episode`
        """
        with _store(run, read_only=False) as store:
            judging = _judging(run, store, load_environment, config, coach, model, overrides)
            with _interruptible():
                asyncio.run(_score(_folder(run), store, judging, _split(split), iteration, again, nodes, quiet))

    @app.command()
    def validate(
        run: RunArgument,
        labels: Annotated[
            Path | None, typer.Option(help='JSON lines of {"action": id, "score": 0..10, "blame": [agents]}; blame may be left out.')
        ] = None,
        config: ConfigOption = None,
        coach: KindOption = None,
        model: ModelOption = None,
        overrides: SetOption = None,
        split: SplitOption = "train",
        iteration: IterationOption = None,
        stored: Annotated[bool, typer.Option(help="Compare the labels with the scores in the store, and ask nothing anew.")] = False,
        twice: Annotated[int, typer.Option(min=0, help="How many actions are scored twice, for self-agreement.")] = 20,
        episodes: Annotated[int, typer.Option(min=0, help="How many episodes are shown in two orders, for effects of position.")] = 5,
        seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    ) -> None:
        """Compare a coach with labels, with itself, and with what it says when the order is another.

        Example: `mappa-graph coach validate runs/mine --labels labels.jsonl --model openai:gpt-5-mini`
        """
        if stored and labels is None:
            raise ConfigError("--stored compares scores with labels, and there are none", hint="add --labels FILE")
        with _store(run, read_only=True) as store:
            judging = _judging(run, store, load_environment, config, coach, model, overrides)
            traces = [t for t in store.traces(split=_split(split), iteration=iteration) if t.actions]
            if not traces:
                raise ConfigError(f"{run} holds no such episode with an action", hint=f"see: mappa-graph traces list {run}")
            with _interruptible():
                found, text = asyncio.run(_validate(judging, traces, labels, stored, twice, episodes, seed))
        Console().print(text, markup=False, highlight=False)
        path = _folder(run) / "coach-validation.json"
        path.write_text(json.dumps(_plain(found), indent=2) + "\n", encoding="utf-8")
        Console().print(f"the numbers: {escape(str(path))}")

    @app.command()
    def sample(
        run: RunArgument,
        count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many actions.")] = 50,
        out: OutOption = None,
        split: SplitOption = "train",
        iteration: IterationOption = None,
        seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    ) -> None:
        """Write a sample of actions to be labelled by hand: fill in each `score` (and `blame`), then `coach validate --labels`.

        Example: `mappa-graph coach sample runs/mine -n 50 --out labels.jsonl`
        """
        with _store(run, read_only=True) as store:
            rows: list[dict[str, Any]] = [
                {
                    "action": a.id,
                    "score": None,
                    "blame": [],
                    "agent": a.agent,
                    "task": t.episode.task,
                    "output": a.output,
                    "episode": t.episode.id,
                }
                for t in store.traces(split=_split(split), iteration=iteration)
                for a in t.actions
            ]
        _write(random.Random(seed).sample(rows, min(count, len(rows))), out, "actions to label")

    @app.command()
    def better(
        run: RunArgument,
        out: OutOption = None,
        split: SplitOption = "train",
        iteration: IterationOption = None,
        below: Annotated[float | None, typer.Option(min=0, max=10, help="Only of actions scored below this.")] = None,
    ) -> None:
        """Give out the better actions that the coach proposed, as JSON lines of prompt, chosen and rejected.

        Example: `mappa-graph coach better runs/mine --out better.jsonl`
        """
        from ..coach import better_actions

        with _store(run, read_only=True) as store:
            rows = better_actions(store.traces(split=_split(split), iteration=iteration))
            kept = [row for row in rows if below is None or (row["score"] is not None and row["score"] < below)]
        _write(kept, out, "better actions")

    return app


async def _score(
    folder: Path, store: TraceStore, judging: Judging, split: str | None, iteration: int | None, again: bool, nodes: bool, quiet: bool
) -> None:
    from ..coach import UnscoredWatch, score_pending

    config, console = judging.config, Console()
    done = 0

    def progress(_: Any) -> None:
        nonlocal done
        done += 1
        if not quiet and done % 50 == 0:
            console.print(f"{done} verdicts")

    found = await score_pending(
        store,
        judging.coach,
        judging.team,
        when=config.when,
        unit=config.unit,
        environment=judging.environment,
        reveal_reference=judging.reveal,
        split=split,
        iteration=iteration,
        concurrency=config.concurrency,
        watch=UnscoredWatch(config.max_unscored_share),
        again=again,
        nodes=nodes,
        progress=progress,
    )
    console.print(
        f"{found.scored} scored, {found.unscored} without a score; {found.pending} actions were pending in {found.episodes} episodes"
    )
    for cause, count in sorted((found.causes or {}).items(), key=lambda item: -item[1])[:5]:
        console.print(f"  {count} x {cause}", markup=False)
    each = found.per_episode()
    console.print(
        f"an episode: {each['calls']:.2f} calls, {each['tokens']:.0f} tokens, {each['usd']:.4f} USD, {each['seconds']:.2f} s of requests"
    )
    if found.episodes:
        row = {
            "at": time.time(),
            "coach": judging.coach.name,
            "when": config.when,
            "unit": config.unit,
            **asdict(found),
            "per_episode": each,
        }
        with (folder / "coaching.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


async def _validate(
    judging: Judging, traces: Sequence[EpisodeTrace], labels: Path | None, stored: bool, twice: int, episodes: int, seed: int
) -> tuple[dict[str, Any], str]:
    from ..coach import position_effects, self_agreement, validate
    from ..coach.validation import compare, read_labels, summary
    from ..record import Verdict

    groups = [_cases(trace, judging) for trace in traces]
    cases = [case for group in groups for case in group]
    gold = read_labels(labels) if labels is not None else {}
    unknown = sorted(gold.keys() - {case.action_id for case in cases})
    if gold and len(unknown) == len(gold):
        raise ConfigError(f"none of the {len(gold)} labels of {labels} is of an action here (the first: {unknown[0]!r})")
    agreement = itself = position = None
    lines = [f"{len(unknown)} of {len(gold)} labels are of actions that are not here, and left out"] if unknown else []
    if gold and stored:
        verdicts = {id: v for trace in traces for id, v in trace.verdicts.items()}
        labelled = [case for case in cases if case.action_id in gold]
        none = Verdict(None, error="never asked")
        agreement = compare(labelled, [verdicts.get(case.action_id, none) for case in labelled], gold)
    elif gold:
        agreement = await validate(judging.coach, cases, gold, concurrency=judging.config.concurrency)
    rng = random.Random(seed)
    if twice and not stored:
        chosen = rng.sample(cases, min(twice, len(cases)))
        itself = await self_agreement(judging.coach, chosen, concurrency=judging.config.concurrency)
    several = [group for group in (_cases(trace, judging, hindsight=True) for trace in traces) if len(group) > 1]
    if episodes and not stored and several and hasattr(judging.coach, "score_episode"):
        position = await position_effects(judging.coach, rng.sample(several, min(episodes, len(several))))
    elif episodes and not stored:
        lines.append("order            none: this coach is shown one action at a time")
    parts = {"agreement": agreement, "self_agreement": itself, "position": position}
    found: dict[str, Any] = {name: None if part is None else asdict(part) for name, part in parts.items()}
    if found["agreement"] is not None:
        found["agreement"]["blame"] = [[gold, said, n] for (gold, said), n in found["agreement"]["blame"].items()]
    found |= {"coach": judging.coach.name, "stored": stored}
    return found, "\n".join(filter(None, [summary(agreement, itself, position), *lines]))


def _cases(trace: EpisodeTrace, judging: Judging, *, hindsight: bool | None = None) -> list[Case]:
    from ..coach import cases_for
    from ..coach.pending import as_generated

    when = judging.config.when
    cases = cases_for(
        trace,
        judging.team,
        environment=judging.environment,
        reveal_reference=judging.reveal,
        hindsight=when == "episode" if hindsight is None else hindsight,
    )
    return [as_generated(case) for case in cases] if when == "generated" and hindsight is None else cases


def _judging(
    run: Path,
    store: TraceStore,
    load_environment: Loader,
    config: str | None,
    coach: str | None,
    model: str | None,
    overrides: Sequence[str] | None,
) -> Judging:
    from ..coach import AgentCard
    from ..coach.make import make_coach

    path = find(config) if config is not None else _folder(run) / "config.yaml"
    settings = _settings(path if path.exists() else None, coach, model, overrides or [])
    first = next(iter(store.episodes()), None)
    name = first.environment if first is not None else ""
    environment: Environment | None = None
    if path.exists():
        made = load_environment(settings)
        environment = made if made.name == name or not name else None
    if environment is not None:
        return Judging(
            settings.coach,
            make_coach(settings.coach, environment.rules),
            environment.team,
            environment.name,
            environment.coach_sees_reference,
        )
    agents = dict.fromkeys(action.agent for trace in store.traces(limit=50) for action in trace.actions)
    Console(stderr=True).print(
        f"no config names the environment {name!r} of these episodes: agents are taken from them, without roles and rules, and references "
        "are not shown; name it with --set environment.name=package.module:object",
        style="yellow",
        markup=False,
    )
    return Judging(settings.coach, make_coach(settings.coach), [AgentCard(agent) for agent in agents], name, reveal=False)


def _settings(path: Path | None, coach: str | None, model: str | None, overrides: Sequence[str]) -> RunConfig:
    if coach is not None and model is not None:
        raise ConfigError("--coach and --model name two coaches", hint="give one of them")
    extra = [*overrides]
    if model is not None:
        extra = ["coach.kind=llm", f"coach.model={json.dumps(model)}", *extra]
    if coach is not None:
        # An LLM's settings in the run's config are not this coach's.
        when = [] if coach != "outcome" else ["coach.when=episode"]
        base = load_config(path).model_dump(mode="json") if path is not None else {}
        kept = {k: v for k, v in base.get("coach", {}).items() if k in ("when", "unit", "concurrency", "max_unscored_share")}
        return load_config(None, [f"coach.kind={json.dumps(coach)}", *when, *extra], base={**base, "coach": kept})
    return load_config(path, extra)


def _write(rows: Sequence[dict[str, Any]], out: Path | None, what: str) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if out is None:
        typer.echo(lines, nl=False)
        return
    try:
        out.write_text(lines, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't write {out}: {error.strerror or error}", hint="give another file: --out FILE") from error
    Console().print(f"{len(rows)} {what}: {escape(str(out))}")


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; verdicts that came are kept, and the same command goes on")
        raise typer.Exit(130) from None


def _folder(run: Path) -> Path:
    return run.parent if run.is_file() else run


def _split(name: str) -> str | None:
    return None if name == "all" else name


def _store(run: Path, *, read_only: bool) -> TraceStore:
    from ..store import TraceStore

    path = run if run.is_file() else run / "trace.db"
    if not path.is_file():
        raise ConfigError(f"{run} holds no recorded run (no {path.name})", hint="give a run's folder, e.g. runs/demo")
    return TraceStore(path, read_only=read_only)


def _plain(value: Any) -> Any:
    """As JSON knows it: no NaN."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""A whole run: `train(environment, settings)` opens its parts, loops, and leaves a summary and a report in its folder.

The same call on the same folder continues an interrupted run; one that is complete is summed up again and trains nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mappa_graph.coach.base import Coach
from mappa_graph.coach.make import make_coach
from mappa_graph.config import RunConfig, load_config, make_config
from mappa_graph.display import Display
from mappa_graph.environment import Environment
from mappa_graph.errors import ConfigError
from mappa_graph.evaluation import evaluate
from mappa_graph.gateway import Gateway
from mappa_graph.record import EpisodeTrace
from mappa_graph.report import write_report
from mappa_graph.rollout import Job, Runner, Sampling
from mappa_graph.store import TraceStore

from .checkpoint import load_latest, trained_weights
from .engines import make_engine
from .guards import rung
from .loop import Progress, Run, iterate
from .metrics import write_json, write_metrics
from .models import resolve_model
from .publishing import check_engine, publish
from .sampling import check_sampling
from .scores import check_strata, per_episode
from .trackers import Trackers, check_trackers

if TYPE_CHECKING:
    from .trainer import ReinforceTrainer


def train(
    environment: Environment,
    settings: RunConfig | Mapping[str, Any] | Path,
    *,
    coach: Coach | None = None,
    display: Display | None = None,
) -> dict[str, Any]:
    """Trains an environment's agents, and returns the run's summary (also in `summary.json`; a report is in `report.html`).

    Args:
        settings: a `RunConfig`, the same as nested plain data (`{"run": "runs/mine", "train": {"iterations": 10}}`), or a YAML file.
        coach: overrides `settings.coach.kind`.

    Under `accelerate launch` the first process makes the run; the others do their shares of its updates here, and return an empty summary.

    Raises `ConfigError` and other `MappaError`s for what the caller can mend. What was recorded until then stays in the folder.
    """
    from .launch import serves

    if serves():
        return {}
    return asyncio.run(atrain(environment, settings, coach=coach, display=display))


async def atrain(
    environment: Environment,
    settings: RunConfig | Mapping[str, Any] | Path,
    *,
    coach: Coach | None = None,
    display: Display | None = None,
) -> dict[str, Any]:
    """`train` for callers that have an event loop already."""
    from .launch import serves

    if serves():  # a process of `accelerate launch` that the first one commands: it has done its part
        return {}
    config = as_config(settings)
    environment = freeze(environment, config.loop.frozen)
    tasks = environment.split("train")
    if config.coach.calibrate != "none":
        check_strata(config.coach.calibrate, tasks)
    check_sampling(config.loop, tasks)
    check_trackers(config.loop.trackers)
    coach = coach or make_coach(config.coach, environment.rules)
    with display or Display(quiet=True) as shown:
        prepare_folder(config)
        models = resolve_models(environment, config, shown)
        async with open_run(environment, config, models, coach, shown) as run:
            try:
                await iterate(run)
            finally:
                await asyncio.to_thread(run.trackers.close)  # so that what they failed at is all counted
                summary = summarise_run(run)
                write_json(config.run / "summary.json", summary)
        shown.status("writing the report")
        write_report(config.run)
        shown.before_after(summary)
    return summary


def freeze(environment: Environment, names: Sequence[str]) -> Environment:
    """The environment with more of its agents frozen: those named, and those whose policy is named.

    An agent that is frozen by its own name gives no samples; a policy that it shares with others still learns from theirs. Raises
    `ConfigError` for a name that is neither an agent's nor a policy's, and where nobody would be left to learn.
    """
    known = {name: None for a in environment.agents for name in (a.name, a.policy_name)}
    for name in names:
        if name not in known:
            raise ConfigError(f"loop.frozen names {name!r}, which is no agent or policy of the team", hint=f"there are: {', '.join(known)}")
    agents = [replace(a, trainable=False) if {a.name, a.policy_name} & set(names) else a for a in environment.agents]
    if not any(a.trainable for a in agents):
        raise ConfigError(
            "no agent is left to train: all are frozen", hint="for a run without training set train.control to no_training, and freeze none"
        )
    return replace(environment, agents=agents) if names else environment


def as_config(settings: RunConfig | Mapping[str, Any] | Path) -> RunConfig:
    if isinstance(settings, RunConfig):
        return settings
    return load_config(settings) if isinstance(settings, Path) else make_config(settings)


def resolve_models(environment: Environment, config: RunConfig, display: Display) -> dict[str, Path]:
    """Policy name -> folder of its first weights. Checks first, before any work, that the environment's deadlines fit the config."""
    environment.check_deadlines(config.rollout.episode_timeout_s)
    policies = sorted({a.policy_name for a in environment.agents})
    specs = dict.fromkeys(policies, config.model) if isinstance(config.model, str) else dict(config.model)
    if set(specs) != set(policies):
        raise ConfigError(
            f"model names policies {sorted(specs)}, the environment has {policies}", hint="name each policy once, or give one model"
        )
    folders: dict[str, Path] = {}
    for spec in sorted(set(specs.values())):
        display.status(f"preparing the model {spec}")
        shown = environment.demonstrations() if spec == "tiny" and environment.demonstrations else None
        folder = resolve_model(spec, demonstrations=shown, progress=lambda what, n, m: display.progress(n, m, what))
        folders.update({p: folder for p, s in specs.items() if s == spec})
    return folders


@asynccontextmanager
async def open_run(
    environment: Environment, config: RunConfig, models: Mapping[str, Path], coach: Coach, display: Display
) -> AsyncIterator[Run]:
    """Opens all parts of a run, continuing from the last good checkpoint in its folder.

    Args:
        models: policy name -> folder of its first weights.
    """
    trained = {a.policy_name: models[a.policy_name] for a in environment.agents if a.trainable}
    async with AsyncExitStack() as stack:
        trainer = stack.enter_context(make_trainer(config, {policy: trained[policy] for policy in models if policy in trained}))
        progress = Progress()
        found = load_latest(config.run / "checkpoints")
        if found is not None:
            folder, extra = found
            trainer.load(folder)
            progress = Progress.from_json(extra)
            write_metrics(config.run / "metrics.jsonl", progress.history)
            display.status(f"continuing from iteration {progress.iteration}")
        store = stack.enter_context(TraceStore(config.run / "trace.db"))
        listening = Gateway(make_engine(config, models), store, host=config.gateway.host, port=config.gateway.port)
        gateway = await stack.enter_async_context(listening)
        runner = await stack.enter_async_context(make_runner(environment, config, gateway.url, store).open())
        trackers = Trackers(config, display.note)
        stack.push_async_callback(asyncio.to_thread, trackers.close)
        for row in progress.history:  # a crash may have come before a tracker had the last of them
            trackers.log(row)
        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="mappa-trainer"))
        run = Run(config, environment, coach, store, gateway, runner, trainer, display, progress, trackers, trained, thread)
        if progress.iteration:
            await publish(run, progress.iteration)
        else:
            await check_engine(run)
        yield run


def make_trainer(config: RunConfig, models: Mapping[str, Path | str]) -> ReinforceTrainer:
    """The trainer that a config asks for. Raises `ConfigError` where the warm-up doesn't fit the run's length.

    Args:
        models: policy -> folder of its first weights, of those that are trained.
    """
    from . import launch
    from .settings import TrainerSettings

    train = config.train
    steps = train.iterations * train.epochs * train.optimizer_batches
    if train.warmup_steps >= steps > 0:
        raise ConfigError(
            f"train.warmup_steps {train.warmup_steps} is not less than the run's {steps} optimizer steps: train.lr would not be reached",
            hint="a run makes iterations x epochs x optimizer_batches steps; lower train.warmup_steps, or train longer",
        )
    chosen = train.model_dump(include=set(TrainerSettings.model_fields))
    settings = TrainerSettings(**chosen, total_steps=max(1 + train.warmup_steps, steps), dtype=config.engine.dtype)
    return launch.make_trainer(models, settings, device=config.engine.device, seed=config.seed)


def make_runner(environment: Environment, config: RunConfig, url: str, store: TraceStore) -> Runner:
    return Runner(
        environment,
        url,
        store,
        seed=config.seed,
        concurrency=config.rollout.concurrency,
        timeout_s=config.rollout.episode_timeout_s,
        when=config.coach.when,
        coach_concurrency=config.coach.concurrency,
        coach_timeout_s=config.coach.verdict_s,
        unit=config.coach.unit,
    )


def prepare_folder(config: RunConfig) -> None:
    """Makes the run's folder and writes the config there, or checks that the run in it was started with the same settings."""
    path = config.run / "config.yaml"
    if (config.run / "offline.json").exists():
        raise ConfigError(f"{config.run} holds a training from traces", hint="give another folder: --run FOLDER")
    try:
        config.run.mkdir(parents=True, exist_ok=True)
        # Settings alone are of an attempt that failed before anything was made, such as one with a model that isn't there.
        if path.exists() and any((config.run / name).exists() for name in ("trace.db", "checkpoints", "metrics.jsonl")):
            changed = config.same_training(load_config(path))
            if changed:
                raise ConfigError(
                    f"{config.run} holds a run with other settings: {', '.join(changed)}",
                    hint="continue it with its own settings, or give another folder: --run FOLDER",
                )
        path.write_text(config.dump(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"can't write the run's folder {config.run}: {error.strerror or error}", hint="give another: --run FOLDER"
        ) from error


@asynccontextmanager
async def open_team(environment: Environment, config: RunConfig, models: Mapping[str, Path]) -> AsyncIterator[Runner]:
    """A team that acts and isn't trained: engine, gateway, store and runner."""
    async with AsyncExitStack() as stack:
        store = stack.enter_context(TraceStore(config.run / "trace.db"))
        gateway = await stack.enter_async_context(
            Gateway(make_engine(config, models), store, host=config.gateway.host, port=config.gateway.port)
        )
        yield await stack.enter_async_context(make_runner(environment, config, gateway.url, store).open())


async def evaluate_team(
    environment: Environment,
    config: RunConfig,
    *,
    limit: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    trained: Path | None = None,
    step: str = "last",
    display: Display | None = None,
    models: Mapping[str, Path] | None = None,
    label: str = "",
) -> dict[str, Any]:
    """Evaluates a team on the environment's held-out split, uncoached; None takes the config's value.

    Args:
        trained, step: a run's folder, and which of its checkpoints the weights come from (`best`, `last`, or an iteration).
        models: policy -> folder of weights, instead of both.

    Returns what `Evaluation.to_dict` gives; it's also kept in `evaluation.json` in the config's run folder.
    """
    with display or Display(quiet=True) as shown:
        prepare_folder(config)
        chosen = dict(models) if models is not None else resolve_models(environment, config, shown)
        if trained is not None:
            chosen.update({p: w for p, w in trained_weights(trained, step).items() if p in chosen})
        async with open_team(environment, config, chosen) as runner:
            found, _ = await evaluate(
                runner,
                split=config.evaluate.split,
                tasks=limit or config.evaluate.tasks,
                samples=samples or config.evaluate.samples,
                pass_ks=config.evaluate.pass_at,
                temperature=config.evaluate.temperature if temperature is None else temperature,
                max_tokens=config.rollout.max_tokens,
                label=label,
                progress=lambda n, m: shown.progress(n, m, "episodes"),
            )
        result = {**found.to_dict(), **(environment.facts() if environment.facts else {})}
        write_json(config.run / "evaluation.json", result)
    return result


async def roll_out(environment: Environment, config: RunConfig, *, limit: int, display: Display | None = None) -> list[EpisodeTrace]:
    """Runs and coaches one episode on each of the first `limit` training tasks; the episodes are in the run's store."""
    coach = make_coach(config.coach, environment.rules)
    with display or Display(quiet=True) as shown:
        prepare_folder(config)
        async with open_team(environment, config, resolve_models(environment, config, shown)) as runner:
            jobs = [Job(task) for task in environment.split("train")[:limit]]
            sampling = Sampling(config.rollout.temperature, config.rollout.top_p, config.rollout.max_tokens)
            return await runner.run(jobs, sampling, coach, progress=lambda n, m: shown.progress(n, m, "episodes"))


def summarise_run(run: Run) -> dict[str, Any]:
    """The contents of `summary.json`; evaluations that did not happen are None."""
    progress, environment = run.progress, run.environment
    rows = [row for row in progress.history if row["agents"]]
    evaluated = [(row["iteration"], row["heldout"]) for row in progress.history if row.get("heldout")]
    said = ("accuracy", "n", "ci95", "mode", "samples", "score", "pass_at", "majority", "metrics")
    brief = [{k: e.get(k) for k in said} for _, e in evaluated]
    names = [a.name for a in environment.agents]
    failures = run.store.failures()
    return {
        "environment": environment.name,
        "engine": run.config.engine.kind,
        "model": run.config.model,
        "seed": run.config.seed,
        "iterations": progress.iteration,
        "episodes": sum(row["rollout"]["episodes"] for row in rows),
        "actions": sum(row["agents"][n]["actions"] for row in rows for n in names),
        "before": brief[0] if brief else None,
        "after": brief[-1] if len(brief) > 1 else None,
        "best": {k: progress.best.get(k) for k in ("iteration", "accuracy", "by", "is", "value")} if progress.best else None,
        "stopped": progress.history[-1].get("stop") if progress.history else None,
        "alarms": rung(progress.history),
        "refused": dict(sum((Counter(dict.fromkeys(row["refused"], 1)) for row in rows), Counter())),
        "trackers": run.trackers.counts(),
        "frozen": sorted(a.name for a in environment.agents if not a.trainable),
        "coach": {
            "name": run.coach.name,
            "when": run.config.coach.when,
            "scored": sum(row["agents"][n]["scored"] for row in rows for n in names),
            "unscored": sum(row["agents"][n]["unscored"] for row in rows for n in names),
            "mean_by_agent_first": {n: rows[0]["agents"][n]["score_mean"] for n in names} if rows else {},
            "mean_by_agent_last": {n: rows[-1]["agents"][n]["score_mean"] for n in names} if rows else {},
            **coaching(run.config, [row for row in rows if row.get("coach")]),
        },
        "tokens": {key: sum(row["tokens"][key] for row in rows) for key in ("trained", "retokenised")},
        "versions": run.gateway.versions(),
        "failures": dict(failures),
        "left_out": dict(sum((Counter(row["rollout"]["left_out"]) for row in rows), Counter())),
        "wall_s": {
            "total": round(sum(s for part, s in progress.wall_s.items() if part != "coach"), 2),
            **{k: round(progress.wall_s.get(k, 0.0), 2) for k in ("rollout", "coach", "train", "publish", "evaluate")},
        },
        "graph": graph_picture(run.runner, names),
        "isolation": (environment.facts() if environment.facts else {}).get("isolation"),
    }


def coaching(config: RunConfig, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What coaching cost, and what is suspicious in the scores: the part of `summary.json` that goes beyond counts."""
    parts = [row["coach"] for row in rows]
    return {
        "unit": config.coach.unit,
        "calibrate": config.coach.calibrate,
        **{key: round(sum(part[key] for part in parts), 6) for key in ("calls", "prompt_tokens", "completion_tokens", "usd", "cached")},
        "per_episode": per_episode(parts),
        "mean_by_stratum_first": {name: s["mean"] for name, s in parts[0]["by_stratum"].items()} if parts else {},
        "mean_by_stratum_last": {name: s["mean"] for name, s in parts[-1]["by_stratum"].items()} if parts else {},
        "alarms": [{"iteration": row["iteration"], **alarm} for row in rows for alarm in row["coach"]["alarms"]],
    }


def graph_picture(runner: Runner, agents: list[str]) -> dict[str, Any]:
    """The graph's nodes and edges, and which agent acts in which node (by what the episodes show)."""
    drawn = runner.graph_drawing()
    acted: dict[str, Counter[str]] = {}
    for trace in runner.store.traces(limit=20):
        node_of = {t.id: t.node for t in trace.transitions}
        for action in trace.actions:
            acted.setdefault(node_of.get(action.transition_id, ""), Counter())[action.agent] += 1
    return {**drawn, "agent_of_node": {node: c.most_common(1)[0][0] for node, c in acted.items() if node}}

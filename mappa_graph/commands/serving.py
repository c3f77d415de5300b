"""`mappa-graph serve`, `publish`, `rollback` and `status`: an app in production, and new weights into it while it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import RunConfig, load_config
from ..configs import names
from ..errors import ConfigError, TrainerError
from .options import SetOption, interruptible, load_environment, settings_of

if TYPE_CHECKING:
    from ..gateway.admin import Control

ToOption = Annotated[
    str | None, typer.Option("--to", help="The deployment: its folder or its address. Default: MAPPA_DEPLOYMENT, or the one under runs/.")
]
AgentOption = Annotated[list[str] | None, typer.Option("--agent", "-a", help="Only this agent (or policy). May be repeated.")]
StepOption = Annotated[
    str | None,
    typer.Option(help="Which checkpoint of the run: best, last, or a number.", show_default="best; last where the run has no best one"),
]
_LONGEST_S = 3600


def register(app: typer.Typer) -> None:
    for command in (serve, publish, rollback, status, weights):
        app.command()(command)


def serve(
    config: Annotated[str, typer.Argument(help=f"A YAML file, or one of: {', '.join(names())}.")] = "demo",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")] = 8000,
    trained: Annotated[Path | None, typer.Option("--from", help="Serve the weights of this run instead of the first ones.")] = None,
    step: StepOption = None,
    run: Annotated[Path | None, typer.Option("--run", help="Folder of the deployment: its trace.db keeps the calls.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key-from", help="Environment variable with the key that clients must send.")] = None,
    overrides: SetOption = None,
) -> None:
    """Serve an environment's policies to a LangGraph app, and keep every call, until Ctrl-C.

    New versions come in by `mappa-graph publish` while it runs; started again, it serves what it served before.

    Example: `mappa-graph serve demo --from runs/demo --step best --port 8000`
    """
    from ..display import Display
    from ..gateway import Gateway
    from ..gateway.admin import Admin, alone
    from ..gateway.deployment import Deployment
    from ..gateway.server import keep_collector_away
    from ..store import TraceStore
    from ..trainers.engines import make_engine
    from ..trainers.run import prepare_folder, resolve_models

    settings = settings_of(config, overrides, run, None)
    if run is None:
        settings = settings.model_copy(update={"run": settings.run.with_name(f"{settings.run.name}-serve")})
    key = os.environ.get(api_key) if api_key else None
    if step is not None and trained is None:
        raise ConfigError(f"--step {step} can't take effect: the first weights have no checkpoints", hint="name the run: --from RUN")
    if api_key and not key:
        raise ConfigError(f"the environment variable {api_key} is not set", hint="it holds the key that clients must send")
    with interruptible(), _ended_by_sigterm() as ended, alone(settings.run):
        prepare_folder(settings)
        models = resolve_models(load_environment(settings), settings, Display())
        sources = {p: settings.model if isinstance(settings.model, str) else settings.model.get(p, str(w)) for p, w in models.items()}
        if trained is not None:
            found, source = _checkpoint(trained, step, merged=not _serves_adapters(settings))
            if not found.keys() & models.keys():
                raise ConfigError(f"{trained} trained {', '.join(sorted(found))}; served are {', '.join(sorted(models))}: none in common")
            models.update({p: w for p, w in found.items() if p in models})
            sources.update(dict.fromkeys(found.keys() & models.keys(), source))
        admin = Admin()
        with TraceStore(settings.run / "trace.db") as store:
            engine = make_engine(settings, models)
            with Gateway(engine, store, host=settings.gateway.host, port=port, api_key=key, routes=admin.routes()) as gateway:
                deployment = Deployment(gateway, settings.run, models, sources=sources, keep=settings.gateway.keep_releases)
                for policy, reason in asyncio.run(deployment.restore()).items():
                    Console(stderr=True).print(f"{policy} starts from its first weights: {reason}", style="yellow", markup=False)
                admin.deployment = deployment
                with admin.announced(settings.run, gateway.url):
                    now = deployment.status()["policies"]
                    serving = ", ".join(f"{policy}@v{told['version']} ({_source(told, told['version'])})" for policy, told in now.items())
                    Console().print(
                        f"serving {escape(serving)} at [bold]{gateway.url}[/]; calls are kept in {escape(str(store.path))}; "
                        f"new versions: mappa-graph publish RUN --to {escape(str(settings.run))}; Ctrl-C ends"
                    )
                    keep_collector_away()
                    ended.wait()


def _serves_adapters(settings: RunConfig) -> bool:
    options = settings.engine.vllm
    mode = options.mode if options is not None else None
    return settings.engine.kind == "vllm" and (mode == "lora" or (mode is None and settings.train.lora is not None))


@contextmanager
def _ended_by_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, so that a service manager's stop is as graceful as Ctrl-C."""
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        yield ended
    finally:
        signal.signal(signal.SIGTERM, before)


def publish(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a training run, or a folder of weights (then with one --agent). Not with --promote.")
    ] = None,
    agent: AgentOption = None,
    step: StepOption = None,
    share: Annotated[float, typer.Option(help="The share of calls that the new version gets, above 0 and at most 1.")] = 1.0,
    promote: Annotated[bool, typer.Option("--promote", help="Give all calls to the versions on trial.")] = False,
    to: ToOption = None,
) -> None:
    """Swap trained versions into a running deployment; its app neither restarts nor loses a call.

    With a share below 1 the new version is on trial: `publish --promote` gives it all calls, `rollback` ends it.

    Example: `mappa-graph publish runs/demo --step best --share 0.1`
    """
    console = Console()
    if not 0 < share <= 1:
        raise ConfigError(f"--share {share} is no share of the calls", hint="give a number above 0 and at most 1")
    with _control(to) as control:
        if promote:
            if run is not None:
                raise ConfigError(f"--promote is for what is on trial already; {run} can't take effect", hint="leave one of the two out")
            trials = [p for p, s in control.status()["policies"].items() if s["trial"]]
            chosen = _chosen(trials, agent, None) if trials else []
            if not chosen:
                raise ConfigError("no version is on trial", hint="publish one with a share: mappa-graph publish RUN --share 0.1")
            for policy in chosen:
                console.print(f"{policy}@v{control.promote(policy)['version']} serves all calls", markup=False)
            return
        if run is None:
            raise ConfigError("there is nothing to publish", hint="give a training run: mappa-graph publish RUN")
        status = control.status()
        served = status["policies"]
        for policy, folder, source in _weights_of(run, step, agent, sorted(served), merged=not status["adapters"]):
            release = control.publish(policy, folder, share=share, source=source)
            how = "serves all calls" if share >= 1 else f"serves {share:.0%} of the calls"
            check = "checked by its canary" if release["verified"] else "not checked: its weights came without a canary"
            console.print(f"{policy}@v{release['version']} {how} ({check}); before: v{served[policy]['version']}", markup=False)


def rollback(agent: AgentOption = None, to: ToOption = None) -> None:
    """Go back: end a trial, or serve the weights before the present ones (under a new number: numbers are never used again).

    Again, it goes back further: as far as releases are kept (`gateway.keep_releases`, 5 steps), and at last to the first weights.

    Example: `mappa-graph rollback --agent solver`
    """
    console = Console()
    with _control(to) as control:
        policies = control.status()["policies"]
        chosen = _chosen(sorted(policies), agent, None)
        if agent is None:  # a policy that serves its first weights has nothing to go back to, and is left alone
            chosen = [p for p in chosen if policies[p]["trial"] or policies[p]["back"]]
            if not chosen:
                first = ", ".join(f"{p} ({policies[p]['first']['source']})" for p in sorted(policies))
                raise ConfigError(f"every policy serves its first weights, {first}: there is nothing older to go back to")
        for policy in chosen:
            release = control.rollback(policy)
            now = control.status()["policies"][policy]
            told = (
                f"its trial has ended, v{now['version']} serves all calls"
                if release is None
                else f"v{release['version']} serves: {release['source']}"
            )
            older = [f"v{version}" if version else "the first weights" for version in now["back"]]
            more = f"older: {', '.join(older)}" if older else "there is nothing older"
            console.print(f"{policy}: {told}; {more}", markup=False)
        for policy in sorted(policies.keys() - set(chosen)) if agent is None else ():
            console.print(f"{policy}: left as it is, there is nothing older", markup=False)


def _source(policy: dict[str, Any], version: int) -> str:
    """Where the weights of a version came from, by what a deployment says of its policy."""
    release = next((r for r in policy["releases"] if r["version"] == version), None)
    return str(release["source"]) if release else f"first weights: {policy['first']['source']}"


def status(
    to: ToOption = None,
    seconds: Annotated[float, typer.Option(help="How long throughput is measured for.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what a deployment serves: versions, shares, calls in flight and served, throughput.

    Example: `mappa-graph status --to runs/demo-serve`
    """
    import json

    if not 0 < seconds <= _LONGEST_S:
        raise ConfigError(f"--seconds {seconds} can't be waited", hint=f"give a number above 0 and at most {_LONGEST_S}")
    with _control(to) as control:
        first = control.status()
        time.sleep(seconds)
        now = control.status()
    span = max(now["at"] - first["at"], 1e-9)
    if as_json:
        typer.echo(json.dumps(now, indent=2))
        return
    table = Table("policy", "version", "share", "in flight", "calls", "calls/s", "tokens/s", "from")
    table.columns[-1].overflow = "fold"  # a path is one word, and says nothing without its end
    for name, policy in now["policies"].items():
        trial, before = policy["trial"], first["policies"][name]
        tokens = policy["tokens"].get("completion", 0) - before["tokens"].get("completion", 0)
        for version, running in policy["inflight"].items():
            number = int(version)
            share = trial["share"] if trial and trial["version"] == number else None
            if number == policy["version"]:
                share = 1.0 - (trial["share"] if trial else 0.0)
            calls = policy["calls"].get(version, 0)
            rate = (calls - before["calls"].get(version, 0)) / span
            table.add_row(
                escape(name),
                f"v{version}",
                "retiring" if share is None else f"{share:.0%}",
                str(running),
                str(calls),
                f"{rate:.1f}",
                f"{tokens / span:.0f}" if number == policy["version"] else "",
                escape(_source(policy, number)),
            )
    Console().print(f"{escape(now['url'])}, engine {now['engine']}, up {now['at'] - now['since']:.0f} s")
    Console().print(table)
    if now["errors"]:
        Console().print("errors: " + ", ".join(f"{status} x {n}" for status, n in sorted(now["errors"].items())))


def weights(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    out: Annotated[Path, typer.Option(help="A folder to write; each policy gets one inside it.")],
    agent: AgentOption = None,
    step: StepOption = None,
    merge: Annotated[bool, typer.Option("--merge", help="Put adapters into their base's weights.")] = False,
) -> None:
    """Write trained weights as ordinary folders: adapters as PEFT's, whole and merged weights as Hugging Face's.

    Example: `mappa-graph weights runs/mine --step best --merge --out models/`
    """
    from ..trainers.portable import copy_weights

    for policy, folder, _ in _weights_of(run, step, agent, None, merged=False):
        Console().print(f"{policy}: {copy_weights(folder, out / policy, merge=merge)}", markup=False)


def _weights_of(
    run: Path, step: str | None, agents: list[str] | None, served: list[str] | None, *, merged: bool
) -> list[tuple[str, Path, str]]:
    """(policy, folder of weights, where it's from) of what is to be taken from a training run, or from a folder of weights."""
    if any(run.glob("*.safetensors")):
        if step is not None:
            raise ConfigError(f"--step {step} can't take effect: {run} is a folder of weights", hint="leave it out, or give a run's folder")
        if not agents or len(agents) != 1:
            raise ConfigError(f"{run} is a folder of weights, and nothing says whose", hint="name the agent: --agent NAME")
        return [(agents[0], run, str(run))]
    found, source = _checkpoint(run, step, merged=merged)
    known = sorted(found if served is None else found.keys() & set(served))
    if not known:
        raise ConfigError(f"{run} trained {', '.join(sorted(found))}; the deployment serves {', '.join(served or [])}: none in common")
    config = run / "config.yaml"
    chosen = _chosen(known, agents, load_config(config) if config.exists() else None)
    return [(policy, found[policy], source) for policy in chosen]


def _checkpoint(run: Path, step: str | None, *, merged: bool) -> tuple[dict[str, Path], str]:
    """(policy -> folder of weights, where they are from in words) of a run's checkpoint; without a step the best one, else the last."""
    from ..trainers.checkpoint import load_latest, trained_weights

    if step is not None:
        return trained_weights(run, step, merged=merged), f"{run}, {step}"
    try:
        return trained_weights(run, "best", merged=merged), f"{run}, best"
    except TrainerError:
        latest = load_latest(run / "checkpoints")
        if latest is None or "iteration" in (latest[1].get("best") or {}):  # one that is there and can't be used must not be passed over
            raise
        return trained_weights(run, "last", merged=merged), f"{run}, last (it has no best checkpoint)"


def _chosen(policies: list[str], agents: list[str] | None, config: RunConfig | None) -> list[str]:
    """The policies of the named agents, or all. An agent is named by itself or by its policy."""
    if agents is None:
        return policies
    policy_of = {a.name: a.policy_name for a in load_environment(config).agents} if config is not None else {}
    chosen = []
    for name in agents:
        policy = name if name in policies else policy_of.get(name, name)
        if policy not in policies:
            raise ConfigError(f"there is no agent or policy {name!r} here", hint=f"there are: {', '.join(policies)}")
        chosen.append(policy)
    return list(dict.fromkeys(chosen))


def _control(to: str | None) -> Control:
    from ..gateway.admin import Control, running

    where = to or os.environ.get("MAPPA_DEPLOYMENT")
    if where is None:
        found = running()
        if len(found) != 1:
            there = f"{len(found)} deployments run under runs/: {', '.join(map(str, found))}" if found else "no deployment runs under runs/"
            raise ConfigError(there, hint="name one: --to FOLDER, or start one: mappa-graph serve CONFIG")
        where = str(found[0])
    return Control(where)

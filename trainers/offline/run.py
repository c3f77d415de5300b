"""`train_offline`: rows, training, a checkpoint, a summary.

The run's folder: `offline.json` (what was asked for), `data/` (the rows and their cards), `checkpoints/` (as the loop's), `metrics.jsonl`,
`summary.json`. Interrupted and begun again by the same call, a run of sft, dpo or kto goes on with the next policy, and one of reinforce
starts over, from the same rows to the same weights. A run that is complete trains nothing and gives its summary again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from mappa_graph.display import Display
from mappa_graph.errors import ConfigError
from mappa_graph.exchange.export import Exported
from mappa_graph.exchange.options import HELDOUT
from mappa_graph.gateway.deployment import CANARY, HISTORY, write_aside
from mappa_graph.sections.offline import OfflineConfig
from mappa_graph.store import TraceStore

from ..checkpoint import POLICIES, load_latest, save_checkpoint, trained_weights
from ..metrics import plain, write_json, write_metrics
from ..models import resolve_model
from .data import Team, Traces, team_of, write_rows

if TYPE_CHECKING:
    from mappa_graph.environment import Environment

_OF_UPDATE = ("weight_mean", "ratio_max", "clip_share", "mismatch_abs", "grad_norm", "steps")
ASKED = "offline.json"
"""In a run's folder: that it was trained from traces, and how."""


def make_offline_config(data: Mapping[str, Any]) -> OfflineConfig:
    """Checked settings from plain data. Raises `ConfigError` that names every setting that is wrong."""
    try:
        return OfflineConfig.model_validate(dict(data))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            name, message = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                message = f"unknown setting; known: {', '.join(OfflineConfig.model_fields)}"
            lines.append(f"{name}: {message}" if name else message)
        raise ConfigError("\n  ".join([f"{len(lines)} setting(s) can't be used:", *lines])) from None


def train_offline(
    store: Path | str,
    run: Path | str,
    settings: OfflineConfig | Mapping[str, Any] | None = None,
    *,
    models: str | Mapping[str, str],
    agents: Sequence[str] | None = None,
    environment: Environment | None = None,
    display: Display | None = None,
) -> dict[str, Any]:
    """Trains the policies of recorded agents from their coached traces; returns the summary (also in the run's `summary.json`).

    Args:
        store: a run's folder, or a `trace.db`; it is only read.
        run: folder of the new run.
        settings: an `OfflineConfig`, or the same as plain data: `{"method": "sft", "min_score": 8}`.
        models: what to start from, for all policies or by policy: `tiny`, `smollm2`, a model's folder, a Hugging Face name, the folder of
            a training run (its last weights), or of a deployment (what it serves).
        agents: only these; None = all that acted and are not frozen.
        environment: says which policy an agent belongs to, and who is frozen; None = as the traces say.

    Raises `ConfigError` where there is nothing to train on, with what was left out and why, or where the folder holds another run;
    `TrainerError` where a training diverged.
    """
    config = settings if isinstance(settings, OfflineConfig) else make_offline_config(settings or {})
    source, folder = Path(store), Path(run)
    path = source if source.is_file() else source / "trace.db"
    if not path.is_file():
        raise ConfigError(f"{source} holds no recorded run (no {path.name})", hint="give a run's folder, e.g. runs/production")
    if folder.resolve() == path.parent.resolve():
        raise ConfigError(f"{folder} holds the traces", hint="give the training a folder of its own: --run FOLDER")
    asked = {
        "from": str(path.resolve()),
        "settings": config.model_dump(mode="json"),
        "models": dict(models) if isinstance(models, Mapping) else models,
        "agents": None if agents is None else sorted(agents),
        "environment": None if environment is None else environment.name,
    }
    done = _prepare(folder, asked)
    with display or Display(quiet=True) as screen:
        if done is not None:
            screen.status("the run is complete")
            return done
        with TraceStore(path, read_only=True) as traces:
            return _Training(traces, folder, config, models, agents, environment, screen).run()


def _prepare(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Notes what was asked for, or checks that it is the same; returns the summary of a run that is complete."""
    note = folder / ASKED
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists() and ((folder / "checkpoints").exists() or (folder / "trace.db").exists()):
            raise ConfigError(f"{folder} holds another run", hint="give another folder: --run FOLDER")
        # A note alone is of an attempt that failed before anything was made.
        if not note.exists() or [path.name for path in folder.iterdir()] == [ASKED]:
            write_aside(note, json.dumps(asked, indent=1) + "\n")
        before = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't use the run's folder {folder}: {error}", hint="give another: --run FOLDER") from error
    changed = [
        *(name for name in asked if name != "settings" and before.get(name) != asked[name]),
        *(name for name, value in asked["settings"].items() if before.get("settings", {}).get(name) != value),
    ]
    if changed:
        raise ConfigError(
            f"{folder} holds a training with other settings: {', '.join(changed)}",
            hint="continue it with its own settings, or give another folder: --run FOLDER",
        )
    if load_latest(folder / "checkpoints") is None or not (folder / "summary.json").is_file():
        return None
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


@dataclass
class _Training:
    store: TraceStore
    folder: Path
    config: OfflineConfig
    models: str | Mapping[str, str]
    agents: Sequence[str] | None
    environment: Environment | None
    screen: Display

    def run(self) -> dict[str, Any]:
        began = time.perf_counter()
        self.screen.status("reading the traces")
        known = None
        if self.environment is not None:
            known = {a.name: a.policy_name if a.trainable else None for a in self.environment.agents}
        split = None if self.config.split == "all" else self.config.split
        team = team_of(self.store, split, self.agents, known)
        folders = self._folders(team)
        trained = self._reinforce(team, folders) if self.config.method == "reinforce" else self._supervised(team, folders)
        about: dict[str, Any] = {"kind": "offline", "method": self.config.method, "from": str(self.store.path), "seed": self.config.seed}
        about["model"] = {policy: str(folder) for policy, folder in folders.items()}
        summary = plain({**about, **trained, "wall_s": {"total": round(time.perf_counter() - began, 2)}})
        write_json(self.folder / "summary.json", summary)
        shutil.rmtree(self.folder / "parts", ignore_errors=True)
        return dict(summary)

    def _folders(self, team: Team) -> dict[str, Path]:
        """Policy -> folder of its first weights."""
        if isinstance(self.models, Mapping):
            unknown = sorted(set(self.models) - set(team.policies))
            missing = sorted(set(team.policies) - set(self.models))
            if missing:
                raise ConfigError(
                    f"no model is given for policy {missing[0]!r}", hint=f"--model {missing[0]}=FOLDER, or leave its agents out"
                )
            if unknown and self.environment is None:
                raise ConfigError(f"there is no policy {unknown[0]!r} to train", hint=f"there are: {', '.join(team.policies)}")
        specs = {p: self.models if isinstance(self.models, str) else self.models[p] for p in team.policies}
        return {policy: self._folder(policy, spec).resolve() for policy, spec in specs.items()}

    def _folder(self, policy: str, spec: str) -> Path:
        place = Path(spec).expanduser()
        if (place / HISTORY).is_file():
            return served_weights(place, policy)
        if (place / "checkpoints").is_dir():
            found = trained_weights(place)
            if policy not in found:
                raise ConfigError(f"the run {spec} trained no policy {policy!r}", hint=f"it trained: {', '.join(found)}")
            return found[policy]
        self.screen.status(f"preparing the model {spec}")
        environment = self.environment
        lessons = environment.demonstrations() if spec == "tiny" and environment is not None and environment.demonstrations else None
        return resolve_model(spec, demonstrations=lessons, progress=lambda what, n, m: self.screen.progress(n, m, what))

    def _told(self, what: str, done: int, total: int) -> None:
        self.screen.progress(done, total, what)

    # -- with tokens

    def _reinforce(self, team: Team, folders: Mapping[str, Path]) -> dict[str, Any]:
        from transformers import AutoTokenizer

        from .reinforce import learn

        loaded = {policy: AutoTokenizer.from_pretrained(folder, local_files_only=True) for policy, folder in folders.items()}
        if self.config.retokenise:
            bare = sorted(policy for policy, tokenizer in loaded.items() if not tokenizer.chat_template)
            if bare:
                raise ConfigError(f"the model of policy {bare[0]!r} has no chat template to tokenise with", hint="leave retokenise out")
        traces = Traces(self.store, {a: loaded[p] for a, p in team.policy_of.items()}, self.config.retokenise)
        try:
            exported = write_rows(traces, self.folder / "data", tuple(team.policy_of), self.config, self._told)
        except ConfigError as error:
            traces.check({agent: folders[policy] for agent, policy in team.policy_of.items()})
            more = (
                "" if self.config.retokenise else "; text alone can train by --method sft, dpo or kto, or be tokenised anew: --retokenise"
            )
            raise ConfigError(f"{error}{more}") from error
        traces.check({agent: folders[policy] for agent, policy in team.policy_of.items()})
        learned = learn(
            exported, team.policy_of, folders, self.config, unweighted=traces.unweighted, retokenised=traces.retokenised, told=self._told
        )
        idle = {p: "no action with tokens and a score is left" for p in team.policies if p not in learned.rows}
        self._refuse_idle(team, idle)
        self.screen.status("writing the checkpoint")
        save_checkpoint(self.folder / "checkpoints", 1, learned, {"kind": "offline", "iteration": 1, "best": {"iteration": 1}})
        update = learned.update
        row = {"iteration": 1, "kind": "offline", "agents": update.metrics, "policies": update.policies, "rollout": None, "heldout": None}
        write_metrics(self.folder / "metrics.jsonl", [plain(row)])
        warned = [*learned.warnings(), *_left(team, exported), *_idle(idle)]
        policies = {
            policy: {
                "agents": list(agents),
                "rows": dict(learned.rows[policy]),
                "tokens": update.policies[policy]["tokens"],
                "retokenised": learned.retokenised[policy],
                "unweighted": learned.unweighted[policy],
                **learned.losses[policy],
                "estimate": learned.estimates[policy],
                **{
                    k: update.policies[policy].get(k)
                    for k in ("weight_mean", "ratio_max", "clip_share", "mismatch_abs", "grad_norm", "steps")
                },
                "canary": learned.trainer.canary(policy) is not None,
            }
            for policy, agents in team.policies.items()
            if policy in learned.rows
        }
        return {
            "policies": policies, "skipped": idle, "left_out": _reasons(exported),
            "text_only": dict(exported.card["text_only"]), "warnings": warned,
            "tokens": {"trained": update.tokens, "retokenised": learned.made_tokens},
        }  # fmt: skip

    # -- texts

    def _supervised(self, team: Team, folders: Mapping[str, Path]) -> dict[str, Any]:
        from .supervised import fit

        fitted: dict[str, dict[str, Any]] = {}
        idle: dict[str, str] = {}
        left_out, text_only = Counter[str](), Counter[str]()
        for policy, agents in team.policies.items():
            try:
                exported = write_rows(self.store, self.folder / "data" / policy, agents, self.config, self._told)
            except ConfigError as error:
                if len(team.policies) == 1:
                    raise
                idle[policy] = str(error).splitlines()[0]
                continue
            left_out.update(_reasons(exported))
            text_only.update(exported.card["text_only"])
            made_of = [file["sha256"] for file in exported.card["files"]]
            part = self.folder / "parts" / policy
            found = _finished(part, made_of)
            if found is None:
                shutil.rmtree(part, ignore_errors=True)
                data = self.folder / "data" / policy / self.config.method
                found = {**fit(policy, folders[policy], data, self.config, part / "weights", self._told).to_json(), "made_of": made_of}
                write_json(part / "done.json", found)
            fitted[policy] = {**found, "agents": list(agents)}
        self._refuse_idle(team, idle)
        if not fitted:
            raise ConfigError("no policy has anything to train on:\n  " + "\n  ".join(f"{p}: {why}" for p, why in idle.items()))
        self.screen.status("writing the checkpoint")
        parts = {policy: self.folder / "parts" / policy / "weights" for policy in fitted}
        extra = {"kind": "offline", "iteration": 1, "best": {"iteration": 1}}
        save_checkpoint(self.folder / "checkpoints", 1, _Parts(parts), extra)
        log = [{"iteration": 1, "kind": "offline", "policy": p, **row} for p, one in fitted.items() for row in one["history"]]
        write_metrics(self.folder / "metrics.jsonl", [plain(row) for row in log])
        too_long = sum(one["too_long"] for one in fitted.values())
        left = {**left_out, **({"longer than the context": too_long} if too_long else {})}
        losses = {policy: one["losses"] for policy, one in fitted.items()}
        policies = {
            policy: {"agents": one["agents"], "rows": one["rows"], **one["losses"], "canary": (parts[policy] / CANARY).is_file()}
            for policy, one in fitted.items()
        }
        return {
            "policies": policies, "skipped": idle, "left_out": left, "text_only": dict(text_only),
            "warnings": [*_worse(losses), *_idle(idle)],
        }  # fmt: skip

    def _refuse_idle(self, team: Team, idle: Mapping[str, str]) -> None:
        """An agent that was asked for by name must not be left out with a remark."""
        for policy, why in idle.items():
            asked = [agent for agent in self.agents or () if team.policy_of[agent] == policy]
            if asked:
                raise ConfigError(f"agent {asked[0]!r} can't be trained: {why}", hint="leave it out, or loosen the filters")


@dataclass(frozen=True)
class _Parts:
    """Finished weights, as a checkpoint takes them."""

    folders: Mapping[str, Path]

    def save(self, folder: Path) -> None:
        for policy, part in self.folders.items():
            shutil.copytree(part, folder / POLICIES / policy)


def served_weights(deployment: Path, policy: str) -> Path:
    """The folder of the weights that a deployment serves to all but a trial's calls. Raises `ConfigError` where it can't be told."""
    try:
        kept = json.loads((deployment / HISTORY).read_text(encoding="utf-8"))
        version, releases, first = kept["current"].get(policy), kept["releases"], kept.get("first", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{deployment / HISTORY} can't be read: {type(error).__name__}: {error}") from error
    if version is None:
        raise ConfigError(f"the deployment {deployment} has no policy {policy!r}", hint=f"it has: {', '.join(kept['current'])}")
    release = next((r for r in releases if (r["policy"], r["version"]) == (policy, version)), None)
    weights = first.get(policy) if release is None or release["of"] == 0 else release["weights"]
    if weights is None:
        raise ConfigError(
            f"the deployment {deployment} serves the first weights of {policy!r}, and doesn't say where they lie",
            hint=f"name them: --model {policy}=FOLDER",
        )
    return deployment / weights  # those inside the deployment are written down relative to it


def _finished(part: Path, made_of: Sequence[str]) -> dict[str, Any] | None:
    """What an earlier start made of the same rows."""
    try:
        found: dict[str, Any] = json.loads((part / "done.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("made_of") == list(made_of) else None


def _reasons(exported: Exported) -> dict[str, int]:
    """Why actions were left out, those of agents that weren't asked for aside."""
    return {reason: count for reason, count in exported.card["left_out"].items() if reason != "agent"}


def _left(team: Team, exported: Exported) -> list[str]:
    """Says how many actions are refused for want of tokens."""
    out = []
    for agent, count in sorted(exported.card["text_only"].items()):
        out.append(
            f"{agent}: {count} of {team.actions[agent]} actions have no tokens (text only), and are not trained on: their calls did "
            "not pass through the gateway, or weren't joined (mappa-graph import --calls)"
        )
    return out


def _worse(losses: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> list[str]:
    out = []
    for policy, found in losses.items():
        before, after = found["before"].get(HELDOUT), found["after"].get(HELDOUT)
        if before is not None and after is not None and after > before:
            out.append(f"{policy}: the loss on held-out tasks rose from {before:.4f} to {after:.4f}: try fewer epochs or a lower lr")
    return out


def _idle(idle: Mapping[str, str]) -> list[str]:
    return [f"{policy} was not trained: {why}" for policy, why in idle.items()]

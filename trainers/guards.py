"""Guards: named alarms about the updates, and the batches that an update refused, kept for replay.

An alarm reads the rows of `metrics.jsonl` and nothing else, so a continued run hears what an uninterrupted one would. Each is said once
for each agent; one whose action is `stop` ends the run after its checkpoint. A refused batch is one folder,
`refused/iteration-0007/`, with the samples as the trainer got them and the step of the checkpoint from before the update.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mappa_graph.errors import ConfigError
from mappa_graph.record import from_json
from mappa_graph.sections.loop import AlarmsConfig

from .batch import Sample
from .weights import atomic_folder

TEAM = ""
"""The agent of an alarm that is about all of them."""
_FOLDER = re.compile(r"iteration-(\d{4,})")


@dataclass(frozen=True)
class Alarm:
    """Something is wrong with the updates of an agent."""

    name: str
    agent: str
    """Empty: all of them together."""
    value: float
    threshold: float
    action: str
    message: str


class Guard:
    """Watches the rows of a run. `history` is what it had already seen."""

    def __init__(self, settings: AlarmsConfig, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self.settings = settings
        self._first: dict[tuple[str, str], float] = {}
        """What entropy and length were in an agent's first update."""
        self._run: defaultdict[tuple[str, str], int] = defaultdict(int)
        """In how many rows on end the value has been past its threshold."""
        self._said: set[tuple[str, str]] = set()
        for row in history:
            self.see(row)

    def see(self, row: Mapping[str, Any]) -> tuple[list[Alarm], list[Alarm]]:
        """Takes a row; returns the alarms that are on now, and those of them that were not said before."""
        on: list[Alarm] = []
        for name, agent, value, past, message in self._looked_at(row):
            setting = getattr(self.settings, name)
            self._run[name, agent] = self._run[name, agent] + 1 if past else 0
            if setting.action != "off" and self._run[name, agent] >= setting.iterations:
                on.append(Alarm(name, agent, round(value, 6), setting.threshold, setting.action, message))
        new = [alarm for alarm in on if (alarm.name, alarm.agent) not in self._said]
        self._said.update((alarm.name, alarm.agent) for alarm in on)
        return on, new

    def _looked_at(self, row: Mapping[str, Any]) -> Iterator[tuple[str, str, float, bool, str]]:
        """`(alarm, agent, value, whether it is past the threshold, message)` of all that the row has numbers for."""
        limit = {name: getattr(self.settings, name).threshold for name in AlarmsConfig.model_fields}
        agents = {name: part for name, part in row.get("agents", {}).items() if part.get("tokens")}
        for agent, part in agents.items():
            entropy = _number(part, "entropy")
            first = self._since("entropy", agent, entropy)
            if entropy is not None and first:
                past = entropy < limit["entropy_collapse"] * first
                text = f"entropy of {agent} fell to {entropy:.3g} nats a token, {entropy / first:.0%} of the first update's {first:.3g}"
                yield "entropy_collapse", agent, entropy, past, f"{text}: it explores no more"
            length = _number(part, "length_mean")
            first = self._since("length_mean", agent, length)
            if length and first:
                factor = max(length / first, first / length)
                text = f"actions of {agent} are {length:.3g} tokens long, {first:.3g} in the first update"
                yield "length_drift", agent, length, factor > limit["length_drift"], text
            for name, key, text in _PLAIN:
                value = _number(part, key)
                if value is not None:
                    yield name, agent, value, value > limit[name], text.format(agent=agent, value=value)
        if agents:
            spread = [_rms(part) for part in agents.values()]
            strongest = max((s for s in spread if s is not None), default=None)
            if strongest is not None:
                text = f"all advantages are about zero (root mean square {strongest:.2g}): the scores of the batch don't differ"
                yield "no_signal", TEAM, strongest, strongest < limit["no_signal"], f"{text}, so nothing was learned"

    def _since(self, key: str, agent: str, value: float | None) -> float | None:
        if value is not None:
            self._first.setdefault((key, agent), value)
        return self._first.get((key, agent))


_PLAIN = (
    ("ratio_explosion", "ratio_max", "a token of {agent} is {value:.3g} times as likely after the update's steps as before"),
    ("mismatch", "mismatch_abs", "log-probs of {agent} differ by {value:.3g} nats a token between engine and trainer"),
    ("kl_explosion", "kl", "{agent} is {value:.3g} nats a token away from its first weights"),
)


def _number(part: Mapping[str, Any], key: str) -> float | None:
    value = part.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _rms(part: Mapping[str, Any]) -> float | None:
    mean, std = _number(part, "advantage_mean"), _number(part, "advantage_std")
    return None if mean is None or std is None else math.hypot(mean, std)


def rung(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each alarm of a run the first time it went off, with its iteration: the `alarms` of `summary.json`."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in history:
        for alarm in row.get("alarms", ()):
            found.setdefault((alarm["name"], alarm["agent"]), {"iteration": row["iteration"], **alarm})
    return list(found.values())


@dataclass(frozen=True)
class Refused:
    """A batch of which an update refused steps, as it is kept."""

    folder: Path
    iteration: int
    refused: Mapping[str, str]
    """Policy -> why."""
    checkpoint: int | None
    """Step of the checkpoint from before the update; None where there was none, and the folder holds the state from after it."""
    models: Mapping[str, str]
    """Policy -> folder of its first weights."""

    def samples(self) -> list[Sample]:
        lines = (self.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        return [from_json(Sample, json.loads(line)) for line in lines]


def keep_refused(
    root: Path,
    iteration: int,
    samples: Sequence[Sample],
    refused: Mapping[str, str],
    *,
    checkpoint: int | None,
    models: Mapping[str, Path],
    settings: str,
    keep: int,
    save: Any = None,
) -> Path:
    """Puts a refused batch under `root`, and drops the oldest ones beyond `keep`.

    Args:
        checkpoint: step of the checkpoint from before the update, where there is one.
        settings: the run's config, as YAML.
        save: `save(folder)` writes the trainer's present state, which stands in where there is no checkpoint.
    """
    folder = root / f"iteration-{iteration:04d}"
    with atomic_folder(folder) as aside:
        (aside / "samples.jsonl").write_text("".join(json.dumps(asdict(s)) + "\n" for s in samples), encoding="utf-8")
        (aside / "settings.yaml").write_text(settings, encoding="utf-8")
        if checkpoint is None and save is not None:
            save(aside / "state")
        about = {"iteration": iteration, "refused": dict(refused), "checkpoint": checkpoint}
        (aside / "refused.json").write_text(json.dumps({**about, "models": {p: str(m) for p, m in models.items()}}, indent=1))
    for old in _folders(root)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def refused_steps(root: Path) -> list[int]:
    """Steps of the checkpoints that kept batches need."""
    steps = []
    for folder in _folders(root):
        try:
            steps.append(json.loads((folder / "refused.json").read_text())["checkpoint"])
        except (OSError, ValueError, KeyError):
            continue
    return [int(step) for step in steps if step is not None]


def find_refused(run: Path, iteration: int | None = None) -> Refused:
    """The refused batch of an iteration, or the latest. Raises `ConfigError` that says which there are."""
    folders = {int(f.name.removeprefix("iteration-")): f for f in _folders(run / "refused")}
    if not folders:
        raise ConfigError(f"{run} holds no refused batch", hint="every step of its updates was made, or it is not the folder of a run")
    chosen = max(folders) if iteration is None else iteration
    if chosen not in folders:
        raise ConfigError(
            f"{run} holds no refused batch of iteration {chosen}", hint=f"it has those of: {', '.join(map(str, sorted(folders)))}"
        )
    try:
        about = json.loads((folders[chosen] / "refused.json").read_text())
        return Refused(folders[chosen], about["iteration"], about["refused"], about["checkpoint"], about["models"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the refused batch in {folders[chosen]} can't be read: {type(error).__name__}: {error}") from error


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if (m := _FOLDER.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(found)]

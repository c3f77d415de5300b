"""A refused update, run again and looked into: which policy, which sample, which tokens are not finite.

`replay(run)` loads the checkpoint from before the update into a trainer of its own, gives it the kept batch, and changes nothing in the
run's folder. What it finds it names in the order in which an update computes: weights, the engine's log-probs, the trainer's, the
reference's, the KL in the reward, advantages; where all of these are finite, loss or gradient are not, and the samples are halved until
the smallest part is left that is still refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mappa_graph.config import load_config
from mappa_graph.errors import TrainerError

from .batch import Sample
from .checkpoint import verify
from .guards import Refused, find_refused
from .run import make_trainer

if TYPE_CHECKING:
    from .trainer import ReinforceTrainer

MOST = 20
"""Findings of one policy that are listed; the others are counted."""


@dataclass(frozen=True)
class Finding:
    """Something that is not finite."""

    policy: str
    what: str
    agent: str = ""
    episode: str = ""
    action: str = ""
    """Empty with `episode` and `agent`: it is about the policy as a whole."""
    tokens: tuple[int, int] | None = None
    """First and last position in the completion, from 0."""


@dataclass(frozen=True)
class Replayed:
    """What a replay showed."""

    iteration: int
    state: str
    """Where the weights came from."""
    samples: int
    then: Mapping[str, str]
    """Policy -> why it was refused in the run."""
    now: Mapping[str, str]
    """The same, in the replay."""
    findings: Sequence[Finding]
    more: int = 0
    """Findings that are not listed."""


def replay(run: Path, iteration: int | None = None) -> Replayed:
    """Runs the refused update of an iteration (None: the latest one) again.

    Raises `ConfigError` where the run keeps no such batch, `TrainerError` where the checkpoint or first weights are gone.
    """
    kept = find_refused(run, iteration)
    samples = kept.samples()
    folder, state = _state(run, kept)
    missing = [f"{policy}: {model}" for policy, model in kept.models.items() if not Path(model).is_dir()]
    if missing:
        raise TrainerError(f"the first weights are no longer where they were: {'; '.join(missing)}", hint="put the folder back")
    trainer = make_trainer(load_config(kept.folder / "settings.yaml"), kept.models)
    trainer.load(folder)
    findings = _findings(trainer, samples, kept.refused)
    trainer.load(folder)
    now = dict(trainer.update(samples).refused)
    for policy in now:
        if not any(f.policy == policy for f in findings):
            findings.append(_smallest(trainer, folder, policy, samples))
    shown = [f for policy in {f.policy: None for f in findings} for f in [g for g in findings if g.policy == policy][:MOST]]
    return Replayed(kept.iteration, state, len(samples), kept.refused, now, shown, len(findings) - len(shown))


def _state(run: Path, kept: Refused) -> tuple[Path, str]:
    if kept.checkpoint is None:
        return kept.folder / "state", "from after the update (there was no checkpoint right before it; a refused step changes no weights)"
    folder = run / "checkpoints" / f"step-{kept.checkpoint:08d}"
    try:
        verify(folder)
    except TrainerError as error:
        raise TrainerError(f"checkpoint {kept.checkpoint}, from before the update, can't be used: {error}") from error
    return folder, f"of checkpoint {kept.checkpoint}, from before the update"


def _findings(trainer: ReinforceTrainer, samples: Sequence[Sample], policies: Iterable[str]) -> list[Finding]:
    """What is not finite before any loss, by policy and sample."""
    found: list[Finding] = []
    usable = [s for s in samples if s.ret is not None]
    parts = {policy: learner.plan([s for s in usable if s.policy == policy], 0) for policy, learner in trainer.learners.items()}
    for policy, part in parts.items():
        learner = trainer.learners[policy]
        bad = [name for name, p in learner.model.named_parameters() if not bool(p.isfinite().all())]
        if bad:
            found.append(Finding(policy, f"{len(bad)} of its weight tensors, the first is {bad[0]}"))
        learner.score(part)
    trainer._advantages(list(parts.values()))
    for policy, part in parts.items():
        kl = part.kl()
        for i, sample in enumerate(part.samples):
            # Where one step needs no old log-probs beforehand, none were computed: then the forward is made here.
            old = part.old[i].tolist() if part.old is not None else trainer.learners[policy].logprobs(sample)
            rows: list[tuple[str, Sequence[float]]] = [
                ("log-probs of the engine", sample.engine_logprobs),
                ("log-probs under its weights", old),
                ("log-probs under its first weights", [] if part.reference is None else part.reference[i].tolist()),
                ("KL times beta, in the reward", (kl[i] * trainer.settings.beta).flip(0).cumsum(0).flip(0).tolist()),
                ("advantages", part.advantages[i].tolist()),
            ]
            for what, values in rows:
                where = [t for t, value in enumerate(values) if not math.isfinite(value)]
                if where:
                    found.append(Finding(policy, what, sample.agent, sample.episode, sample.action_id, (where[0], where[-1])))
                    break
    wanted = set(policies)
    return [f for f in found if f.policy in wanted]


def _smallest(trainer: ReinforceTrainer, folder: Path, policy: str, samples: Sequence[Sample]) -> Finding:
    """Halves a policy's samples for as long as one half alone is refused."""

    def refused(part: Sequence[Sample]) -> bool:
        trainer.load(folder)
        return policy in trainer.update(part).refused

    left = [s for s in samples if s.policy == policy and s.ret is not None]
    while len(left) > 1:
        middle = len(left) // 2
        smaller = next((half for half in (left[:middle], left[middle:]) if refused(half)), None)
        if smaller is None:
            break
        left = smaller
    if len(left) == 1:
        (sample,) = left
        return Finding(policy, "loss or gradient", sample.agent, sample.episode, sample.action_id, (0, len(sample.completion_ids) - 1))
    return Finding(policy, f"loss or gradient of {len(left)} samples together, of no half of them alone")

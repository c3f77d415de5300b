"""A refused update, run again and looked into: which policy, which sample, which tokens are not finite.

`replay(run)` loads the checkpoint from before the update into a trainer of its own, gives it the kept batch, and changes nothing in the
run's folder. What it finds it names in the order in which an update computes: weights, the engine's log-probs, the trainer's, the
reference's, the KL in the reward, advantages; where all of these are finite, loss or gradient are not, and the samples are halved until
the smallest part is left that is still refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mappa_graph.config import load_config
from mappa_graph.errors import TrainerError

from .batch import Sample
from .checkpoint import verify
from .guards import Refused, find_refused
from .run import make_trainer

if TYPE_CHECKING:
    from .learner import Learner, Scored
    from .trainer import ReinforceTrainer

GROWTH = 1000.0
"""A largest weight that one update made this many times larger is named as a cause."""
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
    before = _largest(trainer)
    now = dict(trainer.update(samples).refused)
    after = _largest(trainer)
    for policy in now:
        if any(f.policy == policy for f in findings):
            continue
        if not after[policy] <= GROWTH * before[policy]:
            what = f"weights: an earlier step of the same update took the largest from {before[policy]:.3g} to {after[policy]:.3g}"
            findings.append(Finding(policy, what))
        else:
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


def _largest(trainer: ReinforceTrainer) -> dict[str, float]:
    """The largest absolute weight of each policy."""
    return {name: max((float(p.detach().abs().max()) for p in each.parameters), default=0.0) for name, each in trainer.learners.items()}


def _findings(trainer: ReinforceTrainer, samples: Sequence[Sample], policies: Iterable[str]) -> list[Finding]:
    """What is not finite before any loss, by policy and sample."""
    found: list[Finding] = []
    usable = [s for s in samples if s.ret is not None]
    parts = {policy: learner.plan([s for s in usable if s.policy == policy], 0) for policy, learner in trainer.learners.items()}
    for policy, part in parts.items():
        learner = trainer.learners[policy]
        bad = [name for name, p in zip(learner.body.names, learner.parameters, strict=True) if not bool(p.isfinite().all())]
        if bad:
            found.append(Finding(policy, f"{len(bad)} of its weight tensors, the first is {bad[0]}"))
        learner.score(part)
    trainer._advantages(list(parts.values()))
    wanted = set(policies)
    for policy in wanted & parts.keys():
        part = parts[policy]
        for what, values in _stages(trainer, policy, part):
            where = {i: [t for t, value in enumerate(row) if not math.isfinite(value)] for i, row in enumerate(values)}
            spots = [(part.samples[i], tokens[0], tokens[-1]) for i, tokens in where.items() if tokens]
            found += [Finding(policy, what, s.agent, s.episode, s.action_id, (first, last)) for s, first, last in spots]
            if spots:
                break
    return [f for f in found if f.policy in wanted]


def _stages(trainer: ReinforceTrainer, policy: str, part: Scored) -> Iterator[tuple[str, list[Sequence[float]]]]:
    """What an update computes of a policy's samples, in its order: a name, and numbers by token of each sample."""
    beta, kl = trainer.settings.beta, part.kl()
    yield "log-probs of the engine", [s.engine_logprobs for s in part.samples]
    yield "log-probs under its weights", [_alone(trainer.learners[policy], s) for s in part.samples]
    yield "log-probs under its first weights", [] if part.reference is None else [r.tolist() for r in part.reference]
    yield "KL times beta, in the reward", [(k * beta).flip(0).cumsum(0).tolist() for k in kl]
    yield "advantages", [a.tolist() for a in part.advantages]


def _alone(learner: Learner, sample: Sample) -> list[float]:
    """A sample's log-probs without the rest of its batch, not finite from the first token on that is not so by itself.

    Attention multiplies what it masks with zero, so what is not finite spreads to all of a pack, and to earlier tokens.
    """
    values = learner.logprobs(sample)
    if all(map(math.isfinite, values)):
        return values
    good, bad = 0, len(values)
    while bad - good > 1:
        middle = (good + bad) // 2
        part = replace(sample, completion_ids=sample.completion_ids[:middle], engine_logprobs=sample.engine_logprobs[:middle])
        good, bad = (middle, bad) if all(map(math.isfinite, learner.logprobs(part))) else (good, middle)
    return [0.0] * good + [math.nan] * (len(values) - good)


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

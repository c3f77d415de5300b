"""REINFORCE++ on fixed data: one update of every policy from all rows, over as many epochs as asked for.

It is the loop's own update (`ReinforceTrainer.update`): returns normalised over all agents together, the clipped ratio against the first
weights, and the capped weight `pi_first / pi_behaviour` of each token where the engine's log-probs are known. Where they aren't, the
first weights' own log-probs stand in for them, which makes the weight 1. There is no KL: the old weights of the update are the first ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mappa_graph.errors import TrainerError
from mappa_graph.exchange.export import Exported
from mappa_graph.exchange.options import HELDOUT, TRAIN
from mappa_graph.gateway.deployment import write_canary
from mappa_graph.sections.offline import OfflineConfig

from ..batch import Sample
from ..checkpoint import POLICIES
from ..loss import policy_loss
from ..returns import token_advantages
from ..settings import TrainerSettings
from ..trainer import ReinforceTrainer, Update

Told = Callable[[str, int, int], Any]
Losses = dict[str, dict[str, dict[str, float | None]]]
"""Policy -> when ("before", "after") -> side -> loss; None where the side has no action."""
FAR = 0.3
"""Mean difference of log-probs, in nats a token, from which the traces are said to come from other weights."""
SURE = 4.0
"""An estimate that is worth fewer actions is not warned of."""


@dataclass(frozen=True)
class Learned:
    """What the update did, and the trainer that holds the new weights: `save` is that of a checkpoint."""

    trainer: ReinforceTrainer
    update: Update
    losses: Losses
    estimates: Mapping[str, Mapping[str, float]]
    """Policy -> what its held-out actions tell of the mean return under the new weights; see `_estimate`."""
    unweighted: Mapping[str, int]
    """Policy -> actions with the weight 1, for want of the engine's log-probs."""
    retokenised: Mapping[str, int]
    """Policy -> actions whose tokens were made from their text."""
    rows: Mapping[str, Mapping[str, int]]
    """Policy -> side -> actions."""
    made_tokens: int
    """Tokens of actions that were tokenised anew."""

    def save(self, folder: Path) -> None:
        """Everything that a checkpoint holds, each policy's canary beside its weights."""
        self.trainer.save(folder)
        for policy in self.rows:
            canary = self.trainer.canary(policy)
            if canary is not None:
                write_canary(folder / POLICIES / policy, canary)

    def warnings(self) -> list[str]:
        """What a reader of the results must know of the data."""
        said = []
        for policy, rows in self.rows.items():
            total = rows[TRAIN]
            if made := self.retokenised.get(policy):
                said.append(
                    f"{policy}: {made} of {total} actions were tokenised anew from their text; these are not the tokens that were sampled, "
                    "and their importance weight is 1, as if the first weights had written them"
                )
            if blind := self.unweighted.get(policy):
                said.append(
                    f"{policy}: {blind} of {total} actions have no log-probs of the weights that wrote them: their importance weight is 1, "
                    "as if the first weights had written them"
                )
            apart = self.update.policies.get(policy, {}).get("mismatch_abs", 0.0)
            if apart > FAR:
                said.append(
                    f"{policy}: the traces were written by other weights than the first ones ({apart:.2f} nats a token apart); weights are "
                    "capped there, so little is learned: start from the weights that served (model)"
                )
            guess = self.estimates[policy]
            if guess and guess["after"] < guess["before"] and guess["effective"] >= SURE:
                said.append(
                    f"{policy}: by held-out actions the mean return falls from {guess['before']:.3f} to {guess['after']:.3f}: "
                    "try fewer epochs or a lower lr"
                )
        return said


def learn(
    exported: Exported,
    policy_of: Mapping[str, str],
    models: Mapping[str, Path],
    config: OfflineConfig,
    *,
    unweighted: set[str],
    retokenised: set[str],
    told: Told,
) -> Learned:
    """Trains on exported rows. Raises `TrainerError` where a policy's numbers are not finite.

    Args:
        policy_of: agent -> policy.
        models: policy -> folder of its first weights; those without a row are left as they are.
        unweighted, retokenised: ids of actions.
    """
    sides = {side: read_samples(path, policy_of) for side, path in exported.files.items()}
    train, heldout = sides[TRAIN], sides.get(HELDOUT, [])
    chosen = {policy: folder for policy, folder in models.items() if any(s.policy == policy for s in train)}
    heldout = [s for s in heldout if s.policy in chosen]
    settings = TrainerSettings(
        lora=config.lora, beta=0.0, lr=config.rate, epochs=config.epochs, clip=config.clip, importance_cap=config.importance_cap,
        std_floor=config.std_floor, normalise=config.normalise, grad_clip=config.grad_clip, optimizer_batches=config.optimizer_batches,
        micro_batch_tokens=config.micro_batch_tokens, dtype=config.dtype,
    )  # fmt: skip
    trainer = ReinforceTrainer(chosen, settings, device=config.device, seed=config.seed)
    blind = unweighted | retokenised
    train, heldout = (_with_logprobs(trainer, samples, blind, told) for samples in (train, heldout))
    measured = {TRAIN: train[: config.measure], HELDOUT: heldout[: config.measure]}
    first = {side: _logprobs(trainer, samples) for side, samples in measured.items()}
    mean, divisor = _moments(train, config.std_floor)
    losses: Losses = {policy: {} for policy in chosen}

    def measure(when: str, now: Mapping[str, list[list[float]]]) -> None:
        for policy in chosen:
            losses[policy][when] = {
                side: _loss(policy, samples, first[side], now[side], mean, divisor, settings) for side, samples in measured.items()
            }

    measure("before", first)
    told("training", 0, 1)
    update = trainer.update(train)
    if update.refused:
        why = "; ".join(f"{policy}: {reason}" for policy, reason in sorted(update.refused.items()))
        raise TrainerError(f"the update was refused ({why})", hint=f"lower the learning rate (now {config.rate:g}): --set lr=...")
    last = {side: _logprobs(trainer, samples) for side, samples in measured.items()}
    measure("after", last)
    side = HELDOUT if measured[HELDOUT] else TRAIN
    estimates = {policy: _estimate(policy, measured[side], first[side], last[side]) for policy in chosen}

    def counted(ids: set[str]) -> dict[str, int]:
        return {policy: sum(s.policy == policy and s.action_id in ids for s in train) for policy in chosen}

    rows = {p: {TRAIN: sum(s.policy == p for s in train), HELDOUT: sum(s.policy == p for s in heldout)} for p in chosen}
    made = sum(len(s.completion_ids) for s in train if s.action_id in retokenised)
    return Learned(trainer, update, losses, estimates, counted(unweighted - retokenised), counted(retokenised), rows, made)


def read_samples(path: Path, policy_of: Mapping[str, str]) -> list[Sample]:
    """The samples of an export of the format `rl`, JSON lines."""
    samples = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            samples.append(
                Sample(
                    agent=row["agent"],
                    policy=policy_of[row["agent"]],
                    episode=row["episode"],
                    action_id=row["action"],
                    prompt_ids=tuple(row["prompt_ids"]),
                    completion_ids=tuple(row["completion_ids"]),
                    engine_logprobs=tuple(row["logprobs"]),
                    temperature=row["temperature"],
                    ret=row["return"],
                    truncated=row["truncated"],
                    stratum=row["stratum"] or "",
                )
            )
    return samples


def _with_logprobs(trainer: ReinforceTrainer, samples: Sequence[Sample], blind: set[str], told: Told) -> list[Sample]:
    """The samples with the first weights' log-probs where the engine's are not known."""
    out, done = [], 0
    total = sum(s.action_id in blind for s in samples)
    for sample in samples:
        if sample.action_id in blind:
            trainer.learner(sample.policy).check([sample])
            sample = replace(sample, engine_logprobs=tuple(trainer.learner(sample.policy).logprobs(sample)))
            done += 1
            told("log-probs of actions without any", done, total)
        out.append(sample)
    return out


def _logprobs(trainer: ReinforceTrainer, samples: Sequence[Sample]) -> list[list[float]]:
    for sample in samples:
        trainer.learner(sample.policy).check([sample])
    return [trainer.learner(sample.policy).logprobs(sample) for sample in samples]


def _moments(samples: Sequence[Sample], floor: float) -> tuple[float, float]:
    """Mean and divisor of the returns over all tokens in training."""
    found: list[tuple[float, float]] = []
    zeros = [torch.zeros(len(s.completion_ids)) for s in samples]
    token_advantages([s.ret for s in samples], zeros, 0.0, floor, moments=lambda _, n, mean, std: found.append((mean, max(std, floor))))
    return found[0]


def _loss(
    policy: str,
    samples: Sequence[Sample],
    first: Sequence[Sequence[float]],
    now: Sequence[Sequence[float]],
    mean: float,
    divisor: float,
    settings: TrainerSettings,
) -> float | None:
    """The policy loss per token, with both sides' returns normalised as those in training were."""
    mine = [(s, old, new) for s, old, new in zip(samples, first, now, strict=True) if s.policy == policy and s.ret is not None]
    if not mine:
        return None
    advantages = [torch.full((len(old),), ((s.ret or 0.0) - mean) / divisor) for s, old, _ in mine]
    out = policy_loss(
        torch.tensor([value for *_, new in mine for value in new]),
        torch.tensor([value for _, old, _ in mine for value in old]),
        torch.tensor([value for s, *_ in mine for value in s.engine_logprobs]),
        torch.cat(advantages),
        clip=settings.clip,
        importance_cap=settings.importance_cap,
    )
    return float(out.loss)


def _estimate(policy: str, samples: Sequence[Sample], first: Sequence[Sequence[float]], now: Sequence[Sequence[float]]) -> dict[str, float]:
    """Mean return of actions (0..1) as they are, and as the new weights would earn it: each action weighed by how much more likely it is.

    The weights are those of whole actions, `min(pi_new / pi_first, 10)`, normalised to sum to 1 (self-normalised importance sampling);
    `effective` is the number of equally weighed actions that would be as sure, `(sum w)^2 / sum w^2`. Empty where there is no action.
    """
    mine = [
        (s.ret, sum(new) - sum(old)) for s, old, new in zip(samples, first, now, strict=True) if s.policy == policy and s.ret is not None
    ]
    if not mine:
        return {}
    weights = [math.exp(min(more, math.log(10.0))) for _, more in mine]
    total = sum(weights)
    return {
        "actions": float(len(mine)),
        "before": sum(value for value, _ in mine) / len(mine),
        "after": sum(weight * value for weight, (value, _) in zip(weights, mine, strict=True)) / total,
        "effective": total**2 / sum(weight**2 for weight in weights),
    }

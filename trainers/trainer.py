"""REINFORCE++ over a team: one update of every policy from the samples of a batch.

Score, return, KL, normalise, learn: the steps of `update` are the formulas of the method in their order. Advantages are normalised over
all agents together; each policy's loss is the mean over its own trainable tokens of the optimizer batch, over all ranks. A policy
whose numbers are not finite is refused: it keeps its weights and optimizer, and takes no part in anybody's statistics.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mappa_graph.agent import check_name
from mappa_graph.errors import ConfigError, TrainerError
from mappa_graph.gateway.deployment import write_canary
from mappa_graph.gateway.engine import Canary

from .batch import Sample
from .bodies import Body, Frozen, Whole
from .checkpoint import POLICIES
from .learner import Learner, Scored
from .ranks import Alone
from .returns import token_advantages
from .settings import TrainerSettings
from .sharding import Sharding
from .tally import Tally

CANARY_TOKENS = 16
CANARY_TOLERANCE = {"float32": 0.02, "bfloat16": 0.1}
"""Nats by which an engine's log-probs may differ from the trainer's."""
_STATE = "trainer.pt"


@dataclass(frozen=True)
class Update:
    """What an update did."""

    metrics: Mapping[str, Mapping[str, float]]
    """Per agent: tokens, actions, return_mean, length_mean, advantage_mean, advantage_std, kl (to the first weights), entropy, ratio_mean,
    ratio_max, clip_share, weight_mean, mismatch_kl (mean of log pi_engine - log pi_old), mismatch_abs; and of its policy: loss,
    grad_norm, lr, steps, refused (steps), computed_tokens, shared_tokens."""
    policies: Mapping[str, Mapping[str, float]]
    """The same per policy, over all of its agents."""
    tokens: int
    """Trainable tokens, over all ranks."""
    actions: int
    without_return: int
    """Samples of this rank that were left out because they have no return."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Policy -> why a step of it was refused."""
    seconds: float = 0.0


class ReinforceTrainer(AbstractContextManager["ReinforceTrainer"]):
    """Holds the policies in training.

    Args:
        models: policy -> folder of its first weights, Hugging Face format. Policies from one folder share one frozen reference, or, as
            adapters (`settings.lora`), one base.
        settings: see `TrainerSettings`.
        device: of models and arithmetic.
        seed: of the split into optimizer batches, of adapters' first weights, and torch's.
        ranks: the processes that train together; None = this one. Each calls the same methods in the same order; only the first writes.
        sharding: how models are cut up over the ranks; None = each has all of them.
    """

    def __init__(
        self,
        models: Mapping[str, Path | str],
        settings: TrainerSettings | None = None,
        *,
        device: str = "cpu",
        seed: int = 0,
        ranks: Alone | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        for policy in models:
            check_name("policy", policy)
        if not models:
            raise TrainerError("no policies to train", hint='give at least one: {"solver": "path/to/model"}')
        self.settings = settings or TrainerSettings()
        self.device = torch.device(device)
        self.ranks = ranks or Alone()
        self.seed = seed
        self.updates = 0
        torch.manual_seed(seed)
        if self.settings.offload == "optimizer" and self.device.type == "cpu":
            raise ConfigError("train.offload 'optimizer' has no effect on a CPU: that is where the state is", hint="leave it out")
        if self.settings.offload == "optimizer" and sharding is not None:
            raise ConfigError(
                "train.offload 'optimizer' can't be had where models are sharded",
                hint="accelerate launch --fsdp_offload_params true keeps shards and their optimizer state in the CPU's memory",
            )
        bodies = self._bodies({policy: Path(folder).resolve() for policy, folder in models.items()}, sharding)
        self.learners = {p: Learner(p, body, self.settings, self.device, self.ranks) for p, body in bodies.items()}
        self._recent: dict[str, Sample] = {}

    def _bodies(self, models: Mapping[str, Path], sharding: Sharding | None) -> dict[str, Body]:
        if self.settings.lora is not None:
            from .lora import open_adapters

            return dict(open_adapters(models, self.settings, self.device, self.seed, sharding))
        with_reference = set(models.values()) if self.settings.beta > 0.0 else set()
        frozen = {folder: Frozen(folder, self.settings, self.device, sharding) for folder in sorted(with_reference)}
        return {p: Whole(p, folder, self.settings, self.device, frozen.get(folder), sharding) for p, folder in models.items()}

    def update(self, samples: Sequence[Sample]) -> Update:
        """One update from the samples of a batch. Samples without a return are left out; a policy without samples keeps its weights."""
        started = time.perf_counter()
        parts = self._parts(samples)
        for policy, part in parts.items():
            self.learners[policy].score(part)
        self._agree_on_refusals(parts)
        self._advantages([part for part in parts.values() if part.refused is None])

        metrics: dict[str, dict[str, float]] = {}
        policies: dict[str, dict[str, float]] = {}
        for policy, part in parts.items():
            agents = [str(name) for name in self.ranks.union(s.agent for s in part.samples)]
            if not agents:
                continue
            if part.refused is not None:
                policies[policy] = {"refused": 1.0}
                metrics.update({agent: {"refused": 1.0} for agent in agents})
                continue
            tally = Tally(agents)
            learned = self.learners[policy].learn(part, tally)
            whole = tally.over(self.ranks)
            policies[policy] = {**learned, **whole.metrics()}
            metrics.update({agent: {**learned, **whole.metrics(agent)} for agent in agents})
            if part.refused is None:
                self._keep_shortest(policy, part.samples)
        self.updates += 1
        return Update(
            metrics=metrics,
            policies=policies,
            tokens=int(sum(m.get("tokens", 0.0) for m in policies.values())),
            actions=int(sum(m.get("actions", 0.0) for m in policies.values())),
            without_return=sum(s.ret is None for s in samples),
            refused={policy: part.refused for policy, part in parts.items() if part.refused is not None},
            seconds=time.perf_counter() - started,
        )

    def _keep_shortest(self, policy: str, samples: Sequence[Sample]) -> None:
        """The shortest sample of all ranks is the next canary."""

        def size(sample: Sample) -> tuple[int, str]:
            return len(sample.prompt_ids) + len(sample.completion_ids), sample.action_id

        shortest = [s for s in self.ranks.gather(min(samples, key=size, default=None)) if s is not None]
        self._recent[policy] = min(shortest, key=size)

    def _parts(self, samples: Sequence[Sample]) -> dict[str, Scored]:
        unknown = {s.policy for s in samples} - set(self.learners)
        if unknown:
            raise TrainerError(
                f"samples of policies that are not in training: {', '.join(sorted(unknown))}",
                hint=f"in training: {', '.join(self.learners)}; leave frozen agents' samples out",
            )
        usable = [s for s in samples if s.ret is not None]
        salt = self.seed * 1_000_003 + self.updates
        return {policy: learner.plan([s for s in usable if s.policy == policy], salt) for policy, learner in self.learners.items()}

    def _agree_on_refusals(self, parts: Mapping[str, Scored]) -> None:
        bad = self.ranks.max(torch.tensor([float(part.refused is not None) for part in parts.values()]))
        for flag, part in zip(bad.tolist(), parts.values(), strict=True):
            if flag and part.refused is None:
                part.refused = "refused on another rank"

    def _advantages(self, parts: Sequence[Scored]) -> None:
        """Normalised over all policies and ranks at once."""
        samples = [s for part in parts for s in part.samples]
        kl = [k for part in parts for k in part.kl()]
        returns: list[float | None] = [s.ret for s in samples]
        groups = [self._group(s) for s in samples]
        for absent in set(self.ranks.union(groups)) - set(groups):  # every rank takes part in every group's statistics
            returns.append(0.0)
            kl.append(torch.zeros(0))
            groups.append(str(absent))
        advantages = iter(
            token_advantages(
                returns,
                kl,
                self.settings.beta,
                self.settings.std_floor,
                normalise=self.settings.normalise,
                groups=groups,
                reduce=self.ranks,
            )
        )
        for part in parts:
            part.advantages = [next(advantages) for _ in part.samples]

    def _group(self, sample: Sample) -> str:
        return {"batch": "batch", "agent": sample.agent, "stratum": sample.stratum}[self.settings.normalise]

    def learner(self, policy: str) -> Learner:
        if policy not in self.learners:
            raise TrainerError(f"policy {policy!r} is not in training", hint=f"in training: {', '.join(self.learners)}")
        return self.learners[policy]

    def save_weights(self, policy: str, folder: Path | str, *, durable: bool = True) -> Path:
        """Write a policy's present weights, all at once: an ordinary model folder, tokenizer included, or an ordinary PEFT folder.

        `durable`: they are on disk on return, whatever becomes of the machine.
        """
        self.learner(policy).body.save(Path(folder), write=self.ranks.rank == 0, durable=durable)
        return Path(folder)

    def save_merged(self, policy: str, folder: Path | str, *, durable: bool = True) -> Path:
        """Write a policy's present weights as an ordinary model folder, an adapter merged into its base."""
        if self.settings.lora is None:
            return self.save_weights(policy, folder, durable=durable)
        from .lora import merge

        with tempfile.TemporaryDirectory() as aside:
            self.save_weights(policy, Path(aside) / "adapter", durable=False)
            return merge(Path(aside) / "adapter", folder, durable=durable) if self.ranks.rank == 0 else Path(folder)

    def close(self) -> None:
        """Nothing to let go of, in one process."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def canary(self, policy: str, *, probe: bool = False) -> Canary | None:
        """A few tokens of the last batch, their log-probs under the present weights at temperature 1; None before the first update.

        Args:
            probe: before the first update, take fixed tokens instead.
        """
        sample = self._recent.get(policy)
        if sample is None and not probe:
            return None
        if sample is None:
            vocabulary = self.learner(policy).vocabulary
            ids = tuple((7 * i + 3) % vocabulary for i in range(2 * CANARY_TOKENS))
            sample = Sample(policy, policy, "", "probe", ids[:CANARY_TOKENS], ids[CANARY_TOKENS:], (0.0,) * CANARY_TOKENS)
        size = min(CANARY_TOKENS, len(sample.completion_ids))
        logprobs = self.learner(policy).logprobs(replace(sample, temperature=1.0))[:size]
        tolerance = CANARY_TOLERANCE[self.settings.dtype]
        return Canary(sample.prompt_ids, sample.completion_ids[:size], tuple(logprobs), tolerance=tolerance)

    def save(self, folder: Path | str) -> None:
        """Put everything that `load` needs into `folder`: weights, optimizer, steps, random state. Flushing it to disk is the caller's."""
        folder = Path(folder)
        for policy, learner in self.learners.items():
            learner.body.save(folder / POLICIES / policy, write=self.ranks.rank == 0, durable=False)
            canary = ReinforceTrainer.canary(self, policy)  # every rank is here: a first rank must not call the others together again
            if canary is not None and self.ranks.rank == 0:
                write_canary(folder / POLICIES / policy, canary)
        state = {
            "kind": "full" if self.settings.lora is None else "lora",
            "updates": self.updates,
            "seed": self.seed,
            "rng": torch.get_rng_state(),
            "learners": {policy: learner.state() for policy, learner in self.learners.items()},
            "recent": {policy: _plain(sample) for policy, sample in self._recent.items()},
        }
        if self.ranks.rank == 0:
            torch.save(state, folder / _STATE)

    def load(self, folder: Path | str) -> None:
        """Continue from what `save` wrote, as if nothing had come between. The trainer must hold the same policies."""
        folder = Path(folder)
        try:
            state: dict[str, Any] = torch.load(folder / _STATE, weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            raise TrainerError(f"the trainer's state in {folder} can't be read: {error}") from error
        if set(state["learners"]) != set(self.learners):
            raise TrainerError(
                f"the checkpoint {folder} holds policies {sorted(state['learners'])}, the trainer {sorted(self.learners)}",
                hint="train the same policies, or start a new run",
            )
        mine, kind = "full" if self.settings.lora is None else "lora", state.get("kind", "full")
        if kind != mine:
            raise TrainerError(f"the checkpoint {folder} is of {kind} training, the trainer's is {mine}", hint="set train.lora as it was")
        for policy, learner in self.learners.items():
            learner.restore(folder / POLICIES / policy, state["learners"][policy])
        self.updates, self.seed = int(state["updates"]), int(state["seed"])
        self._recent = {policy: Sample(**fields) for policy, fields in state["recent"].items()}
        torch.set_rng_state(state["rng"])


def _plain(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in Sample.__dataclass_fields__}

"""One policy in training: its weights, its optimizer, and the step.

`score` gives the log-probs that the advantages need; `learn` makes the optimizer steps. When an update makes one step, the policy that
scores is the policy that learns: `pi_old` is then the training forward itself, detached, and a batch that fits one micro-batch is
computed once only.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from mappa_graph.errors import TrainerError

from .attention import takes_rows
from .batch import Sample
from .logprobs import check_head
from .loss import policy_loss
from .packing import Pack, padded_packs, tree_packs
from .ranks import Alone
from .settings import TrainerSettings
from .sharding import compute, gathered, like
from .tally import Tally

if TYPE_CHECKING:
    from .bodies import Body

log = logging.getLogger(__name__)


@dataclass
class Scored:
    """A policy's part of an update. Token tensors are per sample, `[L]`."""

    samples: list[Sample]
    batches: list[list[Pack]]
    """Packs of each optimizer batch."""
    old: list[torch.Tensor] | None = None
    """`log pi_old`; None where it is the training forward's own."""
    reference: list[torch.Tensor] | None = None
    live: tuple[torch.Tensor, torch.Tensor] | None = None
    """Log-probs and entropies of the only pack, with their graph."""
    advantages: list[torch.Tensor] = field(default_factory=list)
    refused: str | None = None

    @property
    def packs(self) -> list[Pack]:
        return [pack for batch in self.batches for pack in batch]

    def kl(self) -> list[torch.Tensor]:
        """`log pi_old - log pi_ref` per sample; zeros without a reference."""
        if self.old is None or self.reference is None:
            return [torch.zeros(len(s.completion_ids)) for s in self.samples]
        return [(old - reference).cpu() for old, reference in zip(self.old, self.reference, strict=True)]


class Learner:
    """A trainable policy: a body (`bodies`, `lora`), its optimizer, and how many steps were made."""

    def __init__(self, name: str, body: Body, settings: TrainerSettings, device: torch.device, ranks: Alone) -> None:
        self.name = name
        self.body = body
        self.settings = settings
        self.device = device
        self.ranks = ranks
        self.steps = 0
        self.model = body.model
        self.tree = body.tree
        self.reference = body.frozen
        self.parameters = body.parameters
        self._pair_cost = 1 / (6 * int(body.model.config.get_text_config().hidden_size))
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def check(self, samples: Sequence[Sample]) -> None:
        """Raises TrainerError for a sample that this policy can't be trained on."""
        vocabulary = self.vocabulary
        for sample in samples:
            ids = (*sample.prompt_ids, *sample.completion_ids)
            if min(ids) < 0 or max(ids) >= vocabulary:
                raise TrainerError(
                    f"sample {sample.action_id} has a token id beyond the {vocabulary} of policy {self.name!r}",
                    hint="it was sampled from a model with another tokenizer",
                )

    def plan(self, samples: Sequence[Sample], update: int) -> Scored:
        """Samples split into optimizer batches (by a hash, so that neither order nor ranks have an effect) and packed."""
        self.check(samples)
        keyed = sorted((_shuffle_key(update, s), n) for n, s in enumerate(samples))
        ordered = [samples[n] for _, n in keyed]
        count = self.settings.optimizer_batches
        place = {key: at for at, key in enumerate(self.ranks.union(key for key, _ in keyed))} if count > 1 else {}
        part = [place.get(key, 0) % count for key, _ in keyed]
        batches = []
        for number in range(count):
            chosen = [i for i, p in enumerate(part) if p == number]
            made = self._packs([ordered[i] for i in chosen])
            batches.append([_renumbered(pack, chosen) for pack in made])
        if self.body.sharded:
            self._even_out(batches)
        return Scored(ordered, batches)

    def _packs(self, samples: Sequence[Sample]) -> list[Pack]:
        if not self.tree:
            return padded_packs(samples, self.settings.micro_batch_tokens, self.device)
        return tree_packs(samples, self.settings.micro_batch_tokens, self.device, pair_cost=self._pair_cost)

    def _even_out(self, batches: Sequence[list[Pack]]) -> None:
        """As many packs on every rank: the shards of a model meet in every forward and backward. The added ones have no trainable token."""
        most = self.ranks.max(torch.tensor([len(packs) for packs in batches], dtype=torch.float64))
        for packs, count in zip(batches, most.tolist(), strict=True):
            if len(packs) < count:
                (idle,) = self._packs([Sample("", "", "", "idle", (0,), (0,), (0.0,))])
                packs.extend([Pack(**{**idle.__dict__, "samples": (), "lengths": (), "tokens": 0})] * (int(count) - len(packs)))

    def score(self, scored: Scored) -> None:
        """Fill in `old` and `reference` where the settings need them."""
        settings = self.settings
        one_step = settings.epochs == 1 and settings.optimizer_batches == 1
        if settings.beta == 0.0 and one_step:  # pi_old is the training forward's own, and nobody asks for the KL
            return
        packs = scored.packs
        if one_step and len(packs) == 1 and not self.body.sharded:
            scored.live = self._forward(packs[0])
            old = [scored.live[0].detach()]
        else:
            with torch.no_grad():
                old = [self._forward(pack)[0] for pack in packs]
        scored.old = _by_sample(packs, old, len(scored.samples))
        if self.reference is not None:
            with torch.no_grad():
                reference = [self._forward(pack, reference=True)[0] for pack in packs]
            scored.reference = _by_sample(packs, reference, len(scored.samples))
        if not all(bool(k.isfinite().all()) for k in scored.kl()) or not all(bool(o.isfinite().all()) for o in scored.old):
            scored.refused = "log-probs are not finite"

    def learn(self, scored: Scored, tally: Tally) -> dict[str, float]:
        """Optimizer steps over the scored batches; adds to the tally. Returns loss, grad_norm, lr, steps and tokens computed."""
        for sample in scored.samples:
            tally.add_action(sample)
        losses, norms, refusals, steps = [], [], [], 0
        lr = self.settings.lr_at(self.steps)
        for _ in range(self.settings.epochs):
            for packs in scored.batches:
                tokens = float(self.ranks.sum(torch.tensor([float(sum(sum(p.lengths) for p in packs))], dtype=torch.float64))[0])
                if tokens == 0.0:
                    continue
                lr = self.settings.lr_at(self.steps)
                loss, norm, refusal = self._step(scored, packs, tokens, lr, tally)
                if refusal is not None:
                    refusals.append(refusal)
                    continue
                losses.append(loss)
                norms.append(norm)
                steps += norm > 0.0
        scored.live = None
        if refusals:
            scored.refused = "; ".join(dict.fromkeys(refusals))
        return {
            "loss": sum(losses) / len(losses) if losses else 0.0,
            "grad_norm": max(norms, default=0.0),
            "lr": lr,
            "steps": float(steps),
            "refused": float(len(refusals)),
            **dict(zip(("computed_tokens", "shared_tokens"), self._counted(scored), strict=True)),
        }

    def _counted(self, scored: Scored) -> list[float]:
        """Positions that were computed, and that were not because they are shared, over all ranks."""
        sums = [float(sum(p.tokens for p in scored.packs)), float(sum(p.shared for p in scored.packs))]
        return self.ranks.sum(torch.tensor(sums, dtype=torch.float64)).tolist()

    def _step(self, scored: Scored, packs: Sequence[Pack], tokens: float, lr: float, tally: Tally) -> tuple[float, float, str | None]:
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(1, dtype=torch.float64)
        for pack in packs:
            total += self._backward(scored, pack, tokens, tally)
        if not self.body.sharded:  # shards have added theirs up
            self.ranks.add_gradients(self.parameters)
        loss = float(self.ranks.sum(total)[0])
        norm = _norm([p.grad for p in self.parameters if p.grad is not None])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            return loss, norm, f"loss {loss:.4g} and gradient norm {norm:.4g} are not both finite"
        if norm > 0.0:  # a batch without signal must not move the weights by the optimizer's momentum
            self._clip(norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if self.settings.offload == "optimizer":
                move_state(self.optimizer, self.device)
            self.optimizer.step()
            if self.settings.offload == "optimizer":
                move_state(self.optimizer, torch.device("cpu"))
            self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm, None

    def _clip(self, norm: float) -> None:
        """Gradients of at most `grad_clip` together. Where they are whole, the optimizer's kernel scales them, which spares a pass."""
        scale = max(1.0, norm / self.settings.grad_clip)
        if not self.body.sharded:
            self.optimizer.grad_scale = torch.tensor(scale, device=self.device) if scale > 1.0 else None  # type: ignore[attr-defined]
        elif scale > 1.0:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], 1.0 / scale)

    def _backward(self, scored: Scored, pack: Pack, tokens: float, tally: Tally) -> float:
        logprobs, entropy = scored.live or self._forward(pack)
        self.body.policy()  # a forward of long ago is gone through backwards in the state it was made in
        if not pack.samples:
            (0.0 * logprobs.sum()).backward()
            return 0.0
        chosen = [scored.samples[i] for i in pack.samples]
        old = logprobs.detach() if scored.old is None else torch.cat([scored.old[i] for i in pack.samples])
        engine = torch.tensor([p for s in chosen for p in s.engine_logprobs], device=self.device)
        advantages = torch.cat([scored.advantages[i] for i in pack.samples]).to(self.device, logprobs.dtype)
        out = policy_loss(
            logprobs,
            old,
            engine,
            advantages,
            clip=self.settings.clip,
            importance_cap=self.settings.importance_cap,
            denominator=tokens,
        )
        out.loss.backward()
        reference = old if scored.reference is None else torch.cat([scored.reference[i] for i in pack.samples])
        owners = torch.tensor([tally.row[s.agent] for s in chosen]).repeat_interleave(torch.tensor(pack.lengths))
        tally.add_tokens(
            owners,
            advantage=advantages,
            kl=old - reference,
            entropy=entropy,
            ratio=out.ratio,
            clipped=out.clipped,
            weight=out.weight,
            mismatch=engine - old,
        )
        return float(out.loss.detach())

    def _forward(self, pack: Pack, *, reference: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.settings.dtype == "bfloat16"
        runs = self.body.reference() if reference else self.body.policy()
        with torch.autocast(self.device.type, torch.bfloat16) if half else nullcontext():
            return compute(runs, pack)

    def logprobs(self, sample: Sample) -> list[float]:
        """Log-probs of a sample's completion under the present weights."""
        with torch.no_grad():
            values: list[float] = self._forward(self._packs([sample])[0])[0].tolist()
        return values

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the weights: the same whatever the number of ranks, and however they share the work."""
        optimizer = self.optimizer.state_dict()
        whole = {i: {k: gathered(v) for k, v in entry.items()} for i, entry in optimizer["state"].items()}
        return {"optimizer": {**optimizer, "state": whole}, "steps": self.steps}

    def restore(self, folder: Path, state: dict[str, Any]) -> None:
        """Take over weights from a folder, and optimizer state."""
        saved = state["optimizer"]["state"]
        if saved and set(saved) != set(range(len(self.parameters))):
            raise TrainerError(
                f"the optimizer state of policy {self.name!r} has {len(saved)} entries for {len(self.parameters)} parameters"
            )
        self.body.load(folder)
        placed = {i: {k: _placed(v, self.parameters[i]) for k, v in entry.items()} for i, entry in saved.items()}
        self.optimizer.load_state_dict({**state["optimizer"], "state": placed})
        if self.settings.offload == "optimizer":
            move_state(self.optimizer, torch.device("cpu"))
        self.steps = int(state["steps"])


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves an optimizer's moments; the step counts stay where they are. Tried with recorded moves only: two places take a GPU."""
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                entry[key] = value.to(device)


def _placed(value: Any, parameter: torch.nn.Parameter) -> Any:
    return like(value, parameter) if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0 else value


def _norm(gradients: Sequence[torch.Tensor]) -> float:
    total = torch.nn.utils.get_total_norm(gradients)
    return float(total.full_tensor() if hasattr(total, "full_tensor") else total)


def prepare(model: PreTrainedModel, name: str) -> bool:
    """Check the head, and switch the model to attention over rows if it can take them; says so where it can't."""
    ids = [1 % model.config.vocab_size, 0, 1 % model.config.vocab_size]
    pair = [Sample("", "", "", str(i), tuple(ids), (i, 0, 1 % model.config.vocab_size), (0.0,) * 3, ret=0.0) for i in (0, 1)]
    (alone,) = padded_packs(pair, 1 << 20, model.device)
    (fork,) = tree_packs(pair, 1 << 20, model.device)
    (split,) = tree_packs(pair, 1 << 20, model.device, block_pairs=1)
    check_head(model, alone)
    if alone.samples != fork.samples:
        (alone,) = padded_packs([pair[i] for i in fork.samples], 1 << 20, model.device)
    reason = takes_rows(model, (fork, split), alone)
    if reason is not None:
        log.warning("policy %s (%s) can't share prefixes and is trained on padded rows: %s", name, type(model).__name__, reason)
    return reason is None


def _shuffle_key(update: int, sample: Sample) -> str:
    return hashlib.sha256(f"{update}\0{sample.episode}\0{sample.action_id}".encode()).hexdigest()


def _renumbered(pack: Pack, chosen: Sequence[int]) -> Pack:
    return Pack(**{**pack.__dict__, "samples": tuple(chosen[i] for i in pack.samples)})


def _by_sample(packs: Sequence[Pack], values: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    out: list[torch.Tensor] = [torch.empty(0)] * count
    for i, part in _parts(packs, values):
        out[i] = part
    return out


def _parts(packs: Sequence[Pack], values: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    for pack, tokens in zip(packs, values, strict=True):
        if pack.samples:
            yield from zip(pack.samples, tokens.split(list(pack.lengths)), strict=True)

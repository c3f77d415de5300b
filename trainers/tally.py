"""Running sums behind the metrics of an update: per agent, over tokens, over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .batch import Sample
from .ranks import Alone

_TOKEN = ("advantage", "advantage_squared", "kl", "entropy", "ratio", "clipped", "weight", "mismatch", "mismatch_abs")
_ACTION = ("actions", "returns", "length")


class Tally:
    """Sums of the agents of one policy. `add_tokens` may see each token several times (epochs): means are over all of them."""

    def __init__(self, agents: Sequence[str]) -> None:
        self.agents = list(agents)
        self.row = {agent: i for i, agent in enumerate(self.agents)}
        self.tokens = torch.zeros(len(self.agents), len(_TOKEN) + 1, dtype=torch.float64)
        self.actions = torch.zeros(len(self.agents), len(_ACTION), dtype=torch.float64)
        self.ratio_max = torch.full((len(self.agents),), -1.0, dtype=torch.float64)

    def add_action(self, sample: Sample) -> None:
        self.actions[self.row[sample.agent]] += torch.tensor([1.0, sample.ret or 0.0, len(sample.completion_ids)], dtype=torch.float64)

    def add_tokens(
        self,
        owners: torch.Tensor,
        *,
        advantage: torch.Tensor,
        kl: torch.Tensor,
        entropy: torch.Tensor,
        ratio: torch.Tensor,
        clipped: torch.Tensor,
        weight: torch.Tensor,
        mismatch: torch.Tensor,
    ) -> None:
        """All `[N]`; `owners` is each token's agent as a row; `mismatch` is `log pi_engine - log pi_old`."""
        fields = (advantage, advantage**2, kl, entropy, ratio, clipped, weight, mismatch, mismatch.abs(), torch.ones_like(advantage))
        stacked = torch.stack([f.detach().to("cpu", torch.float64) for f in fields], dim=1)
        self.tokens.index_add_(0, owners.cpu(), stacked)
        highest = torch.full_like(self.ratio_max, -1.0).scatter_reduce_(0, owners.cpu(), stacked[:, 4], "amax")
        self.ratio_max = torch.maximum(self.ratio_max, highest)

    def over(self, ranks: Alone) -> Tally:
        whole = Tally(self.agents)
        whole.tokens, whole.actions, whole.ratio_max = ranks.sum(self.tokens), ranks.sum(self.actions), ranks.max(self.ratio_max)
        return whole

    def metrics(self, agent: str | None = None) -> dict[str, float]:
        """Of one agent, or of all of them together."""
        chosen = slice(None) if agent is None else slice(self.row[agent], self.row[agent] + 1)
        sums, count = self.tokens[chosen, :-1].sum(0), float(self.tokens[chosen, -1].sum())
        mean = dict(zip(_TOKEN, (sums / max(count, 1.0)).tolist(), strict=True))
        actions, returns, length = self.actions[chosen].sum(0).tolist()
        return {
            "tokens": length,
            "actions": actions,
            "return_mean": returns / max(actions, 1.0),
            "length_mean": length / max(actions, 1.0),
            "advantage_mean": mean["advantage"],
            "advantage_std": max(mean["advantage_squared"] - mean["advantage"] ** 2, 0.0) ** 0.5,
            "kl": mean["kl"],
            "entropy": mean["entropy"],
            "ratio_mean": mean["ratio"],
            "ratio_max": float(self.ratio_max[chosen].max()) if count else 1.0,
            "clip_share": mean["clipped"],
            "weight_mean": mean["weight"],
            "mismatch_kl": mean["mismatch"],
            "mismatch_abs": mean["mismatch_abs"],
        }

"""From scores to per-token advantages: the whole of the method's credit assignment, as plain functions on plain data.

A return is a discounted *mean* over what followed an action, never a sum: if every action of a batch scores the same, every
return equals that score whatever the graph, so no agent gains by its place in the pipeline. Advantages are returns less the KL
still to come, normalised once over all tokens of all agents, with a floor under the standard deviation so that a batch whose scores
agree isn't blown up into noise. Both steps are exact where they should be: equal scores give advantages of exactly 0.0.

Nothing here imports torch until tensors are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mappa_graph.errors import ConfigError, TrainerError

if TYPE_CHECKING:
    import torch

Normalise = Literal["batch", "agent", "stratum"]


def discounted_returns(scores: Sequence[float | None], edges: Iterable[tuple[int, int]], gamma: float) -> list[float | None]:
    """Return of each action: `G_a = sum_b gamma^d(a,b) R_b / sum_b gamma^d(a,b)` with `R = score / 10`.

    b runs over a itself and every scored action reachable from a; d(a,b) is the smallest number of edges from a to b (unscored
    actions on the way count). `gamma = 0` is each action's own score.

    Args:
        scores: 0..10 per action, None where there is no verdict: no source of credit, and its own return is None.
        edges: (earlier, later) positions in `scores`; forks and joins are fine, cycles are not.
        gamma: 0..1, the weight lost per action.

    Returns:
        Per action a return in 0..1, or None.

    Raises:
        TrainerError: a score outside 0..10, an edge to no action, or a cycle. ConfigError: gamma outside 0..1.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"gamma is {gamma!r}", hint="give a number in 0..1; 0 means each action's own score only")
    for position, score in enumerate(scores):
        if score is not None and not (math.isfinite(score) and 0.0 <= score <= 10.0):
            raise TrainerError(f"score {score!r} of action {position} is not a number in 0..10", hint="use None where there is no verdict")
    later = _successors(len(scores), edges)
    rewards = [None if score is None else score / 10.0 for score in scores]
    return [None if reward is None else _discounted_mean(position, rewards, later, gamma) for position, reward in enumerate(rewards)]


def _successors(count: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    later: list[set[int]] = [set() for _ in range(count)]
    for a, b in edges:
        if not (0 <= a < count and 0 <= b < count):
            raise TrainerError(f"edge ({a}, {b}) names an action outside 0..{count - 1}", hint="edges are positions in the list of scores")
        later[a].add(b)
    waiting = [0] * count
    for followers in later:
        for b in followers:
            waiting[b] += 1
    ready = [a for a in range(count) if waiting[a] == 0]
    done = 0
    while ready:
        a = ready.pop()
        done += 1
        for b in later[a]:
            waiting[b] -= 1
            if waiting[b] == 0:
                ready.append(b)
    if done < count:
        stuck = [a for a in range(count) if waiting[a]]
        raise TrainerError(f"the edges form a cycle through actions {stuck[:8]}", hint="an edge goes from an earlier action to a later one")
    return [sorted(followers) for followers in later]


def _discounted_mean(start: int, rewards: Sequence[float | None], later: Sequence[Sequence[int]], gamma: float) -> float:
    own = rewards[start]
    assert own is not None
    seen, frontier = {start}, [start]
    weight, total, gain = 1.0, 1.0, 0.0
    while frontier:
        weight *= gamma
        if weight == 0.0:
            break
        frontier = list(dict.fromkeys(b for a in frontier for b in later[a] if b not in seen))
        seen.update(frontier)
        for b in frontier:
            reward = rewards[b]
            if reward is not None:
                total += weight
                gain += weight * (reward - own)  # differences, so that equal scores give exactly that score
    return own + gain / total


class Reduce(Protocol):
    """How ranks agree: element-wise sum or maximum of a tensor over all of them. One process needs none."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def max(self, tensor: torch.Tensor) -> torch.Tensor: ...


def token_advantages(
    returns: Sequence[float | None],
    kl: Sequence[Any],
    beta: float,
    std_floor: float,
    *,
    normalise: Normalise = "batch",
    groups: Sequence[Hashable] | None = None,
    reduce: Reduce | None = None,
    moments: Callable[[Hashable, float, float, float], None] | None = None,
) -> list[Any]:
    """Advantage of every token: `A_t = G - beta * sum_{s>=t} k_s`, then `(A - mean) / max(std, std_floor)` over all tokens.

    The KL penalty in the reward with estimator k1, and the normalisation over the whole batch, are those of REINFORCE++
    (arXiv 2501.03262); std is the population's. Computed in float64.

    Args:
        returns: per action, 0..1, or None: left out of the statistics, and its result is None.
        kl: per action, `[L]` of `log pi_old - log pi_ref`, as lists, arrays or tensors. L is the action's number of tokens.
        beta: KL coefficient, >= 0.
        std_floor: smallest divisor, > 0.
        normalise: what shares a mean and std: everything ("batch"), or what has the same entry in `groups` ("agent", "stratum").
        groups: per action, the name of its group; needed unless `normalise="batch"`.
        reduce: sums and maxima over ranks, where each rank holds a part of the batch. Groups must then be the same on every rank.
        moments: called with (group, tokens, mean, std) of every group.

    Returns:
        Per action `[L]` in the type that `kl` has there (lists of float, arrays, tensors), or None.
    """
    import torch

    if beta < 0.0 or not math.isfinite(beta):
        raise ConfigError(f"beta is {beta!r}", hint="give a number >= 0")
    if not (std_floor > 0.0 and math.isfinite(std_floor)):
        raise ConfigError(f"std_floor is {std_floor!r}", hint="give a number > 0; 0.05 is the default")
    if len(kl) != len(returns):
        raise TrainerError(f"{len(returns)} returns for {len(kl)} actions of kl", hint="give one kl sequence per action")
    if normalise != "batch" and groups is None:
        raise ConfigError(f'normalise="{normalise}" needs groups', hint="give one group name per action")
    if groups is not None and len(groups) != len(returns):
        raise TrainerError(f"{len(groups)} groups for {len(returns)} returns")

    names: Sequence[Hashable] = groups if normalise != "batch" and groups is not None else [normalise] * len(returns)
    kept = [i for i, value in enumerate(returns) if value is not None]
    raw = [_raw_advantage(float(returns[i]), torch.as_tensor(kl[i], dtype=torch.float64), beta) for i in kept]  # type: ignore[arg-type]
    out: list[Any] = [None] * len(returns)
    for name in sorted(dict.fromkeys(names), key=repr):
        members = [j for j, i in enumerate(kept) if names[i] == name]
        values = torch.cat([raw[j] for j in members]) if members else torch.zeros(0, dtype=torch.float64)
        count, mean, std = _statistics(values, reduce)
        if moments is not None:
            moments(name, count, mean, std)
        scaled = (values - mean) / max(std, std_floor)
        for j, part in zip(members, scaled.split([len(raw[j]) for j in members]), strict=True) if members else ():
            out[kept[j]] = _like(part, kl[kept[j]])
    return out


def _raw_advantage(value: float, kl: torch.Tensor, beta: float) -> torch.Tensor:
    import torch

    if kl.dim() != 1:
        raise TrainerError(f"kl of an action has shape {list(kl.shape)}", hint="give one number per token, [L]")
    base = torch.full(kl.shape, value, dtype=torch.float64, device="cpu")
    if beta == 0.0 or len(kl) == 0:
        return base
    to_come = kl.detach().cpu().flip(0).cumsum(0).flip(0)
    return base - beta * to_come


def _statistics(values: torch.Tensor, reduce: Reduce | None) -> tuple[float, float, float]:
    """Count, mean and population std over all ranks. The mean is held between the extremes, so equal values have exactly std 0."""
    import torch

    def summed(x: torch.Tensor) -> torch.Tensor:
        return x if reduce is None else reduce.sum(x)

    low = values.min() if len(values) else torch.tensor(math.inf, dtype=torch.float64)
    high = values.max() if len(values) else torch.tensor(-math.inf, dtype=torch.float64)
    extremes = torch.stack([-low, high])
    if reduce is not None:
        extremes = reduce.max(extremes)
    count, total = summed(torch.tensor([float(len(values)), float(values.sum())], dtype=torch.float64)).tolist()
    if count == 0:
        return 0.0, 0.0, 0.0
    mean = min(max(total / count, -float(extremes[0])), float(extremes[1]))
    squares = float(summed(((values - mean) ** 2).sum().reshape(1))[0])
    return count, mean, math.sqrt(squares / count)


def _like(values: torch.Tensor, example: Any) -> Any:
    import torch

    if isinstance(example, torch.Tensor):
        return values.to(example.device, example.dtype if example.is_floating_point() else torch.float64)
    if hasattr(example, "__array__"):
        array = values.numpy()
        return array.astype(example.dtype) if example.dtype.kind == "f" else array
    return values.tolist()

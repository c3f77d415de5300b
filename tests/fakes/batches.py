"""Random training batches, and the update of a batch written out slowly: float64, one token after another, nothing shared with the trainer.

Models are read from folders by transformers and run on one sample at a time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from mappa_graph.trainers import Sample


def random_samples(
    seed: int, *, agents: Mapping[str, str], count: int = 16, vocabulary: int = 250, without_return: float = 0.1, prompt: int = 12
) -> list[Sample]:
    """Samples of `agents` (agent -> policy) that share prompt prefixes, fork inside them, repeat and extend one another."""
    rng = random.Random(seed)
    system = {agent: [rng.randrange(vocabulary) for _ in range(4)] for agent in agents}
    known: dict[str, list[Sample]] = {agent: [] for agent in agents}
    out = []
    for number in range(count):
        agent = rng.choice(list(agents))
        earlier = rng.choice(known[agent]) if known[agent] and rng.random() < 0.4 else None
        ids = list(earlier.prompt_ids) if earlier else [*system[agent], *(rng.randrange(3) for _ in range(rng.randrange(prompt)))]
        if earlier and rng.random() < 0.5:  # the next turn of the same conversation
            ids += [*earlier.completion_ids, *(rng.randrange(vocabulary) for _ in range(3))]
        completion = tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, 9)))
        if earlier and rng.random() < 0.2:
            completion = earlier.completion_ids
        sample = Sample(
            agent=agent,
            policy=agents[agent],
            episode=f"e{number % 5}",
            action_id=f"{seed}-{number}",
            prompt_ids=tuple(ids),
            completion_ids=completion,
            engine_logprobs=tuple(math.log(1 / vocabulary) + rng.gauss(0, 0.7) for _ in completion),
            temperature=rng.choice([1.0, 1.0, 0.7, 0.0]),
            ret=None if rng.random() < without_return else rng.random(),
            stratum=rng.choice(["easy", "hard"]),
        )
        known[agent].append(sample)
        out.append(sample)
    return out


def slow_logprobs(model: torch.nn.Module, sample: Sample) -> list[torch.Tensor]:
    """Log-prob of each completion token, in the model's own precision."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0] / (sample.temperature or 1.0)
    out = []
    for t, token in enumerate(sample.completion_ids):
        row = logits[len(sample.prompt_ids) + t - 1]
        out.append(row[token] - torch.logsumexp(row, 0))
    return out


def slow_gradients(
    folders: Mapping[str, Path], references: Mapping[str, Path], samples: Sequence[Sample], *, beta: float, std_floor: float = 0.05
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, float]]:
    """Gradients by policy and parameter, and losses by policy, of one update of one step (`pi_old` = the present weights)."""
    kept = [s for s in samples if s.ret is not None]
    models = {p: AutoModelForCausalLM.from_pretrained(f, dtype=torch.float64) for p, f in folders.items()}
    frozen = {p: AutoModelForCausalLM.from_pretrained(f, dtype=torch.float64) for p, f in references.items()}
    logprobs = [slow_logprobs(models[s.policy], s) for s in kept]
    raw: list[list[float]] = []
    for sample, own in zip(kept, logprobs, strict=True):
        with torch.no_grad():
            first = slow_logprobs(frozen[sample.policy], sample)
        k = [float(a.detach() - b) for a, b in zip(own, first, strict=True)]
        raw.append([float(sample.ret or 0.0) - beta * sum(k[t:]) for t in range(len(k))])
    flat = [a for row in raw for a in row]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((a - mean) ** 2 for a in flat) / len(flat))
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    losses: dict[str, float] = {}
    for policy, model in models.items():
        members = [i for i, s in enumerate(kept) if s.policy == policy]
        tokens = sum(len(kept[i].completion_ids) for i in members)
        loss = torch.zeros((), dtype=torch.float64)
        for i in members:
            for t, value in enumerate(logprobs[i]):
                old = value.detach()
                weight = min(math.exp(float(old) - kept[i].engine_logprobs[t]), 2.0)
                advantage = (raw[i][t] - mean) / max(std, std_floor)
                ratio = torch.exp(value - old)
                loss = loss - weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / tokens
        if members:
            loss.backward()
        losses[policy] = float(loss.detach())
        gradients[policy] = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return gradients, losses

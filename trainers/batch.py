"""What the trainer eats: one `Sample` per trainable action, holding exactly the token ids that the engine saw and sampled.

No text is ever tokenised here. A trace's actions are joined to their calls by action id; whatever has no tokens, no verdict, or must not
be trained on is left out and counted under its reason. The counter's `retokenised` is measured, not assumed: it compares each
sample's ids with its call's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mappa_graph.errors import ConfigError, TrainerError
from mappa_graph.record import Action, Call, EpisodeTrace, Verdict

from .returns import discounted_returns

Credit = Literal["discounted", "own"]
Truncated = Literal["mask", "train"]

REASONS: Mapping[str, str] = {
    "untrainable": "the agent is frozen, or not marked as one that is trained",
    "discarded": "its output never reached the graph's state",
    "failed": "the call failed or was cut off",
    "no_call": "no tokens: the trace was imported from text, or the call went past the gateway",
    "no_tokens": "no tokens: the engine gave none",
    "bad_logprobs": "the engine gave log-probs that are not finite",
    "no_verdict": "the coach gave no score",
    "truncated": "the completion hit the length limit",
}
"""Why an action is left out, in the order in which they are looked for, and in words."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One action as the trainer sees it. `prompt_ids` and `completion_ids` are the engine's own."""

    agent: str
    policy: str
    episode: str
    action_id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    engine_logprobs: tuple[float, ...]
    """Natural log-probability of each completion id at `temperature`, same length as `completion_ids`."""
    temperature: float = 1.0
    """Of the call; 0 (greedy) is trained on as 1."""
    ret: float | None = None
    """Return in 0..1; None is left out of loss and statistics."""
    truncated: bool = False
    stratum: str = ""

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.completion_ids:
            raise TrainerError(f"sample {self.action_id} has {len(self.prompt_ids)} prompt and {len(self.completion_ids)} completion ids")
        if len(self.engine_logprobs) != len(self.completion_ids):
            raise TrainerError(f"sample {self.action_id}: {len(self.engine_logprobs)} log-probs for {len(self.completion_ids)} tokens")
        if not all(map(math.isfinite, self.engine_logprobs)):
            raise TrainerError(f"sample {self.action_id}: a log-prob of the engine is not finite")
        if self.ret is not None and not (math.isfinite(self.ret) and 0.0 <= self.ret <= 1.0):
            raise TrainerError(f"sample {self.action_id}: return {self.ret!r} is not in 0..1", hint="returns are scores divided by 10")
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise TrainerError(f"sample {self.action_id}: temperature {self.temperature!r} is not a number >= 0")


def samples_from_trace(
    trace: EpisodeTrace,
    *,
    gamma: float,
    credit: Credit = "discounted",
    outcome_weight: float = 0.0,
    truncated: Truncated = "mask",
) -> tuple[list[Sample], Counter[str]]:
    """The trainable samples of an episode, and how many actions were left out for which reason.

    Returns are computed over the whole episode's graph: verdicts of frozen agents, or of actions whose tokens were lost, still give
    credit to what came before them. Actions whose output was discarded give none.

    Args:
        gamma: discount per action, 0..1; without effect when `credit` is "own".
        credit: "discounted" (mean over what followed) or "own" (each action's own score).
        outcome_weight: >= 0; the outcome joins the score of the episode's last scored action as `(R + w O) / (1 + w)`.
        truncated: "mask" leaves completions that hit the length limit out, "train" keeps them.

    Returns:
        Samples in the actions' order; a counter over `REASONS`, plus `retokenised`, which is 0.
    """
    if credit not in ("discounted", "own"):
        raise ConfigError(f"credit is {credit!r}", hint='use "discounted" or "own"')
    if truncated not in ("mask", "train"):
        raise ConfigError(f"truncated is {truncated!r}", hint='use "mask" or "train"')
    scores = _scores(trace, outcome_weight)
    returns = discounted_returns(scores, trace.edges, gamma if credit == "discounted" else 0.0)
    samples: list[Sample] = []
    left_out: Counter[str] = Counter(retokenised=0)
    for action, value in zip(trace.actions, returns, strict=True):
        call = trace.calls.get(action.id)
        reason = _left_out(action, call, trace.verdicts.get(action.id), truncated)
        if reason is not None or call is None:
            left_out[reason or "no_call"] += 1
            continue
        sample = _sample(trace, action, call, value)
        left_out["retokenised"] += sample.prompt_ids != call.prompt_ids or sample.completion_ids != call.completion_ids
        samples.append(sample)
    return samples, left_out


def _scores(trace: EpisodeTrace, outcome_weight: float) -> list[float | None]:
    if not (math.isfinite(outcome_weight) and outcome_weight >= 0.0):
        raise ConfigError(f"outcome_weight is {outcome_weight!r}", hint="give a number >= 0")
    verdicts = [trace.verdicts.get(action.id) if action.kept else None for action in trace.actions]
    scores = [None if verdict is None else verdict.score for verdict in verdicts]
    outcome = trace.episode.outcome
    last = max((i for i, score in enumerate(scores) if score is not None), key=lambda i: trace.actions[i].order, default=None)
    if outcome_weight > 0.0 and outcome is not None and last is not None:
        scores[last] = ((scores[last] or 0.0) + outcome_weight * 10.0 * outcome.value) / (1.0 + outcome_weight)
    return scores


def _left_out(action: Action, call: Call | None, verdict: Verdict | None, truncated: Truncated) -> str | None:
    if not action.trainable:
        return "untrainable"
    if not action.kept:
        return "discarded"
    if call is None:
        return "failed" if action.error is not None else "no_call"
    if call.finish_reason in ("abort", "error"):
        return "failed"
    if not call.prompt_ids or not call.completion_ids:
        return "no_tokens"
    if not all(map(math.isfinite, call.logprobs)):
        return "bad_logprobs"
    if verdict is None or verdict.score is None:
        return "no_verdict"
    if truncated == "mask" and call.finish_reason == "length":
        return "truncated"
    return None


def _sample(trace: EpisodeTrace, action: Action, call: Call, value: float | None) -> Sample:
    temperature = call.sampling.get("temperature")
    return Sample(
        agent=action.agent,
        policy=call.policy,
        episode=trace.episode.id,
        action_id=action.id,
        prompt_ids=tuple(call.prompt_ids),
        completion_ids=tuple(call.completion_ids),
        engine_logprobs=tuple(call.logprobs),
        temperature=1.0 if temperature is None else float(temperature),
        ret=value,
        truncated=call.finish_reason == "length",
        stratum=trace.episode.stratum,
    )

"""From a store to rows: whose actions there are, and the export that a method learns from.

`Traces` is the store as a training reads it. It checks that tokens are those of the model in training, and adds what the store lacks
where that was asked for: tokens of actions that have none, and a place for log-probs that no engine gave. The one thing to know: each
such action is named in `retokenised` or `unweighted`, so that it is counted and never passes for an exact one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from mappa_graph.agent import check_name
from mappa_graph.errors import ConfigError
from mappa_graph.exchange.export import Exported, Progress, export
from mappa_graph.exchange.filters import Filters, seconds
from mappa_graph.exchange.formats import answer, conversation, offered, template_render
from mappa_graph.exchange.options import Options
from mappa_graph.exchange.pairs import Pairs
from mappa_graph.record import Action, Call, Episode, EpisodeTrace, FinishReason
from mappa_graph.sections.offline import OfflineConfig
from mappa_graph.store import TraceStore

from ..batch import samples_from_trace


@dataclass(frozen=True)
class Team:
    """Who acted in the traces, and whose weights each agent's actions train."""

    policy_of: Mapping[str, str]
    actions: Mapping[str, int]
    """By agent."""

    @property
    def policies(self) -> dict[str, tuple[str, ...]]:
        """Policy -> its agents."""
        out: dict[str, list[str]] = {}
        for agent, policy in sorted(self.policy_of.items()):
            out.setdefault(policy, []).append(agent)
        return {policy: tuple(agents) for policy, agents in sorted(out.items())}


def team_of(store: TraceStore, split: str | None, agents: Sequence[str] | None, known: Mapping[str, str | None] | None) -> Team:
    """The agents in the traces that can be trained.

    Args:
        agents: only these; None = all of them.
        known: agent -> policy as an environment has it, None for one that is frozen; an agent that isn't in it goes by the traces.

    Raises `ConfigError` where there is nothing to learn from: no episode, an agent that isn't there, no score, or weights of more than
    one name behind one agent.
    """
    actions, useful, frozen = Counter[str](), Counter[str](), Counter[str]()
    served: dict[str, Counter[str]] = {}
    named: dict[str, Counter[str]] = {}
    for trace in store.traces(split=split):
        for action in trace.actions:
            actions[action.agent] += 1
            frozen[action.agent] += not action.trainable
            verdict, call = trace.verdicts.get(action.id), trace.calls.get(action.id)
            useful[action.agent] += verdict is not None and (verdict.score is not None or bool(verdict.better_action))
            if call is not None and call.completion_ids:
                served.setdefault(action.agent, Counter())[call.policy] += 1
            named.setdefault(action.agent, Counter())[action.policy] += 1
    if not actions:
        raise ConfigError(
            f"{store.path} holds no action" + ("" if split is None else f" of split {split!r}"),
            hint="import traces (mappa-graph import), or give another split: --set split=all",
        )
    unknown = [name for name in agents or () if name not in actions]
    if unknown:
        raise ConfigError(f"there is no agent {unknown[0]!r} in {store.path}", hint=f"there are: {', '.join(sorted(actions))}")
    chosen: dict[str, str] = {}
    for agent in sorted(agents or actions):
        fixed = known[agent] is None if known is not None and agent in known else frozen[agent] == actions[agent]
        if fixed and agents:
            raise ConfigError(f"agent {agent!r} is frozen: its weights are not to be trained", hint="leave it out")
        if not fixed:
            # Names come from traces, which anybody may have written, and become folders.
            chosen[agent] = check_name("policy", (known or {}).get(agent) or _policy(agent, served.get(agent) or named[agent]))
    if not chosen:
        raise ConfigError(f"every agent in {store.path} is frozen: there is nobody to train")
    if not any(useful[agent] for agent in chosen):
        raise ConfigError(
            f"none of the {sum(actions[agent] for agent in chosen)} actions of {', '.join(chosen)} has a score",
            hint=f"coach them first: mappa-graph coach {store.path.parent}",
        )
    return Team(chosen, dict(actions))


def _policy(agent: str, found: Counter[str]) -> str:
    if len(found) > 1:
        counts = ", ".join(f"{policy} {n}" for policy, n in found.most_common())
        raise ConfigError(f"agent {agent!r} acted with weights of several names: {counts}", hint="name the environment: --config FILE")
    return next(iter(found))


@dataclass
class Traces:
    """A store whose calls can be trained on; what an export needs of a store.

    Args:
        tokenizers: agent -> the tokenizer of the model that its actions train.
        retokenise: make tokens of actions that have none.
    """

    store: TraceStore
    tokenizers: Mapping[str, Any]
    retokenise: bool = False
    retokenised: set[str] = field(default_factory=set)
    """Actions whose tokens were made here."""
    unweighted: set[str] = field(default_factory=set)
    """Actions whose engine gave no log-probs."""
    foreign: dict[str, list[str]] = field(default_factory=dict)
    """Agent -> actions whose tokens don't spell their text in the agent's tokenizer."""
    checked: Counter[str] = field(default_factory=Counter)
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.store.path

    def episodes(self, *, split: str | None = None, iteration: int | None = None) -> Iterator[Episode]:
        return self.store.episodes(split=split, iteration=iteration)

    def counts(self) -> dict[str, int]:
        return self.store.counts()

    def episode(self, id: str) -> EpisodeTrace | None:
        trace = self.store.episode(id)
        if trace is None:
            return None
        calls = dict(trace.calls)
        for action in trace.actions:
            if action.agent not in self.tokenizers:
                continue
            call, tokenizer = calls.get(action.id), self.tokenizers[action.agent]
            if call is not None and call.prompt_ids and call.completion_ids:
                self.checked[action.agent] += 1
                if not _spells(tokenizer, call):
                    self.foreign.setdefault(action.agent, []).append(action.id)
                if not all(map(math.isfinite, call.logprobs)):
                    self.unweighted.add(action.id)
                    calls[action.id] = replace(call, logprobs=(0.0,) * len(call.completion_ids))
            elif self.retokenise:
                made = _tokenised(trace, action, tokenizer)
                if made is not None:
                    self.retokenised.add(action.id)
                    calls[action.id] = made
        return replace(trace, calls=calls)

    def check(self, models: Mapping[str, Path]) -> None:
        """Raises `ConfigError` where tokens that were read are another model's. `models`: by agent."""
        for agent, actions in self.foreign.items():
            raise ConfigError(
                f"the tokens of {len(actions)} of {self.checked[agent]} actions of agent {agent!r} (the first: {actions[0]}) are not those "
                f"of {models[agent]}: another tokenizer wrote them",
                hint="start from the model that was served (--model), or take only its time (--set since=..., until=...)",
            )


def _spells(tokenizer: Any, call: Call) -> bool:
    """Whether the ids of a call say its text. A text that the ids can't be held against (parsed tool calls, broken bytes) passes."""
    if max(max(call.prompt_ids), max(call.completion_ids)) >= len(tokenizer):
        return False
    if call.tool_calls or not call.text.strip() or "\ufffd" in call.text:
        return True
    said = "".join(call.text.split())
    spelt = ("".join(tokenizer.decode(list(call.completion_ids), skip_special_tokens=skip).split()) for skip in (True, False))
    # Less than the ids say where thinking was parsed off or a stop text taken away, more where the prompt was echoed.
    return any(ids and (said in ids or ids in said) for ids in spelt)


def _tokenised(trace: EpisodeTrace, action: Action, tokenizer: Any) -> Call | None:
    """A call as the model in training would have read and written it, without log-probs; None where there is no text."""
    prompt, completion = conversation(action.messages), answer(action, "keep")
    if not prompt or completion is None or action.error is not None:
        return None
    head, tail = template_render(tokenizer)(prompt, completion, offered(trace, action))
    prompt_ids = tokenizer(head, add_special_tokens=False)["input_ids"]
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    ends = [at for at, token in enumerate(ids) if token == tokenizer.eos_token_id]
    cut = action.finish_reason == "length"
    if ends:  # what a template writes after the end of the turn is no answer, nor is that end where the answer was cut off
        ids = ids[: ends[-1] + (not cut)]
    if not prompt_ids or not ids:
        return None
    reason = action.finish_reason if action.finish_reason in get_args(FinishReason) else "stop"
    return Call(
        id=f"retokenised:{action.id}", policy=action.policy, version=0, prompt_ids=tuple(prompt_ids), completion_ids=tuple(ids),
        logprobs=(0.0,) * len(ids), finish_reason=cast(FinishReason, reason), text=action.output, sampling={"temperature": 1.0},
    )  # fmt: skip


def write_rows(
    store: TraceStore | Traces, folder: Path, agents: tuple[str, ...], config: OfflineConfig, progress: Progress | None = None
) -> Exported:
    """Exports what the method learns from into `folder`, with a data card; for reinforce as JSON lines, else as `datasets` folders.

    The folder is the training's own: what a killed export left there is written over. Raises `ConfigError`, with the reasons counted,
    where nothing is left.
    """
    method, split = config.method, None if config.split == "all" else config.split
    filters = Filters(
        agents=agents,
        min_score=config.least_score if method in ("sft", "reinforce") else None,
        since=None if config.since is None else seconds(config.since),
        until=None if config.until is None else seconds(config.until, end=True),
        split=split,
        truncated=method == "reinforce" and config.truncated == "train",
    )
    if method == "reinforce":
        returns = partial(
            samples_from_trace, gamma=config.gamma, credit=config.credit, outcome_weight=config.outcome_weight, truncated=config.truncated
        )
        options = Options(heldout=config.heldout, salt=config.salt)
        # What the work file of a killed export holds is not told of `retokenised` and `unweighted`: it is made anew.
        more: dict[str, Any] = {"samples": returns, "resume": False}
        return export(store, "rl", folder / "rl.jsonl", filters=filters, options=options, force=True, progress=progress, **more)
    pairs = Pairs()
    if method in ("dpo", "kto"):
        sources = {"dpo": ("siblings", "coach"), "kto": ("siblings", "coach", "scores")}[method]
        pairs = Pairs(cast(Any, sources), config.min_margin, config.pairs_per_state, config.good, config.bad)
    options = Options(heldout=config.heldout, salt=config.salt, thinking=config.thinking, pairs=pairs)
    return export(store, method, folder / method, kind="datasets", filters=filters, options=options, force=True, progress=progress)

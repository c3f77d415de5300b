"""The method as four plain functions over plain data: no graph, no server, no store.

1. `coach_case`: what a coach is shown of one action, as a case and as an LLM's prompt.
2. `action_rewards`: the scores of a trajectory's actions and the returns that each earns.
3. `reinforce_update`: one REINFORCE++ update of one agent.
4. `train_on_stream`: the loop over a stream of tasks, for a whole team.

A trajectory is a dict: `{"task": str, "actions": [...]}`, and optionally `reference`, `outcome` (a bool, or 0..1), `stratum`, and `edges`
((earlier, later) positions; default: each action follows the one before it). An action is a dict with `agent` and `output`, and
optionally `messages`, `executions` (dicts of `code`, `stdout`, `stderr`, `result`, `error`), `finish_reason`, and, for training,
`prompt_ids`, `completion_ids`, `logprobs` (natural, of the sampling engine) and `temperature`. The one thing to know: everything here is
made into the records that the rest of the package works on, so a number from here is the number of a whole run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mappa_graph.coach.base import AgentCard, Case, Coach, score_episode
from mappa_graph.coach.case import case_for, cases_for
from mappa_graph.coach.prompts import load_prompts
from mappa_graph.coach.render import render_case
from mappa_graph.errors import ConfigError, MappaError
from mappa_graph.record import (
    Action,
    Call,
    Episode,
    EpisodeTrace,
    Execution,
    ExecutionErrorInfo,
    Outcome,
    Verdict,
)

from .batch import Sample, samples_from_trace
from .returns import discounted_returns

if TYPE_CHECKING:
    from .trainer import ReinforceTrainer, Update

Trajectory = Mapping[str, Any]
_ACTION = {"agent", "output", "messages", "tool_calls", "executions", "finish_reason", "error", "trainable"}
_TOKENS = {"prompt_ids", "completion_ids", "logprobs", "temperature", "policy"}
_TRAJECTORY = {"task", "actions", "reference", "outcome", "stratum", "edges", "id"}


@dataclass(frozen=True, slots=True)
class Rewards:
    """What the actions of a trajectory earned, in their order. None = no verdict: out of loss and statistics."""

    verdicts: Sequence[Verdict]
    scores: Sequence[float | None]
    """0..10."""
    returns: Sequence[float | None]
    """0..1."""


def coach_case(
    trajectory: Trajectory, action: int, team: Sequence[AgentCard] = (), *, hindsight: bool = False, prompt: str = "default"
) -> tuple[Case, list[dict[str, str]]]:
    """Step 1: the evidence for one action, and the messages by which a language model is asked to judge it.

    Args:
        action: position in the trajectory.
        team: the agents in their order, with roles and artifacts.
        hindsight: whether later actions and the outcome are shown.
        prompt: the rubric, `default` or the path of a text file.

    Raises `ConfigError` for what is no trajectory.
    """
    trace = trace_of(trajectory)
    if not 0 <= action < len(trace.actions):
        raise ConfigError(f"the trajectory has {len(trace.actions)} actions, and none at {action}")
    case = case_for(trace, trace.actions[action].id, team, hindsight=hindsight)
    prompts = load_prompts(prompt)
    return case, [{"role": "system", "content": f"{prompts.rubric}\n\n{prompts.one}"}, {"role": "user", "content": render_case(case)}]


async def action_rewards(
    trajectory: Trajectory, coach: Coach, team: Sequence[AgentCard] = (), *, gamma: float = 0.5, hindsight: bool = False
) -> Rewards:
    """Step 2: the coach's score of each action, and its return: the discounted mean of its own score and of those that follow from it.

    A coach that fails on an action gives no verdict on it, with the reason; it never gets a made-up score.
    """
    trace = trace_of(trajectory)
    verdicts = [verdict for _, verdict in sorted((await _judge(trace, coach, team, hindsight)).items())]
    scores = [v.score for v in verdicts]
    return Rewards(verdicts, scores, discounted_returns(scores, trace.edges, gamma))


def reinforce_update(
    trainer: ReinforceTrainer, agent: str, actions: Iterable[Mapping[str, Any]], returns: Iterable[float | None]
) -> Update:
    """Step 3: one REINFORCE++ update of one agent's weights (KL in the reward, advantages normalised over the batch, clipped ratio).

    Args:
        trainer: holds the agent's policy, under the agent's name or the actions' `policy`.
        actions: the agent's actions of a batch of trajectories, with tokens; truncated ones (`finish_reason` "length") are left out.
        returns: of each, 0..1; None is left out.
    """
    samples = []
    for number, (action, value) in enumerate(zip(actions, returns, strict=True)):
        if action.get("agent", agent) != agent:
            raise ConfigError(f"action {number} is of agent {action['agent']!r}, the update of {agent!r}")
        if action.get("finish_reason") != "length":
            samples.append(_sample(action, agent, number, value))
    return trainer.update(samples)


async def train_on_stream(
    batches: Iterable[Sequence[Any]] | AsyncIterable[Sequence[Any]],
    play: Callable[[Sequence[Any]], Awaitable[Sequence[Trajectory]]],
    coach: Coach,
    trainer: ReinforceTrainer,
    team: Sequence[AgentCard] = (),
    *,
    gamma: float = 0.5,
    hindsight: bool = False,
    after: Callable[[ReinforceTrainer], Awaitable[None]] | None = None,
) -> AsyncIterator[tuple[Update, Counter[str]]]:
    """Step 4: for each batch of tasks, play, coach, give credit, update every agent, and hand the new weights on.

    Args:
        batches: of tasks, as long as they come.
        play: a batch of tasks -> trajectories, acted by the present weights.
        after: called after each update: the place to swap weights into what plays.

    Yields each update, with how many actions were left out of it for which reason.
    """
    async for tasks in _stream(batches):
        samples: list[Sample] = []
        left_out: Counter[str] = Counter()
        for number, trajectory in enumerate(await play(tasks)):
            trace = trace_of({"id": f"{trainer.updates}/{number}", **trajectory})
            judged = await _judge(trace, coach, team, hindsight)
            verdicts = {trace.actions[i].id: verdict for i, verdict in judged.items()}
            found, missing = samples_from_trace(replace(trace, verdicts=verdicts), gamma=gamma)
            samples += found
            left_out.update(missing)
        update = trainer.update(samples)
        if after is not None:
            await after(trainer)
        yield update, left_out


def trace_of(trajectory: Trajectory) -> EpisodeTrace:
    """The record of a trajectory. Raises `ConfigError` for what is none, naming the place."""
    unknown = set(trajectory) - _TRAJECTORY
    if unknown or not isinstance(trajectory.get("actions"), Sequence):
        raise ConfigError(f"a trajectory has task, actions and optionally {sorted(_TRAJECTORY)}; got {sorted(trajectory)}")
    name = str(trajectory.get("id", "trajectory"))
    actions, calls = [], {}
    for i, data in enumerate(trajectory["actions"]):
        if "agent" not in data or set(data) - _ACTION - _TOKENS:
            raise ConfigError(f"action {i}: an action has an agent and optionally {sorted(_ACTION | _TOKENS)}; got {sorted(data)}")
        action = Action(
            id=f"{name}#{i}",
            transition_id=f"{name}#{i}",
            policy=data.get("policy", data["agent"]),
            order=i,
            **{key: data[key] for key in _ACTION & set(data) - {"executions"}},
            executions=tuple(_execution(e, f"{name}#{i}.{n}") for n, e in enumerate(data.get("executions", ()))),
        )
        actions.append(action)
        if "completion_ids" in data:
            calls[action.id] = _call(action, data)
    outcome = trajectory.get("outcome")
    if outcome is not None and not isinstance(outcome, Outcome):
        outcome = Outcome(outcome) if isinstance(outcome, bool) else Outcome(outcome >= 1.0, score=float(outcome))
    edges = trajectory.get("edges")
    episode = Episode(
        id=name,
        task=str(trajectory.get("task", "")),
        reference=trajectory.get("reference"),
        stratum=trajectory.get("stratum", ""),
        status="done",
        outcome=outcome,
    )
    pairs = [(i, i + 1) for i in range(len(actions) - 1)] if edges is None else [(int(a), int(b)) for a, b in edges]
    return EpisodeTrace(episode, actions=tuple(actions), edges=tuple(pairs), calls=calls)


async def _judge(trace: EpisodeTrace, coach: Coach, team: Sequence[AgentCard], hindsight: bool) -> dict[int, Verdict]:
    """By position."""
    cases = cases_for(trace, team, hindsight=hindsight)
    try:
        if hindsight:
            whole = await score_episode(coach, cases)
            return {i: whole.get(case.action_id, Verdict(None, error="the coach left it out")) for i, case in enumerate(cases)}
    except MappaError as error:
        return {i: Verdict(None, error=str(error)) for i in range(len(cases))}
    verdicts = {}
    for i, case in enumerate(cases):
        try:
            verdicts[i] = await coach.score(case)
        except MappaError as error:
            verdicts[i] = Verdict(None, error=str(error))
    return verdicts


async def _stream(batches: Iterable[Sequence[Any]] | AsyncIterable[Sequence[Any]]) -> AsyncIterator[Sequence[Any]]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch


def _execution(data: Mapping[str, Any], id: str) -> Execution:
    error = data.get("error")
    if error is not None and not isinstance(error, ExecutionErrorInfo):
        text = str(error)
        error = ExecutionErrorInfo(text.partition(":")[0].strip(), text.partition(":")[2].strip(), text)
    plain = {key: value for key, value in data.items() if key not in ("error", "id")}
    return Execution(**{"id": id, "status": "error" if error else "ok", **plain}, error=error)


def _call(action: Action, data: Mapping[str, Any]) -> Call:
    return Call(
        id=action.id,
        policy=action.policy,
        version=0,
        prompt_ids=tuple(data["prompt_ids"]),
        completion_ids=tuple(data["completion_ids"]),
        logprobs=tuple(data["logprobs"]),
        finish_reason=data.get("finish_reason") or "stop",
        sampling={"temperature": data.get("temperature", 1.0)},
    )


def _sample(action: Mapping[str, Any], agent: str, number: int, value: float | None) -> Sample:
    return Sample(
        agent=agent,
        policy=action.get("policy", agent),
        episode=str(number),
        action_id=str(number),
        prompt_ids=tuple(action["prompt_ids"]),
        completion_ids=tuple(action["completion_ids"]),
        engine_logprobs=tuple(action["logprobs"]),
        temperature=float(action.get("temperature", 1.0)),
        ret=value,
    )

"""Rollouts: an environment's graph run on tasks, many at once, each run an episode in the store.

`Runner.run(jobs)` gives back one `EpisodeTrace` a job, in the order of the jobs. A job's episode id follows from the run's seed, the
split, the iteration, the task and the sample; an episode that the store already holds complete is not run again. That, and seeds that
follow from what is asked of the model rather than from order or time, is what lets an interrupted run continue as if it had not been.
An episode that fails is a trace with a status and an error, never an exception.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from .agent import Agent
from .callback import CoachCallback, Unit, When
from .client import LoopClient
from .coach.base import Coach
from .environment import Environment, Task
from .errors import DeadlineError, describe
from .record import Episode, EpisodeStatus, EpisodeTrace, Failure, Outcome
from .store import TraceStore

_NAMESPACE = uuid.UUID("5a2c9d0e-6f0b-4b0e-9f38-6d6170706147")


@dataclass
class _Scope:
    """The episode a model call is made in: its id, and how often each request was made, for seeds."""

    episode: str
    seen: dict[bytes, int] = field(default_factory=dict)

    def seed(self, payload: Mapping[str, Any]) -> int:
        """A seed from the episode, the request, and how many equal requests came before it; the same whatever ran beside it."""
        body = json.dumps([payload.get("model"), payload.get("messages")], sort_keys=True, default=str).encode()
        key = hashlib.sha256(self.episode.encode() + body).digest()
        nth = self.seen[key] = self.seen.get(key, -1) + 1
        return int.from_bytes(hashlib.sha256(key + nth.to_bytes(4, "big")).digest()[:4], "big") >> 1


_scope: ContextVar[_Scope | None] = ContextVar("mappa_episode", default=None)


class EpisodeChat(ChatOpenAI):
    """A `ChatOpenAI` whose requests carry the episode and agent as headers, and a seed that makes the episode repeatable."""

    mappa_agent: str = ""

    def _get_request_payload(self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)
        scope = _scope.get()
        if scope is not None:
            payload.setdefault("seed", scope.seed(payload))
            headers = {"x-mappa-episode": scope.episode, "x-mappa-agent": self.mappa_agent}
            payload["extra_headers"] = {**headers, **payload.get("extra_headers", {})}
        return payload


def chat_model(
    agent: Agent, url: str, *, temperature: float, top_p: float = 1.0, max_tokens: int | None = None, timeout_s: float
) -> EpisodeChat:
    """The chat model that reaches an agent's policy through the gateway at `url`."""
    return EpisodeChat(
        model=agent.policy_name,
        base_url=url,
        api_key=SecretStr("unused"),
        temperature=temperature,
        top_p=top_p,
        max_completion_tokens=max_tokens,
        timeout=timeout_s,
        max_retries=2,
        http_async_client=LoopClient(timeout=timeout_s),
        mappa_agent=agent.name,
        metadata={"mappa_agent": agent.name, "mappa_policy": agent.policy_name, "mappa_role": agent.role},
    )


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to run."""

    task: Task
    split: str = "train"
    iteration: int = 0
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the policies are sampled in a batch of rollouts. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None


class Runner:
    """Runs an environment's graph against a gateway, with a callback that records and a coach that scores.

    Use it as an async context manager: what the environment shares between episodes (a sandbox pool) is open meanwhile.

    Args:
        url: the gateway's base URL, `http://…/v1`.
        seed: of the run; episodes' ids and seeds follow from it.
    """

    def __init__(
        self,
        environment: Environment,
        url: str,
        store: TraceStore,
        *,
        seed: int = 0,
        concurrency: int = 64,
        timeout_s: float = 120.0,
        when: When = "completed",
        unit: Unit = "action",
        coach_concurrency: int = 16,
        coach_timeout_s: float = 120.0,
    ) -> None:
        environment.check_deadlines(timeout_s)
        self.environment = environment
        self.store = store
        self.seed = seed
        self.timeout_s = timeout_s
        self.episodes_reused = 0
        self._url = url
        self._limit = asyncio.Semaphore(concurrency)
        self._when: When = when
        self._unit: Unit = unit
        self._coach_concurrency = coach_concurrency
        self._coach_timeout_s = coach_timeout_s
        self._graphs: dict[Sampling, Any] = {}
        self._shared: Any = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Runner]:
        if self.environment.shared is None:
            yield self
            return
        async with self.environment.shared() as shared:
            self._shared = shared
            yield self

    def episode_id(self, job: Job) -> str:
        return str(uuid.uuid5(_NAMESPACE, f"{self.seed}/{job.split}/{job.iteration}/{job.task.id}/{job.sample}"))

    async def run(
        self,
        jobs: Sequence[Job],
        sampling: Sampling,
        coach: Coach | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[EpisodeTrace]:
        """The jobs' episodes, in order. Never raises for what happens inside an episode; cancelling stops all of them."""
        graph = self._graph(sampling)
        callback = CoachCallback(
            coach,
            store=self.store,
            graph=graph,
            agents=self.environment.agents,
            environment=self.environment.name,
            team=self.environment.team,
            coach_sees_reference=self.environment.coach_sees_reference,
            when=self._when,
            unit=self._unit,
            concurrency=self._coach_concurrency,
            coach_timeout_s=self._coach_timeout_s,
        )
        done = 0

        async def one(job: Job) -> EpisodeTrace:
            nonlocal done
            async with self._limit:
                trace = self._kept(job, coached=coach is not None) or await self._episode(job, graph, callback)
            done += 1
            if progress is not None:
                progress(done, len(jobs))
            return trace

        async with callback:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(one(job)) for job in jobs]
        for name, count in callback.failures.items():
            self.store.add_failure(Failure("callback", name, f"{count} handler failure(s) in {len(jobs)} episodes"))
        return [task.result() for task in running]

    def _graph(self, sampling: Sampling) -> Any:
        if sampling not in self._graphs:
            models = {
                agent.name: chat_model(
                    agent,
                    self._url,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    max_tokens=sampling.max_tokens,
                    timeout_s=self.timeout_s,
                )
                for agent in self.environment.agents
            }
            self._graphs[sampling] = self.environment.build_graph(models)
        return self._graphs[sampling]

    def graph_drawing(self) -> dict[str, Any]:
        """Nodes and `[from, to, conditional]` edges of the environment's graph, as LangGraph draws it."""
        graph = next(iter(self._graphs.values()), None)
        if graph is None:
            graph = self._graph(Sampling())
        drawn = graph.get_graph()
        return {"nodes": list(drawn.nodes), "edges": [[e.source, e.target, bool(e.conditional)] for e in drawn.edges]}

    def _kept(self, job: Job, *, coached: bool) -> EpisodeTrace | None:
        """The job's episode as the store has it, if it ended properly there and was coached as it is to be now."""
        trace = self.store.episode(self.episode_id(job))
        if trace is None or trace.episode.status != "done" or (coached and not trace.verdicts):
            return None
        self.episodes_reused += 1
        return trace

    async def _episode(self, job: Job, graph: Any, callback: CoachCallback) -> EpisodeTrace:
        environment, task, id_ = self.environment, job.task, self.episode_id(job)
        episode = Episode(
            id=id_,
            environment=environment.name,
            task_id=task.id,
            task=task.prompt,
            reference=task.reference,
            stratum=task.stratum,
            split=job.split,
            iteration=job.iteration,
            sample=job.sample,
        )
        callback.begin(episode)
        token = _scope.set(_Scope(id_))
        status: EpisodeStatus = "failed"
        outcome: Outcome | None = None
        failure: BaseException | None = None
        try:
            async with asyncio.timeout(self.timeout_s):
                state = await self._invoke(graph, task, id_, callback)
            outcome = await environment.outcome(task, state)
            status = "done"
        except TimeoutError:
            failure = DeadlineError(
                f"episode on task {task.id!r} ran past its {self.timeout_s:g} s",
                hint="raise rollout.episode_timeout_s, or look where it waits",
            )
        except asyncio.CancelledError:
            status = "cancelled"
            raise
        except Exception as error:  # noqa: BLE001 - whatever a user's graph raises is this episode's data, recorded below
            failure = error
        finally:
            _scope.reset(token)
            if status == "cancelled":
                callback.forget(id_)
        if failure is not None:
            kind, name, what = describe(failure)
            self.store.add_failure(Failure("episode" if kind == "foreign" else kind, name, what[:2000], episode=id_))
        cause = None if failure is None else f"{type(failure).__name__}: {failure}"
        return await callback.finish(id_, outcome=outcome, status=status, error=cause)

    async def _invoke(self, graph: Any, task: Task, id_: str, callback: CoachCallback) -> Any:
        config = {"callbacks": [callback], "run_id": uuid.UUID(id_), "configurable": {"thread_id": id_}}
        environment = self.environment
        if environment.resources is None:
            return await graph.ainvoke(environment.graph_input(task), config=config)
        resources = environment.resources(task, self._shared) if environment.shared is not None else environment.resources(task)
        async with resources as context:
            return await graph.ainvoke(environment.graph_input(task), config=config, context=context)


def failed_share(traces: Sequence[EpisodeTrace]) -> float:
    """Share of episodes that did not end properly."""
    return sum(t.episode.status != "done" for t in traces) / max(1, len(traces))


def first_failure(traces: Sequence[EpisodeTrace]) -> str:
    """The error of the first failed episode, for messages."""
    return next((t.episode.error or "unknown" for t in traces if t.episode.status != "done"), "none failed")


__all__ = ["EpisodeChat", "Job", "Runner", "Sampling", "chat_model", "failed_share", "first_failure"]

"""`LLMCoach`: any LangChain chat model as a coach.

A case goes in as quoted data (`render`), a verdict comes out by a schema (`reply`): with the model's structured output where it has one,
as JSON alone where not. A reply that is no verdict is answered with the whole case again and what was wrong, a few times; a provider
that fails is tried again with jitter, or when its headers say. If that doesn't lead to a verdict there is none:
`Verdict(score=None, error=…)` says why, and the action stays pending for a later pass. The one thing to know: there is no
path by which a number reaches `score` other than a valid verdict of the model on this very case.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import tenacity
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage

from ..errors import CoachError, ConfigError
from ..record import Verdict
from .base import Case
from .budget import Budget, Ledger, Prices, Spend, price_of
from .cache import VerdictCache
from .models import estimate, identity, make_model, structured, tokens_used, without_secrets
from .prompts import Prompts, load_prompts
from .render import DEFAULT_LIMITS, Limits, labels_for, labels_of, render_case, render_episode, untrusted_texts
from .reply import (
    VERDICT_SCHEMA,
    VERDICTS_SCHEMA,
    MalformedReply,
    Names,
    Parsed,
    parse_verdict,
    parse_verdicts,
    payload_of,
    refuse_echo,
    squeeze,
    text_of,
)
from .retry import Pause, retrying, status_of, wait_asked

T = TypeVar("T")
Kind = Literal["one", "episode"]
_SCHEMAS: Mapping[Kind, Mapping[str, Any]] = {"one": VERDICT_SCHEMA, "episode": VERDICTS_SCHEMA}
_REPLY_TOKENS = 400
"""What a reply is taken to need, for the budget, before it is there; for each action."""
_NO_SCHEMA = frozenset({400, 404, 415, 422, 501})


class LLMCoach:
    """Scores by asking a chat model.

    Args:
        model: a LangChain chat model, or "provider:model".
        prompt: the rubric: "default", or the path of a text file.
        name: shown with each verdict; default "provider:model".
        reasks: how often a reply that is no verdict is asked for again.
        retries: how often a request is sent again after the provider failed (time-out, lost connection, 429, 5xx).
        timeout_s: of one request.
        max_wait_s: the longest pause that a provider's rate limit may ask for.
        concurrency: requests in flight at once.
        budget: caps on requests, tokens and money; past them there are no verdicts, and nothing is sent.
        prices: of this model, or a table by "provider:model".
        cache: path of a file (or a `VerdictCache`) in which verdicts are kept.
        output: "structured" (refuse a model without), "json", or "auto".
        limits: most characters of each part of a case.
        actions_per_call: most actions scored by one request of `score_episode`.
        model_kwargs: settings for a model given by name.
    """

    def __init__(
        self,
        model: BaseChatModel | str,
        *,
        prompt: str | Path = "default",
        name: str | None = None,
        reasks: int = 2,
        retries: int = 4,
        timeout_s: float = 120.0,
        max_wait_s: float = 60.0,
        concurrency: int = 8,
        budget: Budget | None = None,
        prices: Mapping[str, Prices | tuple[float, float]] | Prices | None = None,
        cache: str | Path | VerdictCache | None = None,
        output: Literal["auto", "structured", "json"] = "auto",
        limits: Limits = DEFAULT_LIMITS,
        actions_per_call: int = 24,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        for what, value, least in (
            ("reasks", reasks, 0),
            ("retries", retries, 0),
            ("concurrency", concurrency, 1),
            ("actions_per_call", actions_per_call, 1),
        ):
            if value < least:
                raise ConfigError(f"the coach's {what} is {value!r}", hint=f"give a whole number from {least}")
        for what, seconds in (("timeout_s", timeout_s), ("max_wait_s", max_wait_s)):
            if seconds <= 0:
                raise ConfigError(f"the coach's {what} is {seconds!r}", hint="give a number of seconds above 0")
        self.prompts: Prompts = load_prompts(prompt)
        self.model = make_model(model, timeout_s, model_kwargs)
        model_name, settings = identity(self.model)
        self.name = name or model_name
        self.reasks, self.retries, self.timeout_s, self.concurrency = reasks, retries, timeout_s, concurrency
        self.limits, self.actions_per_call = limits, actions_per_call
        self.version = self.prompts.version
        self._identity = f"{model_name}|{settings}"
        self._ledger = Ledger(budget, price_of(model_name, prices), self.name)
        self._cache = VerdictCache(cache) if isinstance(cache, str | Path) else cache
        self._pause = Pause(max_wait_s)
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
        bound = {} if output == "json" else {kind: structured(self.model, schema) for kind, schema in _SCHEMAS.items()}
        self._structured = {kind: runnable for kind, runnable in bound.items() if runnable is not None}
        if output == "structured" and len(self._structured) < len(_SCHEMAS):
            raise ConfigError(f"model {model_name!r} has no structured output", hint="use output='auto' or 'json'")
        self._may_fall_back = output == "auto"

    @property
    def spend(self) -> Spend:
        """What was used so far: requests, tokens, money, time."""
        return self._ledger.spend

    def without_cache(self) -> LLMCoach:
        """The same coach, budget and spending shared, that never reads or writes the cache: for asking twice."""
        twin = copy(self)
        twin._cache = None
        return twin

    async def score(self, case: Case) -> Verdict:
        """The model's verdict on a case, or a verdict without a score that says why there is none."""
        text = render_case(case, self.limits)
        key = self._key("one", text)
        kept = self._kept(key)
        if kept is not None:
            return kept
        names = Names(labels_of(case), [card.name for card in case.team] or [case.agent])
        texts = squeeze(untrusted_texts(case))

        def read(payload: Any, reply: str) -> Parsed:
            parsed = parse_verdict(payload, names)
            refuse_echo(parsed, reply, texts)
            return parsed

        usage = _Usage()
        again = self.prompts.again
        problem: str | None = None
        try:
            for _ in range(self.reasks + 1):
                asked = text if problem is None else f"{text}\n{again.replace('{problem}', problem)}\n"
                parsed, problem = await self._ask("one", asked, read, usage, 1)
                if parsed is not None:
                    verdict = self._verdict(parsed, usage, 1)
                    self._keep(key, verdict)
                    return verdict
        except CoachError as error:
            return self._none(str(error), usage, 1)
        return self._none(f"no valid verdict in {self.reasks + 1} replies: {problem}", usage, 1)

    async def score_episode(self, cases: Sequence[Case]) -> Mapping[str, Verdict]:
        """Verdicts on all actions of an episode, by action id, in one request (one for every `actions_per_call` actions).

        Actions that a reply leaves out, gives twice, or judges wrongly in form are asked for again, only they. Every action of `cases`
        is in the result. Cases of several episodes are scored episode by episode.
        """
        episodes: dict[str, list[Case]] = {}
        for case in cases:
            episodes.setdefault(case.episode_id, []).append(case)
        parts = [
            self._score_part(whole, whole[i : i + self.actions_per_call])
            for whole in episodes.values()
            for i in range(0, len(whole), self.actions_per_call)
        ]
        done = await asyncio.gather(*parts)
        return {action_id: verdict for part in done for action_id, verdict in part.items()}

    async def _score_part(self, whole: Sequence[Case], part: Sequence[Case]) -> dict[str, Verdict]:
        text = render_episode(whole, self.limits)
        labels = labels_for(whole)
        keys = {case.action_id: self._key("episode", text, labels[case.action_id]) for case in part}
        done = {action_id: kept for action_id, key in keys.items() if (kept := self._kept(key)) is not None}
        wanted = [case for case in part if case.action_id not in done]
        names = Names(
            {name: action_id for action_id, name in labels.items()},
            list(dict.fromkeys([*(card.name for card in whole[0].team), *(case.agent for case in whole)])),
        )
        texts = squeeze(text for case in whole for text in untrusted_texts(case))
        problem: str | None = None
        why = "no reply"
        usage = _Usage()
        found: dict[str, Parsed] = {}

        def read(payload: Any, reply: str) -> dict[str, Parsed]:
            nonlocal problem
            parsed = parse_verdicts(payload, names, {case.action_id for case in wanted})
            problems = list(parsed.problems)
            good: dict[str, Parsed] = {}
            for action_id, verdict in parsed.verdicts.items():
                try:
                    refuse_echo(verdict, reply, texts)
                    good[action_id] = verdict
                except MalformedReply as error:
                    problems.append(str(error))
            left = [case for case in wanted if case.action_id not in good]
            if left:
                problem = "; ".join(problems[:4]) or "it left out " + ", ".join(labels[case.action_id] for case in left)
            return good

        try:
            for attempt in range(self.reasks + 1):
                if not wanted:
                    break
                asked = ", ".join(labels[case.action_id] for case in wanted)
                ask = f"Score these actions: {asked}."
                if attempt:
                    ask = self.prompts.again_episode.replace("{actions}", asked).replace("{problem}", problem or why)
                good, wrong = await self._ask("episode", f"{text}\n{ask}\n", read, usage, len(wanted))
                problem = wrong or problem
                found.update(good or {})
                wanted = [case for case in wanted if case.action_id not in found]
                if wanted and good is not None:
                    self._ledger.count(asked_again=1)
            why = f"no valid verdict in {self.reasks + 1} replies: {problem}"
        except CoachError as error:
            why = str(error)
        for case in part:
            if case.action_id in found:
                done[case.action_id] = self._verdict(found[case.action_id], usage, len(part))
                self._keep(keys[case.action_id], done[case.action_id])
            elif case.action_id not in done:
                done[case.action_id] = self._none(why, usage, len(part))
        return done

    async def _ask(self, kind: Kind, text: str, read: Callable[[Any, str], T], usage: _Usage, actions: int) -> tuple[T | None, str | None]:
        """What `read` made of the reply, or None and what was wrong with it."""
        try:
            message = await self._request(kind, text, usage, actions)
            return read(payload_of(message, _SCHEMAS[kind]["title"]), text_of(message)), None
        except MalformedReply as error:
            self._ledger.count(asked_again=1)
            return None, str(error)

    async def _request(self, kind: Kind, text: str, usage: _Usage, actions: int) -> Any:
        """One reply, after as many tries as the provider's failures need. Raises `CoachError`, or `MalformedReply`."""
        runnable = self._structured.get(kind)
        try:
            if runnable is None:
                return await self._tried(kind, text, None, usage, actions)
            try:
                return await self._tried(kind, text, runnable, usage, actions)
            except Exception as error:
                if not self._may_fall_back or status_of(error) not in _NO_SCHEMA:
                    raise
                message = await self._tried(kind, text, None, usage, actions)
                self._structured = {}
                return message
        except (CoachError, MalformedReply):
            raise
        except Exception as error:
            status = status_of(error)
            code = f" (HTTP {status})" if status is not None else ""
            said = _short(without_secrets(str(error), self.model))
            raise CoachError(f"the coach's model failed{code}: {type(error).__name__}: {said}") from error

    async def _tried(self, kind: Kind, text: str, runnable: Any | None, usage: _Usage, actions: int) -> Any:
        def again(state: tenacity.RetryCallState) -> None:
            self._ledger.count(retried=1)

        async for attempt in retrying(self.retries, self._pause, on_retry=again):
            with attempt:
                return await self._send(kind, text, runnable, usage, actions)
        raise CoachError("no request was sent")

    async def _send(self, kind: Kind, text: str, runnable: Any | None, usage: _Usage, actions: int) -> Any:
        system = f"{self.prompts.rubric}\n\n{self.prompts.one if kind == 'one' else self.prompts.episode}"
        if runnable is None:
            system += f"\n\n{self.prompts.json}\n{json.dumps(_SCHEMAS[kind])}"
        messages = [SystemMessage(system), HumanMessage(text)]
        guess = estimate(system) + estimate(text)
        async with self._slot():
            await self._pause.wait()
            ticket = self._ledger.open(guess, _REPLY_TOKENS * actions)
            started = time.monotonic()
            used = (0, 0)
            try:
                # An empty context and no callbacks: a coach that is called inside a graph is no part of that graph's trace.
                task = asyncio.get_running_loop().create_task(
                    (runnable or self.model).ainvoke(messages, config={"callbacks": [], "run_name": "coach"}),
                    context=contextvars.Context(),
                )
                answer = await asyncio.wait_for(task, self.timeout_s)
                message = answer["raw"] if isinstance(answer, Mapping) else answer
                used = tokens_used(message) or (guess, estimate(text_of(message)))
                headers = (getattr(message, "response_metadata", None) or {}).get("headers")
                self._pause.ask(wait_asked(headers) if isinstance(headers, Mapping) else None)
                return message
            except TimeoutError as error:
                used = (guess, 0)
                raise TimeoutError(f"no reply within {self.timeout_s:g} s") from error
            except Exception as error:
                if type(error).__name__ == "LengthFinishReasonError":
                    used = (guess, _REPLY_TOKENS * actions)
                    raise MalformedReply("the reply was cut off at the length limit; write a shorter reason") from error
                if type(error).__name__ == "ContentFilterFinishReasonError":
                    raise MalformedReply("the reply was stopped by a content filter") from error
                raise
            finally:
                seconds = time.monotonic() - started
                usd = self._ledger.close(ticket, *used, seconds)
                usage.add(*used, usd, seconds)

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = asyncio.Semaphore(self.concurrency)
        return self._slots[loop]

    def _key(self, *parts: str) -> str:
        return hashlib.sha256("\x00".join([self._identity, self.version, *parts]).encode("utf-8", "surrogatepass")).hexdigest()

    def _kept(self, key: str) -> Verdict | None:
        verdict = self._cache.get(key) if self._cache is not None else None
        if verdict is None:
            return None
        self._ledger.count(cached=1, scored=1)
        return replace(verdict, usage={**dict.fromkeys(verdict.usage, 0.0), "cached": 1.0}, duration_s=0.0)

    def _keep(self, key: str, verdict: Verdict) -> None:
        if self._cache is not None:
            self._cache.put(key, verdict)

    def _verdict(self, parsed: Parsed, usage: _Usage, share: int) -> Verdict:
        self._ledger.count(scored=1)
        return Verdict(
            score=parsed.score,
            reason=parsed.reason,
            blame=parsed.blame,
            better_action=parsed.better_action,
            coach=f"{self.name}@{self.version}",
            duration_s=usage.seconds / share,
            usage=usage.shared(share),
        )

    def _none(self, why: str, usage: _Usage, share: int) -> Verdict:
        self._ledger.count(unscored=1)
        return Verdict(None, error=why, coach=f"{self.name}@{self.version}", duration_s=usage.seconds / share, usage=usage.shared(share))


class _Usage:
    """What the requests for one case (or one part of an episode) used."""

    def __init__(self) -> None:
        self.calls = self.prompt_tokens = self.completion_tokens = 0
        self.usd = self.seconds = 0.0

    def add(self, prompt_tokens: int, completion_tokens: int, usd: float, seconds: float) -> None:
        self.calls += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.usd += usd
        self.seconds += seconds

    def shared(self, share: int) -> dict[str, float]:
        """The part of one of `share` actions."""
        return {
            "calls": self.calls / share,
            "prompt_tokens": self.prompt_tokens / share,
            "completion_tokens": self.completion_tokens / share,
            "usd": self.usd / share,
        }


def _short(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"

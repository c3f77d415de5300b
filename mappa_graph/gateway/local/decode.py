"""The decode loop under `LocalEngine`: rows of many calls, one forward per token, in one worker thread.

Batching is continuous: a row joins the batch of its weights at any step and leaves it when it ends. Every row has a slot in the
key/value cache and writes at its own position, so nothing is ever shifted or padded on the left; a leaving row's slot is filled from
the end. The one thing to know: a row's randomness is its own (one uniform number per token, inverse distribution function), so a
seeded call gives the same tokens whatever batch it lands in. Rows stand for calls from any event loop; they are answered there.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from ...errors import EngineError
from ...record import FinishReason
from ..text import TextStream
from .cache import new_cache
from .fast import FastStep, fast_step

T = TypeVar("T")
_PREFILL_TOKENS = 8192


class Row:
    """One completion that is being sampled. Written by the worker thread only, but for `cancelled`."""

    __slots__ = (
        "alternatives", "cancelled", "eos", "error", "finish_reason", "greedy", "ids", "last", "length", "logprobs", "loop", "max_new",
        "prompt", "random", "sink", "stream", "temperature", "text", "top_k", "top_logprobs", "top_p",
    )  # fmt: skip

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        max_new: int,
        eos: frozenset[int],
        temperature: float,
        top_p: float,
        top_k: int,
        seed: str | None,
        top_logprobs: int | None,
        text: TextStream | None,
        stream: bool,
        sink: Callable[[Row, int, str], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.prompt = tuple(prompt)
        self.max_new = max_new
        self.eos = eos
        self.greedy = temperature <= 0.0
        self.temperature = 1.0 if self.greedy else temperature
        self.top_p = top_p
        self.top_k = top_k
        self.random = random.Random(seed).random
        self.top_logprobs = top_logprobs
        self.text = text
        self.stream = stream
        self.sink = sink
        """`sink(row, n, text)` on `loop`: `n` tokens were added and `text` may be given out; the last time, `finish_reason` is set."""
        self.loop = loop
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.alternatives: list[tuple[list[int], list[float]]] = []
        self.finish_reason: FinishReason | None = None
        self.error: EngineError | None = None
        self.cancelled = False
        self.last = self.prompt[-1]
        """The token that the next forward takes in."""
        self.length = 0
        """Tokens in the cache."""

    def add(self, id: int, logprob: float) -> str:
        """Takes a sampled token; returns what text may be given out."""
        self.ids.append(id)
        self.logprobs.append(logprob)
        self.last = id
        self.length += 1
        piece = ""
        if id in self.eos:
            self.finish_reason = "stop"
        else:
            if self.text is not None:
                piece = self.text.push(id)
                if self.text.stopped:
                    self.finish_reason = "stop"
            if self.finish_reason is None and len(self.ids) >= self.max_new:
                self.finish_reason = "length"
        return piece


class Batch:
    """The rows that are being sampled from one module."""

    def __init__(self, module: Any, device: str, max_tokens: int, fast: FastStep | None = None) -> None:
        self.module = module
        self.fast = fast
        self.device = device
        self.max_tokens = max_tokens
        self.retired = False
        self.rows: list[Row] = []
        self.waiting: deque[Row] = deque()
        self.cache = new_cache(module)
        self._zero = torch.zeros((), dtype=module.dtype, device=device)
        self._knobs: tuple[Any, ...] | None = None

    @property
    def busy(self) -> bool:
        return bool(self.rows or self.waiting)

    def step(self) -> list[tuple[Row, int, str]]:
        """Takes in what waits and fits, samples one token for every row, and returns what there is to tell."""
        self._drop([row for row in self.rows if row.cancelled])
        self._admit()
        if not self.rows:
            return []
        rows, cache = self.rows, self.cache
        tokens = torch.tensor([[row.last] for row in rows], device=self.device)
        cache.at = torch.tensor([row.length for row in rows], device=self.device)
        cache.slots = torch.arange(len(rows), device=self.device)
        cache.top = max(row.length for row in rows) + 1
        cache.reserve(len(rows), cache.top)
        hidden = (torch.arange(cache.top, device=self.device) > cache.at[:, None])[:, None, None]
        mask = self._zero.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(self._zero.dtype).min)
        if self.fast is not None:
            logits = self.fast(tokens, cache, mask)
        else:
            logits = self.module(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=cache.at[:, None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        chosen, logprobs, tops = self._sample(logits.float())
        events = []
        ended = []
        for place, (row, id, logprob) in enumerate(zip(rows, chosen, logprobs, strict=True)):
            if row.top_logprobs is not None and tops is not None:
                ids, values = tops
                row.alternatives.append((ids[place][: row.top_logprobs], values[place][: row.top_logprobs]))
            piece = row.add(id, logprob)
            if row.finish_reason is not None:
                ended.append(row)
                events.append((row, 1, piece))
            elif row.stream:
                events.append((row, 1, piece))
        if ended:
            self._drop(ended)
        return events

    def _admit(self) -> None:
        joining: list[Row] = []
        longest = max((row.length for row in self.rows), default=0)
        while self.waiting:
            row = self.waiting[0]
            reach = max(longest, len(row.prompt) + min(row.max_new, 64))
            if (self.rows or joining) and (len(self.rows) + len(joining) + 1) * reach > self.max_tokens:
                break
            self.waiting.popleft()
            if not row.cancelled:
                joining.append(row)
                longest = reach
        if not joining:
            return
        self._knobs = None
        joining.sort(key=lambda row: len(row.prompt))
        self.cache.reserve(len(self.rows) + len(joining), len(joining[-1].prompt))
        group: list[Row] = []
        for row in joining:
            if group and (len(group) + 1) * len(row.prompt) > _PREFILL_TOKENS:
                self._fill(group)
                group = []
            group.append(row)
        self._fill(group)

    def _fill(self, group: list[Row]) -> None:
        """Takes in prompts but for their last token, which the next step reads; equal prompts go through the model once."""
        places: dict[tuple[int, ...], int] = {}
        source = [places.setdefault(row.prompt, len(places)) for row in group]
        span = max(len(prompt) for prompt in places) - 1
        if span:
            # Padding lies behind the prompt, where causal attention never looks, and is overwritten token by token.
            padded = [list(prompt[:-1]) + [0] * (span - len(prompt) + 1) for prompt in places]
            self.cache.filling = (len(self.rows), torch.tensor(source, device=self.device))
            try:
                self.module(
                    input_ids=torch.tensor(padded, device=self.device), past_key_values=self.cache, use_cache=True, logits_to_keep=1
                )
            finally:
                self.cache.filling = None
        for row in group:
            row.length = len(row.prompt) - 1
        self.rows.extend(group)

    def _drop(self, gone: Iterable[Row]) -> None:
        marked = set(map(id, gone))
        if not marked:
            return
        self._knobs = None
        kept = len(self.rows) - len(marked)
        holes = [i for i in range(kept) if id(self.rows[i]) in marked]
        movers = [i for i in range(kept, len(self.rows)) if id(self.rows[i]) not in marked]
        if holes:
            self.cache.move(movers, holes)
            for hole, mover in zip(holes, movers, strict=True):
                self.rows[hole] = self.rows[mover]
        del self.rows[kept:]

    def _sample(self, logits: torch.Tensor) -> tuple[list[int], list[float], tuple[list[list[int]], list[list[float]]] | None]:
        """One token per row of `logits` [rows, vocabulary]."""
        rows = self.rows
        if self._knobs is None:
            temperatures = [row.temperature for row in rows]
            hot = any(t != 1.0 for t in temperatures)
            greedy = [row.greedy for row in rows]
            limits = [(row.top_p, row.top_k or logits.shape[1]) for row in rows]
            self._knobs = (
                torch.tensor(temperatures, device=self.device)[:, None] if hot else None,
                torch.tensor(greedy, device=self.device) if any(greedy) else None,
                tuple(torch.tensor(limit, device=self.device)[:, None] for limit in zip(*limits, strict=True))
                if any(p < 1.0 or k < logits.shape[1] for p, k in limits)
                else None,
                max((row.top_logprobs for row in rows if row.top_logprobs is not None), default=None),
            )
        temperature, greedy_rows, limit, top = self._knobs
        logprobs = torch.log_softmax(logits if temperature is None else logits / temperature, dim=-1)
        masses = logprobs.exp().double()
        if limit is not None:
            masses = _limit(masses, *limit)
        steps = masses.cumsum(-1)
        uniform = torch.tensor([row.random() for row in rows], dtype=torch.double, device=self.device)
        chosen = torch.searchsorted(steps, (uniform * steps[:, -1])[:, None], right=True).clamp_(max=logits.shape[1] - 1)
        if greedy_rows is not None:
            chosen = torch.where(greedy_rows[:, None], logits.argmax(-1, keepdim=True), chosen)
        picked = logprobs.gather(1, chosen)
        tops = None
        if top is not None:
            values, ids = logprobs.topk(max(1, min(top, logits.shape[1])), dim=-1)
            tops = (ids.tolist(), values.tolist())
        return chosen[:, 0].tolist(), picked[:, 0].tolist(), tops


def _limit(masses: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zeroes what top-k and nucleus sampling leave out; `masses` [rows, vocabulary], limits [rows, 1]."""
    ordered, order = masses.sort(dim=-1, descending=True)
    rank = torch.arange(masses.shape[1], device=masses.device)
    before = ordered.cumsum(-1) - ordered
    kept = (rank < top_k) & ((before < top_p) | (rank == 0))
    return torch.zeros_like(masses).scatter_(1, order, ordered * kept)


class Decoder:
    """The worker thread: every batch with rows gets a step in turn."""

    def __init__(self, device: str, max_batch_tokens: int, threads: int | None) -> None:
        self.device = device
        self.max_batch_tokens = max_batch_tokens
        self.threads = threads
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._batches: dict[int, Batch] = {}
        self._fast: weakref.WeakKeyDictionary[Any, FastStep] = weakref.WeakKeyDictionary()
        self._thread = threading.Thread(target=self._run, name="mappa-decode", daemon=True)
        self._thread.start()

    def prepare(self, module: Any, max_positions: int, *, compare: bool) -> None:
        """Gives a module its fast step, where it can have one; `compare` checks it against the module's own forward."""
        step = fast_step(module, new_cache(module), max_positions, compare=compare)
        if step is not None:
            self._fast[module] = step

    def prepared_like(self, module: Any) -> bool:
        return module in self._fast

    def submit(self, module: Any, rows: Sequence[Row]) -> None:
        """Starts rows; they are told of on their own loops."""

        def take() -> None:
            batch = self._batches.get(id(module))
            if batch is None:
                # It stays when its rows have ended: the cache's memory is dear to get anew for every burst of calls.
                batch = self._batches[id(module)] = Batch(module, self.device, self.max_batch_tokens, self._fast.get(module))
            batch.waiting.extend(rows)

        self._inbox.put(take)

    def forget(self, module: Any) -> None:
        """Frees what is kept for a module, once its rows have ended."""

        def retire() -> None:
            batch = self._batches.get(id(module))
            if batch is not None and batch.busy:
                batch.retired = True
            elif batch is not None:
                del self._batches[id(module)]

        self._inbox.put(retire)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` in the worker thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  the caller gets it
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def stop(self) -> None:
        """Ends every row with an error, and the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self.threads is not None:
            _limit_threads(self.threads)
        with torch.inference_mode():
            while self._take():
                for batch in [batch for batch in self._batches.values() if batch.busy]:
                    try:
                        events = batch.step()
                    except Exception as error:  # noqa: BLE001  whatever a model raises fails its rows, not the thread
                        events = self._fail(batch, error)
                    if batch.retired and not batch.busy:
                        del self._batches[id(batch.module)]
                    _tell(events)
        for batch in self._batches.values():
            _tell(self._fail(batch, EngineError("the local engine was stopped")))

    def _take(self) -> bool:
        """Does what is in the inbox; waits for more where nothing runs. False = stop."""
        while not (self._inbox.empty() and any(batch.busy for batch in self._batches.values())):
            work = self._inbox.get()
            if work is None:
                return False
            work()
        return True

    def _fail(self, batch: Batch, error: Exception) -> list[tuple[Row, int, str]]:
        rows = [*batch.rows, *batch.waiting]
        batch.rows.clear()
        batch.waiting.clear()
        told = error if isinstance(error, EngineError) else EngineError(f"the model failed: {type(error).__name__}: {error}")
        for row in rows:
            row.error = told
            row.finish_reason = "error"
        return [(row, 0, "") for row in rows]


def _limit_threads(threads: int) -> None:
    """Sets torch's thread count for this thread alone: torch also makes it the default of all threads that are still to come (a
    trainer's, for one), so that default is put back from a thread that ends at once."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    restorer = threading.Thread(target=torch.set_num_threads, args=(before,))
    restorer.start()
    restorer.join()


def _tell(events: Sequence[tuple[Row, int, str]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Row, int, str]]] = defaultdict(list)
    for event in events:
        by_loop[event[0].loop].append(event)
    for loop, told in by_loop.items():
        # A loop that was closed has nobody waiting on it.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_deliver, told)


def _deliver(events: Sequence[tuple[Row, int, str]]) -> None:
    for row, tokens, piece in events:
        row.sink(row, tokens, piece)

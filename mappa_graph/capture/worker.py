"""`Worker`: the thread that turns events into records, has actions scored, and saves episodes.

It has an event loop of its own and runs everything in an empty context. A task made from inside a handler would inherit the node's
config, and the coach's own model call would then be recorded as an action of the node, scored, recorded, and so on.
Events are taken a few milliseconds after the first of a burst, many at a time, so that the thread seldom asks a busy app for the
interpreter. Store access runs on one more thread, in order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass, replace
from time import time
from typing import Any, TypeVar

from ..errors import EpisodeError
from ..record import Call, Episode, EpisodeStatus, EpisodeTrace, Failure, Outcome
from ..store import TraceStore
from .judge import Judge
from .recording import Recording
from .resume import revived
from .structure import Structure
from .tap import ChainStart, Event, LlmEnd, LlmStart, Tap, ToolStart
from .team import Team

log = logging.getLogger(__name__)
T = TypeVar("T")

COALESCE_S = 0.01
GRACE_S = 1.0
"""How long a root that has ended stays open for `finish` and for events that come late."""
_RECENT = 64
_CALLS_REMEMBERED = 20_000


@dataclass(frozen=True, slots=True)
class Begun:
    """Puts what is known of an episode into the queue, in order with the events."""

    episode: Episode


class Worker:
    """Everything here but `start`, `wake`, `submit` and `stop` runs on the worker's thread."""

    def __init__(
        self,
        team: Team,
        structure: Structure,
        judge: Judge,
        store: TraceStore | None,
        environment: str,
        release: Callable[[Any], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self.team = team
        self.structure = structure
        self.judge = judge
        self.store = store
        self.orphans = 0
        self.recordings: dict[str, Recording] = {}
        self._environment = environment
        self._release = release
        self._failed = failed
        self._events: Any = None
        self._begun: dict[str, Episode] = {}
        self._roots: dict[str, list[Any]] = {}
        self._aliases: dict[str, str] = {}
        self._saved: OrderedDict[str, EpisodeTrace] = OrderedDict()
        self._suspended: OrderedDict[str, EpisodeTrace] = OrderedDict()
        self._calls: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._finishing: dict[str, asyncio.Task[EpisodeTrace]] = {}
        self._idle = True
        self._disk = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="mappa-callback-store")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=Context().run, args=(self._main,), name="mappa-callback", daemon=True)
        self._stopped = False

    # -- from any thread

    @property
    def running(self) -> bool:
        return not self._stopped

    def start(self, tap: Tap) -> None:
        self._events = tap.events
        self._thread.start()

    def wake(self) -> None:
        """Called after each append. A worker that is awake takes the event without being told."""
        if self._idle and not self._stopped:
            self._idle = False
            self._loop.call_soon_threadsafe(self._soon, context=Context())

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Runs a coroutine on the worker's loop, in a context of its own."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        done.set_running_or_notify_cancel()  # whoever waits may give up; the work goes on

        async def run() -> None:
            try:
                self.take_all()
                done.set_result(await work())
            except BaseException as error:  # noqa: BLE001  handed to whoever waits
                done.set_exception(error)

        if self._stopped:
            raise EpisodeError("the callback is closed", hint="make a new CoachCallback, or close it after the last run")
        self._loop.call_soon_threadsafe(self._spawn, run, context=Context())
        return done

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._events:
            log.warning("%d recorded events were not processed when the callback was closed", len(self._events))
        self._loop.call_soon_threadsafe(self._loop.stop, context=Context())
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5)
        self._disk.shutdown(wait=True)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        return self.judge.keep(self._loop.create_task(work(), context=Context()))

    # -- events

    def _soon(self) -> None:
        self._loop.call_later(COALESCE_S, self.take_all)

    def take_all(self) -> None:
        # First the flag, then the queue: an event appended after the queue was seen empty wakes the worker again.
        self._idle = True
        events = self._events
        while events:
            event = events.popleft()
            try:
                self._take(event)
            except Exception as error:  # noqa: BLE001  one event that can't be placed must not stop the recording of the rest
                root = getattr(event, "root", None)
                self._failed("worker", error)
                self._note("callback", error, None if root is None else str(root.id))

    def _take(self, event: Event | Begun) -> None:
        if isinstance(event, Begun):
            self._take_begun(event.episode)
            return
        recording: Recording | None = event.root.recording
        if recording is None and not event.root.over:
            recording = self._place(event)
        if recording is None:
            return
        was_over = recording.ended is not None
        recording.take(event)
        if isinstance(event.what, LlmEnd):
            self.judge.generated(recording, recording.runs[event.run_id].what)
        self._judge_ready(recording)
        if recording.ended is not None and not was_over:
            self._over(recording)

    def _judge_ready(self, recording: Recording) -> None:
        for action in recording.ready:
            self.judge.complete(recording, action)
        recording.ready.clear()

    def _take_begun(self, episode: Episode) -> None:
        self._begun[episode.id] = episode
        recording = self.recordings.get(episode.id)
        if recording is not None and not recording.begun:
            self._describe(recording, episode)

    @staticmethod
    def _describe(recording: Recording, known: Episode) -> None:
        now = recording.episode
        recording.begun = True
        recording.episode = replace(
            known,
            id=recording.id,
            status=now.status,
            error=now.error,
            started=now.started or known.started,
            ended=now.ended,
            thread_id=known.thread_id or now.thread_id,
        )

    def _place(self, event: Event) -> Recording | None:
        """The recording of a root's first event: a new one, or the one that it turns out to be a part of."""
        root, what = event.root, event.what
        if not isinstance(what, ChainStart | LlmStart | ToolStart):
            root.over = True
            self._release(root)
            return None
        ns = str(what.metadata.get("langgraph_checkpoint_ns", ""))
        host = next(((r, a) for r in self.recordings.values() if (a := r.namespaces.get(ns)) is not None), None) if ns else None
        if host is not None:
            # A node that passes callbacks of its own cuts the run tree; the namespace still says where it was.
            recording, attempt = host
            event.parent_id = next(run.id for run in recording.runs.values() if run.what is attempt)
        elif isinstance(what, ChainStart):
            recording = self._resumed(what) or Recording(self._new_id(str(root.id)), self.team, self.structure, self._taken)
            self._aliases[str(root.id)] = recording.id
            self.recordings[recording.id] = recording
            if not recording.episode.environment:
                recording.episode = replace(recording.episode, environment=self._environment)
            begun = self._begun.get(str(root.id))
            if begun is not None and not recording.begun:
                self._describe(recording, begun)
        else:
            if isinstance(what, LlmStart):
                self.orphans += 1
            root.over = True
            self._release(root)
            return None
        root.recording = recording
        self._roots.setdefault(recording.id, []).append(root)
        return recording

    def _new_id(self, id: str) -> str:
        """The root's run id; a run id that an app uses twice gets a number."""
        number = 1
        new = id
        while new in self.recordings or (new in self._saved and id not in self._begun):
            number += 1
            new = f"{id}:{number}"
        return new

    def _taken(self, id: str, index: int) -> bool:
        key = (id, index)
        if key in self._calls:
            return True
        self._calls[key] = None
        if len(self._calls) > _CALLS_REMEMBERED:
            self._calls.popitem(last=False)
        return False

    def _resumed(self, start: ChainStart) -> Recording | None:
        """The recording that a root goes on with: the interrupted one of the same thread. A fork (it names a checkpoint) is new."""
        thread = start.metadata.get("thread_id")
        if not start.resume or thread is None or start.metadata.get("checkpoint_id"):
            return None
        thread = str(thread)
        live = next((r for r in self.recordings.values() if r.ended == "interrupted" and r.episode.thread_id == thread), None)
        if live is not None:
            return live
        trace = self._suspended.pop(thread, None)
        if trace is None and self.store is not None:
            heads = self.store.episodes(status="interrupted", newest_first=True)
            head = next((e for e in heads if e.thread_id == thread), None)
            trace = None if head is None else self.store.episode(head.id)
        return None if trace is None else revived(trace, self.team, self.structure, self._taken)

    # -- ends

    def _over(self, recording: Recording) -> None:
        if not recording.begun and recording.id not in self._finishing:
            self._loop.call_later(GRACE_S, self._finish_alone, recording)

    def _finish_alone(self, recording: Recording) -> None:
        if recording.ended is not None and self.recordings.get(recording.id) is recording and recording.id not in self._finishing:
            task = self.judge.keep(self._finishing_task(recording, None, None, None))
            task.add_done_callback(self._saved_alone)

    def _saved_alone(self, task: asyncio.Task[EpisodeTrace]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed("save", error)

    def _finishing_task(
        self, recording: Recording, outcome: Outcome | None, status: EpisodeStatus | None, error: str | None
    ) -> asyncio.Task[EpisodeTrace]:
        task = self._loop.create_task(self._finish(recording, outcome, status, error), context=Context())
        self._finishing[recording.id] = task
        return task

    async def finish(self, id: str, outcome: Outcome | None, status: EpisodeStatus | None, error: str | None) -> EpisodeTrace:
        id = self._aliases.get(id, id)
        running = self._finishing.get(id)
        if running is not None:
            await asyncio.wait((running,))
        recording = self.recordings.get(id)
        if recording is None and id in self._saved:
            return await self._save_again(self._saved[id], outcome, status, error)
        if recording is None:
            if id not in self._begun:
                raise EpisodeError(
                    f"episode {id!r} was neither begun nor seen by this callback",
                    hint='pass config={"callbacks": [callback], "run_id": UUID(episode.id)} to the graph',
                )
            recording = Recording(id, self.team, self.structure, self._taken)
            self._describe(recording, self._begun[id])
            self.recordings[id] = recording
        return await self._finishing_task(recording, outcome, status, error)

    async def _finish(self, recording: Recording, outcome: Outcome | None, status: EpisodeStatus | None, error: str | None) -> EpisodeTrace:
        opened = recording.opened
        try:
            await self._late_events(recording)
            if recording.ended != "interrupted" or (status or "interrupted") != "interrupted":
                recording.close(status or "cancelled", error, time())
            self._judge_ready(recording)
            known = recording.episode
            recording.episode = replace(
                known, status=status or known.status, error=error if error is not None else known.error, outcome=outcome or known.outcome
            )
            await self.judge.finished(recording)
            trace = recording.trace()
            trace = replace(trace, calls=await self._calls_of(trace))
            await self._save(trace)
            return trace
        finally:
            self._finishing.pop(recording.id, None)
            if recording.opened == opened:
                self._free(recording)
            elif recording.ended is not None:
                # An interrupted run was resumed, and has ended, while its first half was being saved.
                self._over(recording)

    async def _late_events(self, recording: Recording) -> None:
        """Calls of tasks that a node started and did not await may end after the graph did."""
        if recording.ended is None:
            return
        for _ in range(50):
            if not recording.open_llms:
                return
            await asyncio.sleep(GRACE_S / 50)

    async def _calls_of(self, trace: EpisodeTrace) -> dict[str, Call]:
        store = self.store
        wanted = [(a.id, a.call_id, a.call_index) for a in trace.actions if a.call_id is not None]
        if store is None or not wanted:
            return {}

        def read() -> dict[str, Call]:
            found = ((id, store.call(call_id, index)) for id, call_id, index in wanted)
            return {id: call for id, call in found if call is not None}

        return await self._loop.run_in_executor(self._disk, read)

    async def _save(self, trace: EpisodeTrace) -> None:
        id = trace.episode.id
        if self.store is not None:
            await self._loop.run_in_executor(self._disk, self.store.save_episode, trace)
        elif trace.episode.status == "interrupted" and trace.episode.thread_id is not None:
            self._suspended[trace.episode.thread_id] = trace
            if len(self._suspended) > _RECENT:
                self._suspended.popitem(last=False)
        if id not in self._begun:
            self._saved[id] = trace
            if len(self._saved) > _RECENT:
                old, _ = self._saved.popitem(last=False)
                self._aliases = {k: v for k, v in self._aliases.items() if v != old}

    async def _save_again(
        self, trace: EpisodeTrace, outcome: Outcome | None, status: EpisodeStatus | None, error: str | None
    ) -> EpisodeTrace:
        """An episode that was saved by itself before `finish` was called gets what `finish` knows."""
        known = trace.episode
        episode = replace(known, outcome=outcome or known.outcome, status=status or known.status, error=error or known.error)
        trace = replace(trace, episode=episode)
        await self._save(trace)
        return trace

    def _free(self, recording: Recording) -> None:
        self.recordings.pop(recording.id, None)
        begun = self._begun.pop(recording.id, None)
        for root in self._roots.pop(recording.id, ()):
            root.recording, root.over = None, True
            self._release(root)
            begun = self._begun.pop(str(root.id), begun)
        if begun is not None:
            self._aliases = {k: v for k, v in self._aliases.items() if v != recording.id}
        self.judge.forget(recording)

    def forget(self, id: str) -> None:
        """Drops an episode unsaved."""
        id = self._aliases.get(id, id)
        recording = self.recordings.get(id)
        self._begun.pop(id, None)
        if recording is not None:
            self._free(recording)

    async def drain(self, everything: bool) -> None:
        """Saves the roots that have ended and that nobody will `finish`; with `everything`, all that is held."""
        while True:
            self.take_all()
            waiting = [r for r in self.recordings.values() if r.id not in self._finishing and (everything or (r.ended and not r.begun))]
            tasks = [self._finishing_task(r, None, None, None) for r in waiting] + list(self._finishing.values())
            if not tasks:
                return
            done, _ = await asyncio.wait(set(tasks))
            for task in done:
                self._saved_alone(task)

    # -- failures

    def _note(self, kind: str, error: BaseException, episode: str | None) -> None:
        self.note(Failure(kind, type(error).__name__, str(error) or repr(error), episode, time()))

    def note(self, failure: Failure) -> None:
        """Keeps a failure in the store, in the background."""
        store = self.store
        if store is None:
            return

        def write() -> None:
            try:
                store.add_failure(failure)
            except Exception as error:  # noqa: BLE001  the place to report failures has failed: counted, and the episode still ends
                self._failed("store", error)

        self._disk.submit(write)

"""`Keeper`: a batch of imported traces into the store, with their tokens, and into the ledger.

A batch is one transaction of the ledger before, one of the store for its episodes and one for their calls, and one of the ledger after, so
a kill costs a batch done again. The one thing to know: a trace that comes again with other words (a message of a chat was edited) replaces
the first, and verdicts on actions that no longer say or see the same are taken away, so that a score never stands by what it did not judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import StoreError
from ..record import Action, Call, EpisodeTrace
from ..store import TraceStore
from .ledger import Ledger, Rated
from .names import Names
from .spans import Notes

if TYPE_CHECKING:
    from .importer import Imported, SourceTrace


@dataclass(frozen=True, slots=True)
class Found:
    """A trace that is to be stored."""

    given: SourceTrace
    trace: EpisodeTrace
    rated: Sequence[Rated]
    digest: str
    before: bool
    """Whether it was stored before."""
    begun: bool
    """Whether it was, or an import that was cut off may have got to it."""

    @property
    def host(self) -> str | None:
        """The episode that the trace goes on with, after an interrupt; None for one of its own."""
        return self.trace.episode.id if self.trace.episode.id != self.given.id else None


class Keeper:
    """Stores what an importer finds.

    Args:
        calls: of the gateway that the app spoke to; those that actions name are copied from it.
    """

    def __init__(self, store: TraceStore, ledger: Ledger, names: Names, calls: TraceStore | None) -> None:
        self._store, self._ledger, self._names, self._calls = store, ledger, names, calls

    def keep(self, batch: list[Found], source: str, cursor: Any, done: Imported, notes: Notes) -> None:
        """Stores a batch, counts it in `done`, and empties it. Raises `StoreError`; what was stored by then stays."""
        if not batch:
            return
        self._ledger.begin(
            [
                (
                    f.given.id, source, f.given.session, self._names.thread(f.trace.episode.thread_id), f.digest, f.host,
                    f.trace.episode.status == "interrupted",
                )
                for f in batch
            ]
        )  # fmt: skip
        done.unscored += self._unscore({f.trace.episode.id: f.trace for f in batch if f.begun})
        kept = self._save(batch, done, notes)
        if calls := self._missing(kept):
            self._store.add_calls(calls)
        for found in kept:
            self._count(found, done)
        self._ledger.done([f.given.id for f in kept], [r for f in kept for r in f.rated], source, cursor)
        batch.clear()

    def _save(self, batch: Sequence[Found], done: Imported, notes: Notes) -> list[Found]:
        """Stores the episodes: all at once or, where one can't be written down, each by itself; returns those that are in."""
        try:
            self._store.save_episodes(f.trace for f in batch)
        except StoreError:
            raise
        except Exception:  # noqa: BLE001  whichever it is, it will say so by itself
            kept = []
            for found in batch:
                try:
                    self._store.save_episode(found.trace)
                except StoreError:
                    raise
                except Exception as error:  # noqa: BLE001  a record that can't be written down is its own loss, not that of the batch
                    done.failed += 1
                    notes.add(f"trace that can't be stored: {type(error).__name__}", f"{found.given.id}: {error}")
                else:
                    kept.append(found)
            return kept
        return list(batch)

    def _missing(self, batch: Sequence[Found]) -> list[Call]:
        """The gateway's calls that actions name and the store has not."""
        if self._calls is None:
            return []
        named = {(a.call_id, a.call_index) for f in batch for a in f.trace.actions if a.call_id is not None}
        found = (self._calls.call(id, index) for id, index in sorted(named) if self._store.call(id, index) is None)
        return [call for call in found if call is not None]

    def _unscore(self, new: Mapping[str, EpisodeTrace]) -> int:
        """Takes away verdicts on actions that are not what they were; returns how many there were.

        Before the new trace is stored, so that a kill between the two leaves an action without its score, and none with a wrong one.
        """
        taken = 0
        for old in self._store.traces(ids=new):
            if not old.verdicts:
                continue
            said = {action.id: _said(action) for action in self._store.as_kept(new[old.episode.id]).actions}
            stale = [a.id for a in old.actions if a.id in old.verdicts and said.get(a.id) != _said(a)]
            self._store.drop_verdicts(old.episode.id, stale)
            taken += len(stale)
        return taken

    def _count(self, found: Found, done: Imported) -> None:
        new = found.trace.actions
        if found.host is not None:
            ids = {str(s.get("id")) for s in found.given.spans}
            new = tuple(a for a in new if a.id in ids)
        for action in new:
            exact = self._has_tokens(action)
            done.exact += exact
            done.text_only += not exact
            done.executions += len(action.executions)
        done.actions += len(new)
        done.updated += found.before
        done.traces += not found.before

    def _has_tokens(self, action: Action) -> bool:
        # The store is asked, not the gateway's: token ids spell out the text, so a call that a hook changed is kept without them.
        call = None if action.call_id is None else self._store.call(action.call_id, action.call_index)
        return call is not None and bool(call.prompt_ids) and bool(call.completion_ids)


def _said(action: Action) -> tuple[Any, ...]:
    """What a verdict on an action rests on."""
    return action.messages, action.output, action.tool_calls, action.executions, action.error

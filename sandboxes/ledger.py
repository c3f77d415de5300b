"""Who wrote which file: the ledger behind "who owed this missing file?" and "who wrote this broken one?".

Agents declare what they read and write; executions show what they did. The ledger joins the two, in the order the actions happened, and
answers with names and evidence. It only knows what went through it: a change without an execution (a file put in by the host) is recorded
under no agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from mappa_graph.record import EpisodeTrace, Execution, FileChange


class Declares(Protocol):
    """An agent's declaration; `mappa_graph.Agent` is one. Names may hold `*` and `?`."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> Iterable[str]: ...
    @property
    def writes(self) -> Iterable[str]: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One change of one file by one action. `agent` and `action` are empty for the host's own files."""

    agent: str
    action: str
    execution: str
    change: FileChange


@dataclass(frozen=True, slots=True)
class Blame:
    """Who is answerable for a file, and why in words."""

    path: str
    agents: tuple[str, ...]
    actions: tuple[str, ...]
    reason: str


class Ledger:
    """The file history of one episode.

    Args:
        agents: the team, in the order of the pipeline.
    """

    def __init__(self, agents: Iterable[Declares] = ()) -> None:
        self.reads: dict[str, tuple[str, ...]] = {}
        self.writes: dict[str, tuple[str, ...]] = {}
        for agent in agents:
            self.reads[agent.name], self.writes[agent.name] = tuple(agent.reads), tuple(agent.writes)
        self._entries: dict[str, list[Entry]] = {}

    @classmethod
    def of(cls, trace: EpisodeTrace, agents: Iterable[Declares] = ()) -> Ledger:
        """The ledger of a recorded episode."""
        ledger = cls(agents)
        for action in sorted(trace.actions, key=lambda a: a.order):
            for execution in action.executions:
                ledger.record(action.agent, action.id, execution)
        return ledger

    def record(self, agent: str, action: str, execution: Execution) -> None:
        """Note what an execution of an action did to the files. Call it in the order things happened."""
        for change in execution.files:
            self._entries.setdefault(change.path, []).append(Entry(agent, action, execution.id, change))

    def given(self, files: Mapping[str, int]) -> None:
        """Note files that the host put in, by name and size, before any agent acted."""
        for path, size in files.items():
            self._entries.setdefault(path, []).append(Entry("", "", "", FileChange(path, "created", size)))

    def history(self, path: str) -> tuple[Entry, ...]:
        """Every change of a file, oldest first."""
        return tuple(self._entries.get(path, ()))

    def first(self, path: str) -> Entry | None:
        """Who made the file."""
        history = self.history(path)
        return history[0] if history else None

    def last(self, path: str) -> Entry | None:
        """Who touched the file last, be it to delete it."""
        history = self.history(path)
        return history[-1] if history else None

    @property
    def present(self) -> frozenset[str]:
        """The files that exist, as far as the ledger knows."""
        return frozenset(path for path, entries in self._entries.items() if entries[-1].change.change != "deleted")

    def owners(self, path: str) -> tuple[str, ...]:
        """The agents that declare to write the file."""
        return tuple(agent for agent, names in self.writes.items() if any(fnmatchcase(path, name) for name in names))

    def missing(self) -> dict[str, tuple[str, ...]]:
        """Declared artifacts that nothing has written: name -> agents that owe it."""
        present = self.present
        out: dict[str, list[str]] = {}
        for agent, names in self.writes.items():
            for name in names:
                if not any(fnmatchcase(path, name) for path in present):
                    out.setdefault(name, []).append(agent)
        return {name: tuple(agents) for name, agents in out.items()}

    def who_owed(self, path: str) -> Blame:
        """Who is answerable for a file that isn't there: who deleted it, else who declared to write it."""
        last = self.last(path)
        if last is not None and last.change.change == "deleted":
            return Blame(path, _named(last.agent), _named(last.action), f"{last.agent or 'the host'} deleted it")
        if last is not None:
            return Blame(path, (), (), "it is there")
        owners = self.owners(path)
        if owners:
            return Blame(path, owners, (), f"{' and '.join(owners)} declared to write it, and no action did")
        readers = tuple(agent for agent, names in self.reads.items() if any(fnmatchcase(path, name) for name in names))
        reason = f"{' and '.join(readers)} declared to read it, but nobody declared to write it" if readers else "nobody declared it"
        return Blame(path, (), (), reason)

    def who_broke(self, path: str) -> Blame:
        """Who is answerable for what a file holds now: who wrote it last, and who had made it."""
        first, last = self.first(path), self.last(path)
        if first is None or last is None:
            return self.who_owed(path)
        if last.change.change == "deleted":
            return self.who_owed(path)
        reason = f"{last.agent or 'the host'} wrote it last"
        owners = self.owners(path)
        if first.action != last.action:
            reason += f", {first.agent or 'the host'} made it"
        if owners and last.agent not in owners:
            reason += f"; it was {' and '.join(owners)}'s to write"
        return Blame(path, _named(last.agent), _named(last.action), reason)


def _named(name: str) -> tuple[str, ...]:
    return (name,) if name else ()

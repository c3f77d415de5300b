"""What followed from what: parents of transitions, and edges between actions.

Parents. LangGraph runs a graph in steps, and names a cause only sometimes. In this order: an earlier attempt of the same task has the
same parents; a pushed node follows the task of the step before that made the very `Send` it was given; a join names its
sources; otherwise the tasks of the step before that lead to the node by the graph's own edges, where the callback was given the graph;
else those whose `Command` or router named the node, else those that named no node, else all of them. The first step of a nested graph
follows the node it runs in.

Edges. Inside a transition an action follows what had ended before it started, and is not followed by something else that had; so
consecutive calls are a chain, and calls made at once are side by side. The first action of a transition follows the last actions of
the transition's parents, through transitions that hold none. A failed or superseded attempt leads nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from .model import OPEN, Acted, Attempt, Graph, Llm
from .structure import Structure

Item = Llm | Graph | Attempt


def frontier(items: Sequence[Item], before: float) -> list[Item]:
    """Of the items that ended before `before`, those that no other of them followed; an attempt made anew does not count."""
    done = [i for i in items if i.end_seq < before and not (isinstance(i, Attempt) and i.superseded)]
    latest_start = max((i.seq for i in done), default=-1.0)
    return [i for i in done if i.end_seq > latest_start]


class Lineage:
    """Answers for one state of a recording; make a new one when it has grown."""

    def __init__(self, structure: Structure, transitions: Sequence[Attempt] = ()) -> None:
        self._structure = structure
        self._parents: dict[Attempt, list[Attempt]] = {}
        self._entries: dict[Attempt, list[Acted]] = {}
        self._tails: dict[Item, list[Acted]] = {}
        self._steps: dict[Graph, dict[int, list[Attempt]]] = {}
        self._by_id = {t.id: t for t in transitions}

    def parents(self, attempt: Attempt) -> list[Attempt]:
        """Attempts of the same graph invocation that led to this one; empty for its first step."""
        if attempt not in self._parents:
            self._parents[attempt] = self._find_parents(attempt)
        return self._parents[attempt]

    def _find_parents(self, attempt: Attempt) -> list[Attempt]:
        graph = attempt.graph
        if graph is None:
            return []
        if attempt.fixed_parents is not None:
            found = [self._by_id[id] for id in attempt.fixed_parents if id in self._by_id]
            return [p for p in found if p is not attempt.enclosing]
        tries = graph.by_task[attempt.task_id]
        if tries[0] is not attempt:
            return self.parents(tries[0])
        if attempt.functional:
            return self._tasks_before(attempt)
        if attempt.node.startswith("__error_handler__"):
            handled = attempt.node.removeprefix("__error_handler__")
            return [t for t in graph.attempts if t.node == handled and t.status == "failed" and t.end_seq < attempt.seq][-1:]
        steps = self._steps.get(graph)
        if steps is None:
            steps = self._steps[graph] = graph.steps()
        earlier = sorted(k for k in steps if k < attempt.step)
        if not earlier:
            return []
        before = [p for p in steps[earlier[-1]] if p.seq < attempt.seq]
        if attempt.pushed:
            made = [p for p in before if any(s.arg is attempt.input_object for s in p.sends)]
            return made or before
        joined = [p for trigger in attempt.triggers if trigger.startswith("join:") for p in self._sources(trigger, steps, earlier)]
        if joined:
            return list(dict.fromkeys(joined))
        enclosing = graph.enclosing
        shape = self._structure.shape("" if enclosing.graph is None else enclosing.path)
        leading = [p for p in before if shape is not None and shape.leads(p.node, p.goto, attempt.node)]
        if leading:
            return leading
        naming = [p for p in before if attempt.node in p.goto]
        together = {t.node for t in steps.get(attempt.step, ())} | {"__end__"}
        silent = [p for p in before if not p.goto & together and not p.sends]
        return naming or silent or before

    @staticmethod
    def _sources(trigger: str, steps: dict[int, list[Attempt]], earlier: list[int]) -> list[Attempt]:
        sources = trigger.split(":")[1].split("+")
        out: list[Attempt] = []
        for source in sources:
            step = next((k for k in reversed(earlier) if any(t.node == source for t in steps[k])), None)
            if step is not None:
                out += [t for t in steps[step] if t.node == source]
        return out

    @staticmethod
    def _tasks_before(attempt: Attempt) -> list[Attempt]:
        assert attempt.graph is not None
        return [i for i in frontier(attempt.graph.enclosing.items, attempt.seq) if isinstance(i, Attempt)]

    def shown_parents(self, attempt: Attempt, recorded: set[str]) -> tuple[str, ...]:
        """Ids of the recorded transitions that led to this one; unrecorded ones are seen through."""
        if attempt.fixed_parents is not None:
            return attempt.fixed_parents
        out: list[str] = []
        for parent in self.parents(attempt):
            out += [parent.id] if parent.id in recorded else self.shown_parents(parent, recorded)
        if not out and attempt.enclosing is not None and attempt.enclosing.id in recorded:
            out = [attempt.enclosing.id]
        return tuple(dict.fromkeys(out))

    def entry(self, attempt: Attempt) -> list[Acted]:
        """The actions that the first action of the attempt follows."""
        if attempt not in self._entries:
            self._entries[attempt] = []  # ends a cycle, which only a damaged record could have
            graph = attempt.graph
            if graph is None:
                found: list[Acted] = []
            elif attempt.functional:
                found = self.before(attempt, graph.enclosing)
            elif parents := self.parents(attempt):
                found = [a for p in parents for a in self.tail(p)]
            else:
                found = self.before(graph, graph.enclosing)
            self._entries[attempt] = list(dict.fromkeys(found))
        return self._entries[attempt]

    def before(self, item: Item, inside: Attempt) -> list[Acted]:
        """The actions that `item` of the attempt `inside` follows."""
        ended = frontier(inside.items, item.seq)
        if not ended:
            return self.entry(inside)
        return list(dict.fromkeys(a for i in ended for a in self.tail(i)))

    def tail(self, item: Item) -> list[Acted]:
        """The last actions of a model run, a graph invocation, or an attempt."""
        if item not in self._tails:
            self._tails[item] = []
            if isinstance(item, Llm):
                found = list(item.actions)
            elif isinstance(item, Graph):
                inner = [t for t in item.attempts if not t.functional and item.by_task[t.task_id][-1] is t]
                followed = {p for t in inner for p in self.parents(t)}
                sinks = [t for t in inner if t not in followed]
                found = [a for t in sinks for a in self.tail(t)] if sinks else self.before(item, item.enclosing)
            else:
                ended = frontier(item.items, OPEN)
                found = [a for i in ended for a in self.tail(i)] if ended else self.entry(item)
            self._tails[item] = list(dict.fromkeys(found))
        return self._tails[item]


def edges(attempts: Sequence[Attempt], llms: Sequence[Llm], lineage: Lineage, position: dict[str, int]) -> tuple[tuple[int, int], ...]:
    """(earlier, later) positions, `position` by action id; attempts and model runs in order of start."""
    for attempt in attempts:
        lineage.entry(attempt)  # in order of start, so that no walk back is long
    out: dict[tuple[int, int], None] = {}
    for llm in llms:
        causes = lineage.before(llm, llm.attempt)
        for action in llm.actions:
            for cause in causes:
                if cause.base.id in position and action.base.id in position:
                    out[position[cause.base.id], position[action.base.id]] = None
    return tuple(sorted(out))

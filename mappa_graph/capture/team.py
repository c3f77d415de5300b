"""Which agent made a call.

The first of these that answers: the mark on the model object (`Policy`, `mark`), the callback's `agents=` mapping by node path, the
node's metadata, the agent name that `create_agent(name=)` gives, the model's name, the node's name. Where the callback was
given agents, the last four count only if they name one of them. A call that stays unknown is recorded under its node's name,
observed only: it is neither scored nor trained on, and it is counted, since a mark that did not take effect looks just like that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..agent import Agent
from ..coach.base import AgentCard
from ..errors import ConfigError

_VERSION = re.compile(r"@v\d+$")


@dataclass(frozen=True, slots=True)
class Owner:
    """Who made a call. `known` = it is one of the agents that are scored."""

    agent: str
    policy: str
    trainable: bool
    known: bool


def base_name(model: str) -> str:
    """`solver@v12` -> `solver`."""
    return _VERSION.sub("", model)


@cache
def glob(pattern: str) -> re.Pattern[str]:
    """Matches node paths: `*` is any one name or part of it, `**` any number of names, so `planner/**` is planner and all below it."""
    out = ""
    for part in re.split(r"(\*\*/|/\*\*|\*\*|\*|\?)", pattern):
        out += {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(part, re.escape(part))
    return re.compile(out + r"\Z")


class Team:
    """The agents that a callback knows, and those it learns of from marks."""

    def __init__(self, agents: Mapping[str, Agent] | Sequence[Agent] | None, cards: Sequence[AgentCard]) -> None:
        self.by_path: list[tuple[re.Pattern[str], Agent]] = []
        given: list[Agent] = []
        if isinstance(agents, Mapping):
            self.by_path = [(glob(pattern), agent) for pattern, agent in agents.items()]
            given = list(agents.values())
        elif agents is not None:
            given = list(agents)
        for agent in given:
            if not isinstance(agent, Agent):
                raise ConfigError(
                    f"agents= holds {agent!r}, which is no Agent", hint='give agents=[Agent("solver")] or {"path/**": Agent(…)}'
                )
        self.agents: dict[str, Agent] = {}
        for agent in given:
            if self.agents.setdefault(agent.name, agent) != agent:
                raise ConfigError(f"agents= has two different agents named {agent.name!r}", hint="agent names must be unique")
        self.closed = agents is not None
        self.unknown: Counter[str] = Counter()
        """`node path (model)` -> calls that no agent could be found for."""
        self.acted: Counter[str] = Counter()
        """Agent -> calls."""
        self._cards = tuple(cards)
        self._marked: dict[str, AgentCard] = {}

    @property
    def cards(self) -> tuple[AgentCard, ...]:
        """The team as a coach is told of it."""
        if self._cards:
            return self._cards
        known = {a.name: AgentCard(a.name, a.role, tuple(a.reads), tuple(a.writes)) for a in self.agents.values()}
        return tuple((self._marked | known).values())

    def owner(self, metadata: Mapping[str, Any], node_metadata: Mapping[str, Any], path: str, node: str, model: str, echo: str) -> Owner:
        """`metadata` is the model run's, `model` what was asked for, `echo` the model that the reply names."""
        found = self._find(metadata, node_metadata, path, node, model, echo)
        if found.known:
            self.acted[found.agent] += 1
        else:
            self.unknown[f"{path} ({model})"] += 1
        return found

    def _find(self, metadata: Mapping[str, Any], node_metadata: Mapping[str, Any], path: str, node: str, model: str, echo: str) -> Owner:
        mark = metadata.get("mappa_agent")
        node_mark = node_metadata.get("mappa_agent")
        if isinstance(mark, str) and mark != node_mark:
            return self._of_mark(mark, metadata)
        for pattern, agent in self.by_path:
            if pattern.match(path):
                return _of(agent)
        if isinstance(node_mark, str):
            return self._of_mark(node_mark, node_metadata)
        asked = base_name(model)
        named = [node_metadata.get("agent"), metadata.get("lc_agent_name")]
        for name in (*named, asked):
            if isinstance(name, str) and name in self.agents:
                return _of(self.agents[name])
        sharing = [a for a in self.agents.values() if a.policy_name == asked]
        if len(sharing) == 1:
            return _of(sharing[0])
        if node in self.agents:
            return _of(self.agents[node])
        name = next((n for n in named if isinstance(n, str) and n), node)
        if not self.closed and _VERSION.search(echo):
            # A reply that names a version comes from a gateway: a policy, whoever calls it.
            return Owner(asked, asked, True, True)
        return Owner(name, asked or name, False, False)

    def _of_mark(self, mark: str, metadata: Mapping[str, Any]) -> Owner:
        if mark in self.agents:
            return _of(self.agents[mark])
        self._marked.setdefault(mark, AgentCard(mark, str(metadata.get("mappa_role") or "")))
        return Owner(mark, str(metadata.get("mappa_policy") or mark), metadata.get("mappa_trainable") is not False, True)


def _of(agent: Agent) -> Owner:
    return Owner(agent.name, agent.policy_name, agent.trainable, True)

"""The state of the DSBench graph: plain JSON, each agent's words without its thinking."""

from __future__ import annotations

from typing import TypedDict

from .facts import Facts


class Turn(TypedDict):
    """One turn of an agent: its message without thinking, and what its code gave."""

    text: str
    observation: str
    """What it was shown of its runs; "" = no code was run."""
    status: str
    """ok, error, timeout, killed or lost; "" = no code was run."""
    over: bool
    """Whether its part ended with this turn: it said that it is done, what it owes is there, or its turns were used up."""


class FileNote(TypedDict):
    """A file in the workspace, as the next agent is told of it."""

    name: str
    size: int
    by: str
    """The agent that wrote it last; "" = it came with the task."""
    shows: str
    """What it holds, found out inside the sandbox."""


class Summary(TypedDict):
    agent: str
    text: str


class DSBenchInput(TypedDict, total=False):
    task: str
    facts: Facts
    """Left out: those that the desk has."""


class DSBenchState(DSBenchInput, total=False):
    files: list[FileNote]
    turns: dict[str, list[Turn]]
    """By agent."""
    summaries: list[Summary]
    """What each agent said last, in the order of the pipeline."""
    submission: str | None
    """The text of the submission, None where there is none that can be read."""
    submission_problem: str
    """Why it can't be read."""

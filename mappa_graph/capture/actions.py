"""From a model run to actions, one for each of its completions; and whether a completion was kept."""

from __future__ import annotations

from collections.abc import Callable

from ..record import Action
from .model import Acted, Attempt, Llm
from .render import error_text
from .snapshot import openai_calls
from .tap import GIVEN_BY_LANGCHAIN, Failed, Generation
from .team import Team

CallTaken = Callable[[str, int], bool]
"""Whether another action had this call already (a cached reply); notes it as taken."""


def act(llm: Llm, generations: list[Generation], failed: Failed | None, ended: float, team: Team, taken: CallTaken) -> list[Acted]:
    """The actions of a model run that has ended; a failed one is an action with an error."""
    attempt = llm.attempt
    echo = generations[0].model if generations else ""
    owner = team.owner(llm.metadata, attempt.metadata, attempt.path, attempt.node, llm.model, echo)
    prompt = tuple(m.openai() for m in llm.prompt)
    made: list[Generation | None] = [*generations] if failed is None else [None]
    out = []
    for index, generation in enumerate(made):
        message = None if generation is None else generation.message
        call_id = _call_id(llm, generation, failed)
        if call_id is not None and taken(call_id, index):
            call_id = None
        base = Action(
            id=llm.id if index == 0 else f"{llm.id}:{index}",
            transition_id=attempt.id,
            agent=owner.agent,
            policy=owner.policy,
            order=0,
            call_id=call_id,
            call_index=index,
            messages=prompt,
            output="" if generation is None else _output(generation),
            tool_calls=tuple(openai_calls(message)) if message is not None else (),
            finish_reason=None if generation is None else generation.finish_reason,
            error=None if failed is None else error_text(failed.error),
            trainable=owner.trainable,
            started=llm.started,
            ended=ended,
        )
        calls = {} if message is None else {str(c.get("id") or f"#{i}"): c for i, c in enumerate(message.tool_calls)}
        out.append(Acted(base, llm, owner.known, message, calls))
    return out


def _call_id(llm: Llm, generation: Generation | None, failed: Failed | None) -> str | None:
    if generation is None:
        return (failed.response_id if failed is not None else None) or llm.stream_id
    if generation.response_id:
        return generation.response_id
    id = llm.stream_id or (generation.message.id if generation.message is not None else None)
    # LangChain merges the choices of a stream into one text, which is no completion that the server made.
    return None if id is None or id.startswith(GIVEN_BY_LANGCHAIN) or llm.n > 1 else id


class Kept:
    """Whether completions reached the graph's state, as far as a node's return shows it."""

    def __init__(self) -> None:
        self._shown: dict[Attempt, tuple[set[str], set[int]]] = {}

    def __call__(self, action: Acted) -> bool:
        attempt = action.llm.attempt
        if action.kept_before is not None:
            return action.kept_before and not attempt.superseded
        if attempt.superseded or attempt.status in ("failed", "cancelled") or action.base.error is not None:
            return False
        message = action.message
        if message is None:
            return action.base.call_index == 0
        returned, prompted = self._of(attempt)
        # A node that returns none of its messages may have made what it returns of any of them.
        return message.id in returned or id(message) in prompted or (not returned and action.base.call_index == 0)

    def _of(self, attempt: Attempt) -> tuple[set[str], set[int]]:
        """Ids of the attempt's own messages in its return, and the copies that its models were shown."""
        if attempt not in self._shown:
            mine = {a.message.id for llm in attempt.llms for a in llm.actions if a.message is not None}
            returned = {m.id for m in attempt.returned if m.id is not None and m.id in mine}
            self._shown[attempt] = returned, {id(m) for llm in attempt.llms for m in llm.prompt}
        return self._shown[attempt]


def _output(generation: Generation) -> str:
    message = generation.message
    text = generation.text if message is None else message.text
    return f"<think>\n{message.reasoning}\n</think>\n{text}" if message is not None and message.reasoning else text

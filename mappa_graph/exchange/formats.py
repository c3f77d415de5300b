"""From an action to a row: the formats, their columns, and how messages are written for TRL.

Messages are TRL's conversational format: `role`, `content` as a text, `tool_calls` whose arguments are objects (chat templates print
them), `tool_call_id` and `name`; `tools` is a JSON text, which every TRL trainer reads and no column type can spoil. The one thing to
know: a row is made from texts, whatever model wrote them, and only the format `rl` holds tokens. With `render`, prompt and completion
become plain texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from ..coach.case import split_thinking
from ..codec import encode
from ..errors import ConfigError
from ..record import Action, EpisodeTrace

Format = Literal["sft", "messages", "dpo", "kto", "reward", "rl"]
Thinking = Literal["keep", "strip"]
Messages = list[dict[str, Any]]
Render = Callable[[Messages, Messages, Any], tuple[str, str]]
"""`(prompt, completion, tools) -> (prompt text, completion text)`."""

FORMATS: tuple[Format, ...] = ("sft", "messages", "dpo", "kto", "reward", "rl")
PAIRED: tuple[Format, ...] = ("dpo", "kto", "reward")

_DEEPEST = 64
_OF_ACTION = {
    "agent": "text", "policy": "text", "version": "int", "episode": "text", "action": "text", "task_id": "text", "stratum": "text",
    "split": "text", "iteration": "int", "score": "float", "outcome": "float", "finish_reason": "text",
}  # fmt: skip
_OF_PAIR = {
    "agent": "text", "task_id": "text", "stratum": "text", "source": "text", "margin": "float", "chosen_score": "float",
    "rejected_score": "float", "chosen_action": "text", "rejected_action": "text",
}  # fmt: skip
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "sft": {"prompt": "messages", "completion": "messages", "tools": "text", **_OF_ACTION},
    "messages": {"messages": "messages", "tools": "text", **_OF_ACTION},
    "dpo": {"prompt": "messages", "chosen": "messages", "rejected": "messages", "tools": "text", **_OF_PAIR},
    "reward": {"prompt": "messages", "chosen": "messages", "rejected": "messages", "tools": "text", **_OF_PAIR},
    "kto": {
        "prompt": "messages", "completion": "messages", "label": "bool", "tools": "text", "agent": "text", "task_id": "text",
        "stratum": "text", "source": "text", "score": "float", "action": "text",
    },
    "rl": {
        "prompt_ids": "ints", "completion_ids": "ints", "logprobs": "floats", "return": "float", "advantage": "float",
        "temperature": "float", "truncated": "bool", **_OF_ACTION,
    },
}  # fmt: skip
"""Columns by format, each with its kind: text, int, float, bool, ints, floats, messages. With `render`, messages are text."""
MEANING = {
    "prompt": "what the agent saw",
    "completion": "what the agent said, tool calls included",
    "messages": "what the agent saw, and last what it said",
    "text": "what the agent saw, and last what it said",
    "chosen": "the better of two answers to the prompt",
    "rejected": "the worse of two answers to the prompt",
    "label": "whether the completion is a good one",
    "prompt_ids": "token ids that the engine was given",
    "completion_ids": "token ids that the engine sampled",
    "policy": "the model that acted, and in `version` which of its weights",
    "action": "id of the action, the same as that of its LangSmith run",
    "truncated": "whether the completion was cut off at the length limit",
    "margin": "chosen less rejected score, divided by 10; 0 where the chosen text is a coach's proposal, which has no score",
    "return": "discounted mean of this action's score and of those that followed from it, 0..1",
    "advantage": "return less the mean over the file's tokens, divided by their standard deviation or its floor; without any KL term",
    "logprobs": "natural log-probability of each completion id at `temperature`, from the engine that sampled it",
    "score": "the coach's, 0 to 10",
    "outcome": "the episode's grade, 0 to 1",
    "tools": "the tools that the model was offered, as a JSON text",
    "source": "siblings: two samples of one prompt; coach: the coach's better action against the agent's; scores: by thresholds",
}


def conversation(messages: Sequence[Mapping[str, Any]]) -> Messages | None:
    """Messages as TRL's chat templates take them; None where one holds more than text (an image, a sound)."""
    out: Messages = []
    for message in messages:
        content = plain(message.get("content"))
        if content is None:
            return None
        one: dict[str, Any] = {"role": str(message.get("role") or "user"), "content": content}
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple) and calls:
            one["tool_calls"] = tool_calls(calls)
        one.update({name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)})
        out.append(one)
    return out


def plain(content: Any) -> str | None:
    """A message's content as a text; None where it holds more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        return None
    parts = []
    for block in content:
        text = block if isinstance(block, str) else block.get("text") if isinstance(block, Mapping) else None
        if not isinstance(text, str):
            return None
        parts.append(text)
    return "".join(parts)


def tool_calls(calls: Sequence[Any]) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's shape, their arguments as an object where they parse as one, else as the text they were."""
    out = []
    for call in calls:
        if not isinstance(call, Mapping):
            continue
        function = call.get("function")
        named = function if isinstance(function, Mapping) else {"name": call.get("name"), "arguments": call.get("args")}
        one: dict[str, Any] = {"type": "function", "function": {"name": str(named.get("name") or ""), "arguments": _arguments(named)}}
        out.append({"id": call["id"], **one} if isinstance(call.get("id"), str) else one)
    return out


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    if arguments is None:
        return {}
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        if isinstance(parsed, Mapping):
            return holdable(parsed)
    except (ValueError, RecursionError):
        pass
    return arguments if isinstance(arguments, str) else encode(str(arguments)).decode()


def holdable(value: Any, depth: int = 0) -> Any:
    """The same data as JSON readers and Arrow can hold it: no lone surrogate, no integer over 64 bits. `ValueError` beyond 64 levels."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if depth > _DEEPEST:
        raise ValueError(f"data nested more than {_DEEPEST} deep")
    if isinstance(value, Mapping):
        return {holdable(str(k)): holdable(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [holdable(v, depth + 1) for v in value]
    return str(value) if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63 else value


def answer(action: Action, thinking: Thinking) -> Messages | None:
    """The completion: one assistant message, or None where the action said and called nothing."""
    output = action.output if thinking == "keep" else split_thinking(action.output)[1]
    if not output.strip() and not action.tool_calls:
        return None
    message: dict[str, Any] = {"role": "assistant", "content": output}
    return [message | {"tool_calls": tool_calls(action.tool_calls)} if action.tool_calls else message]


def offered(trace: EpisodeTrace, action: Action) -> list[Any] | None:
    """The tools that the model was offered, where its call tells."""
    call = trace.calls.get(action.id)
    tools = None if call is None else call.sampling.get("tools")
    return list(tools) if isinstance(tools, list | tuple) and tools else None


def length(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters of contents and of tool calls' arguments."""
    total = 0
    for message in messages:
        total += len(message["content"])
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            total += len(arguments) if isinstance(arguments, str) else len(json.dumps(arguments, ensure_ascii=False, default=str))
    return total


def about(trace: EpisodeTrace, action: Action) -> dict[str, Any]:
    """The columns that say where a row came from."""
    call, verdict, episode = trace.calls.get(action.id), trace.verdicts.get(action.id), trace.episode
    return {
        "agent": action.agent, "policy": action.policy, "version": None if call is None else call.version, "episode": episode.id,
        "action": action.id, "task_id": episode.task_id, "stratum": episode.stratum, "split": episode.split,
        "iteration": episode.iteration, "score": None if verdict is None or verdict.score is None else float(verdict.score),
        "outcome": None if episode.outcome is None else float(episode.outcome.value), "finish_reason": action.finish_reason,
    }  # fmt: skip


def as_json(tools: Any) -> str | None:
    """Tools as the JSON text of the `tools` column."""
    return None if not tools else encode(tools).decode()


def plain_render(prompt: Messages, completion: Messages, tools: Any) -> tuple[str, str]:
    """Messages as a plain text that no model's template knows: a line with the role, then what was said."""
    head = f"tools: {as_json(tools)}\n\n" if tools else ""
    body = "".join(f"{message['role']}:\n{_said(message)}\n\n" for message in prompt)
    return f"{head}{body}assistant:\n", "".join(_said(message) for message in completion)


def _said(message: Mapping[str, Any]) -> str:
    calls = [
        encode({"name": c["function"]["name"], "arguments": c["function"]["arguments"]}).decode() for c in message.get("tool_calls", ())
    ]
    return "\n".join(filter(None, [message["content"], *calls]))


def template_render(tokenizer: Any) -> Render:
    """Messages as the chat template of a Hugging Face tokenizer prints them. Raises `ConfigError` where it has none."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("the tokenizer has no chat template", hint="give that of a chat model, or export messages")

    def render(prompt: Messages, completion: Messages, tools: Any) -> tuple[str, str]:
        head = tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([*prompt, *completion], tools=tools, tokenize=False)
        # A template may write the end of the prompt in another way once an answer follows.
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(head, whole, strict=False)))
        return whole[:shared], whole[shared:]

    # By its template, an export that was killed is known to go on with the same one.
    vars(render)["fingerprint"] = f"chat template {hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()}"
    return render

"""A small recorded run of two agents for exports: siblings of each task, tools, scores, a coach's proposals, with or without tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from mappa_graph.record import Action, Call, Episode, EpisodeTrace, Execution, Outcome, Transition, Verdict
from mappa_graph.store import TraceStore

TOOLS = [{"type": "function", "function": {"name": "run", "description": "runs code", "parameters": {"type": "object", "properties": {}}}}]
START = 1_770_000_000.0


def ids_of(text: str) -> tuple[int, ...]:
    """The tiny tokenizer's ids of ASCII letters, near enough: bytes after the three specials."""
    return tuple(3 + byte % 200 for byte in text.encode("utf-8", "replace"))


def run_of(folder: Path, *, tasks: int = 6, samples: int = 3, tokens: bool = True, redact=None, extra=()) -> Path:
    """A run's folder with `tasks` x `samples` episodes and whatever traces are in `extra`."""
    folder.mkdir(parents=True, exist_ok=True)
    with TraceStore(folder / "trace.db", redact=redact) as store:
        for trace in (*traces(tasks, samples, tokens), *extra):
            store.add_calls(trace.calls.values())
            store.save_episode(trace)
    return folder


def traces(tasks: int, samples: int, tokens: bool = True) -> Iterator[EpisodeTrace]:
    for task in range(tasks):
        for sample in range(samples):
            yield episode(task, sample, tokens=tokens)


def episode(task: int, sample: int, *, tokens: bool = True, text: str | None = None, **more) -> EpisodeTrace:
    """A solver that calls a tool or answers, then a writer. The later the sample the better its scores."""
    id = f"e{task}-{sample}"
    question = f"What is {task} + {task}?"
    prompt = [{"role": "system", "content": "You solve sums."}, {"role": "user", "content": question}]
    called = sample % 2 == 0
    use = [{"id": f"{id}-u", "type": "function", "function": {"name": "run", "arguments": json.dumps({"code": f"{task}+{task}"})}}]
    solved = Action(
        id=f"{id}-s", transition_id=f"{id}-t0", agent="solver", policy="solver", order=0, call_id=f"{id}-cs" if tokens else None,
        messages=prompt, output=text or (f"<think>hm {sample}</think>" if called else f"<think>so {sample}</think>It is {task * 2}."),
        tool_calls=use if called else (), finish_reason="tool_calls" if called else "stop", started=START + task,
        executions=(Execution(f"{id}-x", "ok", code=f"{task}+{task}", stdout=f"{task * 2}\n", tool_call_id=f"{id}-u"),) if called else (),
    )  # fmt: skip
    seen = [
        *prompt,
        {"role": "assistant", "content": "", "tool_calls": use},
        {"role": "tool", "content": f"{task * 2}", "tool_call_id": f"{id}-u"},
    ]
    wrote = Action(
        id=f"{id}-w", transition_id=f"{id}-t1", agent="writer", policy="writer", order=1, call_id=f"{id}-cw" if tokens else None,
        messages=seen if called else prompt, output=f"The sum, written by sample {sample}, is {task * 2}.", finish_reason="stop",
        started=START + task + 1,
    )  # fmt: skip
    calls = {}
    if tokens:
        for action in (solved, wrote):
            words = action.output + json.dumps(list(action.tool_calls))
            ids = ids_of(words)[: 12 + sample]
            calls[action.id] = Call(
                id=action.call_id or "", policy=action.policy, version=sample, prompt_ids=ids_of(json.dumps(list(action.messages)))[:60],
                completion_ids=ids, logprobs=tuple(-0.5 - 0.125 * (i % 4) for i in range(len(ids))), finish_reason=action.finish_reason,
                text=action.output, sampling={"temperature": 1.0, "tools": TOOLS if action is solved else None},
                messages=tuple(action.messages), tool_calls=tuple(action.tool_calls),
            )  # fmt: skip
    verdicts = {
        solved.id: Verdict(min(10.0, 2.0 + 3.0 * sample), better_action=f"Say that it is {task * 2}." if sample == 0 else None, coach="c"),
        wrote.id: Verdict(5.0, coach="c"),
    }
    head = Episode(
        id=id, environment="sums", task_id=f"task-{task}", task=question, stratum="even" if task % 3 else "odd", sample=sample,
        iteration=task % 2, status="done", outcome=Outcome(sample > 0), started=START + 86_400.0 * task, ended=START + 86_400.0 * task + 9,
    )  # fmt: skip
    parts = (Transition(f"{id}-t0", "solver", "solver", 0), Transition(f"{id}-t1", "writer", "writer", 1, parents=(f"{id}-t0",)))
    if more:
        from dataclasses import replace

        head = replace(head, **more)
    return EpisodeTrace(head, parts, (solved, wrote), ((0, 1),), verdicts, calls)

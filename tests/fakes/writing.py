"""Recorded episodes whose tokens are a tiny model's own ids: a drafter and an editor, scored, with or without tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mappa_graph.record import Action, Call, Episode, EpisodeTrace, Transition, Verdict
from mappa_graph.store import TraceStore

AGENTS = ("drafter", "editor")


def write_run(
    folder: Path,
    model: Path,
    *,
    tasks: int = 8,
    samples: int = 3,
    written_by: Path | None = None,
    change: Callable[[EpisodeTrace], EpisodeTrace] = lambda trace: trace,
) -> Path:
    """A run's folder with `tasks` x `samples` episodes.

    Args:
        model: whose tokenizer the ids are of.
        written_by: the model that the log-probs are of; None = `model`.
        change: what is to be different in an episode.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(written_by or model).eval()

    def call(action: Action, version: int) -> Call:
        prompt = tokenizer.apply_chat_template(list(action.messages), add_generation_prompt=True, return_dict=False)
        said = [*tokenizer(action.output, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(said)[:, None]).squeeze(-1).tolist()
        return Call(
            id=action.call_id or "", policy=action.policy, version=version, prompt_ids=tuple(prompt), completion_ids=tuple(said),
            logprobs=tuple(logprobs), finish_reason="stop", text=action.output, sampling={"temperature": 1.0},
        )  # fmt: skip

    folder.mkdir(parents=True, exist_ok=True)
    with TraceStore(folder / "trace.db") as store:
        for task in range(tasks):
            for sample in range(samples):
                trace = change(episode(task, sample, call))
                store.add_calls(trace.calls.values())
                store.save_episode(trace)
    return folder


def episode(task: int, sample: int, call: Callable[[Action, int], Call]) -> EpisodeTrace:
    """A drafter, then an editor; the later the sample the better both are."""
    id = f"e{task}-{sample}"
    actions, steps = [], []
    for order, (agent, said) in enumerate(zip(AGENTS, (f"note {task}" + "!" * sample, f"Note {task}, take {sample}."), strict=True)):
        seen = [{"role": "system", "content": f"You are the {agent}."}, {"role": "user", "content": f"Write note {task}."}]
        steps.append(Transition(f"{id}-t{order}", agent, agent, order, parents=(f"{id}-t0",) if order else ()))
        names = {"id": f"{id}-{agent}", "transition_id": f"{id}-t{order}", "call_id": f"{id}-c{order}"}
        actions.append(Action(**names, agent=agent, policy=agent, order=order, messages=seen, output=said, finish_reason="stop"))
    verdicts = {action.id: Verdict(1.0 + 4.0 * sample, coach="test") for action in actions}
    head = Episode(id=id, environment="notes", task_id=f"task-{task}", task=f"Write note {task}.", status="done", started=1.0 + task)
    return EpisodeTrace(head, tuple(steps), tuple(actions), ((0, 1),), verdicts, {a.id: call(a, 0) for a in actions})


def text_only(trace: EpisodeTrace, agents: Sequence[str] = AGENTS) -> EpisodeTrace:
    """The episode as it would be had these agents' calls not passed through a gateway."""
    actions = tuple(replace(a, call_id=None) if a.agent in agents else a for a in trace.actions)
    kept = {a.id for a in actions if a.call_id is not None}
    return replace(trace, actions=actions, calls={id: call for id, call in trace.calls.items() if id in kept})

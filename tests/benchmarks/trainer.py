"""A training step beside TRL's `GRPOTrainer` step, and the memory of log-probs at a vocabulary of 151k.

    python tests/benchmarks/trainer.py [--model smollm2|small] [--batches mathchat dsbench single] [--threads 2] [--repeat 2] [--json FILE]

Each figure comes from a process of its own, which builds its trainer, makes one step to warm up and `--repeat` steps that count (the
fastest is shown; CPU time too, which says more on a busy machine). Both sides get the same weights, tokens, advantages and loss (float32,
no KL, importance weights 1), and their losses and gradient norms are compared. TRL gets one padded row per action, as rewards per action
need, and for `dsbench` also one row per episode (`merged`: it learns from the same tokens, with each action's advantage put on them by
hand). `bare` is the forward and backward of the same model, head and cross-entropy included, on as many tokens as the tree has unique
ones, in rows about as long as the batch's longest.

Batches: `mathchat` 8 samples of a 512-token prompt, 64 new; `dsbench` 4 episodes of 4 turns, context growing from 1,024 tokens by 64 new
and 128 observed a turn, the first 1,024 shared; `single` 16 samples of 192 + 64 with nothing shared.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BATCHES = ("mathchat", "dsbench", "single")
TRL_TOKENS = 5_000
"""Tokens in one of TRL's forward and backward passes: `mathchat` and `single` are one pass, the rows of `dsbench` would not fit in one."""


def make_batch(name: str, vocabulary: int) -> list[tuple[tuple[int, ...], tuple[int, ...], float]]:
    """(prompt, completion, return) of each action."""
    rng = random.Random(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(n))

    if name == "mathchat":
        prompt = ids(512)
        return [(prompt, ids(64), rng.random()) for _ in range(8)]
    if name == "single":
        return [(ids(192), ids(64), rng.random()) for _ in range(16)]
    task, rows = ids(1024), []
    for _ in range(4):
        context = task
        for _ in range(4):
            completion = ids(64)
            rows.append((context, completion, rng.random()))
            context = (*context, *completion, *ids(128))
    return rows


def timed(step: Callable[[], dict[str, float]], repeat: int) -> dict[str, float]:
    """The fastest of `repeat` steps after one to warm up; with 0, of the one step that there is."""
    out = step() if repeat else {}
    wall, cpu = [], []
    for _ in range(max(1, repeat)):
        start, busy = time.perf_counter(), time.process_time()
        out = step() or out
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {**out, "wall_s": round(min(wall), 3), "cpu_s": round(min(cpu), 3), "peak_gib": round(peak, 2)}


def ours(model: str, batch: str, repeat: int) -> dict[str, Any]:
    from dataclasses import replace

    from mappa_graph.trainers import ReinforceTrainer, Sample, TrainerSettings

    trainer = ReinforceTrainer({"p": model}, TrainerSettings(beta=0.0, lr=1e-12))
    learner = trainer.learner("p")
    vocabulary = learner.model.config.vocab_size
    rows = make_batch(batch, vocabulary)
    samples = [Sample("p", "p", "e", str(i), p, c, (0.0,) * len(c), ret=g) for i, (p, c, g) in enumerate(rows)]
    samples = [replace(s, engine_logprobs=tuple(learner.logprobs(s))) for s in samples]

    def step() -> dict[str, float]:
        metrics = trainer.update(samples).policies["p"]
        return {k: metrics[k] for k in ("loss", "grad_norm", "computed_tokens", "shared_tokens")}

    return timed(step, repeat)


def merged_rows(rows: list[tuple[tuple[int, ...], tuple[int, ...], float]]) -> list[list[int]]:
    """Which actions are one row when a conversation is one: each action's context continues the one before it."""
    groups: list[list[int]] = []
    for i, (prompt, _, _) in enumerate(rows):
        last = rows[groups[-1][-1]] if groups else None
        if last is not None and len(prompt) > len(last[0]) and prompt[: len(last[0]) + len(last[1])] == last[0] + last[1]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def trl(model: str, batch: str, repeat: int, merge: bool = False) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from mappa_graph.trainers import token_advantages

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = make_batch(batch, network.config.vocab_size)
    groups = merged_rows(rows) if merge else [[i] for i in range(len(rows))]
    width = max(len(rows[g[0]][0]) for g in groups)
    long = max(len(rows[g[-1]][0]) + len(rows[g[-1]][1]) - len(rows[g[0]][0]) for g in groups)
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=len(groups),
        num_generations=len(groups),
        max_completion_length=long,
        beta=0.0,
        loss_type="dapo",
        learning_rate=1e-12,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
    )
    trainer = GRPOTrainer(
        network,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * len(groups)),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    advantages = token_advantages([g for _, _, g in rows], [torch.zeros(len(c)) for _, c, _ in rows], 0.0, 0.05)
    shape = (len(groups), long)
    ids, there, ours_only, value = (torch.zeros(shape, dtype=t) for t in (torch.long, torch.long, torch.long, torch.float32))
    for row, group in enumerate(groups):
        first = len(rows[group[0]][0])
        whole = rows[group[-1]][0][first:] + rows[group[-1]][1]
        ids[row, : len(whole)], there[row, : len(whole)] = torch.tensor(whole), 1
        for i in group:  # an action's own tokens; what tools answered between them is read and not trained on
            place = slice(len(rows[i][0]) - first, len(rows[i][0]) - first + len(rows[i][1]))
            ours_only[row, place], value[row, place] = 1, advantages[i]
    starts = [rows[g[0]][0] for g in groups]
    inputs = {
        "prompt_ids": torch.tensor([(0,) * (width - len(p)) + p for p in starts]),
        "prompt_mask": torch.tensor([(0,) * (width - len(p)) + (1,) * len(p) for p in starts]),
        "completion_ids": ids,
        "completion_mask": there,
        "tool_mask": ours_only,
        "advantages": value,
        "num_items_in_batch": torch.tensor(sum(len(c) for _, c, _ in rows)),
    }
    parameters = list(trainer.model.parameters())
    size = max(1, TRL_TOKENS // (width + long))
    parts = [{k: v if v.dim() == 0 else v[start : start + size] for k, v in inputs.items()} for start in range(0, len(groups), size)]

    def step() -> dict[str, float]:
        total = 0.0
        for part in parts:
            loss = trainer.compute_loss(trainer.model, part)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return {"loss": total, "grad_norm": norm.item()}

    return timed(step, repeat)


def bare(model: str, batch: str, repeat: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from mappa_graph.trainers import Sample
    from mappa_graph.trainers.packing import tree_packs

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = make_batch(batch, network.config.vocab_size)
    unique = sum(p.tokens for p in tree_packs([Sample("", "", "", "", p, c, (0.0,) * len(c), ret=0.0) for p, c, _ in rows], 1 << 30))
    count = max(1, round(unique / max(len(p) + len(c) for p, c, _ in rows)))
    ids = torch.randint(0, network.config.vocab_size, (count, unique // count))

    def step() -> dict[str, float]:
        network.zero_grad()
        network(input_ids=ids, labels=ids).loss.backward()
        return {"tokens": float(ids.numel())}

    return timed(step, repeat)


def logprob_memory(kind: str, tokens: int = 2048, width: int = 256, vocabulary: int = 151_936) -> dict[str, Any]:
    """Peak growth of the process, less the head's own gradient, while log-probs of `tokens` are computed and differentiated."""
    import torch

    torch.manual_seed(0)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    hidden, target = torch.randn(tokens, width, requires_grad=True), torch.randint(0, vocabulary, (tokens,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    if kind == "ours":
        from mappa_graph.trainers.logprobs import head_logprobs

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        head_logprobs(head, hidden, target, torch.ones(tokens))[0].sum().backward()
    elif kind == "trl":
        from trl.kernels import chunked_logprob

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        call = chunked_logprob.ChunkedLogProbFunction.apply
        call(hidden, head.weight, None, target, 1.0, 8192, None, 1.0, ("entropy",))[0].sum().backward()
    else:
        logits = head(hidden)
        log_all = logits.log_softmax(-1)
        with torch.no_grad():
            -(log_all.exp() * log_all).sum(-1)
        log_all.gather(-1, target[:, None]).sum().backward()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "peak_mib": round(grown / 1024),
        "head_gradient_mib": round(width * vocabulary * 4 / 2**20),
        "cpu_s": round(time.process_time() - start, 2),
    }


def make_small(folder: Path) -> Path:
    """A random Llama of about 7M parameters: the script's own check of itself in seconds."""
    sys.path.insert(0, str(ROOT))
    from tests.fakes.tinymodel import make_tiny_model

    return make_tiny_model(folder, hidden=256, layers=8, heads=4, max_positions=4096, scale=0.05)


def run_alone(task: dict[str, Any], threads: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--task", json.dumps({**task, "threads": threads})]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, small, or a model folder")
    parser.add_argument("--batches", nargs="*", default=list(BATCHES), choices=BATCHES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-memory", action="store_true", help="leave the log-probs' memory out")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        task = json.loads(args.task)
        import torch

        torch.set_num_threads(task.pop("threads"))
        kind = task.pop("kind")
        work = {"ours": ours, "trl": trl, "bare": bare}
        print(json.dumps(logprob_memory(task["side"]) if kind == "memory" else work[kind](**task)))
        return
    if args.model == "small":
        model = str(make_small(Path(tempfile.mkdtemp()) / "small"))
    else:
        from mappa_graph.trainers.models import resolve_model

        model = str(resolve_model(args.model))
    results: dict[str, Any] = {"memory": {}}
    for side in () if args.no_memory else ("naive", "trl", "ours"):
        results["memory"][side] = found = run_alone({"kind": "memory", "side": side}, args.threads)
        print("log-probs at 151k,", side, found, flush=True)
    for batch in args.batches:
        shared = {"model": model, "batch": batch, "repeat": args.repeat}
        rows = {kind: run_alone({"kind": kind, **shared}, args.threads) for kind in ("ours", "trl", "bare")}
        if batch == "dsbench":
            rows["trl, merged rows"] = run_alone({"kind": "trl", "merge": True, **shared}, args.threads)
        results[batch] = rows
        for kind, row in rows.items():
            print(batch, kind, row, flush=True)
        if not any("error" in row for row in rows.values()):
            mine, theirs, plain = rows["ours"], rows["trl"], rows["bare"]
            per_token = mine["computed_tokens"] / plain["tokens"]
            for clock in ("wall_s", "cpu_s"):
                others = {"TRL": theirs, **({"TRL merged": rows["trl, merged rows"]} if "trl, merged rows" in rows else {})}
                told = ", ".join(f"{name} / ours {row[clock] / mine[clock]:.2f}" for name, row in others.items())
                print(f"{batch}: {told}, bare / ours by unique token {plain[clock] / mine[clock] * per_token:.2f} ({clock})", flush=True)
            apart = abs(mine["loss"] - theirs["loss"]), abs(mine["grad_norm"] / theirs["grad_norm"] - 1)
            print(f"{batch}: loss differs by {apart[0]:.1e}, gradient norm by {apart[1]:.1e} of itself", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

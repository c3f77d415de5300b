"""Counters of a gateway, and their Prometheus text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..record import Call
from .engine import Completion


class Metrics:
    """Counts since the start; written on the gateway's loop."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, int, str]] = Counter()
        self.tokens: Counter[tuple[str, str]] = Counter()
        self.errors: Counter[int] = Counter()
        self.publishes: Counter[tuple[str, str]] = Counter()
        self.disconnects = 0

    def served(self, policy: str, version: int, completions: Sequence[Completion | Call]) -> None:
        for completion in completions:
            self.calls[policy, version, completion.finish_reason] += 1
            self.tokens[policy, "completion"] += len(completion.completion_ids)
        if completions:
            self.tokens[policy, "prompt"] += len(completions[0].prompt_ids)

    def text(self, versions: Mapping[str, int], running: Mapping[str, int]) -> str:
        lines: list[str] = []

        def family(name: str, kind: str, about: str, samples: Sequence[tuple[Mapping[str, object], float]]) -> None:
            lines.append(f"# HELP mappa_{name} {about}")
            lines.append(f"# TYPE mappa_{name} {kind}")
            for labels, value in samples:
                inside = ",".join(f'{key}="{label}"' for key, label in labels.items())
                lines.append(f"mappa_{name}{{{inside}}} {value}" if inside else f"mappa_{name} {value}")

        family(
            "calls_total",
            "counter",
            "Completions served.",
            [({"policy": p, "version": v, "finish_reason": r}, n) for (p, v, r), n in sorted(self.calls.items())],
        )
        family(
            "tokens_total", "counter", "Tokens in and out.", [({"policy": p, "kind": k}, n) for (p, k), n in sorted(self.tokens.items())]
        )
        family("errors_total", "counter", "Requests answered with an error.", [({"status": s}, n) for s, n in sorted(self.errors.items())])
        family("disconnects_total", "counter", "Requests whose client went away.", [({}, self.disconnects)])
        family(
            "publishes_total",
            "counter",
            "Versions published or refused.",
            [({"policy": p, "result": r}, n) for (p, r), n in sorted(self.publishes.items())],
        )
        family("version", "gauge", "The current version.", [({"policy": p}, v) for p, v in sorted(versions.items())])
        family("inflight", "gauge", "Requests in flight.", [({"policy": p}, n) for p, n in sorted(running.items())])
        return "\n".join(lines) + "\n"

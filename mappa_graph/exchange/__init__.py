"""Traces of apps that run in production come in, training data and feedback go out.

`importer` is the one way in: plain dict spans, whatever they were recorded by, become the same records as live runs in the same store;
`langsmith`, `mlflow`, `otel` and `chat` only map to spans. `writeback` carries verdicts back to where the traces came from. `export` is
the way out: rows for supervised, preference and reinforcement training.
"""

from __future__ import annotations

from typing import Any

_FROM = {
    "Imported": "importer",
    "Importer": "importer",
    "import_traces": "importer",
    "write_back": "writeback",
    "export_traces": "export",
    "Filters": "filters",
    "Redactor": "redact",
    "redactor": "redact",
}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Filters", "Imported", "Importer", "Redactor", "export_traces", "import_traces", "redactor", "write_back"]

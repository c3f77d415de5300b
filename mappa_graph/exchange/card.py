"""The data card of an export: what is in the files, where it came from, what was left out and what was taken out.

It is written twice beside the data, as JSON for programs and as Markdown for people, and holds no time and no path of the machine, so the
same store and options give the same card. The licence is left open: only who owns the data can fill it in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

LICENCE = "not set: state here under which licence this data may be used, and by whom"


def markdown(card: Mapping[str, Any]) -> str:
    """The card as a page."""
    source, rows = card["source"], card["rows"]
    lines = [f"# {card['title']}", ""]
    lines += [f"{_n(sum(rows.values()))} rows in the format `{card['format']}`, written by mappa-graph {card['version']}.", ""]
    lines += ["**Licence:** " + card["licence"], "", "## Files", ""]
    lines += _table(
        ("file", "rows", "bytes", "sha256"), ((f["name"], _n(f["rows"]), _n(f["bytes"]), f"`{f['sha256']}`") for f in card["files"])
    )
    lines += ["", "Load it with:", "", "```python", card["load"], "```", "", "## Columns", ""]
    lines += _table(("column", "type", "meaning"), ((c["name"], c["type"], c["meaning"]) for c in card["columns"]))
    lines += ["", "## Source", ""]
    lines += [f"- {_n(source['episodes_read'])} of {_n(source['episodes'])} episodes and {_n(source['actions_seen'])} actions were read"]
    lines += [f"- {name}: {_list(source[name])}" for name in ("environments", "policies", "first_episode", "last_episode") if source[name]]
    lines += ["", "## What is in it", ""]
    for name, counts in card["by"].items():
        lines += [f"- by {name}: " + ", ".join(f"{_cell(k)} {_n(v)}" for k, v in counts.items())]
    if card["scores"]["count"]:
        scores = card["scores"]
        lines += [f"- scores: {_n(scores['count'])} rows, mean {scores['mean']:.2f}, from {scores['min']:g} to {scores['max']:g}"]
    lines += ["", "## How it was chosen", ""]
    lines += [f"- {name}: {_list(value)}" for name, value in {**card["filters"], **card["options"]}.items()]
    lines += ["", "Left out, each for the first reason that held:", ""]
    lines += _table(("reason", "how many"), ((k, _n(v)) for k, v in card["left_out"].items())) if card["left_out"] else ["nothing"]
    if card["text_only"]:
        who = ", ".join(f"{_cell(k)} {_n(v)}" for k, v in card["text_only"].items())
        lines += ["", f"Actions without tokens, by agent: {who}. They are texts only, and the format `rl` refuses them."]
    lines += ["", "## Redaction", ""]
    rules = ((r["rule"], f"`{r['placeholder']}`", r["what"] + (f": `{r['pattern']}`" if "pattern" in r else ""), _n(r["found"]))
             for r in card["redaction"])  # fmt: skip
    lines += _table(("rule", "becomes", "looks for", "found"), rules)
    lines += ["", "A rule finds what it looks for, and nothing else: names and addresses in prose are still there.", ""]
    return "\n".join(lines)


def source(counts: Mapping[str, Any], total: Mapping[str, int]) -> dict[str, Any]:
    """Where the rows came from: the store's counts, the environments and policies in them, and the days of the episodes."""

    def day(name: str) -> str | None:
        return datetime.fromtimestamp(counts[name], UTC).date().isoformat() if name in counts else None

    return {
        "episodes": total["episodes"], "actions": total["actions"], "episodes_read": counts.get("episodes_read", 0),
        "actions_seen": counts.get("actions_seen", 0), "environments": counts.get("environments", []),
        "policies": counts.get("policies", []), "first_episode": day("first"), "last_episode": day("last"),
    }  # fmt: skip


def load_line(kind: str, names: Mapping[str, str], out: str) -> str:
    """How the files are loaded with `datasets`."""
    if kind == "datasets":
        return f'datasets.load_from_disk("{out}")'
    return f'datasets.load_dataset("{"json" if kind == "jsonl" else "parquet"}", data_files={dict(names)!r})'


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    head = list(head)
    return [_line(head), _line("---" for _ in head), *(_line(map(_cell, row)) for row in rows)]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: Any) -> str:
    """Agents' names and strata come from data: nothing of them may end a cell or begin markup."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;") or "(none)"


def _list(value: Any) -> str:
    return ", ".join(_cell(v) for v in value) if isinstance(value, list | tuple) else _cell(value)


def _n(value: int) -> str:
    return f"{value:,}"

"""`export`: recorded actions become training data, in a format that a trainer reads.

One pass reads the store an episode at a time: filters, rows, redaction, then the work file, which holds redacted rows only. Then pairs are
made, rows balanced, and the files written aside and renamed, the data card last. The one thing to know: the same store and options give
the same bytes, whether or not an export was killed on the way and begun again; nothing depends on time, order of sets or chance, and the
side of the train/held-out split is a hash of the task, so no task is on both.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from ..codec import decode, encode
from ..errors import ConfigError
from ..record import Episode, EpisodeTrace
from . import card as cards
from . import formats, writers
from .filters import Filters
from .formats import COLUMNS, FORMATS, PAIRED, Format, Render
from .making import End, Maker, Samples, Waiting
from .options import HELDOUT, TRAIN, Options
from .pairs import best_and_worst
from .redact import Redactor
from .rows import Row, Rows

Progress = Callable[[str, int, int], Any]
"""`(stage, done, total)`; stages: read, pair, write."""
_COMMIT_EVERY = 500
_OWN = frozenset({"files", "load", "version", "columns", "redaction"})
"""Parts of a data card that no record has a say in; a user's pattern must not spoil a check sum."""


class Store(Protocol):
    """What an export needs of a trace store."""

    path: Path

    def episodes(self, *, split: str | None = None, iteration: int | None = None) -> Iterator[Episode]: ...

    def episode(self, id: str) -> EpisodeTrace | None: ...

    def counts(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    files: Mapping[str, Path]
    """By side: train, and heldout where there is one."""
    card: Mapping[str, Any]
    card_path: Path
    resumed: bool = False

    @property
    def rows(self) -> int:
        return int(sum(self.card["rows"].values()))


def export(
    store: Store,
    format: Format,
    out: Path | str,
    *,
    kind: str | None = None,
    filters: Filters | None = None,
    options: Options | None = None,
    redactor: Redactor | None = None,
    samples: Samples | None = None,
    render: Render | None = None,
    force: bool = False,
    resume: bool = True,
    progress: Progress | None = None,
) -> Exported:
    """Writes the actions of a store as training data, with a data card beside it.

    Args:
        store: a `TraceStore`.
        format: sft (prompt and completion), messages, dpo, kto, reward (preferences), or rl (tokens, log-probs, returns).
        out: the file, or for datasets the folder. Held-out tasks go to `NAME-heldout` beside it, the card to `out.card.json` and `.md`.
        kind: jsonl, parquet or datasets; None goes by the ending of `out`.
        redactor: what to take out; None takes out keys. Keys are taken out in any case.
        samples: needed for rl, and for it only: `functools.partial(trainers.batch.samples_from_trace, gamma=0.5)`.
        render: makes texts of messages (`formats.template_render(tokenizer)`, `formats.plain_render`); not for rl.
        force: overwrite what no export has written.
        resume: go on with the work file of an export of the same options that was killed.
        progress: called with (stage, done, total) now and then.

    Raises `ConfigError` for options that can't take effect, and where nothing is left to export (with what was left out, and why).
    """
    return _Export(store, format, Path(out), kind, filters, options, redactor, samples, render, force, resume, progress).run()


export_traces = export
"""The name that `mappa_graph.exchange` gives it, where `export` is this module."""


class _Export:
    def __init__(
        self,
        store: Store,
        format: Format,
        out: Path,
        kind: str | None,
        filters: Filters | None,
        options: Options | None,
        redactor: Redactor | None,
        samples: Samples | None,
        render: Render | None,
        force: bool,
        resume: bool,
        progress: Progress | None,
    ) -> None:
        if format not in FORMATS:
            raise ConfigError(f"there is no format {format!r}", hint=f"use one of: {', '.join(FORMATS)}")
        if (format == "rl") != (samples is not None):
            raise ConfigError(
                "the format rl needs samples=" if format == "rl" else f"samples= has no effect on the format {format}",
                hint="samples=functools.partial(samples_from_trace, gamma=0.5), from mappa_graph.trainers.batch",
            )
        if format == "rl" and render is not None:
            raise ConfigError("render= has no effect on the format rl, which holds tokens")
        self.store, self.format, self.out = store, format, out
        self.kind = writers.kind_of(out, kind)
        self.filters = filters or Filters()
        self.options = options or Options()
        self.options.check(format)
        self.redactor = redactor or Redactor()
        self.samples, self.render, self.resume = samples, render, resume
        self.progress: Progress = progress or (lambda stage, done, total: None)
        self.maker = Maker(format, self.filters, self.options, self.redactor, samples, render)
        if self.kind != "jsonl":
            writers.arrow()
        self.card_path = out.with_name(f"{out.name}.card.json")
        for path in [out] if self.kind == "datasets" else self._files([TRAIN, HELDOUT]).values():
            writers.check_place(path, self.kind, ours=self.card_path.exists(), force=force)
        self.columns = dict(COLUMNS[format])
        if render is not None:
            if format == "messages":
                self.columns = {"text": "text", **{k: v for k, v in self.columns.items() if k != "messages"}}
            self.columns = {k: "text" if v == "messages" else v for k, v in self.columns.items() if k != "tools"}

    def run(self) -> Exported:
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"can't make the folder {self.out.parent}: {error.strerror or error}", hint="give another path") from error
        before = self.redactor.counts
        self.rows = rows = Rows(self.out.with_name(f".{self.out.name}.work"), self._fingerprint(), resume=self.resume)
        remove = True
        try:
            self.counts = counts = rows.counts
            for name in ("left_out", "text_only", "redacted"):
                counts[name] = Counter(counts.get(name, {}))
            self.maker.text_only, self.maker.rich = counts["text_only"], bool(counts.get("rich"))
            found = Counter(counts["redacted"])

            def commit(done: int, phase: int) -> None:
                counts["rich"] = self.maker.rich
                counts["redacted"] = found + (self.redactor.counts - before)
                rows.commit(done, phase)

            if rows.phase == 0:
                self._read(commit)
            if rows.phase == 1:
                self._pair(commit)
            return self._write()
        except ConfigError:
            raise
        except BaseException:
            remove = False
            raise
        finally:
            rows.close(remove=remove)

    # -- reading

    def _read(self, commit: Callable[[int, int], None]) -> None:
        total = self.store.counts()["episodes"]
        at = 0
        for at, head in enumerate(self.store.episodes(split=self.filters.split, iteration=self.filters.iteration), 1):
            if at <= self.rows.done:
                continue
            self._episode(head)
            if at % _COMMIT_EVERY == 0:
                commit(at, 0)
                self.progress("read", at, total)
        commit(at, 1)
        self.progress("read", total, total)

    def _episode(self, head: Episode) -> None:
        counts = self.counts
        counts["episodes_read"] = counts.get("episodes_read", 0) + 1
        reason = self.filters.episode(head)
        if reason is not None:
            counts["left_out"][f"episode: {reason}"] += 1
            return
        trace = self.store.episode(head.id)
        if trace is None:
            return  # deleted meanwhile
        counts["actions_seen"] = counts.get("actions_seen", 0) + len(trace.actions)
        kept = False
        for made in self.maker(trace):
            if isinstance(made, Waiting):
                self.rows.add_sibling(made.state, made.head, made.side, made.digest, made.score, made.data)
                kept = True
                continue
            kept = kept or isinstance(made, Row)
            reason = self.rows.add(made) if isinstance(made, Row) else made
            if reason is not None:
                counts["left_out"][reason] += 1
        if kept:
            self._source(head, trace)

    def _source(self, head: Episode, trace: EpisodeTrace) -> None:
        counts = self.counts
        for name, values in (("environments", [head.environment]), ("policies", [a.policy for a in trace.actions])):
            counts[name] = sorted({*counts.get(name, ()), *(_cleaned(value, self.redactor) for value in set(filter(None, values)))})
        if head.started:
            counts["first"] = min(counts.get("first", head.started), head.started)
            counts["last"] = max(counts.get("last", head.started), head.started)

    def _pair(self, commit: Callable[[int, int], None]) -> None:
        if self.format in PAIRED and "siblings" in self.options.pairs.sources:
            for number, (head, side, siblings) in enumerate(self.rows.states(), 1):
                found = False
                for better, worse in best_and_worst(siblings, self.options.pairs):
                    found = True
                    ends = [End(s.score, **self.rows.sibling(s.key)) for s in (better, worse)]
                    for row in self.maker.pair(head, side, "siblings", *ends):
                        reason = self.rows.add(row)
                        if reason is not None:
                            self.counts["left_out"][reason] += 1
                if not found:
                    self.counts["left_out"]["state: margin too small"] += 1
                if number % 10_000 == 0:
                    self.progress("pair", number, number)
        commit(self.rows.done, 2)

    # -- writing

    def _files(self, sides: Sequence[str]) -> dict[str, Path]:
        """Where each side's rows lie; a `datasets` folder holds both."""
        if self.kind == "datasets":
            return {side: self.out / side if HELDOUT in sides and self.options.heldout else self.out for side in sides}
        return {side: self.out if side == TRAIN else self.out.with_name(f"{self.out.stem}-{side}{self.out.suffix}") for side in sides}

    def _write(self) -> Exported:
        dropped = Counter[str]()
        if self.options.balance is not None:
            for side in (TRAIN, HELDOUT):
                dropped.update(self.rows.balance(side))
        sizes = self.rows.sizes()
        if TRAIN not in sizes:
            why = ", ".join(f"{reason} {n}" for reason, n in self.counts["left_out"].most_common()) or "no episode, or none with an action"
            if self.counts["text_only"] and self.format == "rl":
                why += "; text only are " + ", ".join(f"{agent} {n}" for agent, n in sorted(self.counts["text_only"].items()))
            raise ConfigError(
                f"there is nothing to export as {self.format}"
                + (f" but {sizes[HELDOUT]} held-out rows" if sizes else "")
                + f" (left out: {why})",
                hint="loosen the filters, coach the run first (mappa-graph coach RUN), or choose another format",
            )
        files = self._files(sorted(sizes, key=[TRAIN, HELDOUT].index))
        root = self.out if self.kind == "datasets" else None
        aside = {side: path.with_name(f".{path.name}.part") for side, path in files.items()}
        if root is not None:
            whole = root.with_name(f".{root.name}.part")
            writers.remove(whole)
            aside = {side: whole / path.relative_to(root) for side, path in files.items()}
        for side, path in aside.items():
            writers.remove(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write_side(side, path, sizes[side], sum(sizes.values()))
        if root is not None:
            if len(files) > 1 or self.options.heldout:
                (whole / "dataset_dict.json").write_text(json.dumps({"splits": list(files)}))
            writers.replace(whole, root)
        else:
            for side, path in aside.items():
                writers.replace(path, files[side])
        return self._card(files, sizes, dropped)

    def _write_side(self, side: str, path: Path, size: int, total: int) -> None:
        writer = writers.open_writer(self.kind, path, self.columns, bool(self.counts.get("rich")))
        moments = self.rows.moments(side, self.options.std_floor) if self.format == "rl" else {}
        for number, (row, value, group) in enumerate(self.rows.read(side), 1):
            if value is not None:
                mean, divisor = moments[group]
                data = decode(row) | {"advantage": (value - mean) / divisor}
                row = encode({name: data[name] for name in self.columns})
            writer.write(row)
            if number % 10_000 == 0 or number == size:
                self.progress("write", number, total)
        writer.close()

    def _card(self, files: Mapping[str, Path], sizes: Mapping[str, int], dropped: Mapping[str, int]) -> Exported:
        counts, options = self.counts, self.options
        total = self.store.counts()
        listed = []
        for side, path in files.items():
            for part in sorted(path.glob("*.*")) if path.is_dir() else [path]:
                if part.is_file() and part.name != "dataset_dict.json":
                    n = sizes[side] if not path.is_dir() or part.suffix == ".arrow" else 0
                    name = part.relative_to(self.out.parent).as_posix()
                    listed.append({"name": name, "side": side, "rows": n, "bytes": part.stat().st_size, "sha256": writers.sha256(part)})
        chosen: dict[str, Any] = {"dedupe": self.maker.dedupe, "heldout": options.heldout, "thinking": options.thinking}
        chosen |= {"balance": options.balance} if options.balance else {}
        chosen |= {"salt": options.salt} if options.salt else {}
        chosen |= {f"pairs.{k}": v for k, v in options.pairs.describe().items()} if self.format in PAIRED else {}
        if self.format == "rl":
            chosen |= {"normalise": options.normalise, "std_floor": options.std_floor, "returns": _named(self.samples)}
            del chosen["thinking"]
        names = {side: path.relative_to(self.out.parent).as_posix() for side, path in files.items()}
        card = {
            "title": f"Data card of {self.out.name}", "format": self.format, "kind": self.kind, "version": version("mappa-graph"),
            "licence": cards.LICENCE, "files": listed, "load": cards.load_line(self.kind, names, self.out.name),
            "rows": {side: sizes[side] for side in files},
            "columns": [{"name": name, "type": kind, "meaning": formats.MEANING.get(name, "")} for name, kind in self.columns.items()],
            "source": cards.source(counts, total), "by": {name: self.rows.by(name) for name in ("agent", "stratum")},
            "scores": self.rows.scores(), "filters": self.filters.describe(), "options": chosen,
            "left_out": dict(counts["left_out"].most_common()) | {f"balance: {k or '(none)'}": n for k, n in dropped.items()},
            "text_only": dict(sorted(counts["text_only"].items())),
            "redaction": [{**rule, "found": counts["redacted"].get(rule["rule"], 0)} for rule in self.redactor.describe()],
        }  # fmt: skip
        card = {name: part if name in _OWN else _cleaned(part, self.redactor) for name, part in card.items()}
        self._forget(listed)
        for path, page in (
            (self.card_path, json.dumps(card, indent=2, ensure_ascii=False) + "\n"),
            (self.card_path.with_suffix(".md"), cards.markdown(card)),
        ):
            part = path.with_name(f".{path.name}.part")
            part.write_text(page, encoding="utf-8")
            writers.replace(part, path)
        return Exported(files, card, self.card_path, self.rows.resumed)

    def _forget(self, listed: Sequence[Mapping[str, Any]]) -> None:
        """Takes away files of an earlier export to the same name that this one didn't write: a stale held-out file would mislead."""
        try:
            old = json.loads(self.card_path.read_text(encoding="utf-8"))["files"]
        except (OSError, ValueError, KeyError):
            return
        held = self.out.with_name(f"{self.out.stem}-{HELDOUT}{self.out.suffix}")
        if any(file.get("name") == held.name for file in old) and all(file["name"] != held.name for file in listed):
            held.unlink(missing_ok=True)

    def _fingerprint(self) -> str:
        """Of all that decides the rows: a work file of another one is of no use."""
        told = {
            "format": self.format, "filters": self.filters.describe(), "options": asdict(self.options), "dedupe": self.maker.dedupe,
            "redaction": self.redactor.describe(), "samples": _named(self.samples), "render": _named(self.render),
            "version": version("mappa-graph"), "store": _signature(self.store.path),
        }  # fmt: skip
        if any("<" in str(told[name]) for name in ("samples", "render")):
            told["once"] = os.urandom(8).hex()  # a lambda: whether it is the same one next time can't be told
        return hashlib.sha256(encode(told)).hexdigest()


def _cleaned(value: Any, redactor: Redactor) -> Any:
    """The texts of a part of the card, redacted and fit for UTF-8; names of agents in it were cleaned as they were counted."""
    if isinstance(value, str):
        return formats.holdable(redactor.text(value))
    if isinstance(value, Mapping):
        return {name: _cleaned(part, redactor) for name, part in value.items()}
    return [_cleaned(part, redactor) for part in value] if isinstance(value, list | tuple) else value


def _named(function: Any) -> str | None:
    """A function by name and bound options."""
    if function is None:
        return None
    if isinstance(function, partial):
        options = ", ".join(f"{name}={value!r}" for name, value in sorted(function.keywords.items()))
        return f"{_named(function.func)}({options})"
    return str(getattr(function, "fingerprint", "") or getattr(function, "__qualname__", type(function).__name__))


def _signature(path: Path) -> list[int]:
    """What changes with the file: sizes and times of the database and of its log. A log that is empty says nothing."""
    out: list[int] = []
    for part in (path, path.with_name(path.name + "-wal")):
        stat = part.stat() if part.exists() else None
        out += [stat.st_size, stat.st_mtime_ns] if stat is not None and stat.st_size else [0, 0]
    return out

"""Files as sources: JSONL, JSON, gzip of these, and Parquet, one file or a folder of them, read in one pass.

Which kind of record a file holds is told from its first rows: chats, LangSmith runs, OpenTelemetry spans, or spans in this package's
own words. A line that is not whole, or not JSON, or not UTF-8 is counted and left out or read as far as it goes. A span file is read
trace by trace where it is written so; one whose traces are mixed is put down on disk first, so memory stays the same for any size.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ..codec import decode
from ..errors import ConfigError
from . import chat, langsmith, otel
from .importer import SourceTrace
from .spans import Notes
from .spool import Spool

FORMATS = ("chat", "langsmith", "otel", "spans")
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".parquet")
_LOOKED_AT = 2000
_CHECKED = 4096

Placed = tuple[Mapping[str, Any], int]
"""A row, and the place in its file where it begins."""


class FileSource:
    """A file or folder of traces.

    Args:
        path: `.jsonl`, `.json` (also `.gz`), `.parquet`, or a folder that holds such files at any depth.
        folder: where mixed traces are put down while they are sorted; the run's folder.
        format: one of `FORMATS`; default: told from the first row.
        agent: who speaks in chats that name nobody.
    """

    def __init__(self, path: str | Path, folder: Path, *, format: str | None = None, agent: str | None = "assistant") -> None:
        self.path = Path(path)
        if format is not None and format not in FORMATS:
            raise ConfigError(f"there is no format {format!r}", hint=f"one of: {', '.join(FORMATS)}")
        self._files = files_of(self.path)
        self._format = format
        self._folder = folder
        self._agent = agent
        self.name = f"file:{self.path.absolute()}"

    def traces(self, cursor: Any, notes: Notes) -> Iterator[SourceTrace]:
        first, place = 0, 0
        if isinstance(cursor, Mapping) and cursor.get("files") == len(self._files):
            first = min(int(cursor.get("file", 0)), len(self._files) - 1)
            place = int(cursor.get("at", 0)) if cursor.get("mark") == _mark(self._files[first], int(cursor.get("at", 0))) else 0
        for number in range(first, len(self._files)):
            path = self._files[number]

            def where(at: int, number: int = number, path: Path = path) -> Any:
                return {"files": len(self._files), "file": number, "at": at, "mark": _mark(path, at)}

            yield from self._file(path, place if number == first else 0, where, notes)

    def _file(self, path: Path, place: int, where: Callable[[int], Any], notes: Notes) -> Iterator[SourceTrace]:
        rows = read_rows(path, place, notes)
        head = list(islice(rows, 1))
        if not head:
            if not place:
                notes.add("file without a row", path.name)
            return
        format = self._format or format_of(head[0][0])
        if format is None:
            raise ConfigError(
                f"can't tell what {path} holds: its first row has the keys {', '.join(map(str, list(head[0][0])[:8]))}",
                hint=f"say it: --format {' | '.join(FORMATS)}",
            )
        rows = chain(head, rows)
        if format == "chat":
            for row, at in rows:
                trace = chat.trace_of(row, self._agent, notes)
                if trace is not None:
                    trace.cursor = where(at)
                    yield trace
            return
        spans = _spans(format, rows)
        looked = list(islice(spans, _LOOKED_AT))
        spans = chain(looked, spans)
        if _mixed(looked):
            yield from self._sorted(spans)
        else:
            yield from self._streamed(path, format, spans, where, notes)

    def _streamed(
        self, path: Path, format: str, spans: Iterator[Placed], where: Callable[[int], Any], notes: Notes
    ) -> Iterator[SourceTrace]:
        """Traces that lie together, as they come; those that turn out to be in pieces are put together at the end."""
        closed: set[int] = set()
        torn: set[str] = set()
        held: list[Mapping[str, Any]] = []
        trace, began = "", 0
        for span, at in spans:
            id = str(span.get("trace_id"))
            if held and id != trace:
                closed.add(hash(trace))
                if trace not in torn:
                    yield _made(trace, held, where(began))
                held = []
            if not held:
                trace, began = id, at
                if hash(id) in closed:
                    torn.add(id)
            held.append(span)
        if held and trace not in torn:
            yield _made(trace, held, where(began))
        if torn:
            again = _spans(format, read_rows(path, 0, Notes()))
            yield from self._sorted(s for s in again if str(s[0].get("trace_id")) in torn)

    def _sorted(self, spans: Iterable[Placed]) -> Iterator[SourceTrace]:
        mark = hashlib.sha256(self.name.encode()).hexdigest()[:12]
        path = self._folder / f"import-{mark}.spool"
        Spool(path).close(delete=True)
        spool = Spool(path)
        try:
            batch: list[tuple[str, str, Mapping[str, Any]]] = []
            for number, (span, _) in enumerate(spans):
                batch.append((str(span.get("trace_id")), str(span.get("id") or f"#{number}"), span))
                if len(batch) >= 1000:
                    spool.add(batch)
                    batch = []
            spool.add(batch)
            for _, trace, found in spool.traces():
                yield _made(trace, found, None)
        finally:
            spool.close(delete=True)


def _made(trace: str, spans: Sequence[Mapping[str, Any]], cursor: Any) -> SourceTrace:
    session = next((str(s["session"]) for s in spans if s.get("session")), None)
    return SourceTrace(trace, spans, cursor, session)


def _mixed(spans: Iterable[Placed]) -> bool:
    seen: set[str] = set()
    last = None
    for span, _ in spans:
        trace = str(span.get("trace_id"))
        if trace != last and trace in seen:
            return True
        seen.add(trace)
        last = trace
    return False


def _spans(format: str, rows: Iterable[Placed]) -> Iterator[Placed]:
    for row, at in rows:
        if format == "spans":
            yield row, at
            continue
        read = langsmith.rows_to_spans if format == "langsmith" else otel.rows_to_spans
        for span in read((row,)):
            yield span, at


def format_of(row: Mapping[str, Any]) -> str | None:
    """What kind of record a row is; None where nothing tells."""
    if chat.is_chat(row):
        return "chat"
    if otel.is_otel(row):
        return "otel"
    if "run_type" in row or "dotted_order" in row or "run_id" in row:
        return "langsmith"
    return "spans" if "trace_id" in row and "kind" in row else None


def files_of(path: Path) -> list[Path]:
    """The files of a path, in the order of their names. Raises `ConfigError` where there is none."""
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.lower().endswith(_SUFFIXES))
        if not found:
            raise ConfigError(f"{path} holds no file of traces", hint=f"known endings: {', '.join(_SUFFIXES)}")
        return found
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", hint="give a file, a folder, langsmith:PROJECT or mlflow:EXPERIMENT")
    return [path]


def read_rows(path: Path, place: int, notes: Notes) -> Iterator[Placed]:
    """The rows of a file from a place on; for Parquet a place is a row's number, for lines a byte's."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from _parquet(path, place, notes)
        return
    file: Any
    with gzip.open(path) if name.endswith(".gz") else path.open("rb") as file:
        if not name.endswith((".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")) and _is_document(file):
            yield from _document(path, file, notes)
            return
        file.seek(place)
        yield from _lines(path, file, place, notes)


def _is_document(file: io.BufferedReader) -> bool:
    """Whether a file is one JSON value over several lines, and not one a line."""
    start = file.peek(_CHECKED)[:_CHECKED].lstrip()
    if start[:1] == b"[":
        return True
    line = start.split(b"\n", 1)[0]
    try:
        decode(line)
    except ValueError:
        return len(line) < _CHECKED - 64
    return False


def _document(path: Path, file: Any, notes: Notes) -> Iterator[Placed]:
    value = _decoded(file.read(), f"{path.name}", notes)
    if isinstance(value, Mapping):
        rows = next((value[k] for k in ("runs", "spans", "traces", "data", "rows") if isinstance(value.get(k), list)), [value])
    else:
        rows = value if isinstance(value, list) else []
    for row in rows:
        if isinstance(row, Mapping):
            yield row, 0
        else:
            notes.add("row that is no object", path.name)


def _lines(path: Path, file: Any, at: int, notes: Notes) -> Iterator[Placed]:
    for number, line in enumerate(file, 1):
        begin, at = at, at + len(line)
        if line.isspace():
            continue
        row = _decoded(line, f"{path.name}, byte {begin} (line {number} from where reading began)", notes)
        if isinstance(row, Mapping):
            yield row, begin
        elif row is not None:
            notes.add("row that is no object", f"{path.name}, byte {begin}")


def _decoded(data: bytes, where: str, notes: Notes) -> Any:
    try:
        return decode(data)
    except UnicodeDecodeError:
        notes.add("text that is not UTF-8 (read as far as it goes)", where)
    except (ValueError, RecursionError):
        # orjson reports bad UTF-8 as bad JSON; half a line is neither.
        try:
            data.decode()
        except UnicodeDecodeError:
            notes.add("text that is not UTF-8 (read as far as it goes)", where)
        else:
            notes.add("line that is not JSON", where, hint="a half-written last line is left by a killed writer; --no-strict leaves it out")
            return None
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        notes.add("line that is not JSON", where)
        return None


def _parquet(path: Path, place: int, notes: Notes) -> Iterator[Placed]:
    try:
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(f"{path} needs pyarrow", hint="pip install 'mappa-graph[exchange]'") from None
    try:
        file = pq.ParquetFile(path)
    except Exception as error:  # noqa: BLE001  pyarrow has many; all say that this file is no Parquet
        notes.add("file that is no Parquet", f"{path.name}: {error}")
        return
    with file:
        number = 0
        for batch in file.iter_batches(batch_size=256):
            if number + batch.num_rows <= place:
                number += batch.num_rows
                continue
            for row in batch.to_pylist():
                if number >= place:
                    yield {k: v for k, v in row.items() if v is not None}, number
                number += 1


def _mark(path: Path, at: int) -> str:
    """Tells whether a file is still the one that was read up to `at`: a hash of what lies before."""
    if path.name.lower().endswith((".parquet", ".gz")):
        stat = path.stat()
        return f"{stat.st_size}/{stat.st_mtime_ns}"
    with path.open("rb") as file:
        head = file.read(min(at, _CHECKED))
        file.seek(max(0, at - _CHECKED))
        tail = file.read(min(at, _CHECKED))
    return hashlib.sha256(head + tail).hexdigest()[:16]

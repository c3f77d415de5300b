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
from ..errors import ConfigError, MappaError
from . import chat, langsmith, otel
from .importer import SourceTrace
from .spans import Notes, name_of, seconds
from .spool import SORTING, Spool

FORMATS = ("chat", "langsmith", "otel", "spans")
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".parquet")
_LOOKED_AT = 2000
_CHECKED = 4096
_HASHED = 1 << 20

Placed = tuple[Mapping[str, Any], int]
"""A row, and the place in its file where it begins."""
Item = tuple[str, Mapping[str, Any] | SourceTrace, int, int]
"""A trace's id, a span of it or, for a chat, the whole of it, and the file and place where it begins."""


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
        self._marks = _Marks()
        self.name = f"file:{self.path.absolute()}"
        self.known: Callable[[str], bool] | None = None
        """Whether a trace is stored already; set by the importer."""
        self.redact: Callable[[Any], Any] | None = None
        """What spans go through before they are put down on disk; set by the importer."""

    def traces(self, cursor: Any, notes: Notes) -> Iterator[SourceTrace]:
        first, place, resumed = 0, 0, False
        if isinstance(cursor, Mapping) and cursor.get("files") == len(self._files):
            number, at = min(int(cursor.get("file", 0)), len(self._files) - 1), int(cursor.get("at", 0))
            if cursor.get("mark") == self._marks.of(self._files[number], at):
                first, place, resumed = number, at, bool(number or at)
        items = self._items(first, place, notes)
        looked = list(islice(items, _LOOKED_AT))
        if _mixed(looked):
            yield from self._sorted(self._items(0, 0, Notes()) if resumed else chain(looked, items))
        else:
            yield from self._streamed(chain(looked, items), resumed and not (cursor or {}).get("torn"), resumed)

    def _items(self, first: int, place: int, notes: Notes) -> Iterator[Item]:
        """The chats and spans of all files from a place on."""
        for number in range(first, len(self._files)):
            path = self._files[number]
            rows = read_rows(path, place if number == first else 0, notes)
            head = next(rows, None)
            if head is None:
                if not place:
                    notes.add("file without a row", path.name)
                continue
            format = self._format or format_of(head[0])
            if format is None:
                raise ConfigError(
                    f"can't tell what {path} holds: its first row has the keys {', '.join(map(str, list(head[0])[:8]))}",
                    hint=f"say it: --format {' | '.join(FORMATS)}",
                )
            for row, at in chain((head,), rows):
                for id, item in self._read(format, row, f"{path.name}, byte {at}", notes):
                    yield id, item, number, at

    def _read(self, format: str, row: Mapping[str, Any], where: str, notes: Notes) -> list[tuple[str, Mapping[str, Any] | SourceTrace]]:
        """What a row holds; nothing, and counted, where reading it fails: one row must not end the import of a million."""
        try:
            if format == "chat":
                trace = chat.trace_of(row, self._agent, notes)
                return [] if trace is None else [(trace.id, trace)]
            if format == "spans":
                return [(name_of(row.get("trace_id")), row)]
            spans = (langsmith.rows_to_spans if format == "langsmith" else otel.rows_to_spans)((row,))
            return [(name_of(span.get("trace_id")), span) for span in spans]
        except MappaError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a hostile row made of it
            notes.add(f"row that can't be read: {type(error).__name__}", where)
            return []

    def _cursor(self, number: int, at: int, torn: bool = False) -> Callable[[], Any]:
        return lambda: {"files": len(self._files), "file": number, "at": at, "mark": self._marks.of(self._files[number], at), "torn": torn}

    def _streamed(self, items: Iterable[Item], whole_first: bool, resumed: bool) -> Iterator[SourceTrace]:
        """Traces that lie together, as they come; those that turn out to be in pieces are put together at the end.

        A piece is known by its trace having been closed before, here or by the import that this one goes on with. While there are pieces,
        the cursor stays where the first was found, so that a killed import finds them again.
        """
        closed: set[int] = set()
        torn: set[str] = set()
        held: list[Mapping[str, Any]] = []
        trace, began = "", (0, 0)
        hold: tuple[int, int] | None = None
        for id, item, number, at in items:
            if isinstance(item, SourceTrace):
                item.cursor = self._cursor(number, at)
                yield item
                continue
            if held and id != trace:
                closed.add(hash(trace))
                if trace not in torn:
                    yield _made(trace, held, self._cursor(*(hold or began), hold is not None))
                held = []
            if not held:
                trace, began = id, (number, at)
                if hash(id) in closed or (resumed and not whole_first and self.known is not None and self.known(id)):
                    torn.add(id)
                    hold = hold or began
                whole_first = False
            held.append(item)
        if held and trace not in torn:
            yield _made(trace, held, self._cursor(*(hold or began), hold is not None))
        if torn:
            yield from self._sorted(i for i in self._items(0, 0, Notes()) if i[0] in torn)

    def _sorted(self, items: Iterable[Item]) -> Iterator[SourceTrace]:
        mark = hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        path = self._folder / f"{SORTING}{mark}.spool"
        Spool(path).close(delete=True)
        spool = Spool(path, self.redact)
        try:
            batch: list[tuple[str, str, float, Mapping[str, Any]]] = []
            for place, (trace, item, _, _) in enumerate(items):
                if isinstance(item, SourceTrace):
                    yield item
                    continue
                batch.append((name_of(trace), name_of(item.get("id") or f"#{place}"), seconds(item.get("start")) or 0.0, item))
                if len(batch) >= 1000:
                    spool.add(batch)
                    batch = []
            spool.add(batch)
            for trace, found in spool.traces():
                yield _made(trace, found, None)
        finally:
            spool.close(delete=True)


def _made(trace: str, spans: Sequence[Mapping[str, Any]], cursor: Any) -> SourceTrace:
    session = next((name_of(s["session"]) for s in spans if s.get("session")), None)
    return SourceTrace(trace, spans, cursor, session)


def _mixed(items: Iterable[Item]) -> bool:
    seen: set[str] = set()
    last = None
    for trace, item, _, _ in items:
        if isinstance(item, SourceTrace):
            continue
        if trace != last and trace in seen:
            return True
        seen.add(trace)
        last = trace
    return False


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


class _Marks:
    """Tells whether files are still those that were read: a hash of all that lies before a place, made as reading goes on."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._at = 0
        self._hash = hashlib.sha256()

    def of(self, path: Path, at: int) -> str:
        if path.name.lower().endswith((".parquet", ".gz")):
            stat = path.stat()
            return f"{stat.st_size}/{stat.st_mtime_ns}"
        if path != self._path or at < self._at:
            self._path, self._at, self._hash = path, 0, hashlib.sha256()
        with path.open("rb") as file:
            file.seek(self._at)
            while self._at < at and (data := file.read(min(at - self._at, _HASHED))):
                self._hash.update(data)
                self._at += len(data)
        return self._hash.hexdigest()[:32]

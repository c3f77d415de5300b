"""How rows become files: JSON lines, Parquet, or a folder that `datasets.load_from_disk` reads.

Every file is written aside and renamed once it is whole, and rows pass through in groups of bounded size. Columns are typed by the format,
not by what the first rows hold. Messages that are more than role and content are stored as Arrow's JSON type (`datasets.Json`), so that
one message's tool call puts no empty field into another's. Same rows, same bytes: no file holds a time or a random name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from ..codec import decode, encode
from ..errors import ConfigError

As = Literal["jsonl", "parquet", "datasets"]
KINDS: tuple[As, ...] = ("jsonl", "parquet", "datasets")

_GROUP_ROWS, _GROUP_BYTES = 10_000, 32 << 20
_BLOCK = 1 << 20


class Writer(Protocol):
    """Takes rows as JSON; `close` ends the file, which is whole then."""

    def write(self, row: bytes) -> None: ...

    def close(self) -> None: ...


def kind_of(out: Path, chosen: str | None) -> As:
    """What to write: as chosen, else by the path's ending. Raises `ConfigError`."""
    by_ending: dict[str, As] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet", "": "datasets"}
    kind = chosen or by_ending.get(out.suffix.lower())
    for known in KINDS:
        if kind == known:
            return known
    raise ConfigError(
        f"{out} doesn't say what to write" if chosen is None else f"rows can't be written as {chosen!r}",
        hint="end the path in .jsonl or .parquet, or choose: --as jsonl, parquet or datasets",
    )


class Jsonl:
    """One JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, row: bytes) -> None:
        self._file.write(row + b"\n")

    def close(self) -> None:
        self._file.close()


class Arrow:
    """Groups of rows as Arrow tables, given to `sink`; `end` closes what is behind it."""

    def __init__(self, columns: Mapping[str, str], rich: bool, sink: Callable[[Any], None], end: Callable[[], None]) -> None:
        self._columns, self._rich, self._sink, self._end = columns, rich, sink, end
        self._schema = schema(columns, rich)
        self._rows: list[Any] = []
        self._bytes = 0

    def write(self, row: bytes) -> None:
        self._rows.append(decode(row))
        self._bytes += len(row)
        if len(self._rows) >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._end()

    def _flush(self) -> None:
        import pyarrow as pa  # type: ignore[import-untyped]

        if not self._rows:
            return
        arrays = []
        for field, (name, kind) in zip(self._schema, self._columns.items(), strict=True):
            values = [row.get(name) for row in self._rows]
            if kind == "messages" and self._rich:
                texts = [[encode(message).decode() for message in messages] for messages in values]
                arrays.append(pa.array(texts, type=pa.list_(pa.string())).cast(field.type))
            else:
                arrays.append(pa.array(values, type=field.type))
        self._sink(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows, self._bytes = [], 0


def open_writer(kind: As, path: Path, columns: Mapping[str, str], rich: bool) -> Writer:
    """A writer into `path`, a file aside (for datasets: a folder, which is made). Raises `ConfigError` without pyarrow."""
    if kind == "jsonl":
        return Jsonl(path)
    pa = arrow()
    if kind == "parquet":
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        parquet = pq.ParquetWriter(path, schema(columns, rich), compression="zstd")
        return Arrow(columns, rich, parquet.write_table, parquet.close)
    path.mkdir(parents=True)
    stream = pa.ipc.new_stream(str(path / _DATA), schema(columns, rich))

    def end() -> None:
        stream.close()
        about: dict[str, Any] = {
            "_data_files": [{"filename": _DATA}], "_fingerprint": sha256(path / _DATA)[:16], "_format_columns": None,
            "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None,
        }  # fmt: skip
        (path / "state.json").write_text(json.dumps(about, indent=2) + "\n")
        (path / "dataset_info.json").write_text(json.dumps({"features": features(columns, rich)}, indent=2) + "\n")

    return Arrow(columns, rich, stream.write_table, end)


_DATA = "data-00000-of-00001.arrow"


def arrow() -> Any:
    """The module pyarrow. Raises `ConfigError` where it is missing or too old."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ConfigError(
            f"Parquet and datasets need pyarrow: {error}", hint="pip install 'mappa-graph[exchange]', or --as jsonl"
        ) from error
    if not hasattr(pa, "json_"):
        raise ConfigError(f"pyarrow {pa.__version__} has no JSON type", hint="pip install 'pyarrow>=19', or --as jsonl")
    return pa


def schema(columns: Mapping[str, str], rich: bool) -> Any:
    """The Arrow schema, with the features that `datasets` reads from its metadata."""
    pa = arrow()
    types = {
        "text": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "ints": pa.list_(pa.int64()),
        "floats": pa.list_(pa.float64()),
        "messages": pa.list_(pa.json_() if rich else pa.struct([("role", pa.string()), ("content", pa.string())])),
    }  # fmt: skip
    made = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    return made.with_metadata({"huggingface": json.dumps({"info": {"features": features(columns, rich)}})})


def features(columns: Mapping[str, str], rich: bool) -> dict[str, Any]:
    """The columns as `datasets.Features` writes them."""
    names = {"text": "string", "int": "int64", "float": "float64", "bool": "bool", "ints": "int64", "floats": "float64"}

    def value(dtype: str) -> dict[str, Any]:
        return {"dtype": dtype, "_type": "Value"}

    def of(kind: str) -> dict[str, Any]:
        if kind == "messages":
            message = {"_type": "Json"} if rich else {"role": value("string"), "content": value("string")}
            return {"feature": message, "_type": "List"}
        return {"feature": value(names[kind]), "_type": "List"} if kind in ("ints", "floats") else value(names[kind])

    return {name: of(kind) for name, kind in columns.items()}


def check_place(path: Path, kind: As, *, ours: bool, force: bool) -> None:
    """Raises `ConfigError` where an export would overwrite what is not one. `ours`: its card lies beside it."""
    if not path.exists():
        return
    if path.is_dir() != (kind == "datasets"):
        raise ConfigError(f"{path} is a {'folder' if path.is_dir() else 'file'}, which {kind} can't replace", hint="give another path")
    if path.is_dir() and any(path.iterdir()) and not any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        raise ConfigError(f"the folder {path} holds other things than a dataset", hint="give a new folder")
    if not ours and not force:
        raise ConfigError(f"{path} exists, and no export wrote it", hint="give another path, or overwrite it: --force")


def replace(aside: Path, final: Path) -> None:
    """Puts what was written aside in its place, once it is on the disk."""
    for part in sorted(aside.rglob("*")) if aside.is_dir() else [aside]:
        if part.is_file():
            with part.open("rb") as file:
                os.fsync(file.fileno())
    if not aside.is_dir():
        aside.replace(final)
        return
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        remove(old)
        final.replace(old)
    aside.replace(final)
    remove(old)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()

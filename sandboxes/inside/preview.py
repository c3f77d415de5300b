"""Looks at files and describes them as one line of JSON. Its text is run as a cell in a fresh kernel that sees the workspace read-only.

A pickle runs its author's code when it is loaded; here that code meets the same wall as a cell does, and nobody else's kernel.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def describe(name: str, rows: int) -> dict[str, Any]:
    """What a file holds: kind, shape, columns with dtypes, and its first rows as text; or the error that opening it gave."""
    out: dict[str, Any] = {"name": name, "kind": os.path.splitext(name)[1].lstrip(".").lower()}
    try:
        value = _load(name, out["kind"])
        out["type"] = f"{type(value).__module__}.{type(value).__qualname__}"
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple):
            out["shape"] = [int(n) for n in shape]
        if hasattr(value, "dtypes") and hasattr(value, "columns"):
            out["columns"] = [[str(column), str(dtype)] for column, dtype in list(zip(value.columns, value.dtypes, strict=False))[:200]]
            out["head"] = value.head(rows).to_string(max_cols=30)
        elif hasattr(value, "dtype"):
            out["columns"] = [["", str(value.dtype)]]
            out["head"] = str(value[:rows])
        else:
            out["head"] = value if isinstance(value, str) else repr(value)
    except BaseException as error:  # noqa: BLE001
        out["error"] = f"{type(error).__name__}: {error}"
    return out


def _load(name: str, kind: str) -> Any:
    if kind in ("csv", "tsv"):
        import pandas

        return pandas.read_csv(name, sep="\t" if kind == "tsv" else ",")
    if kind == "parquet":
        import pandas

        return pandas.read_parquet(name)
    if kind in ("xlsx", "xls"):
        import pandas

        return pandas.read_excel(name)
    if kind in ("npy", "npz"):
        import numpy

        return numpy.load(name, allow_pickle=False)
    if kind == "joblib":
        return importlib.import_module("joblib").load(name)
    if kind in ("pkl", "pickle"):
        import pickle

        with open(name, "rb") as file:
            return pickle.load(file)
    if kind == "json":
        with open(name, encoding="utf-8", errors="replace") as file:
            return json.load(file)
    with open(name, encoding="utf-8", errors="replace") as file:
        return file.read(4000)


def main(name: str, rows: int, marker: str) -> None:
    """Print the description of `name` between two `marker`s."""
    sys.path[:] = [path for path in sys.path if path]
    shown = describe(name, rows)
    shown["head"] = str(shown.get("head", ""))[:8000]
    sys.stdout.write(marker + json.dumps(shown) + marker)

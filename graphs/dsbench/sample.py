"""sample_submission.csv: every id of the test rows with one constant placeholder, so that it shows the form and tells nothing.

It is always made here, never copied from a download: a downloaded sample may belong to another split of the rows, or hold real values. The
placeholder of a label column is its rarest training label, which no sensible model predicts throughout: that is how grading knows a sample
that was handed in as it is.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


def placeholders(
    targets: Sequence[str], form: str, labels: Mapping[str, Sequence[str]] | None, training: Mapping[str, Iterable[str]] | None = None
) -> dict[str, str]:
    """The constant of each target: 0, 0.5, one over the number of classes, the rarest label, or an empty text."""
    if form == "number":
        return dict.fromkeys(targets, "0")
    if form == "probability":
        return dict.fromkeys(targets, "0.5")
    if form == "probabilities":
        return dict.fromkeys(targets, f"{1 / len(targets):.6f}")
    if form == "text":
        return dict.fromkeys(targets, "text")
    out = {}
    for target in targets:
        known = list((labels or {}).get(target, ())) or ["0"]
        counts = Counter((training or {}).get(target, ()))
        out[target] = min(known, key=lambda label: (counts[label], known.index(label)))
    return out


def sample_submission(ids: Sequence[str], id_column: str, placeholder: Mapping[str, str]) -> bytes:
    """The file's bytes; ids in the order given, and in every row the placeholder of each target."""
    buffer = io.StringIO()
    rows = csv.writer(buffer, lineterminator="\n")
    rows.writerow((id_column, *placeholder))
    rows.writerows((one, *placeholder.values()) for one in ids)
    return buffer.getvalue().encode()

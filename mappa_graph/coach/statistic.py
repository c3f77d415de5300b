"""The few statistics that judging a coach needs, in plain Python: an app that imports the coach needs no NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """NaN for no values."""
    return math.fsum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Standard deviation with n - 1; NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, ties sharing their mean rank."""
    order = sorted(range(len(values)), key=values.__getitem__)
    out = [0.0] * len(values)
    i = 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in range(i, j + 1):
            out[order[k]] = (i + j) / 2 + 1
        i = j + 1
    return out


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Correlation; NaN where either side doesn't vary or there are fewer than two pairs."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values against {len(y)}")
    if len(x) < 2:
        return math.nan
    mx, my = mean(x), mean(y)
    sxx = math.fsum((a - mx) ** 2 for a in x)
    syy = math.fsum((b - my) ** 2 for b in y)
    if sxx <= 0 or syy <= 0:
        return math.nan
    return math.fsum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / math.sqrt(sxx * syy)


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Rank correlation with ties (Spearman's rho: Pearson's r of mean ranks)."""
    return pearson(ranks(x), ranks(y))


def cohen_d(group: Sequence[float], rest: Sequence[float]) -> float:
    """Effect size: difference of the means over the pooled deviation (Cohen's d).

    NaN with fewer than two values on a side; infinite where both sides don't vary and differ.
    """
    if len(group) < 2 or len(rest) < 2:
        return math.nan
    gap = mean(group) - mean(rest)
    n, m = len(group), len(rest)
    pooled = math.sqrt(((n - 1) * deviation(group) ** 2 + (m - 1) * deviation(rest) ** 2) / (n + m - 2))
    if pooled == 0:
        return 0.0 if gap == 0 else math.copysign(math.inf, gap)
    return gap / pooled


def slope(values: Sequence[float]) -> tuple[float, float]:
    """`(slope, t)` of a least-squares line through values at 0, 1, 2, …; t is the slope over its standard error.

    t is infinite for an exact line that isn't flat, and 0 for a flat one. Needs three values or more; otherwise `(NaN, NaN)`.
    """
    n = len(values)
    if n < 3:
        return math.nan, math.nan
    centre, level = (n - 1) / 2, mean(values)
    sxx = math.fsum((i - centre) ** 2 for i in range(n))
    b = math.fsum((i - centre) * (v - level) for i, v in enumerate(values)) / sxx
    rest = math.fsum((v - level - b * (i - centre)) ** 2 for i, v in enumerate(values))
    error = math.sqrt(rest / (n - 2) / sxx)
    if error < 1e-12:
        return b, 0.0 if abs(b) < 1e-12 else math.copysign(math.inf, b)
    return b, b / error

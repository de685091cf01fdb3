"""Confidence intervals of means over independent replications, without scipy.

    mean ± t(df, level) · s/sqrt(n),  df = n - 1      (Student 1908)

Cut to the range that the mean must lie in, where that is known: what is cut off holds no possible value, so the
interval covers the mean as often as before.

The quantile inverts the regularised incomplete beta function, whose continued fraction is that of NIST DLMF 8.17.22.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from simkit.errors import InputError


def beta_share(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - beta_share(b, a, 1.0 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    ) / a
    # Lentz's method: c and d are ratios of successive convergents.
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(1.0 - (a + b) * x / (a + 1.0), tiny)
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 + term * d
            c = 1.0 + term / c
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = c if abs(c) > tiny else tiny
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * value


@lru_cache(maxsize=256)
def student(df: int, level: float) -> float:
    """The t with P(|T| <= t) = level for `df` degrees of freedom.

    >>> round(student(9, 0.95), 3)
    2.262
    """
    low, high = 0.0, 1.0
    while 1.0 - beta_share(df / 2.0, 0.5, df / (df + high * high)) < level:
        high *= 2.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        inside = 1.0 - beta_share(df / 2.0, 0.5, df / (df + middle * middle)) < level
        low, high = (middle, high) if inside else (low, middle)
    return 0.5 * (low + high)


def mean_interval(
    values: Sequence[float], level: float = 0.95, *, least: float = -math.inf, most: float = math.inf
) -> tuple[float, float, float]:
    """(mean, low, high), cut to the possible range [least, most]. One value has no interval: low and high are nan.

    Raises InputError for none.
    """
    n = len(values)
    if not n:
        raise InputError("is empty", key="values", hint="run at least one replication")
    mean = math.fsum(values) / n
    if n == 1:
        return mean, math.nan, math.nan
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    half = student(n - 1, level) * math.sqrt(variance / n)
    return mean, max(mean - half, min(least, mean)), min(mean + half, max(most, mean))

"""Quantiles that merge: how many samples fell into each bucket of values, and what that says of a rank.

A bucket is the first bits of a double: its sign, its exponent and six bits of its fraction. So the index of a bucket is
a shift of integers, exact on every machine, it rises with the value, and sketches merge by adding counts. A bucket's
middle is within 0.8 % of everything in it; values nearer to zero than 2^-1028 share the bucket of zero.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lakebed.errors import Invalid

FRACTION_BITS = 6
SHIFT = 52 - FRACTION_BITS
BUCKET_MAX = 0x7FF << FRACTION_BITS  # of infinity; the lowest is its negative
RELATIVE_ERROR = 1 / 2 ** (FRACTION_BITS + 1)  # 0.8 %
QUANTILES_MAX = 16  # asked for at once

# The same in Spark's SQL, for a column `value` without NaN.
BUCKET_SQL = (
    "cast(signum(value) * shiftright(cast(java_method('java.lang.Double', 'doubleToLongBits', abs(value)) as bigint), "
    f"{SHIFT}) as int)"
)


def buckets_of(values: Any) -> Any:
    """The bucket of each value, which must not be NaN."""
    values = np.asarray(values, np.float64)
    size = (np.abs(values).view(np.int64) >> SHIFT).astype(np.int32)
    return np.where(values < 0, -size, size)


def middle(bucket: int) -> float:
    """The value that stands for a bucket."""
    size = abs(bucket)
    if size == 0:
        return 0.0
    if size >= BUCKET_MAX:
        return math.copysign(math.inf, bucket)
    half = np.array([(size << SHIFT) | (1 << (SHIFT - 1))], np.int64).view(np.float64)
    return math.copysign(float(half[0]), bucket)


def quantile(q: float, buckets: Any, counts: Any, low: float, high: float) -> float:
    """The value of rank ceil(q·n) of the n sketched samples, within 1 %; NaN without samples.

    `buckets` ascend; `low` and `high` are the least and the greatest sample, which bound the answer.
    """
    total = int(np.sum(counts))
    if not total:
        return math.nan
    rank = max(1, math.ceil(q * total))
    at = int(np.searchsorted(np.cumsum(counts), rank))
    return min(max(middle(int(buckets[at])), low), high)


def check_quantiles(asked: list[float]) -> list[float]:
    """The quantiles as asked. Raises Invalid outside 0 to 1, and for too many."""
    if len(asked) > QUANTILES_MAX or not all(0 <= q <= 1 for q in asked):
        raise Invalid(f"quantiles are up to {QUANTILES_MAX} numbers from 0 to 1", hint="q=0.99")
    return asked

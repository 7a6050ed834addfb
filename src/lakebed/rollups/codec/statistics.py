"""Exact sums and quantile sketches: both merge, and the result does not depend on the order.

A sum is kept as doubles: `sum`, the exact sum rounded to nearest, and `rest`, what rounding left, rounded in turn until
nothing is left. These parts are themselves doubles to be added up, so sums merge by the same function that made them,
and however samples are grouped on the way the parts come out the same, bit for bit. A value of 2^960 or beyond counts
as infinite, so that no sum of finite values can overflow. Infinities add up as IEEE says: one sign gives that infinity,
both give NaN. NaN must not come in.

A sketch counts the samples in each bucket of values. A bucket is the first bits of a double: its sign, its exponent and
six bits of its fraction. So the index of a bucket is a shift of integers, exact on every machine, it rises with the
value, and sketches merge by adding counts. A bucket's middle is within 0.8 % of everything in it; values nearer to zero
than 2^-1028 share the bucket of zero.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lakebed.core.errors import Invalid

BEYOND = 2.0**960
LIMB_BITS = 32  # of the fixed-point numbers that sums are made in; 2^31 values add up before one overflows
GROUPS_AT_ONCE = 32_768  # sums in work at once: at worst 68 limbs each
_MASK = np.int64(2**LIMB_BITS - 1)
_FRACTION = np.int64(2**52 - 1)


def exact_sums(values: Any, groups: Any, count: int) -> tuple[Any, Any, Any]:
    """The sums of `count` groups: (sum of each, offsets into rest, rest). `groups` ascends from 0; none may be empty.

    No value is NaN. The parts of a merged sum are given back in as values of its group.
    """
    values = np.asarray(values, np.float64) + 0.0  # no negative zero
    starts = _starts(groups, count)
    sizes = np.diff(np.append(starts, len(values)))
    sums = values[starts] if count else np.zeros(0)
    infinite = _infinite(values, groups, count)
    sums[~np.isnan(infinite)] = 0.0
    # One value is its own exact sum: most windows of slow series hold one.
    many = np.flatnonzero((sizes > 1) & np.isnan(infinite))
    rests: list[tuple[Any, Any]] = []
    for at in range(0, len(many), GROUPS_AT_ONCE):
        some = many[at : at + GROUPS_AT_ONCE]
        chosen = np.zeros(count, bool)
        chosen[some] = True
        rows = np.flatnonzero(chosen[groups])
        place = np.cumsum(chosen)[groups[rows]] - 1
        sums[some], left = _add(values[rows], place, len(some))
        rests += [(some[which], part) for which, part in left]
    both = infinite == 0.0
    sums = np.where(np.isnan(infinite), sums, np.where(both, np.nan, infinite))
    return sums, *_ragged(rests, count)


def _infinite(values: Any, groups: Any, count: int) -> Any:
    """Of each group: NaN when all its values are finite, else its infinity, or zero when it has both."""
    signs = np.full(count, np.nan)
    far = np.flatnonzero(np.abs(values) >= BEYOND)
    if len(far):
        up, down = np.zeros(count, bool), np.zeros(count, bool)
        up[groups[far[values[far] > 0]]] = True
        down[groups[far[values[far] < 0]]] = True
        signs = np.where(up & down, 0.0, np.where(up, np.inf, np.where(down, -np.inf, signs)))
    return signs


def _starts(groups: Any, count: int) -> Any:
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    if len(starts) != count:
        raise ValueError(f"{len(starts)} groups where {count} were given")
    return starts


def _add(values: Any, groups: Any, count: int) -> tuple[Any, list[tuple[Any, Any]]]:
    """Rounded sums, and the rests as (which groups, one part of each), in order of size."""
    limbs, low = _limbs(values, groups, count)
    sums, rests = np.zeros(count), []
    open_ = np.arange(count)
    first = True
    while len(open_):
        part = _rounded(limbs, low)
        if first:
            sums, first = part, False
        else:
            rests.append((open_, part))
        taken, taken_low = _limbs(-part, np.arange(len(open_)), len(open_), low, len(limbs))
        assert taken_low == low
        limbs = limbs + taken
        left = _carried(limbs.copy()).any(axis=0)
        open_, limbs = open_[left], limbs[:, left]
    return sums, rests


def _limbs(values: Any, groups: Any, count: int, low: int = -1, height: int = 0) -> tuple[Any, int]:
    """The sums of the groups as fixed-point numbers: signed limbs, lowest first, of which the first has place `low`."""
    bits = values.view(np.int64)
    exponent = (bits >> 52) & 0x7FF
    fraction = (bits & _FRACTION) | np.where(exponent > 0, np.int64(1) << 52, 0)
    power = np.maximum(exponent, 1) - 1  # of the lowest bit, counted from 2^-1074
    place, shift = power >> 5, power & 31
    nothing = fraction == 0
    if nothing.any():  # zeros go where others are: at their own place they would make every number as long as can be
        place[nothing] = max(low, int(place.max()))
    lower = (fraction & _MASK) << shift
    upper = ((fraction >> LIMB_BITS) << shift) + (lower >> LIMB_BITS)
    sign = np.where(bits < 0, np.int64(-1), np.int64(1))
    pieces = ((lower & _MASK) * sign, (upper & _MASK) * sign, (upper >> LIMB_BITS) * sign)
    if low < 0:
        low = int(place.min())
        height = int(place.max()) - low + 5  # three limbs of a value, and two for what carries
    limbs = np.zeros((height, count), np.int64)
    # By place, and inside a place in order of groups: each run of one group is added up at once.
    for where in np.flatnonzero(np.bincount(place)).tolist():
        rows = np.flatnonzero(place == where)
        of = groups[rows]
        begins = np.flatnonzero(np.diff(of, prepend=-1))
        for up, piece in enumerate(pieces):
            limbs[where - low + up, of[begins]] += np.add.reduceat(piece[rows], begins)
    return limbs, low


def _carried(limbs: Any) -> Any:
    """The same numbers with every limb but the highest in [0, 2^32): the one way to write them. In place."""
    for at in range(len(limbs) - 1):
        carry = limbs[at] >> LIMB_BITS
        limbs[at] -= carry << LIMB_BITS
        limbs[at + 1] += carry
    return limbs


def _rounded(limbs: Any, low: int) -> Any:
    """Each number rounded to the nearest double, ties to even."""
    limbs = _carried(limbs.copy())
    negative = limbs[-1] < 0
    limbs[:, negative] *= -1
    limbs = _carried(limbs)
    columns = np.arange(limbs.shape[1])
    top = len(limbs) - 1 - np.argmax(limbs[::-1] != 0, axis=0)
    high, middle, bottom = (_limb(limbs, top - down, columns) for down in range(3))
    sticky = np.zeros(len(columns), bool)
    for at in range(len(limbs)):
        sticky |= (limbs[at] != 0) & (at < top - 2)
    # 64 bits that begin with the highest one; the last of them is set when anything below is: rounding to odd, after
    # which rounding to the nearest of 53 bits is right.
    shift = np.uint64(LIMB_BITS) - _bit_length(high)
    window = (high << (shift + np.uint64(32))) | (middle << shift) | (bottom >> (np.uint64(32) - shift))
    sticky |= (bottom & ((np.uint64(1) << (np.uint64(32) - shift)) - np.uint64(1))) != 0
    window |= sticky.astype(np.uint64)
    power = (low + top) * LIMB_BITS - 1074 - 32 - shift.astype(np.int64)
    sizes = np.where(high == 0, 0.0, _scaled(window.astype(np.float64), power))
    return np.where(negative & (sizes != 0), -sizes, sizes)


def _scaled(numbers: Any, power: Any) -> Any:
    # In two steps: a power below -1074 has no double of its own, but what comes out is exact where it is subnormal.
    half = power // 2
    return np.ldexp(np.ldexp(numbers, half.astype(np.int32)), (power - half).astype(np.int32))


def _limb(limbs: Any, at: Any, columns: Any) -> Any:
    return np.where(at >= 0, limbs[np.maximum(at, 0), columns], 0).astype(np.uint64)


def _bit_length(numbers: Any) -> Any:
    """Of numbers below 2^32, which doubles hold exactly."""
    return np.frexp(numbers.astype(np.float64))[1].astype(np.uint64)


def _ragged(parts: list[tuple[Any, Any]], count: int) -> tuple[Any, Any]:
    """Offsets and parts by group, in the order they were given for each."""
    if not parts:
        return np.zeros(count + 1, np.int64), np.zeros(0)
    which, values = np.concatenate([w for w, _ in parts]), np.concatenate([v for _, v in parts])
    order = np.argsort(which, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(which, minlength=count))]).astype(np.int64)
    return offsets, values[order]


FRACTION_BITS = 6
SHIFT = 52 - FRACTION_BITS
BUCKET_MAX = 0x7FF << FRACTION_BITS  # of infinity; the lowest is its negative
QUANTILES_MAX = 16  # in one request

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
    """The value that represents a bucket."""
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


def check_quantiles(quantiles: list[float]) -> list[float]:
    """The quantiles as requested. Raises Invalid outside 0 to 1, and for too many."""
    if len(quantiles) > QUANTILES_MAX or not all(0 <= q <= 1 for q in quantiles):
        raise Invalid(f"quantiles are up to {QUANTILES_MAX} numbers from 0 to 1", hint="q=0.99")
    return quantiles

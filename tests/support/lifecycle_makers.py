"""Makers of rules and entries for the lifecycle tests."""

from __future__ import annotations

from typing import Any

from lakebed.lifecycle.model import DAY_S, SECOND_NS, Calendar, ObjectEntry, ObjectIdentity, Rule

DAY = DAY_S * SECOND_NS
T0 = 1_760_000_000 * SECOND_NS // DAY * DAY + 10 * 3600 * SECOND_NS  # ten in the morning
EXACT = Calendar(rounding="exact")
MIDNIGHT = Calendar(rounding="midnight")


def rule(**fields: Any) -> Rule:
    return Rule(**fields)


def entry(key: str = "logs/a", *, mtime_ns: int = T0, size: int = 100, bucket: str = "b", **fields: Any) -> ObjectEntry:
    return ObjectEntry(bucket=bucket, key=key, identity=ObjectIdentity(mtime_ns, size, "3,01ab", "00"), **fields)


def noncurrent(since_ns: int, newer: int = 0, **fields: Any) -> ObjectEntry:
    return entry(
        version_id="v1", latest=False, alone=False, noncurrent_since_ns=since_ns, newer_noncurrent=newer, **fields
    )


def marker(*, alone: bool = True, mtime_ns: int = T0, **fields: Any) -> ObjectEntry:
    return entry(version_id="m1", marker=True, alone=alone, size=0, mtime_ns=mtime_ns, **fields)

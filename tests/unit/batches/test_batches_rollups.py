"""Ranges from rollups: chunks of one hour add up, and damage is told."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from batches_gateway import collector
from lakebed.batches import paths
from lakebed.clock import SystemClock
from lakebed.errors import Invalid
from lakebed.frame.rollup import decode_rollup, encode_rollup, rollup_schema
from lakebed.store.memory import MemoryStore

HOUR_NS = 1_760_000_400_000_000_000  # a full hour
MINUTE_NS = 60 * 10**9


def chunk(host: str, *rows: tuple[int, int, float, float, float, int, float]) -> bytes:
    names = ("start_ns", "count", "sum", "min", "max", "last_ns", "last")
    listed: list[dict[str, Any]] = [
        {"agent_id": "a", "labels": [("host", host)], **dict(zip(names, row, strict=True))} for row in rows
    ]
    return encode_rollup(pa.Table.from_pylist(listed, schema=rollup_schema()))


async def test_windows_of_several_chunks_add_up() -> None:
    """Two chunks made from different batches of the same minute are one bucket; other series are left out."""
    store = MemoryStore(clock=SystemClock())
    folder = paths.rollup_folder(60, paths.hour_of(HOUR_NS), "disk/used %")
    later = HOUR_NS + MINUTE_NS
    await store.create(f"{folder}1.lmrollup.zst", chunk("h0", (HOUR_NS, 2, 3.0, 1.0, 2.0, 5, 2.0)))
    await store.create(
        f"{folder}2.lmrollup.zst",
        chunk("h0", (HOUR_NS, 1, 9.0, 9.0, 9.0, 4, 9.0), (later, 1, 1.0, 1.0, 1.0, 9, 1.0)),
    )
    await store.create(f"{folder}3.lmrollup.zst", chunk("h1", (HOUR_NS, 1, 1.0, 1.0, 1.0, 1, 1.0)))
    await store.create(f"{folder}4.lmrollup.zst", b"damaged")

    asked = {"metric": "disk/used %", "match": "host=h0", "window_s": 60, "from": HOUR_NS, "to": HOUR_NS + 10**12}
    async with collector(store) as (client, _):
        answer = (await client.get("/v1/query/range", params=asked)).json()

    (series,) = answer["series"]
    assert {"agent_id": "a", "host": "h0"} == series["labels"]
    assert [[HOUR_NS, 3, 12.0, 1.0, 9.0, 5, 2.0], [later, 1, 1.0, 1.0, 1.0, 9, 1.0]] == series["buckets"]
    assert (True, ["1 rollup chunks cannot be read"]) == (answer["partial"], answer["why_partial"])
    assert {"rollup": 4} == answer["sources"]


def test_chunks_that_lie_are_refused() -> None:
    """Truncated, foreign and oversized chunks are Invalid."""
    good = chunk("h", (0, 1, 1.0, 1.0, 1.0, 1, 1.0))

    for wrong in (good[:-1], b"", b"x" * 100):
        with pytest.raises(Invalid):
            decode_rollup(wrong)
    with pytest.raises(Invalid):
        decode_rollup(good, bytes_max=10)
    with pytest.raises(Invalid):
        encode_rollup(pa.table({"a": [1]}))

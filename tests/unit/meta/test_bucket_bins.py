"""Bins of the bucket backend: when they are split, and which groups they name."""

from __future__ import annotations

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.meta.bucket.backend import BucketMeta
from lakebed.meta.bucket.bins import MEMBERS_CONTENDED_MAX, MEMBERS_MAX
from lakebed.meta.bucket.group import CONTENTION_WINDOW
from lakebed.meta.model import Put, prefix_end
from lakebed.store.memory import MemoryStore
from lakebed.store.runtime import StoreRuntime

FOLDER = "index/"


def connect(store: MemoryStore, clock: ManualClock, seed: int) -> BucketMeta:
    return BucketMeta(StoreRuntime(clock, Ids.seeded(seed), Metrics(), store), "m", layout="bins")


def key(at: int) -> str:
    return f"{FOLDER}{at:06d}"


def group(at: int) -> str:
    return f"orders:{at:03d}"


@pytest.mark.parametrize(
    ("members", "writers", "count", "expected"),
    [
        (MEMBERS_CONTENDED_MAX + 1, 2, CONTENTION_WINDOW // 2, 1),
        (MEMBERS_CONTENDED_MAX + 1, 2, CONTENTION_WINDOW // 2 + 1, 2),
        (MEMBERS_CONTENDED_MAX, 2, CONTENTION_WINDOW, 1),
        (MEMBERS_MAX, 1, CONTENTION_WINDOW, 1),
        (MEMBERS_MAX + 1, 1, 1, 2),
    ],
)
async def test_a_bin_that_several_processes_change_in_turn_is_split_earlier(
    manual_clock: ManualClock, members: int, writers: int, count: int, expected: int
) -> None:
    """When more than half of a process's last changes came behind another's; alone, it may have more groups."""
    store = MemoryStore(clock=manual_clock)
    names = [group(at) for at in range(members)]
    await connect(store, manual_clock, 0).put_all([Put(key(0), b"x", None, name) for name in names])
    metas = [connect(store, manual_clock, seed) for seed in range(1, writers + 1)]

    for _ in range(count):
        for at, meta in enumerate(metas):
            await meta.put(key(0), b"y", partition_key=names[at])

    fresh = connect(store, manual_clock, 9)
    assert expected == len({(await fresh.head(name)).members for name in names})
    assert names == await fresh.groups()


@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_bin_forgets_a_group_with_its_last_entry(
    manual_clock: ManualClock, spilled: bool, at_once: bool
) -> None:
    """In the head or in leaves; until then it is named, its neighbours are, and a group that comes back is again."""
    meta = connect(MemoryStore(clock=manual_clock), manual_clock, 1)
    names = ["orders:0", "orders:1", "orders:2"]
    count = 150 if spilled else 3
    for name in names:
        await meta.put_all([Put(key(at), b"x" * 4000 if spilled else b"x", None, name) for at in range(count)])
    assert spilled == bool((await meta.head("orders:1")).refs)

    if at_once:
        await meta.delete_range(FOLDER, key(count - 1), partition_key="orders:1")
    else:
        for at in range(count - 1):
            await meta.delete(key(at), partition_key="orders:1")
    before = await meta.groups()
    await meta.delete(key(count - 1), partition_key="orders:1")
    after = await meta.groups()
    await meta.put(key(0), b"again", partition_key="orders:1")

    assert (names, ["orders:0", "orders:2"]) == (before, after)
    assert names == await meta.groups()
    assert [key(0)] == [
        entry.key for entry in await meta.range(FOLDER, prefix_end(FOLDER), limit=9, partition_key="orders:1")
    ]

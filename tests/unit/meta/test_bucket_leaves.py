"""Entries that were spilled into leaves: found by every scan, and safe from a sweep that meets a slow spill."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from lakebed.core.clock import ManualClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.meta.bucket.backend import BucketMeta, Layout
from lakebed.meta.bucket.model import BinPaths, BucketPaths, Head, decode_head
from lakebed.meta.model import ABSENT
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from lakebed.store.runtime import StoreRuntime

GROUP = {"partition_key": "orders:0"}
INDEX = "llog/orders/partitions/0/index/"
END = INDEX[:-1] + "0"
PATHS = BucketPaths("m")
LEAVES = PATHS.leaves("orders=3A0")
BIN_LEAVES = BinPaths("m").leaves("")
COUNT = 300  # enough for several leaves


class Hooked(MemoryStore):
    """Something happens once, after a leaf was stored and before the head refers to it."""

    hook: Callable[[], Awaitable[object]] | None = None

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        made = await super().create(key, data)
        if key.startswith((LEAVES, BIN_LEAVES)) and self.hook is not None:
            hook, self.hook = self.hook, None
            await hook()
        return made


def connect(store: MemoryStore, clock: ManualClock, seed: int, layout: Layout = "groups") -> BucketMeta:
    return BucketMeta(StoreRuntime(clock, Ids.seeded(seed), Metrics(), store), "m", horizon_s=60.0, layout=layout)


def key(at: int) -> str:
    return f"{INDEX}{at:020d}"


async def filled(meta: BucketMeta) -> list[str]:
    for at in range(COUNT):
        await meta.put(key(at), b"x" * 250, expected=ABSENT, **GROUP)
    return [key(at) for at in range(COUNT)]


async def test_a_spill_that_a_sweep_overtook_is_planned_again(manual_clock: ManualClock) -> None:
    """The sweep found the leaf unreferenced and old, and deleted it: the head never refers to it."""
    store = Hooked(clock=manual_clock)
    swept: list[int] = []

    async def overtake() -> None:
        await manual_clock.advance(61.0)
        swept.append(await connect(store, manual_clock, 2).sweep())

    store.hook = overtake
    meta, expected = connect(store, manual_clock, 1), []
    while store.hook is not None and len(expected) < COUNT:  # no further: a later spill would write the rows anew
        await meta.put(key(len(expected)), b"x" * 250, expected=ABSENT, **GROUP)
        expected.append(key(len(expected)))

    found = await connect(store, manual_clock, 3).range(INDEX, END, limit=1000, **GROUP)
    head = decode_head((await store.get(PATHS.head("orders=3A0"))).data, "head")
    left = {info.key async for info in store.list(LEAVES)}

    assert [1] == swept
    assert expected == [entry.key for entry in found]
    assert {f"{LEAVES}{ref.id}.json" for ref in head.refs} <= left


async def test_a_spill_of_a_bin_that_a_sweep_overtook_is_planned_again(manual_clock: ManualClock) -> None:
    """As with a group of its own: what was in the deleted leaf is still found."""
    store = Hooked(clock=manual_clock)
    swept: list[int] = []

    async def overtake() -> None:
        await manual_clock.advance(61.0)
        swept.append(await connect(store, manual_clock, 2, "bins").sweep())

    store.hook = overtake
    meta, expected = connect(store, manual_clock, 1, "bins"), []
    while store.hook is not None and len(expected) < COUNT:
        await meta.put(key(len(expected)), b"x" * 4000, expected=ABSENT, **GROUP)
        expected.append(key(len(expected)))

    found = await connect(store, manual_clock, 3, "bins").range(INDEX, END, limit=1000, **GROUP)

    assert [1] == swept
    assert expected == [entry.key for entry in found]


async def test_a_scan_from_any_place_gives_as_many_as_were_asked_for(manual_clock: ManualClock) -> None:
    """Also when it begins in the middle of a leaf and continues in the next one, and in the head."""
    store = Hooked(clock=manual_clock)
    expected = await filled(connect(store, manual_clock, 1))
    meta = connect(store, manual_clock, 2)

    for start in range(0, COUNT, 7):
        found = await meta.range(key(start), END, limit=120, **GROUP)
        assert expected[start : start + 120] == [entry.key for entry in found]
        first = await meta.ceiling(key(start), prefix=INDEX, **GROUP)
        assert key(start) == (first and first.key)


async def test_a_leaf_that_a_slow_spill_refers_to_by_now_is_not_swept(manual_clock: ManualClock) -> None:
    """The sweep read the head before the spill; the write that raises its fence shows the reference."""
    store = Hooked(clock=manual_clock)
    spilling, sweeping = connect(store, manual_clock, 1), connect(store, manual_clock, 2)
    seen: list[int] = []

    async def overtake() -> None:
        """The leaf is stored and old: another process has read the head, and raises its fence after the spill."""
        await manual_clock.advance(61.0)
        group = sweeping._named(GROUP["partition_key"])
        seen.append(len(group._unreferenced(await group.head(), await group._old_leaves())))

    store.hook = overtake
    expected: list[str] = []
    while store.hook is not None and len(expected) < COUNT:
        await spilling.put(key(len(expected)), b"x" * 250, expected=ABSENT, **GROUP)
        expected.append(key(len(expected)))
    group = sweeping._named(GROUP["partition_key"])
    before = group._seen.value

    async def late() -> Head:
        return before  # what it read before the spill

    group.head = late  # type: ignore[method-assign]
    swept = await group.sweep()

    found = await connect(store, manual_clock, 3).range(INDEX, END, limit=1000, **GROUP)
    assert ([1], 0) == (seen, swept)
    assert expected == [entry.key for entry in found]

"""Entries that were spilled into leaves: found by every scan, and safe from a sweep that meets a slow spill."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Denied
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.meta.bucket import bins, group
from lakebed.meta.bucket.backend import BucketMeta, Layout
from lakebed.meta.bucket.model import BinPaths, BucketPaths, Head, decode_head
from lakebed.meta.model import ABSENT, Put
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
        named = sweeping._named(GROUP["partition_key"])
        seen.append(len(named._unreferenced(await named.head(), await named._old_leaves())))

    store.hook = overtake
    expected: list[str] = []
    while store.hook is not None and len(expected) < COUNT:
        await spilling.put(key(len(expected)), b"x" * 250, expected=ABSENT, **GROUP)
        expected.append(key(len(expected)))
    named = sweeping._named(GROUP["partition_key"])
    before = named._seen.value

    async def late() -> Head:
        return before  # what it read before the spill

    named.head = late  # type: ignore[method-assign]
    swept = await named.sweep()

    found = await connect(store, manual_clock, 3).range(INDEX, END, limit=1000, **GROUP)
    assert ([1], 0) == (seen, swept)
    assert expected == [entry.key for entry in found]


async def test_a_leaf_that_a_slow_spill_of_a_bin_refers_to_by_now_is_not_swept(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a group of its own: the spill ends after the sweep has looked, and before its write of the bin."""
    store = Hooked(clock=manual_clock)
    spilling, sweeping = connect(store, manual_clock, 1, "bins"), connect(store, manual_clock, 2, "bins")
    stored, looked = asyncio.Event(), asyncio.Event()

    async def overtaken() -> None:
        await manual_clock.advance(61.0)
        stored.set()
        await looked.wait()

    async def fill() -> list[str]:
        expected: list[str] = []
        while store.hook is not None and len(expected) < COUNT:
            await spilling.put(key(len(expected)), b"x" * 4000, expected=ABSENT, **GROUP)
            expected.append(key(len(expected)))
        return expected

    async def fenced(bin: group.KeyGroup) -> Head:
        """Raises the fence when the spill is done."""
        looked.set()
        await filling
        return await raise_fence(bin)

    store.hook, raise_fence = overtaken, group.KeyGroup.raise_fence
    filling = asyncio.ensure_future(fill())
    await stored.wait()
    orphans = await sweeping.orphans()
    monkeypatch.setattr(group.KeyGroup, "raise_fence", fenced)
    swept = await sweeping.sweep()

    found = await connect(store, manual_clock, 3, "bins").range(INDEX, END, limit=1000, **GROUP)
    assert (1, 0) == (len(orphans), swept)
    assert filling.result() == [entry.key for entry in found]


async def test_a_bin_that_sweeps_after_its_spills_keeps_the_leaves_of_other_bins(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bins share one folder of leaves: what no bin refers to goes, and is counted; what any of them has stays."""
    monkeypatch.setattr(bins, "MEMBERS_MAX", 1)
    monkeypatch.setattr(group, "SWEEP_EVERY", 1)
    store = MemoryStore(clock=manual_clock)
    metrics = Metrics()
    meta = BucketMeta(StoreRuntime(manual_clock, Ids.seeded(1), metrics, store), "m", horizon_s=60.0, layout="bins")
    folders = {"left:0": "llog/left/partitions/0/index/", "right:0": "llog/right/partitions/0/index/"}
    before = [await meta.put(f"{folder}first", b"x", partition_key=name) for name, folder in folders.items()]
    again = [await meta.put(f"{folder}first", b"y", partition_key=name) for name, folder in folders.items()]
    assert max(int(entry.version) for entry in before) < min(int(entry.version) for entry in again)  # after the split
    created: set[str] = set()
    for at in range(0, 600, 200):
        for partition_key, folder in folders.items():
            puts = [Put(f"{folder}{number:06d}", b"x" * 4000, None, partition_key) for number in range(at, at + 200)]
            await meta.put_all(puts)
            created |= {info.key async for info in store.list(BIN_LEAVES)}
            await manual_clock.advance(61.0)
    await meta.sweep()

    fresh = connect(store, manual_clock, 2, "bins")
    left = {info.key async for info in store.list(BIN_LEAVES)}
    heads = [await fresh.head(partition_key) for partition_key in folders]
    assert {f"{BIN_LEAVES}{ref.id}.json" for head in heads for ref in head.refs} == left
    assert (["left:0"], ["right:0"]) == tuple(list(head.members) for head in heads)
    assert 0 < len(created - left) <= metrics.value("lakebed_meta_swept_total")
    for partition_key, folder in folders.items():
        found = await fresh.range(folder, folder[:-1] + "0", limit=1000, partition_key=partition_key)
        assert 601 == len(found)


@pytest.mark.parametrize("layout", ["groups", "bins"])
async def test_a_scan_of_all_groups_is_in_the_order_of_keys_and_of_what_is_there(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """Keys of several groups lie between each other, spilled, split or neither; an entry goes with its session."""
    store = MemoryStore(clock=manual_clock)
    meta = connect(store, manual_clock, 1, layout)
    expected = [key(at) for at in range(COUNT)]
    await meta.put_all([Put(name, b"x" * 4000, None, f"orders:{at % 3}") for at, name in enumerate(expected)])
    monkeypatch.setattr(bins, "MEMBERS_MAX", 1)
    alive = await meta.open_session(timeout_s=30.0)
    brief = [f"llog/brief/{at}" for at in range(6)]
    for at, name in enumerate(brief):
        await meta.put(name, b"x", session=alive, partition_key=f"orders:{at % 3}")

    fresh = connect(store, manual_clock, 2, layout)
    here = await fresh.range("llog/brief/", "llog/brief0", limit=5)
    found = await fresh.range(INDEX, END, limit=COUNT - 1)
    await alive.close()
    gone = await connect(store, manual_clock, 3, layout).range("llog/brief/", "llog/brief0", limit=5)

    assert (brief[:5], []) == ([entry.key for entry in here], gone)
    assert expected[:-1] == [entry.key for entry in found]
    assert [info.key async for info in store.list(PATHS.leaves("orders=3A0") if layout == "groups" else BIN_LEAVES)]


async def test_a_group_that_cannot_be_written_fails_its_own_puts(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has the error; those of another group are made."""
    store = MemoryStore(clock=manual_clock)
    meta = connect(store, manual_clock, 1)
    create = store.create

    async def refused(path: str, data: bytes) -> object:
        if path == PATHS.head("bad=3A0"):
            raise Denied("not here")
        return await create(path, data)

    monkeypatch.setattr(store, "create", refused)
    made = await meta.put_all([Put(key(at), b"x", None, f"{name}:0") for at, name in enumerate(["bad", "good", "bad"])])

    assert ["Denied", "MetaEntry", "Denied"] == [type(one).__name__ for one in made]

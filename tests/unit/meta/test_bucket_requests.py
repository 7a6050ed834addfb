"""What the bucket backend costs in requests, and what it does when sessions and leaves end under it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import AlreadyExists, Corrupt, Fenced, NotFound
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.meta.bucket.backend import BucketMeta
from lakebed.meta.bucket.model import HOT_BYTES_MAX, BucketPaths, decode_head
from lakebed.meta.model import ABSENT
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from lakebed.store.runtime import StoreRuntime

GROUP = {"partition_key": "orders:0"}
ROOT = "llog/orders/partitions/0/"
INDEX = ROOT + "index/"
PATHS = BucketPaths("m")
HEAD = PATHS.head("orders=3A0")
LEAVES = PATHS.leaves("orders=3A0")


class CountingStore(MemoryStore):
    """The memory store, counting requests by verb."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.requests: Counter[str] = Counter()

    async def get(self, key: str) -> Any:
        self.requests["get"] += 1
        return await super().get(key)

    async def create(self, key: str, data: bytes) -> Any:
        self.requests["create"] += 1
        await asyncio.sleep(0)  # as long as anything on a network: others get their turn
        return await super().create(key, data)

    async def replace(self, key: str, data: bytes, etag: str) -> Any:
        self.requests["replace"] += 1
        await asyncio.sleep(0)
        return await super().replace(key, data, etag)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        self.requests["list"] += 1
        async for info in super().list(prefix, after=after):
            yield info

    def taken(self) -> dict[str, int]:
        """The requests since the last call."""
        taken, self.requests = dict(self.requests), Counter()
        return taken


@pytest.fixture
def store(manual_clock: ManualClock) -> CountingStore:
    return CountingStore(manual_clock)


def connect(store: CountingStore, clock: ManualClock, *, horizon_s: float = 600.0) -> BucketMeta:
    runtime = StoreRuntime(clock, Ids.seeded(len(store.requests)), Metrics(), store)
    return BucketMeta(runtime, "m", horizon_s=horizon_s)


def key(offset: int) -> str:
    return f"{INDEX}{offset:020d}"


async def filled(meta: BucketMeta, count: int) -> None:
    for at in range(1, count + 1):
        await meta.put(key(at), b"x" * 250, expected=ABSENT, **GROUP)


async def test_a_change_is_one_request_and_a_read_is_one(store: CountingStore, manual_clock: ManualClock) -> None:
    """Uncontended and unspilled: put, compare-and-swap and delete one replace each, get and ceiling one get each."""
    meta = connect(store, manual_clock)
    made = await meta.put(ROOT + "meta/control", b"1", **GROUP)
    store.taken()

    made = await meta.put(ROOT + "meta/control", b"2", expected=made.version, **GROUP)
    await meta.put(key(1), b"1", expected=ABSENT, **GROUP)
    await meta.delete(ROOT + "meta/control", expected=made.version, **GROUP)
    changes = store.taken()
    await meta.get(key(1), **GROUP)
    await meta.ceiling(key(0), prefix=INDEX, **GROUP)
    await meta.range(INDEX, INDEX[:-1] + "0", limit=10, **GROUP)

    assert changes == {"replace": 3}
    assert store.taken() == {"get": 3}


async def test_changes_that_wait_together_share_one_request(store: CountingStore, manual_clock: ManualClock) -> None:
    """A hundred concurrent puts of one process cost a few writes, not a hundred."""
    meta = connect(store, manual_clock)
    await meta.put(key(0), b"", **GROUP)
    store.taken()

    await asyncio.gather(*(meta.put(key(at), b"x", expected=ABSENT, **GROUP) for at in range(1, 101)))

    assert store.taken()["replace"] <= 3


async def test_reads_that_wait_together_share_one_request(store: CountingStore, manual_clock: ManualClock) -> None:
    """Concurrent reads of a group are answered by one get that began after all of them."""
    meta = connect(store, manual_clock)
    await meta.put(key(0), b"", **GROUP)
    store.taken()

    await asyncio.gather(*(meta.get(key(0), **GROUP) for _ in range(50)))

    assert store.taken() == {"get": 1}


async def test_a_read_after_a_write_does_not_join_one_that_began_before_it(manual_clock: ManualClock) -> None:
    """A slow answer holds the old value: whoever asks after the change of another process gets the new one."""

    class Held(MemoryStore):
        held: asyncio.Event | None = None

        async def get(self, key: str) -> Any:
            found, held = await super().get(key), self.held
            if held is not None:
                await held.wait()
            return found

    store = Held(clock=manual_clock)
    mine, other = (BucketMeta(StoreRuntime(manual_clock, Ids.seeded(seed), Metrics(), store), "m") for seed in range(2))
    await other.put("k", b"old", **GROUP)
    store.held = held = asyncio.Event()
    early = asyncio.ensure_future(mine.get("k", **GROUP))
    await settle()
    store.held = None
    await other.put("k", b"new", **GROUP)

    late = asyncio.ensure_future(mine.get("k", **GROUP))
    await settle()
    held.set()

    assert (b"old", b"new") == ((await early).value, (await late).value)


async def test_spilled_entries_cost_one_more_get_once(store: CountingStore, manual_clock: ManualClock) -> None:
    """A newcomer reads the head and one leaf for a ceiling, and the leaf never again."""
    await filled(connect(store, manual_clock), 400)
    meta = connect(store, manual_clock)
    store.taken()

    first = await meta.ceiling(key(7), prefix=INDEX, **GROUP)
    cost_of_first = store.taken()
    await meta.ceiling(key(8), prefix=INDEX, **GROUP)

    assert key(7) == (first and first.key)
    assert cost_of_first == {"get": 2}
    assert store.taken() == {"get": 1}


async def test_spilling_is_rare_and_keeps_the_head_small(store: CountingStore, manual_clock: ManualClock) -> None:
    """A thousand appends cost about a thousand writes, and the head stays what one quick PUT carries."""
    meta = connect(store, manual_clock)

    await filled(meta, 1000)

    requests = store.taken()
    head = (await store.get(HEAD)).data
    assert sum(requests.values()) < 1100
    assert len(head) < 2 * HOT_BYTES_MAX


async def test_compaction_is_edits_of_the_head(store: CountingStore, manual_clock: ManualClock) -> None:
    """Overwriting the end key and deleting everything below it are two writes, however many entries go."""
    meta = connect(store, manual_clock)
    await filled(meta, 500)
    store.taken()

    await meta.put(key(450), b"COMPACTED", **GROUP)
    await meta.delete_range(key(0), key(450), **GROUP)

    assert store.taken() == {"replace": 2}
    assert len(await meta.range(INDEX, INDEX[:-1] + "0", limit=1000, **GROUP)) == 51


async def test_a_scan_over_all_groups_reads_only_heads_that_changed(
    store: CountingStore, manual_clock: ManualClock
) -> None:
    """Discovery is one list when nothing has changed, and one get more for each group that has."""
    meta = connect(store, manual_clock)
    for at in range(20):
        await meta.put(f"llog/t/partitions/{at}/meta/control", b"1", partition_key=f"t:{at}")
    await meta.range("llog/", "llog0", limit=100)
    store.taken()

    await meta.range("llog/", "llog0", limit=100)
    unchanged = store.taken()
    await meta.put("llog/t/partitions/3/meta/control", b"2", partition_key="t:3")
    store.taken()
    found = await meta.range("llog/", "llog0", limit=100)

    assert unchanged == {"list": 1}
    assert store.taken() == {"list": 1, "get": 1}
    assert len(found) == 20
    assert [f"t:{at}" for at in sorted(range(20), key=str)] == await meta.groups()


async def test_a_reader_with_an_old_head_reads_on_when_its_leaf_was_swept(
    store: CountingStore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaf that went between head and leaf makes a reader look again, not fail."""
    writer = connect(store, manual_clock, horizon_s=-1.0)
    await filled(writer, 300)
    reader = connect(store, manual_clock)
    swept: list[int] = []
    real_get = CountingStore.get

    async def get(self: CountingStore, wanted: str) -> Any:
        if wanted.startswith(LEAVES) and not swept:
            swept.append(0)
            await writer.delete_range(key(0), key(200), **GROUP)
            swept.append(await writer.sweep())
        return await real_get(self, wanted)

    monkeypatch.setattr(CountingStore, "get", get)

    found = await reader.ceiling(key(5), prefix=INDEX, **GROUP)

    assert swept[1] > 0
    assert key(200) == (found and found.key)


async def test_a_sweep_removes_orphans_past_the_horizon_only(store: CountingStore, manual_clock: ManualClock) -> None:
    """Unreferenced leaves go when they are old; referenced ones never do."""
    meta = connect(store, manual_clock, horizon_s=60.0)
    await filled(meta, 300)
    await store.create(LEAVES + "orphan.json", b"{}")

    young = await meta.sweep()
    await manual_clock.advance(61.0)
    old = await meta.sweep()

    head = decode_head((await store.get(HEAD)).data, HEAD)
    left = {info.key async for info in store.list(LEAVES)}
    assert young == 0
    assert old >= 1
    assert {f"{LEAVES}{ref.id}.json" for ref in head.refs} == left
    assert len(await meta.range(INDEX, INDEX[:-1] + "0", limit=1000, **GROUP)) == 300


async def test_an_expired_session_is_ended_before_its_claim_is_taken_and_its_owner_is_fenced(
    store: CountingStore, manual_clock: ManualClock
) -> None:
    """Anyone who takes over first ends the session in its own object, so a late heartbeat cannot revive it."""
    mine, other = connect(store, manual_clock), connect(store, manual_clock)
    session = await mine.open_session(timeout_s=3.0)
    await mine.put(ROOT + "claim", b"me", expected=ABSENT, session=session, **GROUP)
    session._beating.cancel()  # type: ignore[attr-defined]
    await manual_clock.advance(3.5)

    with pytest.raises(AlreadyExists):  # clocks may differ by a second
        await other.put(ROOT + "claim", b"you", expected=ABSENT, **GROUP)
    await manual_clock.advance(1.0)
    await other.put(ROOT + "claim", b"you", expected=ABSENT, **GROUP)

    with pytest.raises(Fenced):
        await session._beat()  # type: ignore[attr-defined]
    with pytest.raises(Fenced):
        await mine.put(ROOT + "claim", b"me", session=session, **GROUP)
    assert (await mine.get(ROOT + "claim", **GROUP)).value == b"you"


async def test_a_late_heartbeat_that_comes_first_keeps_everything(
    store: CountingStore, manual_clock: ManualClock
) -> None:
    """Nobody has noticed the silence: the session continues, and its entries are still there."""
    mine, other = connect(store, manual_clock), connect(store, manual_clock)
    session = await mine.open_session(timeout_s=3.0)
    await mine.put(ROOT + "claim", b"me", session=session, **GROUP)
    session._beating.cancel()  # type: ignore[attr-defined]
    await manual_clock.advance(30.0)

    await session._beat()  # type: ignore[attr-defined]

    assert (await other.get(ROOT + "claim", **GROUP)).value == b"me"


async def test_what_ended_sessions_left_goes_with_sweeps_and_spills(
    store: CountingStore, manual_clock: ManualClock
) -> None:
    """Neither session objects nor dead claims pile up."""
    meta = connect(store, manual_clock, horizon_s=10.0)
    for at in range(5):
        session = await meta.open_session(timeout_s=3.0)
        await meta.put(f"{ROOT}claims/{at}", b"me", session=session, **GROUP)
        session._beating.cancel()  # type: ignore[attr-defined]
    await manual_clock.advance(60.0)

    await meta.sweep()
    await filled(meta, 200)

    assert [info.key async for info in store.list(PATHS.sessions)] == []
    assert not [key for key in decode_head((await store.get(HEAD)).data, HEAD).hot if "/claims/" in key]
    with pytest.raises(NotFound):
        await meta.get(f"{ROOT}claims/0", **GROUP)


async def test_a_damaged_head_is_told_and_left_alone(store: CountingStore, manual_clock: ManualClock) -> None:
    """Neither reads nor changes continue over bytes that are not a head, nor even text."""
    await store.create(HEAD, b'{"schema": "\xff not a head"}')
    meta = connect(store, manual_clock)

    with pytest.raises(Corrupt):
        await meta.get(key(1), **GROUP)
    with pytest.raises(Corrupt):
        await meta.put(key(1), b"x", **GROUP)

    assert b"not a head" in (await store.get(HEAD)).data

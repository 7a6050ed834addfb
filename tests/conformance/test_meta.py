"""The meta seam's contract, run on every backend: memory, SQLite, the bucket in memory and real, and a real Oxia.

Oxia is tested where OXIA_ADDRESS names a running server (`make test-oxia` starts one).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.errors import AlreadyExists, Conflict, Fenced, Invalid, NotFound, Stale, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.meta.bucket.backend import BucketMeta, Layout
from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.meta.model import ABSENT, RANGE_LIMIT_MAX, VALUE_BYTES_MAX, Put, prefix_end
from lakebed.meta.protocol import Meta
from lakebed.meta.sqlite.backend import SqliteMeta
from lakebed.store.memory import MemoryStore
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime
from support import oxia_server

BACKENDS = ["memory", "sqlite", "bucket-memory", "bins-memory", "bucket-seaweedfs"] + (
    ["oxia"] if oxia_server.ADDRESS else []
)
SESSION_S = 4.0  # a session whose end, or long life, is waited for; Oxia's client takes none below 2 s
LASTING_S = 60.0  # any other: no pause between two heartbeats ends it
GONE_S = 60.0  # a session that is silent is gone by then, on every backend

Client = Callable[[], Meta]


@pytest.fixture(params=BACKENDS)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Client:
    """Makes clients of one and the same meta store, as different processes would have them."""
    clock = SystemClock()
    runtime = Runtime(clock, Ids(), Metrics())
    match request.param:
        case "memory":
            state = MemoryState()
            return lambda: MemoryMeta(runtime, state)
        case "sqlite":
            return lambda: SqliteMeta(runtime, tmp_path / "meta.sqlite")
        case "oxia":
            from lakebed.meta.oxia.backend import OxiaMeta

            return lambda: OxiaMeta(runtime, oxia_server.ADDRESS)
        case _:
            real = request.param == "bucket-seaweedfs"
            store: Store = request.getfixturevalue("bucket") if real else MemoryStore(clock=clock)
            layout: Layout = "groups" if request.param == "bucket-memory" else "found"
            on_store = StoreRuntime(clock, runtime.ids, runtime.metrics, store)
            return lambda: BucketMeta(on_store, "llog-meta", layout=layout)


@pytest.fixture
async def client(connect: Client) -> AsyncIterator[Client]:
    """`connect`, which closes in the end what it has made."""
    made: list[Meta] = []

    def new() -> Meta:
        made.append(connect())
        return made[-1]

    yield new
    for meta in made:
        await meta.close()


@pytest.fixture
def meta(client: Client) -> Meta:
    return client()


@pytest.fixture
def group(ids: Ids) -> Iterator[dict[str, str]]:
    """A group of keys of this test's own, as the keyword that every call takes."""
    yield {"partition_key": f"t-{ids.token()}:0"}


@pytest.fixture
def root(group: dict[str, str]) -> str:
    """The folder of that group's keys."""
    return f"llog/{group['partition_key'].split(':')[0]}/partitions/0/"


def index(root: str, offset: int) -> str:
    return f"{root}index/{offset:020d}"


async def eventually(look: Callable[[], Awaitable[bool]], within_s: float = GONE_S) -> bool:
    async with asyncio.timeout(within_s):
        while not await look():
            await asyncio.sleep(0.1)
    return True


async def absent(meta: Meta, key: str, group: dict[str, str]) -> bool:
    try:
        await meta.get(key, **group)
    except NotFound:
        return True
    return False


async def filled(meta: Meta, root: str, group: dict[str, str], offsets: list[int]) -> None:
    await asyncio.gather(*(meta.put(index(root, offset), b"%d" % offset, **group) for offset in offsets))


# One key


async def test_a_value_is_read_back_with_the_version_its_put_gave(meta: Meta, root: str, group: dict[str, str]) -> None:
    """What put answers is what get finds."""
    put = await meta.put(root + "meta/control", b'{"a": 1}', **group)

    got = await meta.get(root + "meta/control", **group)

    assert (root + "meta/control", b'{"a": 1}') == (put.key, put.value)
    assert put == got


async def test_a_missing_key_is_not_found(meta: Meta, root: str, group: dict[str, str]) -> None:
    """Nothing there is NotFound, also beside neighbours."""
    await meta.put(root + "meta/control2", b"x", **group)

    with pytest.raises(NotFound):
        await meta.get(root + "meta/control", **group)


async def test_awkward_bytes_come_back_as_they_were(meta: Meta, root: str, group: dict[str, str]) -> None:
    """A value is any bytes: empty, zeros, not UTF-8."""
    values = [b"", b"\0", bytes(range(256)), b"\xff\xfe", "é".encode()]

    for at, value in enumerate(values):
        await meta.put(f"{root}v/{at}", value, **group)

    assert values == [(await meta.get(f"{root}v/{at}", **group)).value for at in range(len(values))]


async def test_a_value_of_the_stated_limit_is_stored_and_one_byte_more_is_refused(
    meta: Meta, root: str, group: dict[str, str]
) -> None:
    """The limit is exact, and a refused value changes nothing."""
    largest = bytes(range(256)) * (VALUE_BYTES_MAX // 256)
    await meta.put(root + "big", largest, **group)

    with pytest.raises(Invalid):
        await meta.put(root + "big", largest + b"x", **group)

    assert largest == (await meta.get(root + "big", **group)).value


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a/../b", ".", "a\\b", "a\nb", "k" * 1025])
async def test_a_key_that_some_backend_would_change_is_refused(meta: Meta, key: str, group: dict[str, str]) -> None:
    """Keys are the same everywhere or nowhere."""
    with pytest.raises(Invalid):
        await meta.put(key, b"x", **group)


# Compare and swap


async def test_must_be_absent_creates_once(meta: Meta, root: str, group: dict[str, str]) -> None:
    """The second creator gets AlreadyExists, with the current one."""
    first = await meta.put(root + "k", b"1", expected=ABSENT, **group)

    with pytest.raises(AlreadyExists) as met:
        await meta.put(root + "k", b"2", expected=ABSENT, **group)

    assert first == met.value.current
    assert (await meta.get(root + "k", **group)).value == b"1"


async def test_a_version_is_good_for_one_put(meta: Meta, root: str, group: dict[str, str]) -> None:
    """A put over a version that has been overwritten is Stale, with the current one."""
    first = await meta.put(root + "k", b"1", **group)
    second = await meta.put(root + "k", b"2", expected=first.version, **group)

    with pytest.raises(Stale) as met:
        await meta.put(root + "k", b"3", expected=first.version, **group)

    assert second == met.value.current
    assert (await meta.get(root + "k", **group)).value == b"2"


async def test_several_puts_succeed_and_fail_each_on_its_own(meta: Meta, root: str, group: dict[str, str]) -> None:
    """Puts that are requested together are answered in their order, and one that is refused stops no other."""
    stands = await meta.put(f"{root}stands", b"1", **group)
    old = await meta.put(f"{root}changed", b"1", **group)
    await meta.put(f"{root}changed", b"2", **group)

    made = await meta.put_all(
        [
            Put(f"{root}new", b"new", ABSENT, **group),
            Put(f"{root}stands", b"never", ABSENT, **group),
            Put(f"{root}stands", b"2", stands.version, **group),
            Put(f"{root}changed", b"never", old.version, **group),
            Put(f"{root}any", b"any", **group),
        ]
    )

    assert ["MetaEntry", "AlreadyExists", "MetaEntry", "Stale", "MetaEntry"] == [type(one).__name__ for one in made]
    for key, value in (("new", b"new"), ("stands", b"2"), ("changed", b"2"), ("any", b"any")):
        found = await meta.get(f"{root}{key}", **group)
        assert value == found.value
        assert key == "changed" or found in made


async def test_a_put_is_made_only_behind_what_must_be_there_first(meta: Meta, root: str, group: dict[str, str]) -> None:
    """The entry is made where its key is absent and stays where it is not; the put is judged by its own version."""
    swapped = await meta.put(f"{root}swapped", b"1", **group)
    stands = await meta.put(f"{root}there", b"old", **group)

    made = await meta.put_all(
        [
            Put(f"{root}swapped", b"2", swapped.version, first=(f"{root}before", b"b"), **group),
            Put(f"{root}other", b"o", ABSENT, first=(f"{root}there", b"new"), **group),
            Put(f"{root}swapped", b"never", swapped.version, first=(f"{root}maybe", b"m"), **group),
        ]
    )

    assert ["MetaEntry", "MetaEntry", "Stale"] == [type(one).__name__ for one in made]
    assert [b"2", b"o", b"b"] == [(await meta.get(f"{root}{k}", **group)).value for k in ("swapped", "other", "before")]
    assert stands == await meta.get(f"{root}there", **group)
    assert made[0] == await meta.get(f"{root}swapped", **group)


async def test_a_version_of_a_key_that_is_gone_is_stale(meta: Meta, root: str, group: dict[str, str]) -> None:
    """Nothing is made where a version was expected."""
    first = await meta.put(root + "k", b"1", **group)
    await meta.delete(root + "k", **group)

    with pytest.raises(Stale) as met:
        await meta.put(root + "k", b"2", expected=first.version, **group)

    assert met.value.current is None
    assert await absent(meta, root + "k", group)


async def test_versions_never_come_back(meta: Meta, root: str, group: dict[str, str]) -> None:
    """Neither the same bytes again nor a delete in between brings an old version back."""
    seen = set()
    for _ in range(5):
        seen.add((await meta.put(root + "k", b"same", **group)).version)
        seen.add((await meta.put(root + "k", b"same", **group)).version)
        await meta.delete(root + "k", **group)

    assert len(seen) == 10


async def test_delete_with_a_version_deletes_only_that_one(meta: Meta, root: str, group: dict[str, str]) -> None:
    """A conditional delete is refused when something newer, or nothing, is there."""
    first = await meta.put(root + "k", b"1", **group)
    second = await meta.put(root + "k", b"2", **group)

    with pytest.raises(Stale) as met:
        await meta.delete(root + "k", expected=first.version, **group)
    await meta.delete(root + "k", expected=second.version, **group)
    with pytest.raises(Stale):
        await meta.delete(root + "k", expected=second.version, **group)

    assert second == met.value.current
    assert await absent(meta, root + "k", group)


async def test_deleting_nothing_is_fine(meta: Meta, root: str, group: dict[str, str]) -> None:
    """Delete without a version is idempotent."""
    await meta.delete(root + "k", **group)
    await meta.delete(root + "k", **group)

    assert await absent(meta, root + "k", group)


async def test_of_racing_creators_exactly_one_wins(client: Client, root: str, group: dict[str, str]) -> None:
    """Clients that create one key at once: one has it, all others met it."""
    clients = [client() for _ in range(3)]

    async def create(at: int) -> str:
        try:
            return (await clients[at % 3].put(root + "k", b"%d" % at, expected=ABSENT, **group)).version
        except AlreadyExists:
            return ""

    answers = await asyncio.gather(*(create(at) for at in range(9)))

    won = [at for at, version in enumerate(answers) if version]
    assert len(won) == 1
    assert b"%d" % won[0] == (await clients[0].get(root + "k", **group)).value


async def test_racing_increments_lose_nothing(client: Client, root: str, group: dict[str, str]) -> None:
    """A counter incremented by compare-and-swap from several clients counts every success once."""
    clients = [client() for _ in range(3)]
    await clients[0].put(root + "count", b"0", **group)

    async def increment(meta: Meta) -> None:
        for _ in range(200):
            now = await meta.get(root + "count", **group)
            try:
                await meta.put(root + "count", b"%d" % (int(now.value) + 1), expected=now.version, **group)
            except Conflict:
                continue
            return
        raise AssertionError("never won")

    await asyncio.gather(*(increment(meta) for meta in clients for _ in range(3)))

    assert (await clients[0].get(root + "count", **group)).value == b"9"


# Ceiling and ranges


async def test_ceiling_finds_the_entry_at_or_above(meta: Meta, root: str, group: dict[str, str]) -> None:
    """At a key, between two keys, below the first."""
    await filled(meta, root, group, [5, 10, 20])

    found = [
        await meta.ceiling(index(root, offset), prefix=root + "index/", **group) for offset in (0, 5, 6, 10, 11, 20)
    ]

    assert [entry.value for entry in found if entry] == [b"5", b"5", b"10", b"10", b"20", b"20"]


async def test_ceiling_never_leaves_its_prefix(meta: Meta, root: str, group: dict[str, str]) -> None:
    """Above the last key of the prefix there is nothing, whatever follows in other folders."""
    await filled(meta, root, group, [5])
    for neighbour in ("index2/1", "indexes", "inde", "meta/control", "index/deeper/than/this"):
        await meta.put(root + neighbour, b"other", **group)
    await meta.delete(root + "index/deeper/than/this", **group)

    assert await meta.ceiling(index(root, 6), prefix=root + "index/", **group) is None
    assert await meta.ceiling(index(root, 0), prefix=root + "index0/", **group) is None


async def test_ceiling_starts_at_its_prefix(meta: Meta, root: str, group: dict[str, str]) -> None:
    """A key below the prefix finds the prefix's first entry, one above finds nothing."""
    await filled(meta, root, group, [5])
    await meta.put(root + "aaa/1", b"other", **group)

    below = await meta.ceiling(root + "aaa/0", prefix=root + "index/", **group)
    above = await meta.ceiling(root + "zzz/0", prefix=root + "index/", **group)

    assert below is not None
    assert below.value == b"5"
    assert above is None


async def test_zero_padded_offsets_sort_as_numbers(meta: Meta, root: str, group: dict[str, str]) -> None:
    """A scan of index keys gives them in the order of their offsets, whatever order they were put in."""
    offsets = [1, 9, 10, 11, 99, 100, 1000, 2**31, 2**53, 10**19]
    await filled(meta, root, group, list(reversed(offsets)))

    found = await meta.range(root + "index/", prefix_end(root + "index/"), limit=100, **group)

    assert offsets == [int(entry.value) for entry in found]
    assert [index(root, offset) for offset in offsets] == [entry.key for entry in found]


async def test_keys_sort_by_their_bytes_at_any_depth(meta: Meta, root: str, group: dict[str, str]) -> None:
    """Folders and files, prefixes of each other and non-ASCII names come in byte order."""
    names = ["a", "a-b/x", "a.b", "a/b", "a/b/c", "a0", "ab/c/d/e", "b", "b-eu/1", "b/1", "é/1", "z", "ｚ", "𝄞/1"]
    for name in reversed(names):
        await meta.put(root + name, name.encode(), **group)

    found = await meta.range(root, prefix_end(root), limit=100, **group)

    assert sorted(names, key=str.encode) == [entry.key.removeprefix(root) for entry in found]


async def test_every_range_is_half_open_in_byte_order(meta: Meta, root: str, group: dict[str, str]) -> None:
    """For any two bounds, in folders or between them, a scan gives exactly start <= key < end."""
    names = ["a", "a-b/x", "a/b", "a/b/c", "a0", "b/1", "b/2/x", "b0"]
    bounds = [*names, "", "a/", "b/", "a/b/", "a1", "b/10", "c"]
    for name in names:
        await meta.put(root + name, b"", **group)

    for start in bounds:
        for end in bounds:
            found = await meta.range(root + start, root + end, limit=100, **group)
            assert [n for n in names if start <= n < end] == [e.key.removeprefix(root) for e in found], (start, end)


async def test_a_scan_gives_no_more_than_its_limit_and_resumes_behind_the_last_key(
    meta: Meta, root: str, group: dict[str, str]
) -> None:
    """Pages that start behind each other's last key give every entry once."""
    await filled(meta, root, group, list(range(1, 26)))
    start, end, pages = root + "index/", prefix_end(root + "index/"), []

    while page := await meta.range(start, end, limit=10, **group):
        pages.append(page)
        start = page[-1].key + "\0"

    assert [len(page) for page in pages] == [10, 10, 5]
    assert list(range(1, 26)) == [int(entry.value) for page in pages for entry in page]


async def test_an_empty_or_inverted_range_is_empty(meta: Meta, root: str, group: dict[str, str]) -> None:
    """Nothing between equal or swapped bounds, nothing in a gap, nothing in a group that was never written."""
    await filled(meta, root, group, [5, 10])
    ranges = [(5, 5), (10, 5), (6, 10), (11, 99)]

    found = [await meta.range(index(root, a), index(root, b), limit=10, **group) for a, b in ranges]
    never = await meta.range("llog/", "llog0", limit=10, partition_key="never:0")

    assert [list(entries) for entries in found] == [[], [], [], []]
    assert [entry for entry in never if entry.key.startswith("llog/never/")] == []


@pytest.mark.parametrize("limit", [0, -1, RANGE_LIMIT_MAX + 1])
async def test_a_limit_out_of_bounds_is_refused(meta: Meta, limit: int, group: dict[str, str]) -> None:
    """A scan's limit is between 1 and the stated one."""
    with pytest.raises(Invalid):
        await meta.range("a/", "a0", limit=limit, **group)


async def test_a_scan_without_a_group_sees_all_groups(meta: Meta, ids: Ids) -> None:
    """Discovery: one scan over everything, in key order, within its bounds and limit."""
    topic = f"disc-{ids.token()}"
    keys = [f"llog/{topic}/partitions/{at}/meta/control" for at in range(20)]
    await asyncio.gather(*(meta.put(key, b"c", partition_key=f"{topic}:{at}") for at, key in enumerate(keys)))

    found = await meta.range(f"llog/{topic}/", f"llog/{topic}0", limit=100)
    some = await meta.range(f"llog/{topic}/", f"llog/{topic}0", limit=7)

    assert sorted(keys) == [entry.key for entry in found]
    assert sorted(keys)[:7] == [entry.key for entry in some]


async def test_delete_range_is_half_open(meta: Meta, root: str, group: dict[str, str]) -> None:
    """The first key goes, the end key stays, neighbours stay."""
    await filled(meta, root, group, [4, 5, 10, 15, 20])

    await meta.delete_range(index(root, 5), index(root, 15), **group)

    found = await meta.range(root, prefix_end(root), limit=10, **group)
    assert [entry.value for entry in found] == [b"4", b"15", b"20"]


async def test_delete_range_takes_whole_folders_and_nothing_beside_them(
    meta: Meta, root: str, group: dict[str, str]
) -> None:
    """The range of a prefix is everything below it, at any depth."""
    names = ["a/1", "a/b/2", "a/b/c/3"]
    beside = ["a", "a-b/1", "a0", "b/1"]
    for name in names + beside:
        await meta.put(root + name, b"", **group)

    await meta.delete_range(root + "a/", prefix_end(root + "a/"), **group)

    found = await meta.range(root, prefix_end(root), limit=10, **group)
    assert sorted(beside) == [entry.key.removeprefix(root) for entry in found]


async def test_deleting_a_range_across_folders_deletes_exactly_what_a_scan_of_it_gives(
    meta: Meta, root: str, group: dict[str, str]
) -> None:
    """Delete and scan mean the same by a range."""
    names = ["a", "a-b/x", "a/b", "a/b/c", "a0", "b/1", "b/2/x", "b0"]
    for start, end in [("a/", "b/2"), ("a-b/y", "a0"), ("a", "a/b/c"), ("b/1", "c")]:
        for name in names:
            await meta.put(root + name, b"", **group)

        await meta.delete_range(root + start, root + end, **group)

        found = await meta.range(root, prefix_end(root), limit=10, **group)
        assert [n for n in names if not start <= n < end] == [e.key.removeprefix(root) for e in found], (start, end)


async def test_deleting_an_empty_range_changes_nothing(meta: Meta, root: str, group: dict[str, str]) -> None:
    """Gaps, equal and swapped bounds are fine, and repeating a delete is, too."""
    await filled(meta, root, group, [5, 10])

    for a, b in [(6, 10), (5, 5), (10, 5), (11, 99), (6, 10)]:
        await meta.delete_range(index(root, a), index(root, b), **group)

    assert len(await meta.range(root, prefix_end(root), limit=10, **group)) == 2


async def test_many_entries_keep_their_order_through_overwrites_and_deletes(
    meta: Meta, root: str, group: dict[str, str]
) -> None:
    """A model and the store agree after many puts, overwrites and deletes of ranges that outgrow any cache of it."""
    model: dict[str, bytes] = {}
    for base in range(0, 600, 50):
        batch = {index(root, base + at): b"%d" % (base + at) + b"." * 200 for at in range(1, 51)}
        await asyncio.gather(*(meta.put(key, value, **group) for key, value in batch.items()))
        model |= batch
    await meta.put(index(root, 100), b"compacted", **group)
    model[index(root, 100)] = b"compacted"
    await meta.delete_range(index(root, 0), index(root, 100), **group)
    await meta.delete(index(root, 333), **group)
    model = {k: v for k, v in model.items() if k >= index(root, 100) and k != index(root, 333)}

    found = await meta.range(root + "index/", prefix_end(root + "index/"), limit=1000, **group)
    middle = await meta.range(index(root, 300), index(root, 400), limit=20, **group)
    first = await meta.ceiling(index(root, 1), prefix=root + "index/", **group)
    over = await meta.ceiling(index(root, 333), prefix=root + "index/", **group)

    assert sorted(model.items()) == [(entry.key, entry.value) for entry in found]
    assert [index(root, at) for at in range(300, 321) if at != 333][:20] == [entry.key for entry in middle]
    assert (index(root, 100), b"compacted") == (first and first.key, first and first.value)
    assert index(root, 334) == (over and over.key)


# Sessions


async def test_an_ephemeral_entry_is_seen_by_others_and_goes_with_its_session(
    client: Client, root: str, group: dict[str, str]
) -> None:
    """Closing a session deletes what was put under it, and nothing else."""
    mine, other = client(), client()
    session = await mine.open_session(timeout_s=LASTING_S)
    await mine.put(root + "meta/compactor-claim", b"me", expected=ABSENT, session=session, **group)
    await mine.put(root + "meta/control", b"lasting", **group)

    seen = await other.get(root + "meta/compactor-claim", **group)
    with pytest.raises(AlreadyExists):
        await other.put(root + "meta/compactor-claim", b"you", expected=ABSENT, **group)
    await session.close()

    assert seen.value == b"me"
    assert not session.alive
    assert await absent(other, root + "meta/compactor-claim", group)
    assert [entry.value for entry in await other.range(root, prefix_end(root), limit=9, **group)] == [b"lasting"]


@pytest.mark.full
async def test_a_session_lives_as_long_as_its_process_beats(client: Client, root: str, group: dict[str, str]) -> None:
    """An entry outlives several timeouts of a session that is kept alive."""
    mine, other = client(), client()
    session = await mine.open_session(timeout_s=SESSION_S)
    await mine.put(root + "claim", b"me", session=session, **group)

    await asyncio.sleep(2 * SESSION_S + 1.5)

    assert session.alive
    assert (await other.get(root + "claim", **group)).value == b"me"


async def test_a_session_that_falls_silent_ends_and_another_takes_over(
    client: Client, root: str, group: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that stops sending heartbeats loses its entries after the timeout, and gets an error."""
    mine, other = client(), client()
    session = await mine.open_session(timeout_s=SESSION_S)
    await mine.put(root + "claim", b"me", expected=ABSENT, session=session, **group)
    silence(session)

    assert await eventually(lambda: absent(other, root + "claim", group))
    theirs = await other.put(root + "claim", b"you", expected=ABSENT, **group)

    assert not session.alive
    with pytest.raises(Fenced):
        await mine.put(root + "claim2", b"me", session=session, **group)
    await session.close()
    assert theirs == await other.get(root + "claim", **group)


async def test_a_claim_is_won_by_one_of_many(client: Client, root: str, group: dict[str, str]) -> None:
    """Of several processes that claim at once, exactly one holds the claim; when it lets go, the next can."""
    clients = [client() for _ in range(3)]
    sessions = [await meta.open_session(timeout_s=LASTING_S) for meta in clients]

    async def claim(at: int) -> bool:
        try:
            await clients[at].put(root + "claim", b"%d" % at, expected=ABSENT, session=sessions[at], **group)
        except AlreadyExists:
            return False
        return True

    won = await asyncio.gather(*(claim(at) for at in range(3)))
    holder = won.index(True)
    await clients[holder].delete(root + "claim", **group)

    assert sum(won) == 1
    assert await claim((holder + 1) % 3)


async def test_a_put_without_a_session_makes_an_ephemeral_entry_lasting(
    client: Client, root: str, group: dict[str, str]
) -> None:
    """The last put decides how long an entry lives."""
    mine = client()
    session = await mine.open_session(timeout_s=LASTING_S)
    first = await mine.put(root + "k", b"1", session=session, **group)
    await mine.put(root + "k", b"2", expected=first.version, **group)

    await session.close()

    assert (await mine.get(root + "k", **group)).value == b"2"


async def test_an_ended_session_puts_nothing(meta: Meta, root: str, group: dict[str, str]) -> None:
    """A put under a closed session is Fenced; closing twice is fine."""
    session = await meta.open_session(timeout_s=LASTING_S)
    await session.close()
    await session.close()

    with pytest.raises(Fenced):
        await meta.put(root + "claim", b"me", session=session, **group)

    assert await absent(meta, root + "claim", group)


async def test_closing_a_client_ends_its_sessions(client: Client, root: str, group: dict[str, str]) -> None:
    """A process that leaves in order leaves no claims, and its client answers no more."""
    mine, other = client(), client()
    session = await mine.open_session(timeout_s=LASTING_S)
    await mine.put(root + "claim", b"me", session=session, **group)

    await mine.close()

    assert await absent(other, root + "claim", group)
    with pytest.raises(Unavailable):
        await mine.get(root + "claim", **group)


def silence(session: Any) -> None:
    """Stops the heartbeats of a session without ending it, as a frozen process would."""
    if hasattr(session, "_beating"):
        session._beating.cancel()
    else:
        for one in session._used.values():
            one._stop_event.set()

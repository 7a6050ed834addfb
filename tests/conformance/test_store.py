"""The store's contract, run on every backend: the simulation's twin, obstore in memory, and a real SeaweedFS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.errors import AlreadyExists, Corrupt, Invalid, NotFound, Stale
from lakebed.core.metrics import Metrics
from lakebed.store.bucket import BucketStore
from lakebed.store.connect import PrefixedStore, connect
from lakebed.store.memory import MemoryStore
from lakebed.store.model import HashedBytes
from lakebed.store.obstore_client import ObstoreClient
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.runtimes import runtime_of

AWKWARD = [
    "a=b",
    "a b",
    "é",
    "a%2Fb",
    "a~b",
    "a#b",
    "a*b",
    "a{b}",
    'a"b',
    "a?b",
    "a|b",
    "a^b",
    "a:b",
    "a+b",
    "<i>",
    "a&b",
]


@pytest.fixture(params=["memory", "prefixed", "obstore", "seaweedfs", "seaweedfs without the fast path"])
def store(request: pytest.FixtureRequest, metrics: Metrics) -> Store:
    match request.param:
        case "memory":
            return MemoryStore(clock=SystemClock())
        case "prefixed":
            return PrefixedStore(MemoryStore(clock=SystemClock()), "some/where")
        case "obstore":
            from obstore.store import MemoryStore as ObstoreMemory

            return BucketStore(ObstoreClient(ObstoreMemory()), runtime_of(metrics=metrics))
        case "seaweedfs without the fast path":
            settings: StoreSettings = request.getfixturevalue("bucket_settings")
            settings = msgspec.structs.replace(settings, fast_path=False)
            return connect(settings, runtime_of(metrics=metrics))
        case _:
            found: Store = request.getfixturevalue("bucket")
            return found


async def keys(store: Store, prefix: str, after: str = "") -> list[str]:
    return [info.key async for info in store.list(prefix, after=after)]


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


class TestReading:
    async def test_what_was_created_is_read_back_whole(self, store: Store) -> None:
        """A get after a create gives the same bytes, size and etag."""
        created = await store.create("t/one", b"hello")

        stored = await store.get("t/one")

        assert stored.data == b"hello"
        assert (created.key, created.size, created.etag) == (stored.key, stored.info.size, stored.etag)

    async def test_head_tells_size_etag_and_time(self, store: Store) -> None:
        """Head gives what get gives, without the bytes."""
        await store.create("t/one", b"hello")

        head = await store.head("t/one")

        assert (await store.get("t/one")).info == head
        assert head.modified_ms > 1_700_000_000_000

    async def test_a_range_is_exact(self, store: Store) -> None:
        """A range gives exactly the bytes requested."""
        await store.create("t/one", b"0123456789")

        assert await store.get_range("t/one", 3, 3) == b"345"
        assert await store.get_range("t/one", 9, 1) == b"9"

    @pytest.mark.parametrize(("start", "length"), [(8, 3), (10, 1), (50, 1)])
    async def test_a_range_past_the_end_is_corrupt(self, store: Store, start: int, length: int) -> None:
        """An object shorter than its reference reports is Corrupt, never a short answer."""
        await store.create("t/one", b"0123456789")

        with pytest.raises(Corrupt):
            await store.get_range("t/one", start, length)

    @pytest.mark.parametrize(("start", "length"), [(-1, 3), (0, 0), (0, -1)])
    async def test_a_senseless_range_is_invalid(self, store: Store, start: int, length: int) -> None:
        """Negative and empty ranges are the caller's mistake."""
        with pytest.raises(Invalid):
            await store.get_range("t/one", start, length)

    async def test_what_is_missing_is_not_found(self, store: Store) -> None:
        """Get, head and range of a missing key raise NotFound."""
        for read in (store.get("t/no"), store.head("t/no"), store.get_range("t/no", 0, 1)):
            with pytest.raises(NotFound):
                await read

    async def test_empty_objects_exist(self, store: Store) -> None:
        """An empty object is an object."""
        await store.create("t/empty", b"")

        assert (await store.get("t/empty")).data == b""
        assert await keys(store, "t/") == ["t/empty"]


class TestCreate:
    async def test_creating_again_with_the_same_bytes_is_the_same_success(self, store: Store) -> None:
        """Create is idempotent by content."""
        first = await store.create("t/one", b"hello")

        assert first.etag == (await store.create("t/one", b"hello")).etag

    async def test_creating_over_other_bytes_already_exists(self, store: Store) -> None:
        """A create over other bytes raises AlreadyExists carrying them, and changes nothing."""
        await store.create("t/one", b"theirs")

        with pytest.raises(AlreadyExists) as caught:
            await store.create("t/one", b"mine")

        assert caught.value.current.data == b"theirs"
        assert caught.value.current.key == "t/one"
        assert (await store.get("t/one")).data == b"theirs"

    async def test_large_objects_compare_too(self, store: Store) -> None:
        """Idempotence by content holds for objects of megabytes."""
        await store.create("t/big", b"x" * 1_000_000)

        await store.create("t/big", b"x" * 1_000_000)
        with pytest.raises(AlreadyExists):
            await store.create("t/big", b"y" * 1_000_000)

    async def test_of_racing_creates_exactly_one_wins(self, store: Store) -> None:
        """Of eight racing creates one succeeds and seven see the winner's bytes."""
        outcomes = await asyncio.gather(*(store.create("t/race", b"%d" % n) for n in range(8)), return_exceptions=True)

        winners = [n for n, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
        losers = [outcome for outcome in outcomes if isinstance(outcome, AlreadyExists)]
        assert len(winners) == 1
        assert {b"%d" % winners[0]} == {loser.current.data for loser in losers}


class TestReplace:
    async def test_replace_takes_the_place_of_what_was_read(self, store: Store) -> None:
        """A replace with the current etag stores the new bytes."""
        first = await store.create("t/one", b"old")

        second = await store.replace("t/one", b"new", first.etag)

        assert (await store.get("t/one")).data == b"new"
        assert second.etag == (await store.head("t/one")).etag

    async def test_replacing_what_changed_is_stale(self, store: Store) -> None:
        """A replace with an old etag raises Stale carrying what is there."""
        first = await store.create("t/one", b"old")
        await store.replace("t/one", b"newer", first.etag)

        with pytest.raises(Stale) as caught:
            await store.replace("t/one", b"mine", first.etag)

        assert caught.value.current.data == b"newer"

    async def test_replacing_again_with_the_same_bytes_is_the_same_success(self, store: Store) -> None:
        """Replace is idempotent by content: a repeat after a lost answer succeeds."""
        first = await store.create("t/one", b"old")
        await store.replace("t/one", b"new", first.etag)

        await store.replace("t/one", b"new", first.etag)

        assert (await store.get("t/one")).data == b"new"

    async def test_replacing_what_is_gone_is_stale(self, store: Store) -> None:
        """A replace of a deleted object raises Stale with nothing in `current`, and creates nothing."""
        first = await store.create("t/one", b"old")
        await store.delete("t/one")

        with pytest.raises(Stale) as caught:
            await store.replace("t/one", b"new", first.etag)

        assert caught.value.current is None
        assert await keys(store, "t/") == []

    async def test_of_racing_replaces_exactly_one_wins(self, store: Store) -> None:
        """Of eight racing replaces of one etag exactly one succeeds."""
        first = await store.create("t/race", b"start")

        outcomes = await asyncio.gather(
            *(store.replace("t/race", b"%d" % n, first.etag) for n in range(8)), return_exceptions=True
        )

        assert sum(not isinstance(outcome, BaseException) for outcome in outcomes) == 1
        assert sum(isinstance(outcome, Stale) for outcome in outcomes) == 7


class TestListing:
    async def test_a_folder_lists_what_is_under_it_and_nothing_else(self, store: Store) -> None:
        """A prefix is a whole folder: its neighbours by name are not in it."""
        for key in ("t/a/1", "t/a/b/2", "t/ab/3", "t/a-b", "u/4"):
            await store.create(key, b"x")

        assert {"t/a/1", "t/a/b/2"} == set(await keys(store, "t/a/"))

    async def test_inside_a_folder_keys_come_in_byte_order(self, store: Store) -> None:
        """Zero-padded names list in their numeric order."""
        for number in (3, 11, 2, 100, 1):
            await store.create(f"t/{number:05d}", b"x")

        assert [f"t/{number:05d}" for number in (1, 2, 3, 11, 100)] == await keys(store, "t/")

    async def test_after_resumes_behind_a_key(self, store: Store) -> None:
        """Listing after each key in turn gives exactly the keys that followed it."""
        for key in ("t/a/b", "t/a-b", "t/a.b", "t/b", "t/c/d"):
            await store.create(key, b"x")
        listed = await keys(store, "t/")

        for position, key in enumerate(listed):
            assert listed[position + 1 :] == await keys(store, "t/", after=key)

    async def test_a_missing_folder_is_empty(self, store: Store) -> None:
        """Listing nothing gives nothing."""
        assert await keys(store, "nowhere/") == []
        assert list(await store.children("nowhere/")) == []

    async def test_more_than_a_page_is_listed_whole(self, store: Store) -> None:
        """A listing continues over pages, each key once."""
        wanted = [f"t/{number:05d}" for number in range(1100)]
        for start in range(0, 1100, 100):
            await asyncio.gather(*(store.create(key, b"x") for key in wanted[start : start + 100]))

        assert wanted == await keys(store, "t/")
        assert wanted[1050:] == await keys(store, "t/", after=wanted[1049])

    async def test_children_are_the_folders_directly_below(self, store: Store) -> None:
        """Children gives folder names, sorted, without objects and without deeper folders."""
        for key in ("t/b/1", "t/a/2", "t/a/c/3", "t/file"):
            await store.create(key, b"x")

        assert list(await store.children("t/")) == ["a", "b"]

    async def test_what_was_written_is_listed_at_once(self, store: Store) -> None:
        """A list after a create, and after a delete, reports the truth."""
        await store.create("t/one", b"x")
        assert await keys(store, "t/") == ["t/one"]

        await store.delete("t/one")
        assert await keys(store, "t/") == []

    @pytest.mark.parametrize("prefix", ["t", "t/a", "/t/", "t//"])
    async def test_half_a_segment_is_no_prefix(self, store: Store, prefix: str) -> None:
        """A prefix that is not a whole folder is refused rather than matched differently by each store."""
        with pytest.raises(Invalid):
            await keys(store, prefix)


class TestUpload:
    async def test_parts_make_one_object(self, store: Store) -> None:
        """An upload in chunks is one object."""
        parts = [b"a" * 6_000_000, b"b" * 6_000_000, b"c"]

        info = await store.upload("t/big", chunks(*parts))

        assert info.size == 12_000_001
        assert await store.get_range("t/big", 11_999_999, 2) == b"bc"

    async def test_a_source_that_fails_leaves_nothing(self, store: Store) -> None:
        """When the chunks stop with an error, that error is raised and no object appears."""

        async def broken() -> AsyncIterator[bytes]:
            yield b"a" * 9_000_000
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await store.upload("t/big", broken())

        assert await keys(store, "t/") == []

    async def test_an_upload_can_be_repeated(self, store: Store) -> None:
        """An upload has no condition: the same name twice is fine."""
        await store.upload("t/big", chunks(b"one"))
        await store.upload("t/big", chunks(b"one"))

        assert (await store.get("t/big")).data == b"one"


class TestKeys:
    @pytest.mark.parametrize("name", AWKWARD)
    async def test_awkward_names_survive(self, store: Store, name: str) -> None:
        """A key comes back from get and list exactly as it was given."""
        await store.create(f"t/{name}", name.encode())

        assert name.encode() == (await store.get(f"t/{name}")).data
        assert [f"t/{name}"] == await keys(store, "t/")

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a/../b", "./a", "a\\b", "a\x00b", "a\nb", "x" * 1025])
    async def test_keys_that_stores_would_change_are_refused(self, store: Store, key: str) -> None:
        """A key that some store would alter is Invalid on every store."""
        with pytest.raises(Invalid):
            await store.create(key, b"x")

    async def test_deleting_what_is_missing_is_fine(self, store: Store) -> None:
        """Delete is idempotent."""
        await store.create("t/one", b"x")

        await store.delete("t/one")
        await store.delete("t/one")

        with pytest.raises(NotFound):
            await store.get("t/one")


async def test_bytes_that_know_their_hash_are_stored_as_any_others(store: Store) -> None:
    """Created, read back and replaced, they are the same bytes; a signed PUT uses the hash they have."""
    hashed = HashedBytes.of(bytes(range(256)) * 300)

    written = await store.create("hashed", hashed)
    read = await store.get("hashed")
    await store.replace("hashed", HashedBytes.of(b"other"), written.etag)

    assert (bytes(hashed), len(hashed)) == (read.data, written.size)
    assert b"other" == (await store.get("hashed")).data

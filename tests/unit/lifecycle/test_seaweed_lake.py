"""SeaweedFS behind lifecycle's seams: policies, live state and walks, over a scripted filer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.filer import s3
from lakebed.filer.codec import read_page, write_entry
from lakebed.filer.model import (
    Attributes,
    ConditionKind,
    FileChunk,
    FilerEntry,
    FilerEvent,
    MutationKind,
    SkippedEntries,
)
from lakebed.filer.protobuf import encode_field
from lakebed.lifecycle.model import Verb
from lakebed.lifecycle.seaweed.store import VERSIONING_FRESH_S, SeaweedLake
from support.lifecycle_filer import ScriptedFiler

SECOND_NS = 10**9
MADE_NS = 7 * SECOND_NS
XML = b"<LifecycleConfiguration/>"


class Tree(ScriptedFiler):
    """Entries by path, with the folders above them."""

    def file(self, path: str, at_ns: int = MADE_NS, **said: Any) -> FilerEntry:
        folders = path.split("/")[1:-1]
        for depth in range(1, len(folders) + 1):
            above = "/" + "/".join(folders[:depth])
            if above not in self.entries:
                self.put(above, is_directory=True)
        said.setdefault("attributes", Attributes(mtime_ns=at_ns, file_size=3))
        return self.put(path, chunks=(FileChunk("3,01", 0, 3),), **said)

    def bucket(self, name: str, versioning: str = "", **extended: bytes) -> None:
        said = {s3.VERSIONING: versioning.encode()} if versioning else {}
        self.put(f"/buckets/{name}", is_directory=True, extended={**said, **extended})

    async def entries_of(self, directory: str, after: str = "", prefix: str = "") -> AsyncGenerator[FilerEntry, None]:
        names = sorted(path for path in self.entries if path.rsplit("/", 1)[0] == directory)
        for path in names:
            if path.rsplit("/", 1)[1] > after and path.rsplit("/", 1)[1].startswith(prefix):
                yield self.entries[path]


class World:
    def __init__(self) -> None:
        self.clock, self.tree = ManualClock(), Tree()
        tree, self.closed = self.tree, 0
        world = self

        class Filer:
            lookup, page, transact = tree.lookup, tree.page, tree.transact

            def entries(self, directory: str, *, prefix: str = "", after: str = "") -> AsyncGenerator[FilerEntry, None]:
                return tree.entries_of(directory, after, prefix)

            async def pages(
                self, directory: str, *, prefix: str = "", after: str = "", newest_ns: int | None = None
            ) -> AsyncGenerator[list[FilerEntry | SkippedEntries], None]:
                """By three, as the client decodes them."""
                found = [one async for one in tree.entries_of(directory, after, prefix)]
                for begin in range(0, len(found), 3):
                    messages = [encode_field(1, write_entry(one)) for one in found[begin : begin + 3]]
                    yield read_page(messages, newest_ns)[0]

            async def close(self) -> None:
                world.closed += 1

        self.lake = SeaweedLake(Filer(), Runtime(clock=self.clock, ids=Ids.seeded(1), metrics=Metrics()))  # type: ignore[arg-type]

    async def walked(self, bucket: str = "b", after: str = "") -> list[tuple[str, str, str]]:
        return [(one.key, one.upload_id, one.token) async for one in self.lake.scan(bucket, after)]


@pytest.fixture
def world() -> World:
    made = World()
    made.tree.bucket("b")
    return made


# Policies.


async def test_the_policies_are_those_of_buckets_that_have_one(world: World) -> None:
    """With whether they keep versions, suspended ones too; the store's own folders and files are no buckets."""
    world.tree.bucket("plain", **{s3.LIFECYCLE: XML})
    world.tree.bucket("kept", "Enabled", **{s3.LIFECYCLE: XML})
    world.tree.bucket("paused", "Suspended", **{s3.LIFECYCLE: XML})
    world.tree.bucket("locked", **{s3.LIFECYCLE: XML, s3.LOCK_ENABLED: b"true"})
    world.tree.bucket(".hidden", **{s3.LIFECYCLE: XML})
    world.tree.put("/buckets/file", extended={s3.LIFECYCLE: XML})

    found = {policy.bucket: (policy.text, policy.versioned) for policy in await world.lake.all()}

    expected = {"plain": False, "kept": True, "paused": True, "locked": True}
    assert {name: (XML, versioned) for name, versioned in expected.items()} == found


async def test_one_policy_is_read_from_the_store_each_time(world: World) -> None:
    """None for a bucket without a policy and for one that is not there."""
    assert [None, None] == [await world.lake.get("b"), await world.lake.get("missing")]
    world.tree.bucket("b", **{s3.LIFECYCLE: XML})
    found = await world.lake.get("b")
    assert found is not None and (XML, False) == (found.text, found.versioned)


async def test_a_bucket_that_is_not_there_is_named_with_what_to_do(world: World) -> None:
    """As a person names it, not by the filer's path: by a scan, as a dry run makes it, and by a put."""

    async def scan() -> None:
        async for _ in world.lake.scan("missing"):
            pass

    for asked in (scan(), world.lake.put("missing", XML)):
        with pytest.raises(NotFound, match=r"^bucket missing does not exist$") as found:
            await asked
        assert "lakebed bucket create missing" in found.value.hint


async def test_a_policy_is_put_and_removed_by_one_change_of_the_buckets_entry(world: World) -> None:
    """Removing takes the companion attribute along; a bucket that is not there is NotFound, and nothing is changed."""
    await world.lake.put("b", XML)
    await world.lake.put("b", b"")
    with pytest.raises(NotFound):
        await world.lake.put("missing", XML)
    for none in ("", "..", "b/k"):
        with pytest.raises(Invalid, match="bucket"):
            await world.lake.put(none, b"")

    put, removed = world.tree.done
    (change,), (removal,) = put.mutations, removed.mutations
    assert ("/buckets/b", ConditionKind.EXISTS) == (put.path, put.clauses[0].kind)
    assert (MutationKind.PATCH_EXTENDED, "/buckets", "b") == (change.kind, change.directory, change.name)
    assert ({s3.LIFECYCLE: XML}, ()) == (change.set_extended, change.delete_extended)
    assert ({}, (s3.LIFECYCLE, s3.LIFECYCLE_MINIMUM)) == (removal.set_extended, removal.delete_extended)


# Looking.


async def test_a_bucket_whose_entry_changed_is_named_and_heartbeats_are_not(world: World) -> None:
    """Only entries of the folder of buckets are subscribed to, from now on: no object's change comes through."""
    asked: list[tuple[Any, ...]] = []

    async def subscribe(prefixes: Any, *, since_ns: int, directories: Any) -> AsyncGenerator[FilerEvent, None]:
        asked.append((prefixes, since_ns, directories))
        yield FilerEvent("", 1)
        yield FilerEvent("/buckets", 2, old=FilerEntry("b"), new=FilerEntry("b"))
        yield FilerEvent("/buckets", 3, old=FilerEntry("gone"))

    world.lake._filer.subscribe = subscribe  # type: ignore[method-assign, assignment]

    assert ["b", "gone"] == [bucket async for bucket in world.lake.changes()]
    assert [([], world.clock.now_ns(), ["/buckets"])] == asked


async def test_an_object_is_looked_at_as_it_is_now(world: World) -> None:
    """Its tags, lock and identity; a key that is gone, a folder and a missing bucket have no entries."""
    tags = {f"{s3.TAG}t": b"1", s3.LEGAL_HOLD: b"ON"}
    world.tree.file("/buckets/b/x/k", extended=tags)
    found = await world.lake.look("b", "x/k")
    (entry,) = found.entries

    assert ("b", "x/k", "x/k", "") == (found.bucket, found.key, found.token, found.upload_id)
    assert ((("t", "1"),), True, MADE_NS, 3, "3,01") == (
        entry.tags,
        entry.locked,
        entry.mtime_ns,
        entry.size,
        entry.identity.head_fid,
    )
    for bucket, key in (("b", "gone"), ("b", "x"), ("missing", "x/k")):
        assert () == (await world.lake.look(bucket, key)).entries


async def test_the_versions_of_a_key_are_looked_at_where_versions_are_kept(world: World) -> None:
    """The current one first; without a folder of versions the object at the key is all there is."""
    world.tree.bucket("b", "Enabled")
    new, old = (s3.new_version_id(MADE_NS + n * SECOND_NS, "0" * 16) for n in (5, 2))
    world.tree.file("/buckets/b/bare")
    for version in (old, new):
        world.tree.file(f"/buckets/b/k.versions/v_{version}", extended={s3.VERSION_ID: version.encode()})
    world.tree.put("/buckets/b/k.versions", is_directory=True, extended={s3.LATEST_FILE: f"v_{new}".encode()})

    found, bare = await world.lake.look("b", "k"), await world.lake.look("b", "bare")

    assert [(new, True), (old, False)] == [(one.version_id, one.latest) for one in found.entries]
    assert [(s3.NULL, True)] == [(one.version_id, one.latest) for one in bare.entries]
    assert ("k", "bare") == (found.token, bare.token)


async def test_the_state_of_versioning_is_read_again_after_a_second(world: World) -> None:
    """Within it one look at the bucket serves many keys; after it a change is seen."""
    world.tree.file("/buckets/b/k")
    for _ in range(3):
        await world.lake.look("b", "k")
    assert 1 == world.tree.looks.count("/buckets/b")
    world.tree.bucket("b", "Enabled")
    await world.clock.advance(VERSIONING_FRESH_S)
    same = await world.lake.look("b", "k")
    await world.clock.advance(0.001)
    after = await world.lake.look("b", "k")

    assert (1.0, "", s3.NULL) == (VERSIONING_FRESH_S, same.entries[0].version_id, after.entries[0].version_id)
    assert 2 == world.tree.looks.count("/buckets/b")


async def test_an_upload_is_looked_at_by_its_id(world: World) -> None:
    """Its key is what it says; one that is gone has no entries, one that names no key is Corrupt."""
    world.tree.put("/buckets/b/.uploads/u1", is_directory=True, extended={s3.UPLOAD_KEY: b"x/k"})
    world.tree.put("/buckets/b/.uploads/u2", is_directory=True)
    found, gone = await world.lake.look("b", "x/k", "u1"), await world.lake.look("b", "x/k", "u9")

    assert ("x/k", "u1", ".uploads/u1") == (found.entries[0].key, found.entries[0].upload_id, found.token)
    assert ((), "u9") == (gone.entries, gone.upload_id)
    with pytest.raises(Corrupt, match="u2"):
        await world.lake.look("b", "x/k", "u2")


async def test_a_folder_object_is_an_object_only_while_it_is_empty(world: World) -> None:
    """A folder that nobody put is none."""
    mime = Attributes(mtime_ns=MADE_NS, mime="application/x-directory")
    world.tree.put("/buckets/b/put", is_directory=True, attributes=mime)
    world.tree.put("/buckets/b/made", is_directory=True)
    found = await world.lake.look("b", "put/")
    made, gone = await world.lake.look("b", "made/"), await world.lake.look("b", "gone/")
    world.tree.file("/buckets/b/put/inside")
    full = await world.lake.look("b", "put/")

    assert (["put/"], "put") == ([one.key for one in found.entries], found.token)
    assert ((), (), ()) == (made.entries, gone.entries, full.entries)


# Walking.


def fill(world: World) -> None:
    mime = Attributes(mtime_ns=MADE_NS, mime="application/x-directory")
    for key in ("a", "d/e/f", "d/g", "put/inside", "z"):
        world.tree.file(f"/buckets/b/{key}")
    world.tree.put("/buckets/b/empty", is_directory=True, attributes=mime)
    world.tree.put("/buckets/b/put", is_directory=True, attributes=mime)
    world.tree.put("/buckets/b/.uploads", is_directory=True)
    world.tree.put("/buckets/b/.uploads/u1", is_directory=True, extended={s3.UPLOAD_KEY: b"up"})
    world.tree.put("/buckets/b/.uploads/u2", is_directory=True)  # no upload of S3


WALKED = [
    ("up", "u1", ".uploads/u1"),
    ("a", "", "a"),
    ("d/e/f", "", "d/e/f"),
    ("d/g", "", "d/g"),
    ("empty/", "", "empty"),
    ("put/inside", "", "put/inside"),
    ("z", "", "z"),
]


async def test_a_walk_meets_every_key_and_upload_once_in_order(world: World) -> None:
    """Depth first by name; folders that are no objects, or hold others, are not told themselves."""
    fill(world)
    assert WALKED == await world.walked()


async def test_a_walk_goes_on_behind_any_token(world: World) -> None:
    """Wherever it was cut off, the rest comes, each once."""
    fill(world)
    for place, (_, _, token) in enumerate(WALKED):
        assert WALKED[place + 1 :] == await world.walked(after=token), token


async def test_a_resumed_walk_tells_the_folder_whose_last_key_it_had_passed(world: World) -> None:
    """The folder object comes behind what it held: cut off in between, it must not be left out."""
    fill(world)
    del world.tree.entries["/buckets/b/put/inside"]

    assert [("put/", "", "put"), ("z", "", "z")] == await world.walked(after="put/inside")


async def test_a_walk_of_a_versioned_bucket_tells_each_key_once(world: World) -> None:
    """A key with an object beside its versions is told with the object; a damaged version is told as unreadable."""
    world.tree.bucket("b", "Enabled")
    version = s3.new_version_id(MADE_NS, "0" * 16)
    for key in ("both", "only"):
        world.tree.file(f"/buckets/b/{key}.versions/v_{version}", extended={s3.VERSION_ID: version.encode()})
    world.tree.file("/buckets/b/both")
    world.tree.file(f"/buckets/b/zbad.versions/v_{version}", extended={s3.NONCURRENT_SINCE: b"no"})
    world.tree.file(f"/buckets/b/zbad.versions/v_{version[::-1]}", extended={s3.NONCURRENT_SINCE: b"no"})
    found = [one async for one in world.lake.scan("b")]

    assert [("both", "both", 2), ("only", "only.versions", 1), ("zbad", "zbad.versions", 0)] == [
        (one.key, one.token, len(one.entries)) for one in found
    ]
    assert ["", "", True] == [one.unreadable and s3.NONCURRENT_SINCE in one.unreadable for one in found]


@pytest.mark.parametrize("versioning", ["", "Enabled"])
async def test_a_key_below_a_folder_that_is_named_like_one_of_versions_is_walked(world: World, versioning: str) -> None:
    """`y.versions/z` is a key of its own, beside the versions of `y` where there are some."""
    world.tree.bucket("b", versioning)
    version = s3.new_version_id(MADE_NS, "0" * 16)
    if versioning:
        world.tree.file(f"/buckets/b/y.versions/v_{version}", extended={s3.VERSION_ID: version.encode()})
    world.tree.file("/buckets/b/y.versions/z")
    found = [(one.key, len(one.entries)) async for one in world.lake.scan("b")]

    assert [("y.versions/z", 1), *([("y", 1)] if versioning else [])] == found
    assert found[1:] == [(one.key, len(one.entries)) async for one in world.lake.scan("b", "y.versions/z")]


async def test_a_scan_of_a_prefix_or_a_range_lists_that_and_nothing_else(world: World) -> None:
    """By folder and beginning of the name; between two tokens; the uploads alone."""
    fill(world)
    everything = [token for _, _, token in WALKED]
    for number, border in enumerate(everything):
        before = [one.token async for one in world.lake.scan("b", until=border)]
        behind = [one.token async for one in world.lake.scan("b", border)]
        assert everything == [*before, *behind], (number, border)
    for prefix in ("a", "put/", "put/in", ".uploads/", "none/"):
        wanted = [token for key, upload, token in WALKED if token.startswith(prefix.rstrip("/")) and (
            key.startswith(prefix) or (upload and prefix == ".uploads/"))]  # fmt: skip
        assert wanted == [one.token async for one in world.lake.scan("b", prefix=prefix)], prefix


async def test_a_walk_of_a_bucket_that_is_not_there_is_not_found(world: World) -> None:
    """It is not an empty bucket."""
    with pytest.raises(NotFound):
        await world.walked("missing")


# Deleting.


async def test_objects_that_are_too_young_are_counted_and_not_read(world: World) -> None:
    """But where versions are kept: an old version may be beside a young object. Uploads are always read."""
    for number, at_ns in enumerate((MADE_NS, MADE_NS + 9 * 10**9, MADE_NS + 8 * 10**9, MADE_NS)):
        world.tree.file(f"/buckets/b/f/{number}", attributes=Attributes(mtime_ns=at_ns))
    newest_ns = MADE_NS + 10**9

    async def seen() -> list[tuple[str, int, int]]:
        families = world.lake.scan("b", newest_ns=newest_ns)
        return [(one.token, len(one.entries), one.skipped) async for one in families]

    assert [("f/0", 1, 0), ("f/2", 0, 2), ("f/3", 1, 0)] == await seen()
    world.tree.bucket("b", "Enabled")
    assert [(f"f/{number}", 1, 0) for number in range(4)] == await seen()


async def test_a_walked_object_is_deleted_without_another_look(world: World) -> None:
    """The condition proves that it is the one that was judged."""
    world.tree.file("/buckets/b/k")
    (family,) = [one async for one in world.lake.scan("b")]
    looks = len(world.tree.looks)
    await world.lake.delete(family.entries[0], Verb.CURRENT)

    assert looks == len(world.tree.looks)
    (done,) = world.tree.done
    assert [ConditionKind.ENTRY_EQUAL] == [clause.kind for clause in done.clauses]
    assert [("/buckets/b", "k", True)] == [(one.directory, one.name, one.delete_data) for one in done.mutations]


async def test_where_versions_are_kept_a_delete_of_the_current_one_puts_a_marker(world: World) -> None:
    """The pointer moves to the marker, the old version is noted as noncurrent since now, all in one transaction."""
    world.tree.bucket("b", "Enabled")
    version = s3.new_version_id(MADE_NS, "0" * 16)
    world.tree.file(f"/buckets/b/k.versions/v_{version}", extended={s3.VERSION_ID: version.encode()})
    world.tree.put("/buckets/b/k.versions", is_directory=True, extended={s3.LATEST_FILE: f"v_{version}".encode()})
    (entry,) = (await world.lake.look("b", "k")).entries
    await world.lake.delete(entry, Verb.CURRENT)

    (done,) = world.tree.done
    put, point, old = done.mutations
    now_ns = world.clock.now_ns()
    assert put.entry is not None
    marker_id = put.entry.extended[s3.VERSION_ID].decode()
    assert ("/buckets/b/k", "/buckets/b/k.versions") == (done.path, done.condition_path)
    assert (b"true", f"v_{marker_id}", now_ns) == (
        put.entry.extended[s3.DELETE_MARKER],
        put.name,
        s3.version_time_ns(marker_id),
    )
    assert ("/buckets/b", "k.versions", marker_id.encode(), f"v_{marker_id}".encode(), b"true", b"0") == (
        point.directory,
        point.name,
        point.set_extended[s3.LATEST_ID],
        point.set_extended[s3.LATEST_FILE],
        point.set_extended[s3.LATEST_MARKER],
        point.set_extended[s3.LATEST_SIZE],
    )
    assert str(now_ns // SECOND_NS).encode() == point.set_extended[s3.LATEST_MTIME]
    assert {s3.LATEST_ETAG, s3.LATEST_OWNER, s3.NULL_IS_LATEST} == set(point.delete_extended)
    assert (f"v_{version}", str(now_ns).encode()) == (old.name, old.set_extended[s3.NONCURRENT_SINCE])


async def test_the_first_marker_of_a_key_is_put_only_while_it_has_no_versions(world: World) -> None:
    """An object from before versioning stays as the null version; the condition is that no folder has appeared."""
    world.tree.bucket("b", "Enabled")
    world.tree.file("/buckets/b/k")
    (entry,) = (await world.lake.look("b", "k")).entries
    await world.lake.delete(entry, Verb.CURRENT)

    (done,) = world.tree.done
    assert ([ConditionKind.NOT_EXISTS], "/buckets/b/k.versions") == (
        [clause.kind for clause in done.clauses],
        done.condition_path,
    )
    assert [MutationKind.PUT, MutationKind.PATCH_EXTENDED] == [one.kind for one in done.mutations]


async def test_where_versioning_is_suspended_the_marker_replaces_the_null_version(world: World) -> None:
    """The object at the key goes with its bytes in the same step."""
    world.tree.bucket("b", "Suspended")
    world.tree.file("/buckets/b/k")
    (entry,) = (await world.lake.look("b", "k")).entries
    await world.lake.delete(entry, Verb.CURRENT)

    (done,) = world.tree.done
    assert [MutationKind.DELETE, MutationKind.PUT, MutationKind.PATCH_EXTENDED] == [one.kind for one in done.mutations]
    assert ("k", True, f"v_{s3.NULL}") == (
        done.mutations[0].name,
        done.mutations[0].delete_data,
        done.mutations[1].name,
    )
    assert [ConditionKind.ENTRY_EQUAL] == [clause.kind for clause in done.clauses]


async def test_a_current_version_that_is_gone_or_changed_gets_no_marker(world: World) -> None:
    """NotFound and Stale, and nothing is changed."""
    world.tree.bucket("b", "Enabled")
    world.tree.file("/buckets/b/k")
    (entry,) = (await world.lake.look("b", "k")).entries
    world.tree.file("/buckets/b/k", at_ns=MADE_NS + 1)
    with pytest.raises(Exception, match="changed after it was evaluated"):
        await world.lake.delete(entry, Verb.CURRENT)
    del world.tree.entries["/buckets/b/k"]
    with pytest.raises(NotFound):
        await world.lake.delete(entry, Verb.CURRENT)
    assert [] == world.tree.done


async def test_an_upload_is_aborted_whole_and_only_as_it_was_judged(world: World) -> None:
    """Its folder goes with all parts; an upload whose entry changed stays."""
    world.tree.put("/buckets/b/.uploads/u1", is_directory=True, extended={s3.UPLOAD_KEY: b"k"})
    (entry,) = (await world.lake.look("b", "k", "u1")).entries
    await world.lake.delete(entry, Verb.ABORT_MPU)
    world.tree.put("/buckets/b/.uploads/u1", is_directory=True, extended={s3.UPLOAD_KEY: b"k", "more": b"1"})
    with pytest.raises(Exception, match="changed after it was evaluated"):
        await world.lake.delete(entry, Verb.ABORT_MPU)

    (done,) = world.tree.done
    (gone,) = done.mutations
    assert ("/buckets/b/.uploads", "u1", True, True) == (gone.directory, gone.name, gone.recursive, gone.delete_data)


async def test_seaweedfs_own_worker_is_seen_by_the_newest_of_its_cursors(world: World) -> None:
    """Never is 0: there is no folder of cursors before its first run."""
    never = await world.lake.own_worker_ns()
    for shard, at_s in (("shard-00.json", 40), ("shard-01.json", 90), ("shard-02.json", 50)):
        world.tree.file(f"/etc/s3/lifecycle/daily-cursors/{shard}", at_s * SECOND_NS)

    assert (0, 90 * SECOND_NS) == (never, await world.lake.own_worker_ns())


async def test_closing_the_lake_closes_the_filer(world: World) -> None:
    """A command leaves no connection behind."""
    await world.lake.close()
    assert 1 == world.closed

"""The guarded delete on the real embedded bucket: exactly what was judged goes, in one step, or nothing does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio

from lakebed.core.clock import SystemClock
from lakebed.core.errors import Denied, LakebedError, NotFound, Stale, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.filer.client import FilerClient
from lakebed.lifecycle.delete_decision import outcome_of
from lakebed.lifecycle.model import DeleteOutcome, ObjectEntry, Position, Verb
from lakebed.lifecycle.seams import ChangeEvent
from lakebed.lifecycle.seaweed.store import SeaweedLake
from lakebed.store.admin import client

RACES = 48
DEADLINE_S = 60.0


class Place:
    """A bucket of the embedded server, boto3 for everybody else, and lifecycle's view of it."""

    def __init__(self, weed: BucketEndpoints, *, lock: bool = False) -> None:
        self.clock, self.name = SystemClock(), f"gd-{Ids().token()}"
        self.s3: Any = client(weed.store_settings())
        self.s3.create_bucket(Bucket=self.name, ObjectLockEnabledForBucket=lock)
        filer = FilerClient([weed.filer_grpc], Runtime(clock=self.clock, ids=Ids(), metrics=Metrics()))
        self.lake = SeaweedLake(filer, Runtime(clock=self.clock, ids=Ids(), metrics=Metrics()))

    def put(self, key: str, body: bytes = b"x", **options: Any) -> str:
        return str(self.s3.put_object(Bucket=self.name, Key=key, Body=body, **options).get("VersionId", ""))

    def body(self, key: str) -> bytes | None:
        try:
            return bytes(self.s3.get_object(Bucket=self.name, Key=key)["Body"].read())
        except self.s3.exceptions.NoSuchKey:
            return None

    def tag(self, key: str) -> None:
        self.s3.put_object_tagging(Bucket=self.name, Key=key, Tagging={"TagSet": [{"Key": "keep", "Value": "1"}]})

    def versioning(self, status: str) -> None:
        self.s3.put_bucket_versioning(Bucket=self.name, VersioningConfiguration={"Status": status})

    def versions(self) -> tuple[list[str], list[str]]:
        """Version ids and markers' ids; the current one with a star."""
        found = self.s3.list_object_versions(Bucket=self.name)
        shown = [
            [one["VersionId"] + "*" * one["IsLatest"] for one in found.get(kind, [])]
            for kind in ("Versions", "DeleteMarkers")
        ]
        return shown[0], shown[1]

    async def entries(self, key: str) -> tuple[ObjectEntry, ...]:
        return (await self.lake.look(self.name, key)).entries

    async def read(self, after: Position) -> list[ChangeEvent]:
        async with asyncio.timeout(DEADLINE_S):
            events = [event async for event in self.lake.read(after, self.clock.now_ns())]
        return [event for event in events if event.bucket == self.name]


@pytest_asyncio.fixture
async def place(weed: BucketEndpoints) -> AsyncIterator[Place]:
    made = await asyncio.to_thread(Place, weed)
    yield made
    await made.lake.close()


async def refused(place: Place, entry: ObjectEntry, verb: Verb = Verb.CURRENT) -> DeleteOutcome:
    with pytest.raises(LakebedError) as caught:
        await place.lake.delete(entry, verb)
    return outcome_of(caught.value)


async def test_what_was_judged_is_deleted_and_a_second_time_is_gone(place: Place) -> None:
    """Objects of one chunk, of none and of parts."""
    upload = place.s3.create_multipart_upload(Bucket=place.name, Key="parts")["UploadId"]
    part = place.s3.upload_part(Bucket=place.name, Key="parts", UploadId=upload, PartNumber=1, Body=b"p")
    done = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    place.s3.complete_multipart_upload(Bucket=place.name, Key="parts", UploadId=upload, MultipartUpload=done)
    place.put("a/b")
    place.put("empty", b"")

    for key in ("a/b", "empty", "parts"):
        (judged,) = await place.entries(key)
        await place.lake.delete(judged, Verb.CURRENT)
        assert place.body(key) is None
        assert DeleteOutcome.NOT_FOUND is await refused(place, judged)


@pytest.mark.parametrize("body", [b"x", b"y", b""])
async def test_an_overwritten_object_stays(place: Place, body: bytes) -> None:
    """Even by the same bytes in the same second: it has an age of its own."""
    place.put("k", b"x")
    (judged,) = await place.entries("k")
    place.put("k", body)

    assert DeleteOutcome.STALE_IDENTITY is await refused(place, judged)
    assert body == place.body("k")


async def test_an_object_tagged_in_between_stays(place: Place) -> None:
    """Tags are part of what was judged, and of the condition itself."""
    place.put("k")
    (judged,) = await place.entries("k")
    place.tag("k")

    assert DeleteOutcome.STALE_IDENTITY is await refused(place, judged)
    assert b"x" == place.body("k")


async def test_a_write_that_races_a_delete_is_never_lost(place: Place) -> None:
    """Whoever comes first, what was written after the judgement is there afterwards."""
    outcomes: list[str] = []

    async def race(number: int) -> None:
        key = f"k{number}"
        await asyncio.to_thread(place.put, key, b"old")
        (judged,) = await place.entries(key)
        writing = asyncio.create_task(asyncio.to_thread(place.put, key, b"new"))
        await asyncio.sleep(number % 8 * 0.005)
        try:
            await place.lake.delete(judged, Verb.CURRENT)
            outcomes.append("deleted")
        except Stale:
            outcomes.append("stale")
        await writing
        assert b"new" == await asyncio.to_thread(place.body, key)

    for begin in range(0, RACES, 8):
        await asyncio.gather(*(race(number) for number in range(begin, begin + 8)))
    assert RACES == len(outcomes)


async def test_object_lock_is_never_bypassed(weed: BucketEndpoints) -> None:
    """A hold or a retention refuses, also one that was put after the judgement; without them the version goes."""
    place = await asyncio.to_thread(Place, weed, lock=True)
    held, kept, free = (place.put("k", body) for body in (b"1", b"2", b"3"))
    place.put("k", b"4")
    before = {one.version_id: one for one in await place.entries("k")}
    until = datetime.fromtimestamp(place.clock.now_ns() / 1e9, UTC) + timedelta(hours=1)
    which = {"Bucket": place.name, "Key": "k"}
    place.s3.put_object_legal_hold(**which, VersionId=held, LegalHold={"Status": "ON"})
    place.s3.put_object_retention(**which, VersionId=kept, Retention={"Mode": "GOVERNANCE", "RetainUntilDate": until})
    after = {one.version_id: one for one in await place.entries("k")}

    assert {held: True, kept: True, free: False} == {one: after[one].locked for one in (held, kept, free)}
    for locked in (held, kept):
        assert DeleteOutcome.STALE_IDENTITY is await refused(place, before[locked], Verb.VERSION)
        assert DeleteOutcome.SKIPPED_OBJECT_LOCK is await refused(place, after[locked], Verb.VERSION)
    await place.lake.delete(after[free], Verb.VERSION)
    versions, _ = place.versions()
    assert {held, kept} < set(versions) and free not in versions
    await place.lake.close()


@pytest.mark.parametrize("status", ["Enabled", "Suspended"])
async def test_versions_go_one_by_one_until_nothing_is_left(place: Place, status: str) -> None:
    """Marker, then noncurrent versions, then the lone marker and its folder; S3 agrees after each step."""
    place.put("k", b"null")
    place.versioning("Enabled")
    first = place.put("k", b"1")
    place.versioning(status)
    second = place.put("k", b"2") or "null"
    judged = await place.entries("k")
    assert [second, first] == [one.version_id for one in judged][:2]

    await place.lake.delete(judged[0], Verb.CURRENT)
    assert place.body("k") is None
    versions, (marker,) = place.versions()
    assert marker.endswith("*") and first in versions
    assert (second in versions) is (status == "Enabled")  # where suspended, the marker took its place
    for one in (await place.entries("k"))[1:]:
        await place.lake.delete(one, Verb.VERSION)
    assert ([], [marker]) == place.versions()
    (lone,) = await place.entries("k")
    assert lone.marker and lone.alone
    await place.lake.delete(lone, Verb.DELETE_MARKER)
    assert ([], []) == place.versions()
    assert [] == [family async for family in place.lake.scan(place.name)]

    place.put("k", b"again")
    assert b"again" == place.body("k")


async def test_a_version_that_was_current_again_counts_from_its_new_successor(place: Place) -> None:
    """The server notes the time on a version, so its delete is refused; not on a null version, which says so."""
    place.put("null", b"1")
    place.versioning("Enabled")
    place.put("k", b"1")
    before: dict[str, ObjectEntry] = {}
    for key in ("k", "null"):
        newer = place.put(key, b"2")
        before[key] = (await place.entries(key))[1]
        place.s3.delete_object(Bucket=place.name, Key=key, VersionId=newer)
        place.put(key, b"3")

    assert {"k": True, "null": False} == {key: one.since_noted for key, one in before.items()}
    assert DeleteOutcome.STALE_IDENTITY is await refused(place, before["k"], Verb.VERSION)
    for key, old in before.items():
        again = (await place.entries(key))[1]
        assert again.version_id == old.version_id
        assert (again.noncurrent_since_ns or 0) > (old.noncurrent_since_ns or 0)


async def test_a_newer_version_saves_the_current_one_and_its_marker(place: Place) -> None:
    """No marker over a version that nobody judged, no end of a marker that is not alone, no end of what is current."""
    place.versioning("Enabled")
    place.put("k", b"1")
    (judged,) = await place.entries("k")
    newer = place.put("k", b"2")

    assert DeleteOutcome.STALE_IDENTITY is await refused(place, judged)
    assert b"2" == place.body("k")
    place.s3.delete_object(Bucket=place.name, Key="k")
    marker, _, old = await place.entries("k")
    assert DeleteOutcome.STALE_IDENTITY is await refused(place, marker, Verb.DELETE_MARKER)
    place.s3.delete_object(Bucket=place.name, Key="k", VersionId=marker.version_id)
    place.s3.delete_object(Bucket=place.name, Key="k", VersionId=newer)
    assert DeleteOutcome.STALE_IDENTITY is await refused(place, old, Verb.VERSION)  # it is the current one again
    assert b"1" == place.body("k")


async def test_an_upload_is_aborted_with_its_parts(place: Place) -> None:
    """Once; S3 then knows it no more."""
    upload = place.s3.create_multipart_upload(Bucket=place.name, Key="u")["UploadId"]
    place.s3.upload_part(Bucket=place.name, Key="u", UploadId=upload, PartNumber=1, Body=b"p")
    (judged,) = (await place.lake.look(place.name, "u", upload)).entries

    await place.lake.delete(judged, Verb.ABORT_MPU)

    assert not place.s3.list_multipart_uploads(Bucket=place.name).get("Uploads")
    assert DeleteOutcome.NOT_FOUND is await refused(place, judged, Verb.ABORT_MPU)


async def test_events_resume_behind_any_position(place: Place) -> None:
    """Each event once, in order of positions; from each of them exactly the rest."""
    began = Position(place.clock.now_ns())
    place.put("k")
    place.put("k", b"yy")
    place.tag("k")
    place.versioning("Enabled")
    version = place.put("v")
    place.s3.create_multipart_upload(Bucket=place.name, Key="u")
    place.s3.delete_object(Bucket=place.name, Key="v", VersionId=version)

    events = await place.read(began)

    told = [(event.key, event.version_id, event.policy) for event in events]
    assert [("k", "", False)] * 3 + [("", "", True), ("v", version, False)] == told[:5]
    assert [("u", "", False), ("v", version, False)] == told[-2:]
    assert sorted(event.position for event in events) == [event.position for event in events]
    for number, event in enumerate(events):
        assert events[number + 1 :] == await place.read(event.position)


async def test_events_come_from_another_filer_when_one_is_gone(weed: BucketEndpoints, place: Place) -> None:
    """One pass, one position, whichever filer tells."""
    began = Position(place.clock.now_ns())
    place.put("k")
    filer = FilerClient(
        ["127.0.0.1:1", weed.filer_grpc], Runtime(clock=place.clock, ids=Ids(), metrics=Metrics()), timeout_s=DEADLINE_S
    )
    lake = SeaweedLake(filer, Runtime(clock=place.clock, ids=Ids(), metrics=Metrics()))

    told = [event.key async for event in lake.read(began, place.clock.now_ns()) if event.bucket == place.name]

    assert ["k"] == told
    await lake.close()


async def test_a_filer_that_is_not_there_is_a_transport_error(place: Place) -> None:
    """Nothing is decided without an answer."""
    place.put("k")
    (judged,) = await place.entries("k")
    nobody = FilerClient(["127.0.0.1:1"], Runtime(clock=place.clock, ids=Ids(), metrics=Metrics()), timeout_s=1.0)
    alone = SeaweedLake(nobody, Runtime(clock=place.clock, ids=Ids(), metrics=Metrics()))

    with pytest.raises(Unavailable) as caught:
        await alone.delete(judged, Verb.CURRENT)
    assert DeleteOutcome.TRANSPORT_ERROR is outcome_of(caught.value)
    with pytest.raises(Unavailable):
        await alone.look(place.name, "k")
    await alone.close()


def test_outcomes_follow_from_errors() -> None:
    """The typed refusals of the store are the seed's outcomes."""
    wanted = {
        NotFound: DeleteOutcome.NOT_FOUND,
        Stale: DeleteOutcome.STALE_IDENTITY,
        Denied: DeleteOutcome.SKIPPED_OBJECT_LOCK,
    }
    assert list(wanted.values()) == [outcome_of(kind("so")) for kind in wanted]

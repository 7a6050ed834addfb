"""The filer of the real embedded bucket: what S3 clients do arrives as changes, in order, and can be read again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid, NotFound, Stale, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.filer import s3
from lakebed.filer.client import FilerClient
from lakebed.filer.model import Clause, ConditionKind, FilerEvent, Mutation, MutationKind, Transaction
from lakebed.store.admin import client

DEADLINE_S = 60.0
NOBODY = "127.0.0.1:1"  # a port that nobody listens on


@pytest_asyncio.fixture
async def filer(weed: BucketEndpoints) -> AsyncIterator[FilerClient]:
    async with FilerClient([weed.filer_grpc], Runtime(clock=SystemClock(), ids=Ids(), metrics=Metrics())) as made:
        yield made


@pytest.fixture
def boto(weed: BucketEndpoints) -> Any:
    return client(weed.store_settings())


@pytest.fixture
def name(boto: Any) -> str:
    made = f"filer-{Ids().token()}"
    boto.create_bucket(Bucket=made)
    return made


async def changes(filer: FilerClient, name: str, since_ns: int, until_ns: int = 0) -> list[FilerEvent]:
    """Everything that was told of one bucket up to now."""
    async with asyncio.timeout(DEADLINE_S):
        stream = filer.subscribe([f"/buckets/{name}/"], since_ns=since_ns, until_ns=until_ns or SystemClock().now_ns())
        return [event async for event in stream if not event.heartbeat]


def story(events: list[FilerEvent]) -> list[str]:
    """Files only, as "path verb"."""
    told = []
    for event in events:
        shown = event.new or event.old
        if shown is None or shown.is_directory:
            continue
        verb = "made" if event.created else "changed" if event.new else "gone"
        told.append(f"{event.directory.partition('/buckets/')[2].partition('/')[2]}/{shown.name} {verb}".lstrip("/"))
    return told


async def test_changes_arrive_in_order_and_resume_from_a_cursor(filer: FilerClient, boto: Any, name: str) -> None:
    """Create, overwrite, tag, delete: each once, and from any of them exactly the rest."""
    began_ns = SystemClock().now_ns()
    boto.put_object(Bucket=name, Key="a/one", Body=b"1", Tagging="k=v")
    boto.put_object(Bucket=name, Key="a/one", Body=b"22")
    boto.put_object_tagging(Bucket=name, Key="a/one", Tagging={"TagSet": [{"Key": "x", "Value": "y"}]})
    boto.delete_object(Bucket=name, Key="a/one")

    events = await changes(filer, name, began_ns)

    files = [event for event in events if not (event.new or event.old or pytest.fail("empty")).is_directory]
    assert ["a/one made", "a/one changed", "a/one changed", "a/one gone"] == story(files)
    made, overwritten, tagged, _ = files
    assert made.new and overwritten.new and tagged.old and tagged.new
    assert (1, 2) == (made.new.size, overwritten.new.size)
    assert (("k", "v"),) == s3.tags_of(made.new)
    assert made.new.head_fid != overwritten.new.head_fid == tagged.new.head_fid
    assert ((), (("x", "y"),)) == (s3.tags_of(tagged.old), s3.tags_of(tagged.new))
    assert sorted({event.ts_ns for event in files}) == [event.ts_ns for event in files]
    for place, event in enumerate(files):
        rest = await changes(filer, name, event.ts_ns)
        assert [one.ts_ns for one in files[place + 1 :]] == [one.ts_ns for one in rest]


async def test_multipart_and_versions_are_told(filer: FilerClient, boto: Any, name: str) -> None:
    """An upload is a folder that says its key; versions are files beside the key; the older one learns when it aged."""
    began_ns = SystemClock().now_ns()
    upload = boto.create_multipart_upload(Bucket=name, Key="m/p")["UploadId"]
    part = boto.upload_part(Bucket=name, Key="m/p", UploadId=upload, PartNumber=1, Body=b"x" * 10)
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    boto.complete_multipart_upload(Bucket=name, Key="m/p", UploadId=upload, MultipartUpload=parts)
    boto.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    first, second = (boto.put_object(Bucket=name, Key="v", Body=body)["VersionId"] for body in (b"1", b"2"))
    marker = boto.delete_object(Bucket=name, Key="v")["VersionId"]

    events = await changes(filer, name, began_ns)

    (begun,) = (e.new for e in events if e.created and e.new and e.new.name == upload)
    assert begun.is_directory and "m/p" == s3.upload_key(begun)
    told = [one for one in story(events) if not one.startswith(".uploads")]
    assert ["m/p made", f"v.versions/v_{first} made", f"v.versions/v_{second} made"] == told[:3]
    assert f"v.versions/v_{first} changed" == told[3]
    assert f"v.versions/v_{marker} made" == told[4]
    folder = await filer.lookup(f"/buckets/{name}", "v.versions")
    files = {one.name: one async for one in filer.entries(f"/buckets/{name}/v.versions")}
    assert f"v_{marker}" == s3.latest_file(folder)
    assert s3.is_marker(files[f"v_{marker}"])
    assert began_ns < (s3.noncurrent_since_ns(files[f"v_{first}"]) or 0) < SystemClock().now_ns()
    assert began_ns < s3.version_time_ns(first) < s3.version_time_ns(second) < SystemClock().now_ns()


async def test_a_bounded_pass_ends_on_a_quiet_cluster(filer: FilerClient, name: str) -> None:
    """With nothing to tell it ends at once, and so does one that ends a moment from now."""
    clock = SystemClock()
    await asyncio.sleep(0.2)
    quiet_ns = clock.now_ns()

    began_s = clock.monotonic_s()
    assert [] == await changes(filer, name, quiet_ns)
    assert [] == await changes(filer, name, quiet_ns, until_ns=clock.now_ns() + 1_000_000_000)
    assert clock.monotonic_s() - began_s < DEADLINE_S


async def test_a_follower_hears_of_an_object_as_it_appears(filer: FilerClient, boto: Any, name: str) -> None:
    """A stream without an end tells while it goes on, ticks while nothing happens, and can be left at any time."""
    ticks, heard = 0, ""
    stream = filer.subscribe([f"/buckets/{name}/in/"], since_ns=SystemClock().now_ns(), tick_s=0.05)

    async with asyncio.timeout(DEADLINE_S), aclosing(stream):
        async for event in stream:
            ticks += event.heartbeat
            if ticks == 3 and not heard:
                heard = "nothing"
                await asyncio.to_thread(boto.put_object, Bucket=name, Key="out/b", Body=b"x")
                await asyncio.to_thread(boto.put_object, Bucket=name, Key="in/a", Body=b"x")
            if event.created and event.new and not event.new.is_directory:
                heard = event.path
                break

    assert f"/buckets/{name}/in/a" == heard


async def test_a_stream_that_falls_silent_is_given_up(weed: BucketEndpoints, name: str) -> None:
    """Without even a heartbeat for long enough it is Unavailable, not waited for without end."""
    clock = SystemClock()
    async with FilerClient([weed.filer_grpc], Runtime(clock=clock, ids=Ids(), metrics=Metrics()), idle_s=0.3) as filer:
        for tick_s in (0.0, 0.1):
            with pytest.raises(Unavailable):
                async with asyncio.timeout(DEADLINE_S):
                    async for event in filer.subscribe([f"/buckets/{name}/"], since_ns=clock.now_ns(), tick_s=tick_s):
                        assert event.heartbeat


async def test_a_policy_put_by_a_client_is_in_the_bucket_entry(filer: FilerClient, boto: Any, name: str) -> None:
    """The XML is where it is looked for, and so is the state of versioning."""
    rule = {"ID": "r", "Status": "Enabled", "Filter": {"Prefix": "x/"}, "Expiration": {"Days": 3}}
    assert b"" == s3.lifecycle_of(await filer.lookup("/buckets", name))
    boto.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": [rule]})
    boto.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Suspended"})

    bucket = await filer.lookup("/buckets", name)

    assert b"<Days>3</Days>" in s3.lifecycle_of(bucket)
    assert "Suspended" == s3.versioning_of(bucket)


async def test_a_page_follows_the_last_name(filer: FilerClient, boto: Any, name: str) -> None:
    """Small pages give what one large page gives; a folder that is not there is empty."""
    for number in range(7):
        boto.put_object(Bucket=name, Key=f"k{number}", Body=b"x")

    names = [entry.name async for entry in filer.entries(f"/buckets/{name}", limit=3)]

    assert [f"k{number}" for number in range(7)] == names
    assert ["k4", "k5", "k6"] == [e.name async for e in filer.entries(f"/buckets/{name}", after="k3")]
    assert [] == await filer.page(f"/buckets/{name}/nothing/here")
    with pytest.raises(NotFound):
        await filer.lookup(f"/buckets/{name}", "nothing")


async def test_a_transaction_is_made_only_under_its_conditions(filer: FilerClient, boto: Any, name: str) -> None:
    """The whole entry must still be as it was read; a condition that the server does not know never holds."""
    boto.put_object(Bucket=name, Key="k", Body=b"x")
    read = await filer.lookup(f"/buckets/{name}", "k")
    boto.put_object_tagging(Bucket=name, Key="k", Tagging={"TagSet": [{"Key": "x", "Value": "y"}]})
    path, gone = f"/buckets/{name}/k", Mutation(MutationKind.DELETE, f"/buckets/{name}", "k", delete_data=True)

    for clause in (Clause(ConditionKind.ENTRY_EQUAL, expected=read.raw), Clause(99)):  # type: ignore[arg-type]
        with pytest.raises(Stale):
            await filer.transact(Transaction(path, (clause,), (gone,)))
    live = await filer.lookup(f"/buckets/{name}", "k")
    await filer.transact(Transaction(path, (Clause(ConditionKind.ENTRY_EQUAL, expected=live.raw),), (gone,)))

    with pytest.raises(NotFound):
        await filer.lookup(f"/buckets/{name}", "k")


async def test_another_filer_is_asked_when_one_does_not_answer(weed: BucketEndpoints, name: str) -> None:
    """The one that failed is asked last for a while; with none left it is Unavailable, and no address is Invalid."""
    clock, ids = SystemClock(), Ids()
    async with FilerClient(
        [NOBODY, weed.filer_grpc], Runtime(clock=clock, ids=ids, metrics=Metrics()), timeout_s=DEADLINE_S
    ) as filer:
        assert name == (await filer.lookup("/buckets", name)).name
        assert [weed.filer_grpc, NOBODY] == filer._in_order()
        assert name == (await filer.lookup("/buckets", name)).name
        assert [] == await changes(filer, name, clock.now_ns())
    async with FilerClient([NOBODY], Runtime(clock=clock, ids=ids, metrics=Metrics()), timeout_s=1.0) as alone:
        with pytest.raises(Unavailable):
            await alone.lookup("/buckets", name)
        with pytest.raises(Unavailable):
            await alone.delete("/buckets", name)
        with pytest.raises(Unavailable):
            await changes(alone, name, clock.now_ns())
    with pytest.raises(Invalid):
        FilerClient([], Runtime(clock=clock, ids=ids, metrics=Metrics()))

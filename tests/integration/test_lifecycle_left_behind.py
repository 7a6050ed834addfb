"""On the real server: a completed upload keeps its bytes, odd keys expire, and the filers say when they started."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from integration.test_lifecycle_seaweed import DAY_S, Site
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.filer import s3
from lakebed.filer.model import Clause, ConditionKind, Mutation, MutationKind, Transaction
from lakebed.lifecycle.cluster import LogState, observed
from lakebed.lifecycle.model import Rule
from lakebed.store.protocol import Store

PART = b"p" * (5 << 20)


@pytest_asyncio.fixture
async def site(weed: BucketEndpoints, bucket: Store):  # type: ignore[no-untyped-def]
    made = await asyncio.to_thread(Site, weed, bucket)
    yield made
    await made.lake.close()


async def test_the_filers_of_a_cluster_say_when_they_joined(site: Site) -> None:
    """The same each time, so that a restarted filer is told from one that goes on; the log has a reach."""
    first, again = await site.filer.started(), await site.filer.started()

    assert first and first == again
    assert all(at_ns > 1_600_000_000 * 10**9 for _, at_ns in first)
    reach = await site.lake.reach()
    assert first == reach.servers
    other = observed(LogState(), reach, 1)
    moved = tuple((name, at_ns + 1) for name, at_ns in first)
    assert 1 == observed(other, type(reach)(reach.made_ns, reach.first_ns, moved), 2).generation


@pytest.mark.full
async def test_an_upload_that_was_completed_keeps_its_bytes_when_its_folder_is_left_over(site: Site) -> None:
    """The gateway died before it removed the folder: aborting it removes metadata alone, and the object is whole."""
    made = site.s3.create_multipart_upload(Bucket=site.name, Key="big")
    part = site.s3.upload_part(Bucket=site.name, Key="big", UploadId=made["UploadId"], PartNumber=1, Body=PART)
    folder = await site.filer.lookup(s3.uploads_path(site.name), made["UploadId"])
    files = [one async for one in site.filer.entries(f"{s3.uploads_path(site.name)}/{made['UploadId']}")]
    site.s3.complete_multipart_upload(
        Bucket=site.name,
        Key="big",
        UploadId=made["UploadId"],
        MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]},
    )
    uploads = s3.uploads_path(site.name)
    puts = [Mutation(MutationKind.PUT, uploads, folder.name, folder)]
    puts += [Mutation(MutationKind.PUT, f"{uploads}/{folder.name}", one.name, one) for one in files]
    await site.filer.transact(Transaction(s3.bucket_path(site.name), (Clause(ConditionKind.EXISTS),), tuple(puts)))
    await site.rules(Rule("uploads", abort_days=1))
    await asyncio.sleep(DAY_S + 1)

    await site.until(lambda: not site.s3.list_multipart_uploads(Bucket=site.name).get("Uploads"))

    assert any("uses the bytes" in row.reason for row in await site.rows("big"))
    found = await site.filer.lookup(s3.bucket_path(site.name), "big")
    assert made["UploadId"] == found.text(s3.UPLOAD_ID)
    assert PART == site.s3.get_object(Bucket=site.name, Key="big")["Body"].read()


@pytest.mark.full
@pytest.mark.parametrize("versioned", [False, True])
async def test_keys_below_a_folder_named_like_one_of_versions_stop_nothing(site: Site, versioned: bool) -> None:
    """`y.versions/z` is accepted by S3: it and everything behind it expires, and nothing waits for an operator."""
    if versioned:
        site.s3.put_bucket_versioning(Bucket=site.name, VersioningConfiguration={"Status": "Enabled"})
    for key in ("a", "y", "y.versions/z", "z"):
        site.put(key)
    await asyncio.sleep(DAY_S + 1)
    await site.rules(Rule("all", expiration_days=1), Rule("old", noncurrent_days=1))

    async def left() -> list[str]:
        return [family.key async for family in site.lake.scan(site.name)]

    for _ in range(60):
        await site.worker.run_round()
        if not await left():
            break
        await asyncio.sleep(0.3)

    assert [] == await left()
    held = (await site.registers.blockers.read()).value
    assert ({}, {}) == (held.blockers, held.isolated)

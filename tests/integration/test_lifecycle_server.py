"""On the real server: a policy put through S3 is taken up at once, a file of the log that is gone is noticed, and so
is SeaweedFS's own worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import msgspec
import pytest_asyncio

from integration.test_lifecycle_seaweed import Site
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.embedded.weed import find_weed
from lakebed.lifecycle.checks import judged
from lakebed.lifecycle.model import Rule, rule_hash
from lakebed.lifecycle.seaweed.store import LOG, LOG_PARENT
from lakebed.lifecycle.state import changed
from lakebed.store.protocol import Store

TAKEN_UP_S = 2.0
POLL_S = 3600.0
TRIES = 6  # a busy machine may delay one
SHELL_S = 120.0
REST_NS = 1_500_000_000
MINUTE_NS = 60_000_000_000


@pytest_asyncio.fixture
async def site(weed: BucketEndpoints, bucket: Store) -> AsyncIterator[Site]:
    made = await asyncio.to_thread(Site, weed, bucket)
    yield made
    await made.lake.close()


async def test_a_policy_that_is_put_through_s3_is_taken_up_within_two_seconds(site: Site) -> None:
    """By the event of its change: the next poll is in an hour."""
    site.seams.policies.changes = site.lake.changes  # type: ignore[attr-defined]
    worker = site.worker_with(poll_s=POLL_S)
    running = asyncio.create_task(worker.run())
    took_s: list[float] = []
    try:
        while len(took_s) < TRIES and not any(one <= TAKEN_UP_S for one in took_s):
            async with asyncio.timeout(60.0):  # it rests: nothing but the change makes it read policies
                while not worker._compiled_ns or site.clock.now_ns() - worker._compiled_ns < REST_NS:
                    await asyncio.sleep(0.05)
            days = 100 + len(took_s)
            policy = {"ID": "all", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": days}}
            began_s = site.clock.monotonic_s()
            await asyncio.to_thread(
                site.s3.put_bucket_lifecycle_configuration,
                Bucket=site.name,
                LifecycleConfiguration={"Rules": [policy]},
            )
            wanted = rule_hash(Rule("all", expiration_days=days))
            async with asyncio.timeout(60.0):
                while not any(
                    name.startswith(wanted) for name in (await site.registers.bucket(site.name).read()).value.actions
                ):
                    await asyncio.sleep(0.05)
            took_s.append(site.clock.monotonic_s() - began_s)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert any(one <= TAKEN_UP_S for one in took_s), took_s


async def test_a_file_of_the_log_that_is_gone_leads_to_a_recovery_scan(site: Site) -> None:
    """Two files that hold nothing stand for two of the server's own, which other tests need. The first one stays: a
    log without any file would begin anew for the tests that use this server next."""
    now_ns = site.clock.now_ns()
    files = [
        (f"{LOG_PARENT}/{LOG}/{at:%Y-%m-%d}", f"{at:%H-%M}.0badcafe")
        for at in (datetime.fromtimestamp((now_ns - ago * MINUTE_NS) / 1e9, UTC) for ago in (90, 60))
    ]
    for folder, name in files:
        await site.filer.create(folder, name)
    try:
        await site.rules(Rule("all", expiration_days=1000))
        assert (True,) == tuple(scan.complete for scan in (await site.worker.run_round()).scans)
        await _look_again(site)  # where both files are of yesterday, they are seen at its turn
        before = (await site.registers.log.read()).value.generation
        assert () == (await site.worker.run_round()).scans
    finally:
        await site.filer.delete(*files[1])
    await _look_again(site)

    (scan,) = (await site.worker.run_round()).scans

    after = (await site.registers.log.read()).value
    assert (before + 1, True) == (after.generation, scan.complete)
    assert "files of the event log are gone" in after.lost
    assert after.gaps[0].holds(now_ns - 59 * MINUTE_NS)
    assert () == (await site.worker.run_round()).scans


async def _look_again(site: Site) -> None:
    """The next round looks at the log, which it otherwise does every half a minute."""
    await site.registers.log.change(changed(lambda known: msgspec.structs.replace(known, seen_ns=1, counted="")))


async def test_seaweedfs_own_worker_is_noticed_after_its_run(site: Site, weed: BucketEndpoints) -> None:
    """As doctor says it, and by what that worker leaves behind on this version of the server."""
    await site.rules(Rule("all", expiration_days=1000))
    site.put("k")
    before_ns = await site.lake.own_worker_ns()
    (master,) = await site.filer._named_masters()
    shell = await asyncio.create_subprocess_exec(
        str(find_weed()),
        "-logtostderr=true",
        "shell",
        f"-master={master}",
        f"-filer={weed.filer.removeprefix('http://')}.{weed.filer_grpc.rpartition(':')[2]}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    command = f"s3.lifecycle.run-shard -shards 0-15 -s3 {weed.s3_grpc} -events 0\nexit\n"
    said, _ = await asyncio.wait_for(shell.communicate(command.encode()), SHELL_S)

    ran_ns = await site.lake.own_worker_ns()

    assert before_ns < ran_ns, said.decode(errors="replace")[-2000:]
    found = judged(ran_ns, site.clock.now_ns())
    assert ("warn", True) == (found.verdict, "0.0 h ago" in found.seen)

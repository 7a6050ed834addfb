"""Real processes that share one group of the bucket backend on a real SeaweedFS, one of them killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.meta.bucket.backend import BucketMeta
from lakebed.meta.model import prefix_end
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime
from lakebed.store.settings import StoreSettings

GROUP = "orders:0"
ROOT = "llog/orders/partitions/0/"
ENTRIES = 60
PROCESSES = 3
DEADLINE_S = 300.0
APPENDER = """
import asyncio, json, sys
from lakebed.core.runtime import system_runtime
from lakebed.meta.bucket.backend import BucketMeta
from lakebed.meta.model import ABSENT
from lakebed.store.connect import connect
from lakebed.store.runtime import StoreRuntime
from lakebed.store.settings import StoreSettings

name, count, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
runtime = system_runtime()

async def main():
    store = connect(StoreSettings.of(options), runtime)
    meta = BucketMeta(StoreRuntime(clock=runtime.clock, ids=runtime.ids, metrics=runtime.metrics, store=store), "meta")
    session = await meta.open_session(timeout_s=8.0)
    await meta.put(f"llog/orders/partitions/0/claims/{name}", b"", session=session, partition_key="orders:0")
    for at in range(count):
        key = f"llog/orders/partitions/0/index/{name}-{at:04d}"
        await meta.put(key, key.encode() + b"." * 600, expected=ABSENT, partition_key="orders:0")
        print(key, flush=True)
    await meta.close()

asyncio.run(main())
"""


@pytest.mark.full
async def test_what_was_acknowledged_before_a_kill_is_there_and_the_others_go_on(
    bucket: Store, bucket_settings: StoreSettings
) -> None:
    """kill -9 in the midst of puts and spills: nothing acknowledged is lost, its claim goes, nobody is held up."""
    options = {
        "url": bucket_settings.url,
        "prefix": bucket_settings.prefix,
        "endpoint": bucket_settings.endpoint,
        "access_key_id": bucket_settings.access_key_id.reveal(),
        "secret_access_key": bucket_settings.secret_access_key.reveal(),
    }

    async def appender(name: str, kill_after: int) -> list[str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", APPENDER, name, str(ENTRIES), json.dumps(options), stdout=asyncio.subprocess.PIPE
        )
        reported: list[str] = []
        assert process.stdout is not None
        async for line in process.stdout:
            reported.append(line.decode().strip())
            if len(reported) == kill_after:
                os.kill(process.pid, signal.SIGKILL)
        assert (await process.wait() == 0) == (kill_after == 0)
        return reported

    async with asyncio.timeout(DEADLINE_S):
        reported = await asyncio.gather(
            appender("victim", ENTRIES // 2), *(appender(f"p{at}", 0) for at in range(PROCESSES - 1))
        )
        meta = BucketMeta(StoreRuntime(SystemClock(), Ids(), Metrics(), bucket), "meta", horizon_s=-60.0)
        found = await meta.range(ROOT + "index/", prefix_end(ROOT + "index/"), limit=1000, partition_key=GROUP)
        while await meta.range(ROOT + "claims/", prefix_end(ROOT + "claims/"), limit=9, partition_key=GROUP):
            await asyncio.sleep(0.1)
        swept = await meta.sweep()
        after = await meta.range(ROOT + "index/", prefix_end(ROOT + "index/"), limit=1000, partition_key=GROUP)

    keys = {entry.key for entry in found}
    assert {key for each in reported for key in each} <= keys
    assert len(keys) <= sum(map(len, reported)) + 1
    assert sum(map(len, reported[1:])) == (PROCESSES - 1) * ENTRIES
    assert all(entry.value.startswith(entry.key.encode()) for entry in found)
    assert found == after
    assert swept >= 1

"""A real agent, two real gateways, a real bucket: what the agent let go of can be read back from the bucket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import msgspec
import pytest

from lakebed.agent.batcher import make_frame
from lakebed.agent.inspector import QueueInspector
from lakebed.batches.codec.frame import decode, peek
from lakebed.batches.model import Sample
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.agent_process import DEADLINE_S, gateway, lines, run_agent


async def readable(bucket: Store) -> list[float]:
    """The values of every accepted batch, read from the bucket through its manifest."""
    values: list[float] = []
    async for info in bucket.list("accepted/v1/"):
        manifest = msgspec.json.decode((await bucket.get(info.key)).data)
        values += decode((await bucket.get(manifest["raw_blob_key"])).data).columns.values.tolist()
    return values


async def test_every_sample_is_readable_once_though_a_collector_is_killed(
    tmp_path: Path, bucket: Store, bucket_settings: StoreSettings
) -> None:
    """Two collectors, one killed with kill -9 while the agent sends; each sample is in the bucket exactly once."""
    async with gateway(bucket_settings) as (first, one), gateway(bucket_settings) as (_, two):
        agent = asyncio.ensure_future(run_agent(tmp_path / "queue", [one, two], lines(0, 4000)))
        async with asyncio.timeout(DEADLINE_S):
            while len(await readable(bucket)) < 200:
                await asyncio.sleep(0.02)
        first.kill()
        code = await agent

    assert code == 0
    assert sorted(await readable(bucket)) == [float(n) for n in range(4000)]
    assert list((tmp_path / "queue").rglob("*.lmbatch")) == []


@pytest.mark.full
async def test_a_real_conflict_is_parked_with_the_hashes_of_both(
    tmp_path: Path, bucket: Store, bucket_settings: StoreSettings
) -> None:
    """Other bytes be under a queued batch's identity; the agent keeps its own and delivers the rest."""
    queue = tmp_path / "queue"
    await run_agent(queue, [], lines(0, 120))
    inspector_ = QueueInspector(queue, lambda: 0)
    chosen = inspector_.select([inspector_.queued(10)[1].sha256])[0]
    rival = make_frame(peek(chosen.path.read_bytes()), [Sample("rival", 1, -1.0)] * 40)
    async with gateway(bucket_settings) as (_, url):
        async with httpx2.AsyncClient(timeout=DEADLINE_S) as client:
            planted = await client.post(f"{url}/v1/batches", content=rival.data)
        code = await run_agent(queue, [url], lines(120, 160))

    [parked] = inspector_.parked()
    assert (planted.status_code, code) == (200, 0)
    assert (parked.reason, parked.accepted_frame_sha256) == ("identity_conflict", rival.sha256)
    assert parked.submitted_frame_sha256 == chosen.sha256
    assert sorted(value for value in await readable(bucket) if value >= 0) == [
        float(n) for n in range(160) if not 40 <= n < 80
    ]


@pytest.mark.full
async def test_a_wrong_token_keeps_everything_until_it_is_right(
    tmp_path: Path, bucket: Store, bucket_settings: StoreSettings
) -> None:
    """Refused by a real gateway, the agent alerts and keeps its batches; with its own token they arrive."""
    queue = tmp_path / "queue"
    keys = msgspec.json.encode(
        [{"name": "a", "secret": "the-right-token-of-agent-a", "rights": ["batches:write:agent-a"]}]
    ).decode()
    async with gateway(bucket_settings, LAKEBED_GATEWAY_KEYS=keys) as (_, url):
        denied = (queue / "alerts" / "denied.json").exists
        refused = await run_agent(queue, [url], lines(0, 100), token="some-wrong-token-of-nobody", until=denied)
        alerts = [path.name for path in (queue / "alerts").iterdir()]
        waiting = sum(row.samples for row in QueueInspector(queue, lambda: 0).boots())
        code = await run_agent(queue, [url], [], token="the-right-token-of-agent-a")

    assert (refused, alerts, waiting) == (9, ["denied.json"], 100)
    assert (code, sorted(await readable(bucket))) == (0, [float(n) for n in range(100)])
    assert list((queue / "alerts").iterdir()) == []

"""Lists that are cut show a tenant its own rows, however many of others come before them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.batches import view as batches_view
from lakebed.batches.paths import ACCEPTED
from lakebed.console.data import PageData
from lakebed.console.page import field_of
from lakebed.core.auth import Principal
from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.lifecycle import view as lifecycle_view
from lakebed.lifecycle.memory import MemoryLake
from lakebed.lifecycle.model import StreamKind
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.state import ActionState, Blocker, BlockerState, BucketLifecycle, Stream, changed
from lakebed.lifecycle.workers import state_of
from lakebed.pipeline.tables import view as tables_view
from lakebed.queue import view as queue_view
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.store.memory import MemoryStore
from lakebed.ticks import view as ticks_view
from lakebed.ticks.model import TickId
from lakebed.ticks.receiver import Receiver
from support.lifecycle_makers import rule
from support.tick_fixtures import context_of, parquet, sha

ORGS = ("acme", "rival")


async def with_buckets(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each org has a bucket with a rule, its action, and a blocker."""
    monkeypatch.setattr(lifecycle_view, "ROWS_MAX", 1)
    state, lake = state_of(context), MemoryLake(context.clock)
    blockers = {}
    for number, org in enumerate(ORGS):
        bucket = f"{org}.b"
        made = BucketLifecycle(actions={"h/EXPIRATION_DAYS": ActionState()})
        await state.bucket(bucket).change(changed(lambda _, made=made: made))
        await lake.put(bucket, render_xml([rule(expiration_days=1)]))
        stream = Stream(StreamKind.BOOTSTRAP, bucket=bucket)
        blockers[org] = Blocker(org, stream, bucket, "k", "lock", "locked", number, number, 3)
    await state.blockers.change(changed(lambda _: BlockerState(blockers=blockers)))

    @asynccontextmanager
    async def opened(_: Context) -> AsyncIterator[Any]:
        yield SimpleNamespace(lake=lake)

    monkeypatch.setattr(lifecycle_view, "open_services", opened)


async def with_queues(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_view, "QUEUES_MAX", 1)
    for org in ORGS:
        ingestor = Queue.of(context, f"{org}-jobs").ingestor()
        await ingestor.ingest([KeyValueEntry(b"k", b"v")])
        await ingestor.flush()


async def with_ticks(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks_view, "PROJECTS_MAX", 1)
    data = parquet([1])

    async def chunks() -> AsyncIterator[bytes]:
        yield data

    for org in ORGS:
        await Receiver(context).put(TickId(org, "shop", "20261115T120000__a"), 1, sha(data), chunks())


async def with_agents(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_view, "AGENTS_MAX", 1)
    for org in ORGS:
        await context.store.create(f"{ACCEPTED}agent={f'{org}-a'.encode().hex()}/boot=b/1-1.json", b"{}")


async def with_tables(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_view, "FIRST_MAX", 1)
    for org in ORGS:
        await context.store.create(f"tables/silver/{org}/shop/orders/_delta_log/{0:020d}.json", b"{}")


LISTS = {
    "tables.all_tables": (with_tables, "name"),
    "batches.agents": (with_agents, "agent_id"),
    "lifecycle.statuses": (with_buckets, "bucket"),
    "lifecycle.rules": (with_buckets, "bucket"),
    "lifecycle.blockers": (with_buckets, "bucket"),
    "queue.queues": (with_queues, "queue"),
    "ticks.projects": (with_ticks, "org_id"),
}


@pytest.mark.parametrize("name", LISTS)
async def test_rows_of_other_tenants_take_no_place_in_a_list_with_a_limit(
    name: str, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither tenant is shown the other's, however soon one reads after the other; who has no tenant sees the first."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    fill, field = LISTS[name]
    await fill(context, monkeypatch)
    data = PageData(context)
    part, _, method = name.partition(".")
    source = getattr(next(page for page in data.pages.values() if page.name == part), method)()

    async def seen(tenant: str) -> list[str]:
        sample = (await data.read(Principal("key", ("*",), tenant), {"rows": source}))["rows"]
        assert sample.error is None
        return [org for row in sample.value for org in ORGS if org in field_of(row, field)]

    found = {tenant: await seen(tenant) for tenant in ("", "rival", "acme", "third")}
    await data.stop()

    assert {"": ["acme"], "rival": ["rival"], "acme": ["acme"], "third": []} == found

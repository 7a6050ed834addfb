"""Endpoints that look at the store itself: a policy, a dry run before it is enabled, and the retry of a blocker."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx2
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.gateway.app import build
from lakebed.lifecycle.blockers import Failure, block
from lakebed.lifecycle.model import Position, Rule, StreamKind
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.routes import component
from lakebed.lifecycle.state import Stream
from lakebed.lifecycle.workers import open_services, state_of
from lakebed.store import admin
from lakebed.store.authority import claim
from lakebed.store.connect import connect
from lakebed.store.settings import StoreSettings
from lakebed.wiring.parts import sections
from support.runtimes import runtime_of

POLICY = render_xml((Rule("tmp", prefix="tmp/", expiration_days=1),))


@pytest.fixture
def context(weed: BucketEndpoints) -> Context:
    told: dict[str, Any] = weed.as_settings() | {"store.prefix": f"lch-{Ids().token()}", "lifecycle.rounding": "exact"}
    settings = load(sections(), flags=told)
    clock, ids, metrics = SystemClock(), Ids(), Metrics()
    store = connect(settings.of(StoreSettings), runtime_of(clock, ids, metrics))
    return Context(node="http-test", settings=settings, store=store, clock=clock, ids=ids, metrics=metrics)


async def client(context: Context) -> httpx2.AsyncClient:
    await claim(context, expected="")
    app = build(context, [component(context)], authority="authority-1")
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1")


async def test_a_policy_is_judged_before_it_is_enabled(context: Context, weed: BucketEndpoints) -> None:
    """How many, how many bytes and a sample, by the body's policy; nothing is put, nothing is deleted."""
    s3, bucket = admin.client(weed.store_settings()), f"lch-{Ids().token()}"
    await asyncio.to_thread(s3.create_bucket, Bucket=bucket)
    for key in ("tmp/a", "tmp/b", "kept"):
        await asyncio.to_thread(s3.put_object, Bucket=bucket, Key=key, Body=b"123")
    where = f"/api/s3/buckets/{bucket}/lifecycle/dry-run"
    async with await client(context) as ask:
        now = (await ask.post(where, content=POLICY)).json()
        ahead = (await ask.post(f"{where}?days_ahead=2", content=POLICY)).json()
        short = (await ask.post(f"{where}?days_ahead=2&keys_max=1", content=POLICY)).json()
        none = await ask.post(where)
        wrong = await ask.post(where, content=POLICY.replace(b"<Days>1<", b"<Days>0<"))

    assert (0, 3) == (now["count"], now["scanned"])
    assert (2, 6, True) == (ahead["count"], ahead["bytes"], ahead["complete"])
    assert ["tmp/a", "tmp/b"] == [one["key"] for one in ahead["sample"]]
    assert (1, False) == (short["scanned"], short["complete"])
    assert (404, 400) == (none.status_code, wrong.status_code)
    assert 3 == (await asyncio.to_thread(s3.list_objects_v2, Bucket=bucket))["KeyCount"]


async def test_a_blocker_is_tried_again_against_what_is_live(context: Context) -> None:
    """The object is long gone: the retry resolves it, and its stream goes on."""
    stream = Stream(StreamKind.ORIGINAL, 5, Position(7, 0))
    registers = state_of(context)
    await registers.blockers.change(
        lambda known: (block(known, [Failure(stream, "gone", "k", "TRANSPORT_ERROR", "e")], 1, reason="r"), None)
    )
    async with await client(context) as ask:
        (told,) = (await ask.get("/api/s3/lifecycle/blockers")).json()
        answer = await ask.post(f"/api/s3/lifecycle/blockers/{told['blocker_id']}", json={"verb": "retry"})
        left = (await ask.get("/api/s3/lifecycle/blockers")).json()

    assert (200, "NOOP_RESOLVED", []) == (answer.status_code, answer.json()["resolution"], left)


async def test_a_policy_is_read_back_with_the_last_round(context: Context, weed: BucketEndpoints) -> None:
    """Byte for byte; before the first round there is no such header, and status says the same instant."""
    s3, bucket = admin.client(weed.store_settings()), f"lch-{Ids().token()}"
    await asyncio.to_thread(s3.create_bucket, Bucket=bucket)
    where = f"/api/s3/buckets/{bucket}/lifecycle"
    async with await client(context) as ask, open_services(context) as site:
        none = await ask.get(where)
        await site.lake.put(bucket, POLICY)
        before = await ask.get(where)
        began_ns = context.clock.now_ns()
        await site.enforcer.run_round()
        after = await ask.get(where)
        (row,) = (await ask.get(f"{where}/status")).json()

    assert (404, 200, POLICY) == (none.status_code, before.status_code, before.content)
    assert "X-Lakebed-Lifecycle-LastTick" not in before.headers
    told = datetime.fromisoformat(after.headers["X-Lakebed-Lifecycle-LastTick"])
    assert began_ns <= row["last_tick_ns"] <= context.clock.now_ns()
    assert abs(told.timestamp() - row["last_tick_ns"] / 1e9) < 0.002
    assert ("application/xml", POLICY) == (after.headers["content-type"].partition(";")[0], after.content)


async def test_a_retry_deletes_what_is_due_now(context: Context, weed: BucketEndpoints) -> None:
    """What blocked is over: the object goes, the blocker too, and a second retry finds none."""
    s3, bucket = admin.client(weed.store_settings()), f"lch-{Ids().token()}"
    await asyncio.to_thread(s3.create_bucket, Bucket=bucket)
    await asyncio.to_thread(s3.put_object, Bucket=bucket, Key="tmp/a", Body=b"1")
    stream = Stream(StreamKind.BOOTSTRAP, bucket=bucket, key="tmp/a")
    registers = state_of(context)
    await registers.blockers.change(
        lambda known: (block(known, [Failure(stream, bucket, "tmp/a", "TRANSPORT_ERROR", "e")], 1, reason="r"), None)
    )
    async with await client(context) as ask, open_services(context) as site:
        await site.lake.put(bucket, render_xml((Rule("d", prefix="tmp/", expiration_date_ns=86_400 * 10**9),)))
        (told,) = (await ask.get(f"/api/s3/lifecycle/blockers?bucket={bucket}")).json()
        where = f"/api/s3/lifecycle/blockers/{told['blocker_id']}"
        answer = await ask.post(where, json={"verb": "retry"})
        again = await ask.post(where, json={"verb": "retry"})

    assert (200, "DONE", 404) == (answer.status_code, answer.json()["resolution"], again.status_code)
    assert 0 == (await asyncio.to_thread(s3.list_objects_v2, Bucket=bucket))["KeyCount"]


async def test_a_key_tells_when_it_is_due(context: Context, weed: BucketEndpoints) -> None:
    """As AWS's header, and every action with its instant; a key that no rule takes has no header; none is 404."""
    s3, bucket = admin.client(weed.store_settings()), f"lch-{Ids().token()}"
    await asyncio.to_thread(s3.create_bucket, Bucket=bucket)
    for key in ("tmp/a", "kept"):
        await asyncio.to_thread(s3.put_object, Bucket=bucket, Key=key, Body=b"123")
    made = await asyncio.to_thread(s3.head_object, Bucket=bucket, Key="tmp/a")
    where = f"/api/s3/buckets/{bucket}/lifecycle/when"
    async with open_services(context) as services, await client(context) as ask:
        await services.lake.put(bucket, POLICY)
        due = await ask.get(where, params={"key": "tmp/a"})
        kept = await ask.get(where, params={"key": "kept"})
        absent = await ask.get(where, params={"key": "nothing"})
        unnamed = await ask.get(where)

    at = made["LastModified"].astimezone(UTC) + timedelta(days=1)
    assert f'expiry-date="{format_datetime(at, usegmt=True)}", rule-id="tmp"' == due.headers["x-amz-expiration"]
    assert [("EXPIRATION_DAYS", "CURRENT", False)] == [
        (one["kind"], one["verb"], one["due"]) for one in due.json()["actions"]
    ]
    assert "x-amz-expiration" not in kept.headers and [] == kept.json()["actions"]
    assert (404, 400) == (absent.status_code, unnamed.status_code)

"""Rules that really run: what they name goes when it is due, what they do not stays, and the ledger says why.

One object is made undeletable on purpose: its stream stands still and says so, until an operator decides.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from lakebed.clock import SystemClock
from lakebed.context import Context
from lakebed.demo.stage import Stage
from lakebed.errors import Corrupt
from lakebed.filer.client import FilerClient
from lakebed.filer.settings import FilerSettings
from lakebed.lifecycle import xml
from lakebed.lifecycle.home import Home
from lakebed.lifecycle.ledger import Ledger
from lakebed.lifecycle.model import Entry, Outcome, Resolution, Rule, Verb
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.resolver import Seams
from lakebed.lifecycle.seams import Removal
from lakebed.lifecycle.seaweed_filer import SeaweedLake
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.shelf import Shelf
from lakebed.lifecycle.state import Blocker
from lakebed.lifecycle.worker import LifecycleWorker
from lakebed.store.admin import client
from lakebed.store.prefixed import PrefixedStore
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

TITLE = "Lifecycle: expiration, driven by events"
NEXT = ("lakebed lifecycle status",)

DAY_S = 2.0
POISON = "tmp/undeletable"
REASON = "an object of the demo, not worth waiting for"
DEADLINE_S = 40.0
RULES = (
    Rule("tmp", prefix="tmp/", expiration_days=1),
    Rule("old", tags=(("keep", "no"),), expiration_days=1),
)
SETTINGS = LifecycleSettings(
    day_s=DAY_S, rounding="exact", small_delay_s=0.2, flush_lag_s=0.1, lookback_s=2.0, poll_s=0.3, policy_fresh_s=0.0
)


async def play(stage: Stage) -> None:
    context = stage.context()
    bucket = f"demo-{context.ids.token()}"
    # A shelf of its own: the stack's worker has days of 24 hours.
    store = PrefixedStore(context.store, f"demo/{bucket}")
    s3 = await asyncio.to_thread(client, stage.settings.of(StoreSettings))
    await asyncio.to_thread(s3.create_bucket, Bucket=bucket)
    filer = FilerClient.of(stage.settings.of(FilerSettings), clock=context.clock, ids=context.ids)
    lake = SeaweedLake(filer, context.clock, context.ids)
    try:
        home = Home.of(stage.settings.of(StoreSettings))
        shelf = Shelf(store, clock=context.clock, ids=context.ids, metrics=context.metrics)
        seams = Seams(lake, Undeletable(lake, POISON), lake)
        worker = LifecycleWorker(lake, seams, shelf, SETTINGS, node=context.node, home=home)
        await lake.put(bucket, xml.render(RULES))
        await worker.tick()
        await _expire(stage, context, worker, s3, bucket, store)
        await _block(stage, context, worker, s3, bucket, shelf)
    finally:
        await lake.close()


async def _expire(stage: Stage, context: Context, worker: LifecycleWorker, s3: Any, bucket: str, store: Store) -> None:
    count = stage.scaled(20)
    stage.expect("objects expired", count + 1)
    stage.tell(f"{count} objects under a rule of one day, which is {DAY_S:.0f} s here, and two that no rule names")
    for number in range(count):
        await asyncio.to_thread(s3.put_object, Bucket=bucket, Key=f"tmp/{number:04d}", Body=b"x")
    for key in ("kept", "tagged-late"):
        await asyncio.to_thread(s3.put_object, Bucket=bucket, Key=key, Body=b"x")
    early = await asyncio.to_thread(_keys, s3, bucket)
    took = await _until(worker, context, lambda: _keys(s3, bucket) == ["kept", "tagged-late"])
    stage.check("nothing goes before it is due", len(early) == count + 2, f"{len(early)} objects at first")
    stage.check("what is due goes, the rest stays", took is not None, f"{count} gone after {took or 0:.1f} s")
    tags = {"TagSet": [{"Key": "keep", "Value": "no"}]}
    await asyncio.to_thread(s3.put_object_tagging, Bucket=bucket, Key="tagged-late", Tagging=tags)
    took = await _until(worker, context, lambda: _keys(s3, bucket) == ["kept"])
    stage.check("a tag put late is heeded", took is not None, f"gone {took or 0:.1f} s after it was tagged")
    ledger = Ledger(store, SystemClock(), context.ids)
    rows = [row async for row in ledger.rows(bucket)]
    deleted = {row.key for row in rows if row.outcome == Outcome.DELETED and row.key.startswith("tmp/")}
    left = [key for key in await asyncio.to_thread(_keys, s3, bucket) if key.startswith("tmp/")]
    for step, seen in (("due", count), ("gone", count - len(left)), ("deleted by the ledger", len(deleted))):
        stage.counted("expired objects", step, seen)
    told = [row.outcome for row in rows if row.key == "tmp/0000"]
    stage.check("the ledger says why", Outcome.DELETED in told, " → ".join(filter(None, map(str, told))))


class Undeletable:
    """The store, with one object whose delete always fails for good."""

    def __init__(self, lake: SeaweedLake, key: str) -> None:
        self._lake, self._key = lake, key

    async def delete(self, entry: Entry, verb: Verb) -> Removal:
        if entry.key == self._key:
            raise Corrupt(f"{entry.key}: a fault put here by the demo")
        return await self._lake.delete(entry, verb)


async def _block(stage: Stage, context: Context, worker: LifecycleWorker, s3: Any, bucket: str, shelf: Shelf) -> None:
    operator = Operator(shelf)
    await asyncio.to_thread(s3.put_object, Bucket=bucket, Key=POISON, Body=b"x")
    stage.fault("an object whose delete fails for good")
    held: list[Blocker] = []

    async def blocked() -> bool:
        held[:] = await operator.blockers(bucket=bucket)
        return bool(held)

    await _until(worker, context, blocked)
    await asyncio.to_thread(s3.put_object, Bucket=bucket, Key="tmp/behind", Body=b"x")
    stage.check("what cannot be deleted holds its stream", bool(held), held[0].last_error if held else "no blocker")
    if not held:
        return
    ident = held[0].blocker_id
    answer = await operator.retry(ident, worker.resolver, await worker.compile())
    stage.check("a retry that fails leaves it", answer is Resolution.BLOCKED, f"blockers retry {ident}: {answer.value}")
    met: list[str] = []

    async def passed() -> bool:
        # Each stream that meets the object is decided about by itself: its sweep, and, when seven of these short days
        # are over meanwhile, a safety scan too.
        for one in await operator.blockers(bucket=bucket):
            if one.key == POISON:
                await operator.quarantine(one.blocker_id, reason=REASON, who="demo")
                met.append(one.stream.kind.value)
        return await asyncio.to_thread(_keys, s3, bucket) == ["kept", POISON]

    await passed()
    took = await _until(worker, context, passed)
    stage.check(
        "quarantined with a reason, the stream goes on",
        took is not None and not await operator.blockers(bucket=bucket),
        f"what came behind it went after {took or 0:.1f} s; {POISON} is left, on record, given up by {', '.join(met)}",
    )


async def _until(worker: LifecycleWorker, context: Context, holds: Any) -> float | None:
    """Lets the worker look until it holds; after how many seconds, or None when it never did."""
    began = context.clock.monotonic_s()
    while (passed := context.clock.monotonic_s() - began) < DEADLINE_S:
        await worker.tick()
        if await (holds() if inspect.iscoroutinefunction(holds) else asyncio.to_thread(holds)):
            return passed
        await context.clock.sleep(0.1)
    return None


def _keys(s3: Any, bucket: str) -> list[str]:
    return sorted(one["Key"] for one in s3.list_objects_v2(Bucket=bucket).get("Contents", []))

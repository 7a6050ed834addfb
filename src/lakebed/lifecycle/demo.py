"""Rules delete what is due and keep the rest, and the ledger records why.

The delete of one object fails on purpose: its stream is blocked until an operator decides.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.demo.scenario import ScenarioContext
from lakebed.filer.client import FilerClient
from lakebed.filer.settings import FilerSettings
from lakebed.lifecycle.enforcer import Enforcer
from lakebed.lifecycle.ledger import DeletionLedger
from lakebed.lifecycle.model import DeleteOutcome, ObjectEntry, Rule, Verb
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.resolver import Seams
from lakebed.lifecycle.seams import Removal
from lakebed.lifecycle.seaweed.store import SeaweedLake
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import Blocker, LifecycleState
from lakebed.store.admin import client
from lakebed.store.connect import PrefixedStore
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

TITLE = "Lifecycle: expiration, driven by events"
NEXT = ("lakebed lifecycle status",)

DAY_S = 2.0
POISON = "tmp/undeletable"
REASON = "a fault of the demo"
DEADLINE_S = 40.0
RULES = (
    Rule("tmp", prefix="tmp/", expiration_days=1),
    Rule("old", tags=(("keep", "no"),), expiration_days=1),
)
SETTINGS = LifecycleSettings(
    day_s=DAY_S,
    rounding="exact",
    small_delay_s=0.2,
    flush_lag_s=0.1,
    lookback_s=2.0,
    poll_s=0.3,
    policy_fresh_s=0.0,
    retries_max=3,
)


async def play(stage: ScenarioContext) -> None:
    context = stage.context()
    bucket = f"demo-{context.ids.token()}"
    # State of its own: the stack's worker has days of 24 hours.
    store = PrefixedStore(context.store, f"demo/{bucket}")
    s3 = await asyncio.to_thread(client, stage.settings.of(StoreSettings))
    await asyncio.to_thread(s3.create_bucket, Bucket=bucket)
    filer = FilerClient.of(stage.settings.of(FilerSettings), context)
    lake = SeaweedLake(filer, context)
    try:
        reserved = ReservedKeys.of(stage.settings.of(StoreSettings))
        state = LifecycleState(context.on(store))
        seams = Seams(lake, Undeletable(lake, POISON), lake)
        worker = Enforcer(lake, seams, state, SETTINGS, node=context.node, reserved=reserved)
        await lake.put(bucket, render_xml(RULES))
        await worker.run_round()
        await _expire(stage, context, worker, s3, bucket, store)
        await _block(stage, context, worker, s3, bucket, state)
    finally:
        await lake.close()


async def _expire(
    stage: ScenarioContext, context: Context, worker: Enforcer, s3: Any, bucket: str, store: Store
) -> None:
    count = stage.scaled(20)
    stage.expect("objects expired", count + 1)
    stage.report(f"{count} objects under a rule of one day ({DAY_S:.0f} s in this demo), and two that no rule matches")
    for number in range(count):
        await asyncio.to_thread(s3.put_object, Bucket=bucket, Key=f"tmp/{number:04d}", Body=b"x")
    for key in ("kept", "tagged-late"):
        await asyncio.to_thread(s3.put_object, Bucket=bucket, Key=key, Body=b"x")
    early = await asyncio.to_thread(_keys, s3, bucket)
    took = await _until(worker, context, lambda: _keys(s3, bucket) == ["kept", "tagged-late"])
    stage.check("nothing is deleted before it is due", len(early) == count + 2, f"{len(early)} objects at first")
    stage.check("due objects are deleted, the rest stays", took is not None, f"{count} gone after {took or 0:.1f} s")
    tags = {"TagSet": [{"Key": "keep", "Value": "no"}]}
    await asyncio.to_thread(s3.put_object_tagging, Bucket=bucket, Key="tagged-late", Tagging=tags)
    took = await _until(worker, context, lambda: _keys(s3, bucket) == ["kept"])
    stage.check("a tag added later is applied", took is not None, f"gone {took or 0:.1f} s after it was tagged")
    ledger = DeletionLedger(context.on(store))
    rows = [row async for row in ledger.rows(bucket)]
    deleted = {row.key for row in rows if row.outcome == DeleteOutcome.DELETED and row.key.startswith("tmp/")}
    left = [key for key in await asyncio.to_thread(_keys, s3, bucket) if key.startswith("tmp/")]
    for step, seen in (("due", count), ("gone", count - len(left)), ("deleted by the ledger", len(deleted))):
        stage.counted("expired objects", step, seen)
    outcomes = [row.outcome for row in rows if row.key == "tmp/0000"]
    stage.check(
        "the ledger records why", DeleteOutcome.DELETED in outcomes, " → ".join(filter(None, map(str, outcomes)))
    )


class Undeletable:
    """The store, with one object whose delete fails each time it is tried."""

    def __init__(self, lake: SeaweedLake, key: str) -> None:
        self._lake, self._key = lake, key

    async def delete(self, entry: ObjectEntry, verb: Verb) -> Removal:
        if entry.key == self._key:
            raise Unavailable(f"{entry.key}: a fault put here by the demo")
        return await self._lake.delete(entry, verb)


async def _block(
    stage: ScenarioContext, context: Context, worker: Enforcer, s3: Any, bucket: str, state: LifecycleState
) -> None:
    operator = Operator(state)
    await asyncio.to_thread(s3.put_object, Bucket=bucket, Key=POISON, Body=b"x")
    stage.fault("an object whose delete fails each time")
    held: list[Blocker] = []

    async def blocked() -> bool:
        held[:] = await operator.blockers(bucket=bucket)
        return bool(held)

    await _until(worker, context, blocked)
    await asyncio.to_thread(s3.put_object, Bucket=bucket, Key="tmp/behind", Body=b"x")
    stage.check("a failing delete blocks its stream", bool(held), held[0].last_error if held else "no blocker")
    if not held:
        return
    ident = held[0].blocker_id
    answer = await operator.retry(ident, worker.resolver, await worker.compile())
    stage.check(
        "a failed retry keeps the blocker",
        not answer.resolved and bool(await operator.blockers(bucket=bucket)),
        f"blockers retry {ident}: {answer.value}",
    )
    met: list[str] = []

    async def passed() -> bool:
        # Each stream that reaches the object needs its own decision: its sweep, and, when seven of these short days
        # are over meanwhile, a safety scan too.
        for one in await operator.blockers(bucket=bucket):
            if one.key == POISON:
                await operator.quarantine(one.blocker_id, reason=REASON, who="demo")
                met.append(one.stream.kind.value)
        return await asyncio.to_thread(_keys, s3, bucket) == ["kept", POISON]

    await passed()
    took = await _until(worker, context, passed)
    stage.check(
        "quarantined with a reason, the stream continues",
        took is not None and not await operator.blockers(bucket=bucket),
        f"later objects were deleted after {took or 0:.1f} s; {POISON} is kept, skipped by {', '.join(met)}",
    )


async def _until(worker: Enforcer, context: Context, holds: Any) -> float | None:
    """Runs rounds until the condition holds; returns the seconds it took, or None at the deadline."""
    began = context.clock.monotonic_s()
    while (passed := context.clock.monotonic_s() - began) < DEADLINE_S:
        await worker.run_round()
        if await (holds() if inspect.iscoroutinefunction(holds) else asyncio.to_thread(holds)):
            return passed
        await context.clock.sleep(0.1)
    return None


def _keys(s3: Any, bucket: str) -> list[str]:
    return sorted(one["Key"] for one in s3.list_objects_v2(Bucket=bucket).get("Contents", []))

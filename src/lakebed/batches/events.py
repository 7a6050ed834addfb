"""Repairs accepted manifests shortly after they are created: follows object events of accepted/v1/ in the metadata
stream of a SeaweedFS filer.

This is a fast path only: the audit finds what a lost event would have reported. The stream is reopened after a while
from the last event, because a quiet server may forget a subscriber.
"""

from __future__ import annotations

from collections import deque
from contextlib import aclosing

import msgspec

from lakebed.batches import paths
from lakebed.batches.reconciler import Reconciler, ReconcileReport
from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.filer.client import FilerClient
from lakebed.filer.model import FilerEvent
from lakebed.store.model import ObjectInfo
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

LISTEN_S = 30.0  # how long one subscription is trusted
SAVE_EVERY_S = 5.0  # how often the cursor is stored
GROUP_MAX = 5_000  # events checked together
PACE_S = 5.0  # how long a due event waits for others: one look at the index then serves them all
WAITING_MAX = 50_000  # events held back at once; more are repaired early
GRACE_S = 10.0  # how long a collector has for its own derived writes: twice their longest delay
PAUSE_S = 2.0  # before retrying a filer that failed
TICK_S = 0.2  # how often due repairs run while the stream is quiet

log = logger("batches")


class EventCursor(msgspec.Struct, frozen=True):
    """Events up to here are repaired."""

    since_ns: int = 0


class EventFollower:
    """Repairs each new manifest. `root` is the folder of this deployment: /buckets/<bucket>/<prefix>/."""

    def __init__(
        self,
        runtime: StoreRuntime,
        filer: FilerClient,
        root: str,
        reconciler: Reconciler,
        *,
        listen_s: float = LISTEN_S,
        grace_s: float = GRACE_S,
        pace_s: float = PACE_S,
    ) -> None:
        clock = runtime.clock
        self._filer, self._root, self._reconciler = filer, root, reconciler
        self._clock, self._listen_s = clock, listen_s
        self._grace_ns, self._pace_ns = round(grace_s * 1e9), round(pace_s * 1e9)
        self._place = Register(
            runtime,
            paths.EVENTS,
            EventCursor,
            EventCursor(),
            name="events",
        )

    async def run(self) -> None:
        while True:
            try:
                await self.listen()
            except LakebedError as error:
                log.warning("object events could not be read", error=error.message)
                await self._clock.sleep(PAUSE_S)

    async def listen(self) -> ReconcileReport:
        """One subscription, from the stored cursor, until its time is over. The first one starts now.

        A manifest is repaired a while after its event, so that its collector can write first. The cursor is
        stored before the events that still wait at the end, so the next subscription returns them again.
        """
        report = ReconcileReport("hot")
        since_ns = (await self._place.read()).value.since_ns or self._clock.now_ns()
        saved_s = began_s = self._clock.monotonic_s()
        waiting: deque[FilerEvent] = deque()
        stream = self._filer.subscribe([self._root + paths.ACCEPTED], since_ns=since_ns, tick_s=TICK_S)
        async with aclosing(stream) as events:
            async for event in events:
                since_ns = max(since_ns, event.ts_ns)
                if event.created and event.path.endswith(".json") and event.path.startswith(self._root):
                    waiting.append(event)
                await self._repair_due(waiting, report)
                now_s = self._clock.monotonic_s()
                if now_s - saved_s > SAVE_EVERY_S:
                    await self._save(waiting[0].ts_ns - 1 if waiting else since_ns)
                    saved_s = now_s
                if now_s - began_s > self._listen_s:
                    break
        await self._save(waiting[0].ts_ns - 1 if waiting else since_ns)
        return report

    async def _repair_due(self, waiting: deque[FilerEvent], report: ReconcileReport) -> None:
        """Checks what is due, all of it together: one look at the index serves thousands of events."""
        now_ns = self._clock.now_ns()
        if not waiting or (waiting[0].ts_ns > now_ns - self._grace_ns - self._pace_ns and len(waiting) <= WAITING_MAX):
            return
        due: dict[str, ObjectInfo] = {}
        while waiting and len(due) < GROUP_MAX and (waiting[0].ts_ns <= now_ns - self._grace_ns or not due):
            event = waiting.popleft()
            key = event.path.removeprefix(self._root)
            due[key] = ObjectInfo(key, size=0, etag="", modified_ms=event.ts_ns // 1_000_000)
        await self._reconciler.check(list(due.values()), report)

    async def _save(self, since_ns: int) -> None:
        await self._place.change(lambda at: (EventCursor(since_ns) if at.since_ns < since_ns else at, None))

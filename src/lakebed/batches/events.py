"""The hot path of reconciliation: object events of accepted/v1/, from the metadata stream of a SeaweedFS filer.

Only speeds things up: a lost event is found by the audit. The stream is asked for a while and again from the last
event seen, because a quiet server may forget a subscriber.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing

import msgspec

from lakebed.batches import paths
from lakebed.batches.reconciler import Reconciler, Report
from lakebed.clock import Clock
from lakebed.errors import LakebedError
from lakebed.filer.client import FilerClient
from lakebed.filer.model import Event
from lakebed.ids import Ids
from lakebed.logs import logger
from lakebed.metrics import Metrics
from lakebed.store.protocol import Store
from lakebed.store.register import Register

LISTEN_S = 30.0  # how long one subscription is trusted
SAVE_EVERY_S = 5.0  # how often the place in the stream is noted
GROUP_MAX = 16  # events mended together
WAITING_MAX = 50_000  # events held back at once; more are mended early
GRACE_S = 10.0  # how long a winner has for its own derived writes: twice their patience
PAUSE_S = 2.0  # before asking a filer that failed again
TICK_S = 0.2  # how often a quiet stream lets what is due be mended

log = logger("batches")


class Place(msgspec.Struct, frozen=True):
    """Events up to here were mended."""

    since_ns: int = 0


class EventFollower:
    """Mends each manifest as it is created. `root` is the folder of this deployment: /buckets/<bucket>/<prefix>/."""

    def __init__(
        self,
        filer: FilerClient,
        root: str,
        reconciler: Reconciler,
        store: Store,
        *,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        listen_s: float = LISTEN_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._filer, self._root, self._reconciler = filer, root, reconciler
        self._clock, self._listen_s = clock, listen_s
        self._grace_ns = round(grace_s * 1e9)
        self._place = Register(
            store, paths.EVENTS, Place, Place(), clock=clock, ids=ids, metrics=metrics, name="events"
        )

    async def run(self) -> None:
        while True:
            try:
                await self.listen()
            except LakebedError as error:
                log.warning("object events could not be followed", cause=error.message)
                await self._clock.sleep(PAUSE_S)

    async def listen(self) -> Report:
        """One subscription, from the last noted place, until its time is over. At first from now on.

        A manifest is mended a while after its event, so that its winner's own writes are not raced. What is still
        waiting at the end is told again to the next subscription: the place is noted before it.
        """
        report = Report("hot")
        since_ns = (await self._place.read()).value.since_ns or self._clock.now_ns()
        saved_s = began_s = self._clock.monotonic_s()
        waiting: deque[Event] = deque()
        stream = self._filer.subscribe([self._root + paths.ACCEPTED], since_ns=since_ns, tick_s=TICK_S)
        async with aclosing(stream) as events:
            async for event in events:
                since_ns = max(since_ns, event.ts_ns)
                if event.created and event.path.endswith(".json") and event.path.startswith(self._root):
                    waiting.append(event)
                await self._mend_due(waiting, report)
                now_s = self._clock.monotonic_s()
                if now_s - saved_s > SAVE_EVERY_S:
                    await self._save(waiting[0].ts_ns - 1 if waiting else since_ns)
                    saved_s = now_s
                if now_s - began_s > self._listen_s:
                    break
        await self._save(waiting[0].ts_ns - 1 if waiting else since_ns)
        return report

    async def _mend_due(self, waiting: deque[Event], report: Report) -> None:
        due_ns = self._clock.now_ns() - self._grace_ns
        while waiting and (waiting[0].ts_ns <= due_ns or len(waiting) > WAITING_MAX):
            group: list[str] = []
            while waiting and len(group) < GROUP_MAX and (not group or waiting[0].ts_ns <= due_ns):
                group.append(waiting.popleft().path)
            await self._mend([key.removeprefix(self._root) for key in group], report)

    async def _mend(self, keys: list[str], report: Report) -> None:
        await asyncio.gather(*(self._reconciler.mend(key, report) for key in dict.fromkeys(keys)))

    async def _save(self, since_ns: int) -> None:
        await self._place.change(lambda at: (Place(since_ns) if at.since_ns < since_ns else at, None))

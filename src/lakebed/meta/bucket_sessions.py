"""Who is alive, by one object per session. That object decides once: an expired session is ended before it counts."""

from __future__ import annotations

from collections import OrderedDict

from lakebed.clock import Clock, now_ms
from lakebed.errors import Fenced
from lakebed.ids import Ids
from lakebed.meta.bucket_model import Paths, SessionRecord
from lakebed.meta.session import HeartbeatSession
from lakebed.metrics import Metrics
from lakebed.store.protocol import Store
from lakebed.store.register import Register

ENDED_MAX = 10_000  # ended sessions remembered; forgetting one costs a read
SWEEP_MAX = 1_000  # sessions one sweep looks at


class Sessions:
    """`skew_s` is how far clocks may differ: nobody is called dead before the timeout and that have passed."""

    def __init__(self, store: Store, paths: Paths, *, clock: Clock, ids: Ids, metrics: Metrics, skew_s: float) -> None:
        self._store, self._paths, self._clock, self._ids, self._metrics = store, paths, clock, ids, metrics
        self._skew_ms = round(skew_s * 1000)
        self._ended: OrderedDict[str, None] = OrderedDict()

    async def open(self, timeout_s: float) -> HeartbeatSession:
        id, timeout_ms = self._ids.uuid(), round(timeout_s * 1000)
        register = self._register(id)

        def expires() -> SessionRecord:
            return SessionRecord(now_ms(self._clock) + timeout_ms, ended=False)

        def prolong(record: SessionRecord) -> tuple[SessionRecord, None]:
            if record.ended:
                raise Fenced(f"session {id} has ended")
            return expires(), None

        async def beat() -> None:
            await register.change(prolong)

        async def end() -> None:
            await self._store.delete(self._paths.session(id))  # a missing object is an ended session

        opened_s = self._clock.monotonic_s()
        await register.change(lambda _: (expires(), None))
        return HeartbeatSession(id, timeout_s=timeout_s, clock=self._clock, beat=beat, end=end, opened_s=opened_s)

    async def lives(self, id: str) -> bool:
        """Whether the session lives. Ends it for good when it has expired."""
        if id in self._ended:
            return False
        register = self._register(id)
        record = (await register.read()).value
        if not record.ended and self._expired(record):
            record = await register.change(self._end_expired)
        if record.ended:
            self._ended[id] = None
            if len(self._ended) > ENDED_MAX:
                self._ended.popitem(last=False)
        return not record.ended

    async def sweep(self, horizon_ms: int) -> int:
        """Ends what has expired and removes the objects of sessions that ended before the horizon."""
        swept = looked = 0
        async for info in self._store.list(self._paths.sessions):
            looked += 1
            if looked > SWEEP_MAX:
                break
            if info.modified_ms < horizon_ms and not await self.lives(
                info.key.rsplit("/", 1)[-1].removesuffix(".json")
            ):
                await self._store.delete(info.key)
                swept += 1
        return swept

    def _end_expired(self, record: SessionRecord) -> tuple[SessionRecord, SessionRecord]:
        if record.ended or not self._expired(record):
            return record, record
        after = SessionRecord(record.expires_at_ms, ended=True)
        return after, after

    def _expired(self, record: SessionRecord) -> bool:
        return now_ms(self._clock) >= record.expires_at_ms + self._skew_ms

    def _register(self, id: str) -> Register[SessionRecord]:
        return Register(
            self._store,
            self._paths.session(id),
            SessionRecord,
            SessionRecord(),
            clock=self._clock,
            ids=self._ids,
            metrics=self._metrics,
            name="meta-session",
        )

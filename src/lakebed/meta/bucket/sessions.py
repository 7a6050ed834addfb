"""Sessions of the bucket backend, one object each. An expired session is ended in its object before it counts as
ended."""

from __future__ import annotations

from collections import OrderedDict

from lakebed.core.clock import now_ms
from lakebed.core.errors import Fenced
from lakebed.meta.bucket.model import BucketPaths, SessionRecord
from lakebed.meta.protocol import HeartbeatSession
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

ENDED_MAX = 10_000  # ended sessions remembered; forgetting one costs a read
SWEEP_MAX = 1_000  # sessions one sweep looks at


class BucketSessions:
    """`skew_s` is how far clocks may differ: a session expires after its timeout plus this."""

    def __init__(self, runtime: StoreRuntime, paths: BucketPaths, *, skew_s: float) -> None:
        self._runtime, self._paths = runtime, paths
        self._store, self._clock, self._ids = runtime.store, runtime.clock, runtime.ids
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
        """Whether the session is alive. Ends it when it has expired."""
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
            self._runtime,
            self._paths.session(id),
            SessionRecord,
            SessionRecord(),
            name="meta-session",
        )

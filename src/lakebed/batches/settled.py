"""Which batches were accepted once and removed by retention since: their sequence numbers, in a record for each boot.

A collector reads the records before it accepts, so an old batch that is sent again is a duplicate for ever. Retention
writes a record at least `WAIT_S` before it deletes a manifest of it, and a collector does not accept with records that
are older than `TRUST_S`: whoever could still create the manifest anew knows the record.

The record has ranges, not hashes: other bytes under a removed identity are a duplicate too, not a conflict.
"""

from __future__ import annotations

from lakebed.batches import paths, seq_ranges
from lakebed.batches.model import BatchIdentity, RetentionState, SettledBoot
from lakebed.core.errors import LakebedError, Unavailable
from lakebed.core.logs import logger
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

REFRESH_S = 300.0
TRUST_S = 1800.0
WAIT_S = 3600.0

log = logger("batches")


def settled_register(runtime: StoreRuntime, agent_id: str, boot_id: str) -> Register[SettledBoot]:
    key = paths.settled_key(agent_id, boot_id)
    return Register(runtime, key, SettledBoot, SettledBoot(), name="settled")


def state_register(runtime: StoreRuntime) -> Register[RetentionState]:
    return Register(runtime, paths.RETENTION_STATE, RetentionState, RetentionState(), name="retention")


class SettledBoots:
    """The settled records, as a collector knows them: listed at an interval, read when a batch of the boot comes."""

    def __init__(self, runtime: StoreRuntime) -> None:
        self._runtime, self._store, self._clock = runtime, runtime.store, runtime.clock
        self._listed: dict[str, str] = {}  # key: etag
        self._read: dict[str, tuple[str, SettledBoot]] = {}
        self._at_s = -TRUST_S

    async def find(self, identity: BatchIdentity) -> SettledBoot | None:
        """The record that covers this batch; None when it was not removed. Raises Unavailable when that is unknown."""
        if self._clock.monotonic_s() - self._at_s >= TRUST_S:
            await self.refresh()
        key = paths.settled_key(identity.agent_id, identity.boot_id)
        etag = self._listed.get(key)
        if etag is None:
            return None
        known = self._read.get(key)
        if known is None or known[0] != etag:
            record = await settled_register(self._runtime, identity.agent_id, identity.boot_id).read()
            known = self._read[key] = (etag, record.value)
        return known[1] if seq_ranges.covers(known[1].ranges, identity.seq_start, identity.seq_end) else None

    async def refresh(self) -> None:
        at_s = self._clock.monotonic_s()
        try:
            listed = {info.key: info.etag async for info in self._store.list(paths.SETTLED)}
        except LakebedError as error:
            raise Unavailable(f"settled batches could not be read: {error.message}") from error
        self._listed, self._at_s = listed, at_s
        self._read = {key: known for key, known in self._read.items() if listed.get(key) == known[0]}

    async def run(self) -> None:
        while True:
            await self._clock.sleep(REFRESH_S)
            try:
                await self.refresh()
            except LakebedError as error:
                log.warning("settled batches could not be read", error=error.message)

"""Which spooled batches have landed in the bucket: on disk, so that a restart does not forget them.

`landed.jsonl` in the spool's folder has a line for each. Lines are synced before the segment of their batches is
removed: a batch is in a segment, in this file, or both. The newest are kept; of older ones the bucket knows.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import msgspec

from lakebed.batches.model import AcceptedBatch, BatchIdentity, write_record
from lakebed.batches.settings import BatchesSettings
from lakebed.core import private
from lakebed.core.context import Context
from lakebed.core.logs import logger
from lakebed.store.authority import Authority, claim
from lakebed.store.runtime import StoreRuntime
from lakebed.store.settings import StoreSettings

AUTHORITY = "authority.json"
NAME = "landed.jsonl"

log = logger("batches")


class SpoolAuthority:
    """Which bucket the batches of a spool land in. It is stored beside them, so that a collector can start while the
    bucket is away, and compared with the bucket before anything lands."""

    def __init__(self, folder: Path, settings: StoreSettings) -> None:
        self._path, self._settings = folder / AUTHORITY, settings

    def remembered(self) -> Authority | None:
        """The authority of the last confirmed bucket; None when there is none, or the settings name another bucket."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=Authority)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        expected = self._settings.authority or found.authority_id
        same = (found.authority_id, found.location) == (expected, self._settings.location)
        return found if same else None

    async def confirm(self, runtime: StoreRuntime) -> None:
        """Raises Conflict when the bucket is not the one of the settings or of this spool, Unavailable while it is
        away."""
        known, settings = self.remembered(), self._settings
        expected = settings.authority or (known.authority_id if known is not None else "")
        found = await claim(runtime, expected=expected, location=settings.location, moved_from=settings.moved_from)
        if known is None:
            self._remember(msgspec.structs.replace(found, location=settings.location))

    def _remember(self, found: Authority) -> None:
        private.write(self._path, msgspec.json.encode(found))


def offline_authority(context: Context) -> Authority | None:
    """The bucket that this collector's spool has landed in before; None without a local spool, or before that."""
    settings = context.settings.of(BatchesSettings)
    if settings.acceptance != "local_spool" or settings.spool_dir is None:
        return None
    return SpoolAuthority(settings.spool_dir, context.settings.of(StoreSettings)).remembered()


class LandedBatches:
    def __init__(self, folder: Path, *, known_max: int) -> None:
        self._path, self._known_max = folder / NAME, known_max
        self._known: OrderedDict[BatchIdentity, AcceptedBatch] = OrderedDict()
        self._highest: dict[tuple[str, str], int] = {}
        self._pending: list[AcceptedBatch] = []
        self._lines = 0

    def load(self) -> None:
        """Takes up what an earlier run left. A torn line is dropped: its batch is still in its segment."""
        if not self._path.exists():
            return
        for line in self._path.read_bytes().splitlines():
            if not line:
                continue
            try:
                self._remember(msgspec.json.decode(line, type=AcceptedBatch))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                log.warning("a line of the landed batches is unreadable", error=str(error))
            self._lines += 1

    def get(self, identity: BatchIdentity) -> AcceptedBatch | None:
        return self._known.get(identity)

    def is_new(self, identity: BatchIdentity) -> bool:
        """Whether the batch is surely not landed: its boot is known, and its numbers follow what has landed."""
        highest = self._highest.get((identity.agent_id, identity.boot_id))
        return highest is not None and identity.seq_start > highest

    def add(self, accepted: AcceptedBatch) -> None:
        self._remember(accepted)
        self._pending.append(accepted)

    def sync(self) -> None:
        """Makes what was added durable. Raises OSError; then the segments must stay."""
        if not self._pending:
            return
        if self._lines + len(self._pending) > 2 * self._known_max:
            self._rewrite()
        else:
            with open(self._path, "ab", opener=private.opener) as file:
                file.write(b"\n" + b"".join(write_record(each) + b"\n" for each in self._pending))  # ends a torn line
                file.flush()
                os.fsync(file.fileno())
            self._lines += len(self._pending)
        self._pending = []

    def _rewrite(self) -> None:
        private.write(self._path, b"".join(write_record(each) + b"\n" for each in self._known.values()))
        self._lines = len(self._known)

    def _remember(self, accepted: AcceptedBatch) -> None:
        boot = (accepted.agent_id, accepted.boot_id)
        self._highest[boot] = max(self._highest.get(boot, -1), accepted.seq_end)
        self._known[accepted.identity] = accepted
        if len(self._known) > self._known_max:
            self._known.popitem(last=False)

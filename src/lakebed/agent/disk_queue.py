"""The disk queue: one file per batch, fsynced before it counts, deleted only on `complete`, `park` or a counted drop.

Invariant: a batch that `append` returned survives any crash under exactly one name until `complete`, `park` or a drop
that is counted. A file gets its final name only after its bytes are on the disk, so what a crash cuts off is always a
`.tmp` file that was never reported as durable. Its name carries identity, size and SHA-256; `read` refuses bytes that
differ.

Index changes are guarded by a lock, so one thread may append while another completes. No call here waits for anything
but the disk.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from lakebed.agent import paths, recovery
from lakebed.agent.files import Files, QueueLedger, disk_bytes
from lakebed.agent.model import (
    AppendResult,
    BatchKey,
    DiskTrouble,
    Frame,
    ParkedBatch,
    QueuedBatch,
    QueueFull,
    WhenFull,
)
from lakebed.core.errors import Corrupt, NotFound


class QueueLimits(msgspec.Struct, frozen=True):
    bytes_max: int
    batches_max: int
    when_full: WhenFull = "block"


class DiskQueue:
    """An open queue folder, locked for this process. `boot_id` names this run."""

    def __init__(
        self, folder: Path, agent_id: str, boot_id: str, limits: QueueLimits, files: Files, ledger: QueueLedger
    ):
        self.folder, self.agent_id, self.boot_id, self.limits = folder, agent_id, boot_id, limits
        self.files, self.ledger = files, ledger
        self.torn = 0
        self.pending_bytes = 0
        self.parked_bytes = 0
        self.parked_batches = 0
        self._guard = threading.Lock()
        self._pending: OrderedDict[BatchKey, QueuedBatch] = OrderedDict()
        self._claimed: set[BatchKey] = set()
        self._left: dict[tuple[int, str], int] = {}  # batches left of each boot
        self._boot = 1
        self._made = False
        self._lock_fd = -1

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        agent_id: str,
        boot_id: str,
        limits: QueueLimits,
        now_ms: Callable[[], int],
        files: Files | None = None,
    ) -> DiskQueue:
        """Locks the folder (making it if needed), cuts what a crash left unfinished and lists what waits.

        Raises QueueInUse when another agent holds it, Invalid when it is another agent's queue.
        """
        files = files or Files()
        disk_queue = cls(folder, agent_id, boot_id, limits, files, QueueLedger(folder / paths.LEDGER, files, now_ms))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk_queue._lock_fd = recovery.lock(folder)
        try:
            recovery.claim(folder, agent_id, files)
            recovered = recovery.recover(folder, files, disk_queue.ledger)
            disk_queue._boot, disk_queue.torn = recovered.next_boot, recovered.torn
            for entry in recovered.entries:
                disk_queue._insert(entry)
            disk_queue.refresh_parked()
            disk_queue.take_returned()
        except BaseException:
            disk_queue.close()
            raise
        return disk_queue

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    @property
    def batches(self) -> int:
        return len(self._pending)

    @property
    def used_bytes(self) -> int:
        """Disk taken by waiting and parked batches together: what the limit is about."""
        return self.pending_bytes + self.parked_bytes

    def append(self, frames: Sequence[Frame]) -> AppendResult:
        """Stores the frames, in order, durably: two fsyncs for one, one more for each further one.

        Raises QueueFull (policy block) or DiskTrouble; then nothing is promised and the caller offers the same frames
        again, which lands on the same names. Under drop_oldest room is made by giving up the oldest batches nobody is
        sending; when even that is not enough (parked batches fill the disk), the new frames are given up, counted.
        """
        need_bytes = sum(disk_bytes(len(frame.data)) for frame in frames)
        dropped = self._make_room(need_bytes, len(frames))
        lost = (len(dropped), sum(entry.samples for entry in dropped))
        if not self._fits(need_bytes, len(frames)):
            samples = sum(frame.identity.samples for frame in frames)
            self.ledger.note("dropped_when_full", batches=len(frames), samples=samples, newest=True)
            return AppendResult((), lost[0] + len(frames), lost[1] + samples)
        try:
            stored = tuple(self._write(frames))
        except OSError as error:
            raise DiskTrouble(
                f"the queue in {self.folder} cannot be written: {error}", hint="free space, or repair the disk"
            ) from error
        with self._guard:
            for entry in stored:
                self._insert(entry)
        return AppendResult(stored, *lost)

    def claim(self, skip: Callable[[QueuedBatch], bool] = lambda entry: False) -> QueuedBatch | None:
        """The oldest batch that nobody has claimed and `skip` lets through; None when there is none."""
        with self._guard:
            for key, entry in self._pending.items():
                if key not in self._claimed and not skip(entry):
                    self._claimed.add(key)
                    return entry
        return None

    def release(self, entry: QueuedBatch) -> None:
        """Puts a claimed batch back into its place."""
        with self._guard:
            self._claimed.discard(entry.key)

    def read(self, entry: QueuedBatch) -> bytes:
        """The frame's bytes. Raises Corrupt when they are not those stored, NotFound when the file is gone."""
        path = self._path(entry)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise NotFound(f"batch {path.name} is no longer in the queue") from error
        except OSError as error:
            raise DiskTrouble(f"batch {path.name} cannot be read: {error}") from error
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise Corrupt(f"batch {path.name} does not hold the bytes that were stored", size_bytes=len(data))
        return data

    def complete(self, entry: QueuedBatch) -> None:
        """The batch was accepted: forget it. Not synced, because sending it again after a crash is harmless."""
        self.files.unlink(self._path(entry))
        self._forget(entry)

    def gone(self, entry: QueuedBatch) -> None:
        """The file was removed by the owner while we ran: forget it."""
        self._forget(entry)

    def park(self, entry: QueuedBatch, parked: ParkedBatch) -> None:
        """Moves the batch out of the retry order, its reason first. Raises DiskTrouble; then it stays queued."""
        folder, name = self.folder / paths.PARKED, paths.parked_path(parked)
        try:
            reason = folder / (name + paths.REASON)
            self.files.write(folder / (name + paths.UNFINISHED), msgspec.json.encode(parked))
            self.files.rename(folder / (name + paths.UNFINISHED), reason)
            self.files.sync_folder(folder)  # no batch may lie here without its reason
            self.files.rename(self._path(entry), folder / name)
            self.files.sync_folder(folder)
            self.files.sync_folder(self._path(entry).parent)
        except OSError as error:
            raise DiskTrouble(f"batch {name} cannot be parked: {error}") from error
        self._forget(entry)
        self.ledger.note("parked", reason=parked.reason, name=name)
        self.refresh_parked()

    def refresh_parked(self) -> None:
        """Counts what is parked anew: its owner may drop and return batches while the agent runs."""
        sizes = [
            entry.stat().st_size
            for entry in os.scandir(self.folder / paths.PARKED)
            if entry.name.endswith(paths.BATCH) and entry.is_file()
        ]
        self.parked_batches, self.parked_bytes = len(sizes), sum(map(disk_bytes, sizes))

    def take_returned(self) -> int:
        """Puts batches the owner returned back into the queue, under the identity they always had."""
        taken = 0
        for name in recovery.names(self.folder / paths.RETURNED):
            if (place := paths.parse_parked(name)) is None:
                continue
            boot = self._boot_of(place[0])
            self.files.make_folder(self.folder / paths.BOOTS / paths.boot_folder(boot, place[0]))
            target = self.folder / paths.BOOTS / paths.boot_folder(boot, place[0]) / place[1]
            self.files.rename(self.folder / paths.RETURNED / name, target)
            self.files.sync_folder(target.parent)
            with self._guard:
                self._insert(recovery.entry_of(boot, place[0], place[1], target.stat().st_size))
            taken += 1
        return taken

    # what the above is made of

    def _write(self, frames: Sequence[Frame]) -> list[QueuedBatch]:
        folder = self.folder / paths.BOOTS / paths.boot_folder(self._boot, self.boot_id)
        if not self._made:
            self.files.make_folder(folder)
            self._made = True
        stored = []
        for frame in frames:
            identity = frame.identity
            name = paths.batch_file(identity.seq_start, identity.seq_end, frame.sha256)
            self.files.write(folder / (name + paths.UNFINISHED), frame.data)
            self.files.rename(folder / (name + paths.UNFINISHED), folder / name)
            stored.append(recovery.entry_of(self._boot, self.boot_id, name, len(frame.data)))
        self.files.sync_folder(folder)
        return stored

    def _make_room(self, need_bytes: int, need_batches: int) -> list[QueuedBatch]:
        dropped: list[QueuedBatch] = []
        while not self._fits(need_bytes, need_batches):
            if self.limits.when_full == "block":
                raise QueueFull(
                    f"the queue holds {self.batches} batches and {self.used_bytes} of {self.limits.bytes_max} bytes",
                    hint="check the collectors, and settle parked batches: lakebed agent conflicts",
                )
            # Giving up batches is pointless when it is the parked ones that fill the disk: those are never given up.
            hopeless = self.parked_bytes + need_bytes > self.limits.bytes_max
            victim = None if hopeless else self.claim()
            if victim is None:
                break
            self.files.unlink(self._path(victim))
            self._forget(victim)
            dropped.append(victim)
        if dropped:
            self.ledger.note(
                "dropped_when_full",
                batches=len(dropped),
                samples=sum(entry.samples for entry in dropped),
                first=[dropped[0].boot_id, dropped[0].seq_start],
                last=[dropped[-1].boot_id, dropped[-1].seq_end],
            )
        return dropped

    def _fits(self, need_bytes: int, need_batches: int) -> bool:
        limits = self.limits
        return self.used_bytes + need_bytes <= limits.bytes_max and self.batches + need_batches <= limits.batches_max

    def _insert(self, entry: QueuedBatch) -> None:
        if entry.key in self._pending:
            return
        self._pending[entry.key] = entry
        self.pending_bytes += disk_bytes(entry.size_bytes)
        boot = (entry.boot, entry.boot_id)
        self._left[boot] = self._left.get(boot, 0) + 1

    def _forget(self, entry: QueuedBatch) -> None:
        boot = (entry.boot, entry.boot_id)
        with self._guard:
            self._claimed.discard(entry.key)
            if self._pending.pop(entry.key, None) is None:
                return
            self.pending_bytes -= disk_bytes(entry.size_bytes)
            self._left[boot] -= 1
            empty = self._left[boot] == 0
            if empty:
                del self._left[boot]
        if empty and entry.boot_id != self.boot_id:
            self.files.remove_folder(self._path(entry).parent)

    def _path(self, entry: QueuedBatch) -> Path:
        folder, name = paths.queued_path(entry)
        return self.folder / paths.BOOTS / folder / name

    def _boot_of(self, boot_id: str) -> int:
        if boot_id == self.boot_id:
            return self._boot
        return next((ordinal for ordinal, known in self._left if known == boot_id), 0)

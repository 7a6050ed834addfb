"""The files of the local spool: append-only segments of checksummed records, fsynced before an upload is acknowledged.

A record is a fixed head (magic, lengths, time, attempt, checksum) and the frame. After a crash the tail of the last
segment may be torn: it was never acknowledged and is cut off. Damage elsewhere, or of a last record that has all of
its bytes, is skipped and the file is kept.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import google_crc32c
import msgspec

from lakebed.core import private
from lakebed.core.errors import Conflict, Corrupt

MAGIC = b"LMSPOOL1"
HEAD = struct.Struct("<8sIQ16sI")  # magic, frame bytes, accepted_at ns, attempt id, crc32c of head and frame
CRC_AT = HEAD.size - 4
SUFFIX = ".spool"
DAMAGED = ".damaged"  # of a segment that is kept for a person


class SpoolRecord(msgspec.Struct, frozen=True):
    """Where one spooled frame lies."""

    segment: int
    offset: int
    frame_bytes: int
    at_ns: int
    attempt_id: str


def pack(frame: bytes, at_ns: int, attempt_id: str) -> bytes:
    head = HEAD.pack(MAGIC, len(frame), at_ns, attempt_id.encode().ljust(16)[:16], 0)[:CRC_AT]
    return b"".join((head, google_crc32c.extend(google_crc32c.value(head), frame).to_bytes(4, "little"), frame))


class SpoolSegments:
    """The segment files of one folder, locked for this process."""

    def __init__(self, folder: Path) -> None:
        private.folder(folder)
        self.folder = folder
        self._lock = open(folder / "lock", "a", opener=private.opener)  # noqa: SIM115 (held as long as the spool)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise Conflict(
                f"spool {str(folder)!r} is in use by another collector", hint="give each its own batches.spool_dir"
            ) from error
        self._active: IO[bytes] | None = None
        self._number = max([*self.numbers(), *self._numbers(DAMAGED)], default=0)
        self.damaged: set[int] = set()

    def numbers(self) -> list[int]:
        return self._numbers(SUFFIX)

    def _numbers(self, suffix: str) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob(f"*{suffix}") if path.stem.isdigit())

    def path(self, number: int) -> Path:
        return self.folder / f"{number:020d}{SUFFIX}"

    def append(self, records: list[bytes]) -> tuple[int, int]:
        """Writes the records behind each other and syncs them. Returns the segment and the offset of the first.

        On failure nothing of them counts: the segment is cut back, or abandoned for a new one when even that fails.
        """
        file = self._active or self._open()
        start = file.tell()
        try:
            left = memoryview(b"".join(records))
            while left:  # an almost full disk takes a part of a write, without an error
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            self.seal()
            # An fsync that failed leaves unknown pages behind: what was acknowledged before stays, the rest goes.
            with self.path(self._number).open("r+b") as cut:
                cut.truncate(start)
                os.fsync(cut.fileno())
            raise
        return self._number, start

    def seal(self) -> None:
        """The next append opens a new segment."""
        if self._active is not None:
            active, self._active = self._active, None
            try:
                active.close()
            except OSError:
                return

    @property
    def active_bytes(self) -> int:
        return self._active.tell() if self._active is not None else 0

    @property
    def active_number(self) -> int:
        return self._number if self._active is not None else 0

    def recover(self, number: int) -> Iterator[tuple[SpoolRecord, bytes]]:
        """Every whole record of a segment left by an earlier run; a torn tail is cut off."""
        data = self.path(number).read_bytes()
        end = 0
        for record in records(data, number):
            if record.offset > end:
                self.damaged.add(number)
            start, end = record.offset + HEAD.size, record.offset + HEAD.size + record.frame_bytes
            yield record, data[start:end]
        if _has_length(data, end):  # not torn: it may have been acknowledged
            self.damaged.add(number)
        elif end < len(data):
            with self.path(number).open("r+b") as cut:
                cut.truncate(end)
                os.fsync(cut.fileno())

    def damaged_files(self) -> int:
        """Segments that are kept because a record of them cannot be read."""
        return len(self._numbers(DAMAGED)) + len(self.damaged.intersection(self.numbers()))

    def read(self, record: SpoolRecord) -> bytes:
        """The frame of a record. Raises Corrupt when the disk no longer holds it."""
        with self.path(record.segment).open("rb") as file:
            file.seek(record.offset)
            data = file.read(HEAD.size + record.frame_bytes)
        if _whole(data, 0) != record.frame_bytes:
            raise Corrupt(f"spooled batch at {record.offset} of {self.path(record.segment).name} is damaged")
        return data[HEAD.size :]

    def remove(self, number: int) -> None:
        """Forgets a segment that is wholly landed; one with damage inside is kept aside for a person."""
        path = self.path(number)
        if number in self.damaged:
            path.rename(path.with_suffix(DAMAGED))
        else:
            path.unlink(missing_ok=True)
        private.sync_folder(self.folder)

    def close(self) -> None:
        self.seal()
        self._lock.close()

    def _open(self) -> IO[bytes]:
        self._number += 1
        made = open(self.path(self._number), "xb", buffering=0, opener=private.opener)  # noqa: SIM115 (kept open)
        try:
            private.sync_folder(self.folder)
        except OSError:
            made.close()  # its name may not outlive a power loss: nothing is written to it, the next one is new
            raise
        self._active = made
        return made


def records(data: bytes, number: int = 0) -> Iterator[SpoolRecord]:
    """Every whole record in a segment's bytes; what is damaged between them is stepped over."""
    at = 0
    while 0 <= at < len(data):
        frame_bytes = _whole(data, at)
        if frame_bytes is None:
            at = data.find(MAGIC, at + 1)
            continue
        _, _, at_ns, attempt, _ = HEAD.unpack_from(data, at)
        yield SpoolRecord(number, at, frame_bytes, at_ns, attempt.decode(errors="replace").strip())
        at += HEAD.size + frame_bytes


def _has_length(data: bytes, at: int) -> bool:
    """Whether a record begins at this place and has as many bytes as it says."""
    if len(data) - at < HEAD.size:
        return False
    magic, frame_bytes, _, _, _ = HEAD.unpack_from(data, at)
    return bool(magic == MAGIC and at + HEAD.size + frame_bytes <= len(data))


def _whole(data: bytes, at: int) -> int | None:
    """The length of the frame in the record at this place, or None when there is no whole record."""
    if not _has_length(data, at):
        return None
    _, frame_bytes, _, _, crc = HEAD.unpack_from(data, at)
    start = at + HEAD.size
    whole = google_crc32c.extend(google_crc32c.value(data[at : at + CRC_AT]), data[start : start + frame_bytes])
    return int(frame_bytes) if whole == crc else None

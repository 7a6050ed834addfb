"""The owner's view of a queue folder, and what the owner may do with it.

Works beside a running agent: it reads files, deletes or moves whole ones, and the agent notices.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from lakebed.agent import paths
from lakebed.agent.files import Files, QueueLedger
from lakebed.agent.model import ParkedBatch, QueuedBatch
from lakebed.core.errors import Invalid, NotFound

PREFIX_CHARS_MIN = 6  # of a batch's SHA-256, to name it by


class BootRow(msgspec.Struct, frozen=True):
    """The waiting batches of one boot."""

    boot_id: str
    batches: int
    samples: int
    size_bytes: int
    seq_start: int
    seq_end: int
    oldest_at_ms: int


class SelectedBatch(msgspec.Struct, frozen=True):
    """A batch the owner named."""

    state: str  # queued or parked
    boot_id: str
    seq_start: int
    seq_end: int
    sha256: str
    size_bytes: int
    path: Path
    reason: str = ""


class QueueInspector:
    def __init__(self, folder: Path, now_ms: Callable[[], int], files: Files | None = None) -> None:
        if not (folder / paths.ABOUT).exists():
            raise NotFound(f"there is no agent queue in {folder}", hint="name it with --queue-dir")
        self._folder, self._files = folder, files or Files()
        self._ledger = QueueLedger(folder / paths.LEDGER, self._files, now_ms)

    def boots(self) -> list[BootRow]:
        rows = []
        for ordinal, boot_id, folder in self._boots():
            entries = list(self._entries(ordinal, boot_id, folder))
            if entries:
                first = min(entries, key=lambda entry: entry[0].seq_start)[1]
                rows.append(
                    BootRow(
                        boot_id=boot_id,
                        batches=len(entries),
                        samples=sum(entry.samples for entry, _ in entries),
                        size_bytes=sum(entry.size_bytes for entry, _ in entries),
                        seq_start=min(entry.seq_start for entry, _ in entries),
                        seq_end=max(entry.seq_end for entry, _ in entries),
                        oldest_at_ms=_modified_ms(first),
                    )
                )
        return rows

    def queued(self, limit: int) -> list[QueuedBatch]:
        """Waiting batches, oldest first, at most `limit`."""
        found: list[QueuedBatch] = []
        for ordinal, boot_id, folder in self._boots():
            entries = sorted(self._entries(ordinal, boot_id, folder), key=lambda entry: entry[0].seq_start)
            found += [entry for entry, _ in entries[: limit - len(found)]]
            if len(found) >= limit:
                break
        return found

    def parked(self) -> list[ParkedBatch]:
        """What is out of the retry order, longest parked first."""
        return sorted((parked for parked, _ in self._parked()), key=lambda parked: parked.parked_at_ms)

    def select(
        self, names: Sequence[str], *, parked_only: bool = False, all_parked: bool = False
    ) -> list[SelectedBatch]:
        """The batches named by the first characters of their SHA-256. Raises Invalid unless each names one."""
        everything = [_parked_choice(parked, path) for parked, path in self._parked()]
        chosen = list(everything) if all_parked else []
        if not parked_only:
            for ordinal, boot_id, folder in self._boots():
                everything += [_queued_choice(entry, path) for entry, path in self._entries(ordinal, boot_id, folder)]
        for name in names:
            found = [choice for choice in everything if choice.sha256.startswith(name)]
            if len(name) < PREFIX_CHARS_MIN or len(found) != 1:
                raise Invalid(
                    f"{name!r} names {len(found)} batches",
                    hint=f"give at least {PREFIX_CHARS_MIN} characters of one sha256; see lakebed agent conflicts",
                )
            chosen += [choice for choice in found if choice not in chosen]
        return chosen

    def drop(self, chosen: Sequence[SelectedBatch], *, reason: str) -> None:
        """Deletes these batches. The ledger is written first, so that every drop is recorded."""
        for choice in chosen:
            self._note("dropped_by_owner", choice, reason)
            self._files.unlink(choice.path)
            if choice.state == "parked":
                self._files.unlink(_reason_path(choice.path))
            self._files.sync_folder(choice.path.parent)

    def requeue(self, chosen: Sequence[SelectedBatch], *, reason: str) -> None:
        """Puts parked batches back into the queue, under their old identity; the agent takes them within seconds."""
        for choice in chosen:
            if choice.state != "parked":
                raise Invalid(f"batch {choice.sha256[:12]} is not parked")
            self._note("returned", choice, reason)
            self._files.rename(choice.path, self._folder / paths.RETURNED / choice.path.name)
            self._files.sync_folder(self._folder / paths.RETURNED)
            self._files.unlink(_reason_path(choice.path))
            self._files.sync_folder(choice.path.parent)

    def _note(self, what: str, choice: SelectedBatch, reason: str) -> None:
        assert what in ("dropped_by_owner", "returned")
        facts = {**msgspec.to_builtins(choice, enc_hook=str), "parked_for": choice.reason, "reason": reason}
        self._ledger.note("dropped_by_owner" if what == "dropped_by_owner" else "returned", **facts)

    def _boots(self) -> Iterator[tuple[int, str, Path]]:
        for name in sorted(path.name for path in (self._folder / paths.BOOTS).iterdir()):
            if place := paths.parse_boot(name):
                yield *place, self._folder / paths.BOOTS / name

    def _entries(self, ordinal: int, boot_id: str, folder: Path) -> Iterator[tuple[QueuedBatch, Path]]:
        with contextlib.suppress(FileNotFoundError):  # a running agent empties and removes folders
            for file in os.scandir(folder):
                if place := paths.parse_batch(file.name):
                    with contextlib.suppress(FileNotFoundError):
                        yield QueuedBatch(ordinal, boot_id, *place, file.stat().st_size), Path(file.path)

    def _parked(self) -> Iterator[tuple[ParkedBatch, Path]]:
        folder = self._folder / paths.PARKED
        for name in [path.name for path in folder.iterdir()]:
            if paths.parse_parked(name):
                with contextlib.suppress(FileNotFoundError):
                    parked = msgspec.json.decode(_reason_path(folder / name).read_bytes(), type=ParkedBatch)
                    yield parked, folder / name


def _reason_path(path: Path) -> Path:
    return path.with_name(path.name + paths.REASON)


def _queued_choice(entry: QueuedBatch, path: Path) -> SelectedBatch:
    return SelectedBatch("queued", entry.boot_id, entry.seq_start, entry.seq_end, entry.sha256, entry.size_bytes, path)


def _parked_choice(parked: ParkedBatch, path: Path) -> SelectedBatch:
    sha256, size_bytes = parked.submitted_frame_sha256, parked.size_bytes
    return SelectedBatch(
        "parked", parked.boot_id, parked.seq_start, parked.seq_end, sha256, size_bytes, path, parked.reason
    )


def _modified_ms(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except FileNotFoundError:
        return 0

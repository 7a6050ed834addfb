"""Opening a queue folder: one owner at a time, what a crash left unfinished cut off, what waits listed.

Reads names and sizes, never batches: a queue of a hundred thousand opens in seconds.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from lakebed.agent import paths
from lakebed.agent.files import Files, QueueLedger
from lakebed.agent.model import QUEUE_FORMAT, QueuedBatch, QueueInUse
from lakebed.core.errors import Invalid


class RecoveredQueue(msgspec.Struct, frozen=True):
    """Waiting batches, oldest first, the next boot's ordinal, and how many unfinished files were cut off."""

    entries: tuple[QueuedBatch, ...]
    next_boot: int
    torn: int


def lock(folder: Path) -> int:
    """The descriptor that holds the folder's lock until it is closed or its process dies. Raises QueueInUse."""
    fd = os.open(folder / paths.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise QueueInUse(
            f"another agent is using the queue in {folder}", hint="stop it, or set another agent.queue_dir"
        ) from error
    return fd


def claim(folder: Path, agent_id: str, files: Files) -> None:
    """Makes the folder the queue of this agent only. Raises Invalid when it is another's, or of another format."""
    about = folder / paths.ABOUT
    wanted = {"format": QUEUE_FORMAT, "agent_id": agent_id}
    if not about.exists():
        files.write(about.with_suffix(paths.UNFINISHED), msgspec.json.encode(wanted))
        files.rename(about.with_suffix(paths.UNFINISHED), about)
        files.sync_folder(folder)
    try:
        found = msgspec.json.decode(about.read_bytes())
    except msgspec.DecodeError:
        found = "damaged"
    if found != wanted:
        raise Invalid(f"the queue in {folder} is {found}, not {wanted}", hint="give each agent its own agent.queue_dir")
    for name in (paths.BOOTS, paths.PARKED, paths.RETURNED, paths.ALERTS):
        files.make_folder(folder / name)


def recover(folder: Path, files: Files, ledger: QueueLedger) -> RecoveredQueue:
    """Brings the folder back to order after whatever happened to the agent before."""
    _repair_parked(folder, files)
    entries: list[QueuedBatch] = []
    next_boot, torn = 1, 0
    boots = [(place, name) for name in names(folder / paths.BOOTS) if (place := paths.parse_boot(name))]
    for (ordinal, boot_id), name in sorted(boots):
        next_boot = max(next_boot, ordinal + 1)
        found, cut = _boot(ordinal, boot_id, folder / paths.BOOTS / name, files, ledger)
        entries += found
        torn += cut
        if not found:
            files.remove_folder(folder / paths.BOOTS / name)
    return RecoveredQueue(tuple(entries), next_boot, torn)


def entry_of(boot: int, boot_id: str, name: str, size_bytes: int) -> QueuedBatch:
    """The batch of a file name."""
    place = paths.parse_batch(name)
    assert place is not None
    return QueuedBatch(boot, boot_id, *place, size_bytes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _repair_parked(folder: Path, files: Files) -> None:
    parked = folder / paths.PARKED
    found = set(names(parked))
    for name in found:
        # A reason without its batch: the crash came before the move, so the batch is still queued.
        if name.endswith(paths.UNFINISHED) or (
            name.endswith(paths.REASON) and name.removesuffix(paths.REASON) not in found
        ):
            files.unlink(parked / name)
        elif name.endswith(paths.BATCH) and name + paths.REASON not in found:
            files.rename(parked / name, folder / paths.RETURNED / name)  # the reason is lost: send it again


def _boot(ordinal: int, boot_id: str, folder: Path, files: Files, ledger: QueueLedger) -> tuple[list[QueuedBatch], int]:
    entries: list[QueuedBatch] = []
    torn = 0
    for file in os.scandir(folder):
        if file.name.endswith(paths.UNFINISHED):
            files.unlink(Path(file.path))
            ledger.note("torn", name=file.name)
            torn += 1
        elif paths.parse_batch(file.name):
            entries.append(entry_of(ordinal, boot_id, file.name, file.stat().st_size))
    return sorted(entries, key=lambda entry: entry.seq_start), torn

"""Files on this machine that hold data: readable by their owner alone, whatever the umask."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700


def opener(path: str, flags: int) -> int:
    """For `open(…, opener=opener)`: a new file has FILE_MODE."""
    return os.open(path, flags, FILE_MODE)


def create(file: Path) -> None:
    """Creates the file if it is missing. Another program that opens it later keeps its mode.

    A file that exists is not opened: closing it again would drop the locks of SQLite on it in this process.
    """
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))


def folder(path: Path) -> None:
    """Creates the folder and its parents if they are missing; a new one has FOLDER_MODE."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def write(file: Path, data: bytes) -> None:
    """Writes the file whole and durably: after a crash or a power loss it is the old one or the new one.

    Raises OSError; the file is one of the two then.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}")  # of this process: another one may write the file too
    part.unlink(missing_ok=True)  # a leftover could have another mode
    with open(part, "xb", opener=opener) as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    part.replace(file)
    sync_folder(file.parent)


def sync_folder(path: Path) -> None:
    """The names in the folder are on the disk: of files that were created, renamed or removed."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

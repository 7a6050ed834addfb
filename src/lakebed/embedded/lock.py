"""One stack per folder. The kernel holds the lock for the supervisor and lets go when it dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from lakebed.errors import Conflict

LOCK_FILE = "lock"


class FolderLock:
    """Held from `take` until `release` or the end of this process. Not inherited by children."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def take(self) -> None:
        """Raises Conflict when a stack already runs in the folder, or somebody looks at this instant if one does."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise Conflict(
                f"a stack already runs in {self._folder}",
                hint="look at it with lakebed status, stop it with lakebed down, or give another --dir",
            ) from None
        self._descriptor = descriptor

    def release(self) -> None:
        if self.held:
            os.close(self._descriptor)
            self._descriptor = -1


def is_held(folder: Path) -> bool:
    """Whether a stack runs in the folder."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def start_ticks(pid: int) -> int:
    """When a living process started, in clock ticks since boot; 0 when it is gone or the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])

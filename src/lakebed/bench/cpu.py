"""CPU time, where Linux tells it: what a run costs is steadier than how long it takes on a machine that others use."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """What the process has used, or 0 when it is gone or nobody tells."""
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def rss_bytes(pid: int) -> int:
    fields = _fields(pid)
    return int(fields[21]) * os.sysconf("SC_PAGESIZE") if fields else 0


def tree_cpu_s() -> float:
    """What this process and everything it has started and not yet lost have used: generator, servers, bucket."""
    parents = {pid: int(fields[1]) for pid in _pids() if (fields := _fields(pid))}
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own and pid not in own}:
        own |= more
    return sum(map(cpu_s, own))


def _pids() -> list[int]:
    try:
        return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    except OSError:
        return []


def _fields(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat behind the command, which may hold anything."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []

"""Executes a program that the kernel kills when its parent dies: `launch.py PARENT_PID program …`.

Runs as a script, before anything of Lakebed is imported, so it is quick, and safe however many threads the parent has.
The parent-death signal survives exec. Linux only; elsewhere the program is started without it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_STARTED = 127  # the shell's own code for a program that could not be run


def die_with(parent: int) -> None:
    """SIGKILL for this process as soon as the thread that spawned it is gone; at once when it already is."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent:  # it died before prctl: no signal will come
        os._exit(NOT_STARTED)


if __name__ == "__main__":
    try:
        die_with(int(sys.argv[1]))
        os.execv(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"cannot start {sys.argv[2]}: {error}", file=sys.stderr)
        sys.exit(NOT_STARTED)

"""A command in front of a person: its standard error is a terminal, its data goes into a pipe as always."""

from __future__ import annotations

import os
import pty
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DEADLINE_S = 300.0
COLUMNS = 100


class Shown(NamedTuple):
    code: int
    out: bytes
    err: bytes  # what the terminal got, or the pipe


def run(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, terminal: bool) -> Shown:
    """Runs a program to its end, with or without a terminal to write to."""
    clean = {name: value for name, value in env.items() if name not in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE")}
    reported = {**clean, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    if not terminal:
        ended = subprocess.run(argv, env=reported, cwd=cwd, capture_output=True, timeout=DEADLINE_S)
        return Shown(ended.returncode, ended.stdout, ended.stderr)
    ours, theirs = pty.openpty()
    seen: list[bytes] = []
    reader = threading.Thread(target=_read, args=(ours, seen), daemon=True)
    try:
        process = subprocess.Popen(argv, env=reported, cwd=cwd, stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        reader.start()
        out, _ = process.communicate(timeout=DEADLINE_S)
        reader.join(DEADLINE_S)
        return Shown(process.returncode, out, b"".join(seen))
    finally:
        os.close(ours)


def _read(terminal: int, seen: list[bytes]) -> None:
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the last writer has closed it
            return
        if not data:
            return
        seen.append(data)

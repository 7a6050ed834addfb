"""What a process under test says, waited for with a deadline: a silence fails with the end of the process's stderr.

A test that reads a pipe without one hangs for as long as the process does, and nobody learns why.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
from pathlib import Path
from typing import Any, NoReturn

WITHIN_S = 200.0  # more than any process needs on a slow machine, and less than a test may take; a pass waits for none
TAIL_CHARS = 3000


def line_of(process: subprocess.Popen[Any], errors: Path | None = None, *, within_s: float = WITHIN_S) -> str:
    """The next line on stdout. Fails when none comes in time or the process ends first, with the end of `errors`."""
    assert process.stdout is not None
    said: list[Any] = []
    reader = threading.Thread(target=lambda: said.append(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(within_s)
    if not said or not said[0]:
        _fail(process.pid, "ended" if said else "said nothing", within_s, errors)
    return said[0].decode() if isinstance(said[0], bytes) else str(said[0])


async def next_line(
    process: asyncio.subprocess.Process, errors: Path | None = None, *, within_s: float = WITHIN_S
) -> str:
    """The same of a process of asyncio."""
    assert process.stdout is not None
    try:
        said = await asyncio.wait_for(process.stdout.readline(), within_s)
    except TimeoutError:
        _fail(process.pid, "said nothing", within_s, errors)
    if not said:
        _fail(process.pid, "ended", within_s, errors)
    return said.decode()


def _fail(pid: int, what: str, within_s: float, errors: Path | None) -> NoReturn:
    words = errors.read_text(errors="replace")[-TAIL_CHARS:] if errors and errors.exists() else "(not kept)"
    raise AssertionError(f"process {pid} {what} where a line was expected, within {within_s:g} s; its stderr:\n{words}")

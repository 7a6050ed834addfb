"""What a process under test reports, waited for with a deadline: a silence fails with the end of the process's stderr.

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
    output: list[Any] = []
    reader = threading.Thread(target=lambda: output.append(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(within_s)
    if not output or not output[0]:
        _fail(process.pid, "ended" if output else "said nothing", within_s, errors)
    return output[0].decode() if isinstance(output[0], bytes) else str(output[0])


async def next_line(
    process: asyncio.subprocess.Process, errors: Path | None = None, *, within_s: float = WITHIN_S
) -> str:
    """The same of a process of asyncio."""
    assert process.stdout is not None
    try:
        output = await asyncio.wait_for(process.stdout.readline(), within_s)
    except TimeoutError:
        _fail(process.pid, "said nothing", within_s, errors)
    if not output:
        _fail(process.pid, "ended", within_s, errors)
    return output.decode()


def _fail(pid: int, what: str, within_s: float, errors: Path | None) -> NoReturn:
    words = errors.read_text(errors="replace")[-TAIL_CHARS:] if errors and errors.exists() else "(not kept)"
    raise AssertionError(f"process {pid} {what} where a line was expected, within {within_s:g} s; its stderr:\n{words}")

"""An agent as a process, before collectors."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from lakebed.core.settings import env_name
from lakebed.store.settings import StoreSettings
from support.process_output import next_line

DEADLINE_S = 150.0


@asynccontextmanager
async def gateway(settings: StoreSettings, **more: str) -> AsyncIterator[tuple[Process, str]]:
    env = {**os.environ, **{env_name(key): str(value) for key, value in settings.as_layer().items()}, **more}
    arguments = ("serve", "--port", "0", "--parts", "batches", "--log", "error")
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "lakebed", *arguments, env=env, stdout=PIPE)
    try:
        yield process, msgspec.json.decode(await next_line(process))["url"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run_agent(
    queue: Path, collectors: list[str], lines: list[str], *, token: str = "", until: Callable[[], bool] | None = None
) -> int:
    """Feeds an agent to the end of its input and waits until it has sent everything.

    With `until` it is one that will not: its input ends when that is so, and it has half a second to send the rest.
    """
    values = {
        "AGENT_ID": "agent-a",
        "QUEUE_DIR": str(queue),
        "COLLECTORS": msgspec.json.encode(collectors).decode(),
        "STDIN": "true",
        "BATCH_SAMPLES_MAX": "40",
        "BATCH_INTERVAL_S": "0.2" if until else "3600",  # else cut by size alone, however slowly lines come
        "HEDGE_AFTER_S": "0.5",
        "DRAIN_S": "0.5" if until else "120",
        "TOKEN": token,
    }
    env = {name: value for name, value in os.environ.items() if not name.startswith("LAKEBED_")}
    env |= {f"LAKEBED_AGENT_{name}": value for name, value in values.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lakebed", "agent", "run", env=env, stdin=PIPE, stderr=PIPE, cwd=queue.parent
    )
    if until:
        assert process.stdin is not None
        process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        async with asyncio.timeout(DEADLINE_S):
            while not until():
                await asyncio.sleep(0.02)
        lines = []
    await asyncio.wait_for(process.communicate("\n".join(lines).encode()), DEADLINE_S)
    return process.returncode or 0


def lines(start: int, end: int) -> list[str]:
    return [f'{{"metric":"m","value":{n}}}' for n in range(start, end)]

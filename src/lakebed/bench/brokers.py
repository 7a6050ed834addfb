"""Brokers as processes of their own, on the stand's bucket: what benches and load tests run against."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from lakebed.bench.harness import Stand
from lakebed.errors import Unavailable
from lakebed.settings import env_name
from lakebed.store.settings import StoreSettings

READY_S = 60.0
SERVE = ("lakebed", "serve", "--parts", "log", "--port", "0", "--log", "warning")


@asynccontextmanager
async def process(
    stand: Stand,
    arguments: Sequence[str],
    settings: Mapping[str, str],
    *,
    started: Callable[[int], None] = lambda _: None,
    log: Path | None = None,
) -> AsyncIterator[str]:
    """Runs `python -m <arguments>` on the stand's bucket until the block ends; gives the address it says on stdout.

    What it says on stderr goes into the file `log`, where one is named.
    """
    said_to = log.open("wb") if log is not None else None
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *arguments,
        env={**os.environ, **environment(stand), **_named(settings)},
        stdout=asyncio.subprocess.PIPE,
        stderr=said_to,
    )
    if said_to is not None:
        said_to.close()
    started(child.pid)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(READY_S):
            said = await child.stdout.readline()
        if not said:
            raise Unavailable(f"{arguments[0]} did not start")
        yield msgspec.json.decode(said)["url"]
    finally:
        if child.returncode is None:
            child.terminate()
            await child.wait()


def environment(stand: Stand) -> dict[str, str]:
    """The stand's bucket, for a process of its own."""
    store = stand.settings.of(StoreSettings)
    return _named(
        {
            "store.url": store.url,
            "store.prefix": store.prefix,
            "store.endpoint": store.endpoint,
            "store.region": store.region,
            "store.access_key_id": store.access_key_id.reveal(),
            "store.secret_access_key": store.secret_access_key.reveal(),
        }
    )


def _named(settings: Mapping[str, str]) -> dict[str, str]:
    return {env_name(key): value for key, value in settings.items() if value}

"""Brokers as processes on one bucket, for tests that kill them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from httpx2 import AsyncClient, HTTPError

from lakebed.core.clock import SystemClock
from lakebed.core.ids import Ids
from lakebed.core.settings import env_name
from lakebed.embedded.child import Child
from lakebed.embedded.ports import HOST, HeldPorts
from lakebed.store.settings import StoreSettings
from support import oxia_server

DEADLINE_S = 250.0


METAS = ("sqlite", pytest.param("bucket", marks=pytest.mark.full), *(["oxia"] if oxia_server.ADDRESS else []))


def settings_of(store: StoreSettings, folder: Path, meta: str = "sqlite") -> dict[str, str]:
    return {
        "meta.backend": meta,
        "meta.address": oxia_server.ADDRESS,
        "store.url": store.url,
        "store.prefix": store.prefix,
        "store.endpoint": store.endpoint,
        "store.access_key_id": store.access_key_id.reveal(),
        "store.secret_access_key": store.secret_access_key.reveal(),
        "meta.path": str(folder / "meta.sqlite"),
        "log.compact_every_s": "0.3",
        "log.compact_min_entries": "4",
        "log.claim_s": "2.5",  # Oxia has no session of less than 2 s
        "log.vacuum_every_s": "1.0",
        "log.vacuum_horizon_s": "2.0",
        "log.batch_max_delay_ms": "5",
    }


class Crew:
    """Processes of one log, each of which can be killed and started again under its name."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self.folder, self.settings = folder, settings
        self.children: dict[str, Child] = {}
        self.urls: dict[str, str] = {}

    async def start(self, name: str, command: str, port: int, *more: str) -> None:
        child = Child(name, self.folder / f"{name}.log", clock=SystemClock())
        env = {**os.environ, **{env_name(key): value for key, value in self.settings.items() if value}}
        arguments = ["lakebed", command, "--parts", "log", "--port", str(port), "--log", "warning", *more]
        child.start([sys.executable, "-m", *arguments], env=env)
        self.children[name] = child
        self.urls[name] = f"http://{HOST}:{port}"

    async def ready(self, name: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        async with AsyncClient(timeout=2.0) as client:
            while time.monotonic() < deadline and self.children[name].running():
                try:
                    if (await client.get(f"{self.urls[name]}/healthz")).status_code == 200:
                        return
                except HTTPError:
                    pass
                await asyncio.sleep(0.1)
        raise AssertionError(self.children[name].tail())


@asynccontextmanager
async def crew_of(folder: Path, settings: dict[str, str]) -> AsyncIterator[tuple[Crew, list[int]]]:
    supervised = Crew(folder, settings)
    async with AsyncExitStack() as stack:
        held = stack.enter_context(HeldPorts(Ids()))
        try:
            yield supervised, [held.take() for _ in range(4)]
        finally:
            for child in supervised.children.values():
                await child.stop(grace_s=0.0)

"""A gateway as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lakebed.core.settings import env_name
from lakebed.store.settings import StoreSettings

HERE = Path(__file__).parent


DEADLINE_S = 100.0


MEMORY = {"LAKEBED_STORE_URL": "memory:"}


class Running:
    """One process: its address, its logs, its end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.errors = b""
        self.said = b""
        self.url = ""
        self._reader = asyncio.create_task(self._read())

    async def ready(self) -> Running:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S)
        self.said += line
        assert line, (await self.ended(), self.errors.decode())
        self.url = json.loads(line)["url"]
        return self

    async def logged(self, text: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while text.encode() not in self.errors:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{text!r} was not logged:\n{self.errors.decode()[-3000:]}") from None

    async def ended(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), DEADLINE_S)
        await self._reader
        return code

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.url.removeprefix("http://").split(":")
        return await asyncio.open_connection(host, int(port))

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self.ask("GET", path, headers=headers)

    async def ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        async with httpx2.AsyncClient(base_url=self.url, timeout=DEADLINE_S) as client:
            return await client.request(method, path, **options)

    async def _read(self) -> None:
        assert self.process.stderr is not None
        while chunk := await self.process.stderr.read(65536):
            self.errors += chunk


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts `lakebed <command>` with the probe part; ends whatever a test leaves."""
    started: list[Running] = []

    async def begin(*arguments: str, env: dict[str, str] = MEMORY, probe: bool = True) -> Running:
        program = [str(HERE / "probe_part.py")] if probe else ["-m", "lakebed"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LAKEBED_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *program, *arguments,
            env={**clean, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), **env},
            cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        started.append(Running(process))
        return started[-1]

    yield begin
    for running in started:
        if running.process.returncode is None:
            running.process.kill()
        await running.ended()


def bucket_env(settings: StoreSettings) -> dict[str, str]:
    return {env_name(key): str(value) for key, value in settings.as_layer().items()}


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One response by hand, up to the end of the connection or of its body."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await asyncio.wait_for(reader.readexactly(int(headers.get("content-length", "0"))), DEADLINE_S)
    return int(status.split()[1]), headers, body

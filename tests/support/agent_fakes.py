"""Worlds for the agent's tests: frames, a disk that loses power, collectors that answer by script."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from lakebed.agent.disk_queue import DiskQueue, QueueLimits
from lakebed.agent.files import Files
from lakebed.agent.model import Frame, WhenFull
from lakebed.agent.verdict import CollectorResponse
from lakebed.batches.model import BatchIdentity
from lakebed.core.errors import LakebedError

AGENT = "agent-a"
T = TypeVar("T")


async def inline(call: Callable[[], T], /) -> T:
    """Makes a call of the disk at once, in the event loop."""
    return call()


def frame(boot_id: str, start: int, end: int, *, salt: str = "", size: int = 0) -> Frame:
    data = f"{boot_id}:{start}-{end}:{salt};".encode().ljust(size, b"x")
    return Frame(BatchIdentity(AGENT, boot_id, start, end), data, hashlib.sha256(data).hexdigest())


def open_spool(
    folder: Path,
    boot_id: str = "boot-1",
    *,
    bytes_max: int = 1 << 30,
    batches_max: int = 1000,
    when_full: WhenFull = "block",
    files: Files | None = None,
) -> DiskQueue:
    limits = QueueLimits(bytes_max, batches_max, when_full)
    return DiskQueue.open(folder, agent_id=AGENT, boot_id=boot_id, limits=limits, now_ms=lambda: 7, files=files)


class PowerLoss(Exception):
    pass


class FailingPower(Files):
    """A real folder whose power fails at one step. What was not synced to its folder is then lost, or is not.

    Every call is a step. `cut` is how many bytes of a write reach the disk when the power fails inside it.
    """

    def __init__(self, fail_at: int, *, cut: int = 0) -> None:
        super().__init__()
        self.steps = 0
        self.written: list[tuple[int, str]] = []  # the step and name of each whole file written
        self._fail_at, self._cut = fail_at, cut
        self._unsynced: list[tuple[Path, Callable[[], None]]] = []

    def write(self, path: Path, data: bytes) -> None:
        before = path.read_bytes() if path.exists() else None
        if self._step():
            path.write_bytes(data[: self._cut])
            self._unsynced.append((path.parent, lambda: _restore(path, before)))
            raise PowerLoss
        path.write_bytes(data)
        self.written.append((self.steps, path.name))
        self._unsynced.append((path.parent, lambda: _restore(path, before)))

    def append(self, path: Path, data: bytes) -> None:
        before = path.read_bytes() if path.exists() else b""
        if self._step():
            path.write_bytes(before + data[: self._cut])
            raise PowerLoss
        path.write_bytes(before + data)

    def rename(self, source: Path, target: Path) -> None:
        self._fail()
        over = target.read_bytes() if target.exists() else None
        super().rename(source, target)

        def back() -> None:
            if target.exists():
                source.parent.mkdir(exist_ok=True)
                target.rename(source)
            _restore(target, over)

        self._unsynced.append((target.parent, back))

    def unlink(self, path: Path) -> None:
        self._fail()
        before = path.read_bytes() if path.exists() else None
        super().unlink(path)
        if before is not None:
            self._unsynced.append((path.parent, lambda: _restore(path, before)))

    def make_folder(self, path: Path) -> None:
        self._fail()
        path.mkdir(exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        self._fail()
        super().remove_folder(path)

    def sync_folder(self, path: Path) -> None:
        self._fail()
        self.fsyncs += 1
        self._unsynced = [(folder, undo) for folder, undo in self._unsynced if folder != path]

    def forget(self, keep: Callable[[], bool] = lambda: False) -> None:
        """After the loss: undoes, newest first, what was never synced, but for what `keep` keeps."""
        for _, undo in reversed(self._unsynced):
            if not keep():
                undo()

    def _fail(self) -> None:
        if self._step():
            raise PowerLoss

    def _step(self) -> bool:
        self.steps += 1
        return self.steps == self._fail_at


def _restore(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


Reply = CollectorResponse | LakebedError | Callable[[], Awaitable[CollectorResponse]]


def accepted(*, duplicate: bool = False) -> CollectorResponse:
    return CollectorResponse(200, {}, msgspec.json.encode({"duplicate": duplicate}))


def problem(status: int, code: str = "", headers: dict[str, str] | None = None, **facts: str) -> CollectorResponse:
    return CollectorResponse(
        status,
        headers or {},
        msgspec.json.encode({"type": f"urn:lakebed:problem:{code}", "code": code, "message": code, **facts}),
    )


class ScriptedCollectors:
    """A transport whose answers are written down: per collector, in order, the last one for ever.

    `arrived` lists what was sent, as (url, frame bytes); `accepted` holds each identity's first bytes.
    """

    def __init__(self, **scripts: Sequence[Reply]) -> None:
        self._scripts = {f"http://{name}": list(script) for name, script in scripts.items()}
        self.arrived: list[tuple[str, bytes]] = []
        self.by_batch: dict[bytes, Reply] = {}
        self.under_way = 0
        self.most_under_way = 0

    async def post(self, url: str, frame: bytes) -> CollectorResponse:
        self.arrived.append((url, frame))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0)
            script = self._scripts[url]
            reply = self.by_batch.get(frame) or (script.pop(0) if len(script) > 1 else script[0])
            if isinstance(reply, LakebedError):
                raise reply
            return reply if isinstance(reply, CollectorResponse) else await reply()
        finally:
            self.under_way -= 1

    @property
    def sent(self) -> list[str]:
        return [data.decode().partition(";")[0].removesuffix(":") for _, data in self.arrived]

"""`lakebed bench batches`: uploads through a real gateway beside the bare cost of its two conditional creates.

Accepting costs a blob create and a manifest create; everything else is ours. At equal concurrency the median latency of
an upload is at most 1.3 times that of the two bare creates. CPU is that of the whole gateway process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import obstore

from lakebed.batches import acceptance, paths
from lakebed.batches.model import write_record
from lakebed.bench.harness import Check, Stand, at_most, told
from lakebed.errors import Unavailable
from lakebed.frame.codec import columns_of, decode, encode
from lakebed.frame.model import Compression, Identity, Kind, Sample
from lakebed.ids import Ids
from lakebed.settings import env_name
from lakebed.store.obstore_client import open_bucket
from lakebed.store.settings import StoreSettings

T = TypeVar("T")

LANES = (1, 4)
LATENCY_BAR = 1.3  # upload ÷ two bare creates, medians
CPU_BAR_MS = 1.5  # per accepted batch of 64 KiB
READY_S = 30.0


class Frames:
    """Frames of about 64 KiB as an agent makes them, each with an identity of its own."""

    def __init__(self, ids: Ids) -> None:
        self._boot, self._next = ids.uuid(), 0
        samples = [
            Sample(
                f"host_metric_{n % 60}",
                1_760_000_000_000_000_000 + n * 997_003,
                ids.uniform(0.0, 100.0),
                Kind.GAUGE,
                {"cpu": str(n % 8), "host": f"host-{n % 4}"},
            )
            for n in range(4700)
        ]
        self._columns = columns_of(samples)

    def next(self) -> bytes:
        count = self._columns.samples
        start, self._next = self._next, self._next + count
        identity = Identity("bench-agent", self._boot, start, start + count - 1)
        return encode(identity, self._columns, Compression.ZSTD)


async def bench(stand: Stand) -> Sequence[Check]:
    context = stand.context()
    frames = Frames(context.ids)
    bare = open_bucket(stand.settings.of(StoreSettings))
    rounds, each = (12, 24) if stand.quick else (40, 40)  # short rounds: the machine's moods hit both alike
    size = len(frames.next())
    stand.tell(f"frames of {size} bytes with {decode(frames.next()).columns.samples} samples, {each} a round")
    checks: list[Check] = []
    async with gateway(stand) as served:
        await _run(1, [frames.next() for _ in range(20)], served.upload)
        for lanes in LANES:
            ours: list[list[float]] = []
            base: list[list[float]] = []
            rates: list[float] = []
            for number in range(rounds):
                for ourselves in (True, False) if number % 2 == 0 else (False, True):
                    batch = [frames.next() for _ in range(each)]
                    if ourselves:
                        began = time.perf_counter()
                        ours.append(await _run(lanes, batch, served.upload))
                        rates.append(each / (time.perf_counter() - began))
                        await served.settled()
                    else:
                        pairs = [_pair(frame, served.prefix) for frame in batch]
                        base.append(await _run(lanes, pairs, lambda pair: _two_creates(bare, pair)))
            checks += _latencies(lanes, ours, base, rates)
        checks += await _cpu(served, bare, frames, stand.rounds, each * 4)
    return checks


def _latencies(lanes: int, ours: list[list[float]], base: list[list[float]], rates: list[float]) -> list[Check]:
    def quantile(rounds: list[list[float]], share: float) -> list[float]:
        return [sorted(times)[min(len(times) - 1, int(len(times) * share))] * 1e3 for times in rounds]

    at = f"at concurrency {lanes}"
    return [
        told(f"accepted batches {at}", rates, "1/s"),
        told(f"upload p50 {at}", quantile(ours, 0.5), "ms"),
        told(f"two bare creates p50 {at}", quantile(base, 0.5), "ms"),
        told(f"upload p99 {at}", quantile(ours, 0.99), "ms"),
        told(f"two bare creates p99 {at}", quantile(base, 0.99), "ms"),
        at_most(f"upload ÷ two bare creates, p50 {at}", quantile(ours, 0.5), quantile(base, 0.5), LATENCY_BAR),
    ]


async def _cpu(served: Served, bare: Any, frames: Frames, rounds: int, each: int) -> list[Check]:
    """CPU of the gateway per batch: until the answers, and until every derived write is done as well."""
    accepting, whole, rates, base = [], [], [], []
    for _ in range(rounds):
        batch = [frames.next() for _ in range(each)]
        before, began = served.cpu_s(), time.perf_counter()
        await _run(4, batch, served.upload)
        accepting.append((served.cpu_s() - before) / each * 1e3)
        await served.settled()
        whole.append((served.cpu_s() - before) / each * 1e3)
        rates.append(each / (time.perf_counter() - began))
        pairs = [_pair(frames.next(), served.prefix) for _ in range(each)]
        before = time.process_time()
        await _run(4, pairs, lambda pair: _two_creates(bare, pair))
        base.append((time.process_time() - before) / each * 1e3)
    middle = median(accepting)
    spread = round(max(accepting) - min(accepting), 3)
    return [
        told("accepted batches, with every derived write, at concurrency 4", rates, "1/s"),
        Check("CPU per accepted batch of 64 KiB", round(middle, 3), "ms", CPU_BAR_MS, middle < CPU_BAR_MS, spread),
        told("CPU per accepted batch, with its derived writes", whole, "ms"),
        told("CPU of two bare creates, in the bench's own process", base, "ms"),
    ]


async def _run(lanes: int, items: Sequence[T], send: Callable[[T], Awaitable[Any]]) -> list[float]:
    waiting = iter(items)
    times: list[float] = []

    async def lane() -> None:
        for item in waiting:
            began = time.perf_counter()
            await send(item)
            times.append(time.perf_counter() - began)

    await asyncio.gather(*(lane() for _ in range(lanes)))
    return times


class Pair(NamedTuple):
    """The two objects of one acceptance, ready to be created, at keys as deep as the real ones."""

    blob_key: str
    frame: bytes
    manifest_key: str
    manifest: bytes


def _pair(frame: bytes, prefix: str) -> Pair:
    submitted = acceptance.submission(frame, decode(frame))
    made = acceptance.manifest(submitted, at_ns=1, collector_id="bare" * 8, attempt_id="0" * 16)
    root = f"{prefix}-bare"
    key = f"{root}/{paths.accepted_key(made.identity)}"
    return Pair(f"{root}/{submitted.blob_key}", frame, key, write_record(made))


async def _two_creates(bare: Any, pair: Pair) -> None:
    await obstore.put_async(bare, pair.blob_key, pair.frame, mode="create", use_multipart=False)
    await obstore.put_async(bare, pair.manifest_key, pair.manifest, mode="create", use_multipart=False)


class Served:
    """One gateway process and connections to it. A bare client, so that its own cost is not measured as ours."""

    def __init__(self, pid: int, url: str, prefix: str) -> None:
        self._pid, self.prefix = pid, prefix
        self._host, self._port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def upload(self, frame: bytes) -> None:
        status, body = await self.ask(b"POST", b"/v1/batches", frame)
        if status != 200 or msgspec.json.decode(body)["duplicate"]:
            raise Unavailable(f"an upload was answered {status}: {body[:200]!r}")

    async def settled(self) -> None:
        """Waits until the gateway has no derived write left."""
        while True:
            _, body = await self.ask(b"GET", b"/metrics/prometheus")
            lines = [line for line in body.decode().splitlines() if "aftermath_waiting " in line]
            if lines and float(lines[-1].split()[-1]) == 0:
                return
            await asyncio.sleep(0.05)

    async def ask(self, method: bytes, path: bytes, body: bytes = b"") -> tuple[int, bytes]:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        writer.write(b"%s %s HTTP/1.1\r\nhost: bench\r\ncontent-length: %d\r\n\r\n%s" % (method, path, len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        answer = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        self._idle.append((reader, writer))
        return int(head.split(b" ", 2)[1]), answer

    def cpu_s(self) -> float:
        """CPU time of the whole process, from its threads' schedulers: ticks would be too coarse."""
        threads = Path(f"/proc/{self._pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


@asynccontextmanager
async def gateway(stand: Stand) -> AsyncIterator[Served]:
    """A gateway with this part alone, on a fresh folder of the bench's bucket, in a process of its own."""
    prefix = f"bench-batches-{Ids().token()}"
    layer = stand.settings.of(StoreSettings).as_layer() | {"store.prefix": prefix}
    env = {**os.environ, **{env_name(key): str(value) for key, value in layer.items()}}
    command = [sys.executable, "-m", "lakebed", "serve", "--port", "0", "--parts", "batches", "--log", "error"]
    child = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    try:
        ready = msgspec.json.decode(await asyncio.wait_for(child.stdout.readline(), READY_S))
        served = Served(child.pid, ready["url"], prefix)
        yield served
        served.close()
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()

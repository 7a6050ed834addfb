"""`lakebed bench batches`: uploads through a real gateway beside the bare cost of its two conditional creates.

Accepting costs a blob create and a manifest create; everything else is ours. The median latency of an upload is at most
1.15 times that of the two bare creates one at a time, 1.3 times four at once, and 1.3 times without the fast paths. CPU
is that of the whole gateway process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
import obstore

from lakebed.batches import acceptance, paths
from lakebed.batches.codec.frame import columns_of, decode, encode
from lakebed.batches.index import write_rows
from lakebed.batches.model import (
    ACCEPTED_SCHEMA,
    AcceptedBatch,
    BatchIdentity,
    Compression,
    Kind,
    Sample,
    SampleColumns,
    write_record,
)
from lakebed.bench.harness import BenchEnvironment, Check, at_least, at_most, measured
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.core.feed import ahead
from lakebed.core.ids import Ids
from lakebed.core.settings import env_name
from lakebed.store.obstore_client import open_bucket
from lakebed.store.settings import StoreSettings

T = TypeVar("T")

LATENCY_BARS = {1: 1.15, 4: 1.3}  # by concurrency: upload ÷ two bare creates, medians
PLAIN_BAR = 1.3  # the same, one at a time, without the fast paths
PLAIN = {"gateway.fast_path": False, "store.fast_path": False}
CPU_BAR_MS = 1.5  # per accepted batch of 64 KiB
READY_S = 30.0
SUSTAINED_S = 3.0  # of one round: longer than an interval between two flushes
SUSTAINED_BAR = 0.9


def host_samples(ids: Ids, count: int) -> list[Sample]:
    """Samples as an agent reads them from hosts."""
    return [
        Sample(
            f"host_metric_{n % 60}",
            1_760_000_000_000_000_000 + n * 997_003,
            ids.uniform(0.0, 100.0),
            Kind.GAUGE,
            {"cpu": str(n % 8), "host": f"host-{n % 4}"},
        )
        for n in range(count)
    ]


class Frames:
    """Frames of about 64 KiB as an agent makes them, each with an identity of its own."""

    def __init__(self, ids: Ids) -> None:
        self._boot, self._next = ids.uuid(), 0
        self._columns = columns_of(host_samples(ids, 4700))

    def next(self) -> bytes:
        count = self._columns.samples
        start, self._next = self._next, self._next + count
        identity = BatchIdentity("bench-agent", self._boot, start, start + count - 1)
        return encode(identity, self._columns, Compression.ZSTD)


async def bench(environment: BenchEnvironment) -> Sequence[Check]:
    context = environment.context()
    frames = Frames(context.ids)
    bare = open_bucket(environment.settings.of(StoreSettings))
    rounds, each = (
        (12, 24) if environment.quick else (40, 40)
    )  # short rounds: the load of the machine affects both alike
    size = len(frames.next())
    environment.report(f"frames of {size} bytes with {decode(frames.next()).columns.samples} samples, {each} a round")
    checks: list[Check] = []
    async with gateway(environment) as served:
        await _run(1, [frames.next() for _ in range(20)], served.upload)
        for lanes, bar in LATENCY_BARS.items():
            checks += await _compared(served, bare, frames, lanes, (rounds, each), bar)
        checks += await _cpu(served, bare, frames, environment.rounds, each * 4)
        checks += await _sustained(environment, served, frames, 4 if environment.quick else 10)
    async with gateway(environment, PLAIN) as plain:
        await _run(1, [frames.next() for _ in range(20)], plain.upload)
        compared = await _compared(plain, bare, frames, 1, (rounds, each), PLAIN_BAR, ", without the fast paths")
    return [*checks, *compared]


async def _compared(
    served: BenchGateway, bare: Any, frames: Frames, lanes: int, sizes: tuple[int, int], bar: float, how: str = ""
) -> list[Check]:
    """Uploads and their two bare creates in turns: latencies, rates, and the ratio with its bar."""
    ours: list[list[float]] = []
    base: list[list[float]] = []
    rates: list[float] = []
    rounds, each = sizes
    for number in range(rounds):
        for ourselves in (True, False) if number % 2 == 0 else (False, True):
            batch = [frames.next() for _ in range(each)]
            if ourselves:
                began = time.perf_counter()
                ours.append(await _run(lanes, batch, served.upload))
                rates.append(each / (time.perf_counter() - began))
            else:
                pairs = [_pair(frame, served.prefix) for frame in batch]
                base.append(await _run(lanes, pairs, lambda pair: _two_creates(bare, pair)))
    return _latencies(f"at concurrency {lanes}{how}", ours, base, rates, bar)


async def _sustained(environment: BenchEnvironment, served: BenchGateway, frames: Frames, rounds: int) -> list[Check]:
    """Rates beside a gateway that drops its index rows: what the derived writes take from acceptance.

    A round takes longer than a flush interval, so that each includes one.
    """
    derived: list[float] = []
    alone: list[float] = []
    async with gateway(environment, {"batches.aftermath_max": 1}) as bare:
        for number in range(rounds):
            for one, rates in ((served, derived), (bare, alone))[:: 1 if number % 2 == 0 else -1]:
                began, sent = time.perf_counter(), 0
                while time.perf_counter() - began < SUSTAINED_S:
                    some = [frames.next() for _ in range(32)]
                    await _run(4, some, one.upload)
                    sent += len(some)
                rates.append(sent / (time.perf_counter() - began))
    return [
        measured("accepted batches a second, sustained, with derived writes", derived, "1/s"),
        measured("accepted batches a second, sustained, alone", alone, "1/s"),
        at_least("sustained with derived writes ÷ alone", derived, alone, SUSTAINED_BAR),
    ]


def _latencies(
    at: str, ours: list[list[float]], base: list[list[float]], rates: list[float], bar: float
) -> list[Check]:
    def quantile(rounds: list[list[float]], share: float) -> list[float]:
        return [sorted(times)[min(len(times) - 1, int(len(times) * share))] * 1e3 for times in rounds]

    return [
        measured(f"accepted batches {at}", rates, "1/s"),
        measured(f"upload p50 {at}", quantile(ours, 0.5), "ms"),
        measured(f"two bare creates p50 {at}", quantile(base, 0.5), "ms"),
        measured(f"upload p99 {at}", quantile(ours, 0.99), "ms"),
        measured(f"two bare creates p99 {at}", quantile(base, 0.99), "ms"),
        at_most(f"upload ÷ two bare creates, p50 {at}", quantile(ours, 0.5), quantile(base, 0.5), bar),
    ]


async def _cpu(served: BenchGateway, bare: Any, frames: Frames, rounds: int, each: int) -> list[Check]:
    """CPU of the gateway per batch: until the answers, and until every derived write is done as well."""
    accepting, whole, base = [], [], []
    for _ in range(rounds):
        batch = [frames.next() for _ in range(each)]
        before = served.cpu_s()
        await _run(4, batch, served.upload)
        accepting.append((served.cpu_s() - before) / each * 1e3)
        await served.settled()
        whole.append((served.cpu_s() - before) / each * 1e3)
        pairs = [_pair(frames.next(), served.prefix) for _ in range(each)]
        before = time.process_time()
        await _run(4, pairs, lambda pair: _two_creates(bare, pair))
        base.append((time.process_time() - before) / each * 1e3)
    middle = median(accepting)
    spread = round(max(accepting) - min(accepting), 3)
    return [
        Check("CPU per accepted batch of 64 KiB", round(middle, 3), "ms", CPU_BAR_MS, middle < CPU_BAR_MS, spread),
        measured("CPU per accepted batch, with its derived writes", whole, "ms"),
        measured("CPU of two bare creates, in the bench's own process", base, "ms"),
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


class BareObjects(NamedTuple):
    """The two objects of one acceptance, ready to be created, at keys as deep as the real ones."""

    blob_key: str
    frame: bytes
    manifest_key: str
    manifest: bytes


def _pair(frame: bytes, prefix: str) -> BareObjects:
    submitted = acceptance.submission(frame, decode(frame))
    made = acceptance.manifest(submitted, at_ns=1, collector_id="bare" * 8, attempt_id="0" * 16)
    root = f"{prefix}-bare"
    key = f"{root}/{paths.accepted_key(made.identity)}"
    return BareObjects(f"{root}/{submitted.blob_key}", frame, key, write_record(made))


async def _two_creates(bare: Any, pair: BareObjects) -> None:
    await obstore.put_async(bare, pair.blob_key, pair.frame, mode="create", use_multipart=False)
    await obstore.put_async(bare, pair.manifest_key, pair.manifest, mode="create", use_multipart=False)


class BenchGateway:
    """One gateway process and connections to it. A bare client, so that its own cost is not measured as ours."""

    def __init__(self, pid: int, url: str, prefix: str) -> None:
        self._pid, self.prefix = pid, prefix
        self._host, self._port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def upload(self, frame: bytes) -> None:
        status, body = await self.request(b"POST", b"/v1/batches", frame)
        if status != 200 or msgspec.json.decode(body)["duplicate"]:
            raise Unavailable(f"the upload returned {status}: {body[:200]!r}")

    async def settled(self) -> None:
        """Waits until the gateway has no derived write left."""
        while True:
            _, body = await self.request(b"GET", b"/metrics/prometheus")
            lines = [line for line in body.decode().splitlines() if "aftermath_waiting " in line]
            if lines and float(lines[-1].split()[-1]) == 0:
                return
            await asyncio.sleep(0.05)

    async def request(self, method: bytes, path: bytes, body: bytes = b"") -> tuple[int, bytes]:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        start = b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (method, path, self._host.encode())
        writer.write(start + b"content-length: %d\r\n\r\n%s" % (len(body), body))
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
async def gateway(
    environment: BenchEnvironment, more: Mapping[str, object] | None = None
) -> AsyncIterator[BenchGateway]:
    """A gateway with this part alone, on a fresh folder of the bench's bucket, in a process of its own."""
    prefix = f"bench-batches-{Ids().token()}"
    layer = environment.settings.of(StoreSettings).as_layer() | {"store.prefix": prefix} | dict(more or {})
    env = {**os.environ, **{env_name(key): str(value) for key, value in layer.items()}}
    command = [sys.executable, "-m", "lakebed", "serve", "--port", "0", "--parts", "batches", "--log", "error"]
    child = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    try:
        ready = msgspec.json.decode(await asyncio.wait_for(child.stdout.readline(), READY_S))
        served = BenchGateway(child.pid, ready["url"], prefix)
        yield served
        served.close()
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()


SAMPLES_PER_BATCH = 10_000
SERIES = 200
AGENTS = 8
START_NS = 1_790_000_000_000_000_000
STEP_NS = 1_000_000  # between the acceptance of two batches


class BenchFleet(msgspec.Struct, frozen=True):
    """Batches of so many samples in all. Everything that the context's store has, or gets, is this fleet's."""

    context: Context
    samples: int

    @property
    def until_ns(self) -> int:
        """Every batch was accepted before."""
        return START_NS + self.samples // SAMPLES_PER_BATCH * STEP_NS + 1


async def fleet(environment: BenchEnvironment, samples: int) -> BenchFleet:
    """Accepts the batches of a new fleet."""
    made = BenchFleet(environment.apart(), samples)
    async for _ in ahead(range(samples // SAMPLES_PER_BATCH), lambda number: _accept(made.context, number)):
        pass
    return made


async def _accept(context: Context, number: int) -> None:
    first = number * SAMPLES_PER_BATCH
    identity = BatchIdentity(f"agent-{number % AGENTS}", "boot", first, first + SAMPLES_PER_BATCH - 1)
    frame = encode(identity, _columns(first))
    sha256 = hashlib.sha256(frame).hexdigest()
    accepted = AcceptedBatch(
        ACCEPTED_SCHEMA,
        identity.agent_id,
        identity.boot_id,
        identity.seq_start,
        identity.seq_end,
        sha256,
        len(frame),
        paths.blob_key(sha256),
        START_NS + number * STEP_NS,
        "bench",
        1,
        1,
    )
    store = context.store
    await store.create(accepted.raw_blob_key, frame)
    await store.create(paths.accepted_key(identity), write_record(accepted))
    await write_rows(store, [acceptance.entry_of(accepted, acceptance.span_of(decode(frame)))], writer="bench")


def _columns(first: int) -> SampleColumns:
    """Samples of two hundred series, as columns: what a host's exporter gives, each series with two labels."""
    seq = np.arange(first, first + SAMPLES_PER_BATCH)
    metrics = [f"metric_{n:03d}_total" for n in range(SERIES // 4)]
    hosts = [f"host-{n}" for n in range(4)]
    strings = tuple(sorted([*metrics, *hosts, "host", "zone", "eu-1"]))
    at = {text: n for n, text in enumerate(strings)}
    series = range(SERIES)
    values = [(at[hosts[n % 4]], at["eu-1"]) for n in series]
    return SampleColumns(
        times_ns=(START_NS + seq * 1_000_003).astype("<i8"),
        values=np.round(np.sin(seq / 50.0) * 100 + seq % 7, 3).astype("<f8"),
        kinds=np.full(SAMPLES_PER_BATCH, 2, "u1"),
        series=(seq % SERIES).astype("<u4"),
        series_metric=np.array([at[metrics[n // 4]] for n in series], "<u4"),
        label_offsets=np.arange(0, 2 * SERIES + 1, 2).astype("<u4"),
        label_names=np.array([at["host"], at["zone"]] * SERIES, "<u4"),
        label_values=np.array(values, "<u4").reshape(-1),
        strings=strings,
    )

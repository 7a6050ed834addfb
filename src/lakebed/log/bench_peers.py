"""Redis Streams and NATS JetStream beside the log in `lakebed bench log`, where their servers are installed.

Each acknowledges after an fsync. The load is the same for all: lanes that send 100 records of 1 KiB, wait until all are
acknowledged, and send the next. Records are sent in one piece and answers are counted by their lines, so that this
process costs a peer as little as it costs us.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from lakebed.bench.harness import BenchEnvironment, Check, Contender, at_least, measured, rounds_of
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Unavailable
from lakebed.embedded.ports import HOST

LANES, RECORDS, RECORD_BYTES = 8, 100, 1024
REDIS_BAR, NATS_BAR = 0.7, 10.0
READY_S, ANSWER_S = 30.0, 60.0
STREAM = b'{"name":"bench","subjects":["bench.*"],"storage":"file","num_replicas":1}'
INBOX = b"_INBOX.bench."


class Peer(NamedTuple):
    """A server: how it is started, what a lane says first and to how many lines of answer, and its requests.

    `lines` is how many lines answer a request of all records.
    """

    name: str
    binary: str
    package: str
    bar: float
    arguments: Callable[[int, Path], Sequence[str]]
    hello: Callable[[int], bytes]
    hello_lines: int
    request: Callable[[int], bytes]
    lines: int


def _redis(port: int, folder: Path) -> Sequence[str]:
    options = {"port": str(port), "bind": HOST, "appendonly": "yes", "appendfsync": "always", "save": ""}
    return [word for name, value in {**options, "dir": str(folder)}.items() for word in (f"--{name}", value)]


def _redis_request(lane: int) -> bytes:
    key = b"bench%d" % lane
    one = b"*5\r\n$4\r\nXADD\r\n$%d\r\n%s\r\n$1\r\n*\r\n$1\r\nv\r\n$%d\r\n%s\r\n"
    return one % (len(key), key, RECORD_BYTES, b"x" * RECORD_BYTES) * RECORDS


def _nats(port: int, folder: Path) -> Sequence[str]:
    settings = folder / "nats.conf"
    settings.write_text(f'jetstream {{ store_dir: "{folder / "nats"}", sync_interval: always }}\n')
    return ["-a", HOST, "-p", str(port), "-c", str(settings)]


def _nats_hello(lane: int) -> bytes:
    """Every lane has answers of its own, and creates the stream: the same one, so that is no error."""
    named = b'CONNECT {"verbose":false,"headers":false}\r\nSUB %s%d 1\r\n' % (INBOX, lane)
    return named + b"PUB $JS.API.STREAM.CREATE.bench %s%d %d\r\n%s\r\n" % (INBOX, lane, len(STREAM), STREAM)


def _nats_request(lane: int) -> bytes:
    one = b"PUB bench.%d %s%d %d\r\n%s\r\n"
    return one % (lane, INBOX, lane, RECORD_BYTES, b"x" * RECORD_BYTES) * RECORDS


PEERS = (
    Peer(
        "Redis Streams, fsync always",
        "redis-server",
        "the package redis-server",
        REDIS_BAR,
        _redis,
        lambda lane: b"*1\r\n$4\r\nPING\r\n",
        1,
        _redis_request,
        2 * RECORDS,  # the length of an id, and the id
    ),
    Peer(
        "NATS JetStream, syncing always",
        "nats-server",
        "the Go module github.com/nats-io/nats-server/v2",
        NATS_BAR,
        _nats,
        _nats_hello,
        3,  # the server's greeting, and the answer to the stream's creation with its head
        _nats_request,
        2 * RECORDS,  # the head of an acknowledgement, and the acknowledgement
    ),
)


class _Lane:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, data: bytes, lines: int) -> None:
        self._writer.write(data)
        async with asyncio.timeout(ANSWER_S):
            while lines > 0:
                some = await self._reader.read(1 << 16)
                if not some or b"-ERR" in some or b'"error"' in some:
                    raise Unavailable(f"a peer answered {some[:200]!r}")
                lines -= some.count(b"\n")

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def _running(peer: Peer, binary: str, port: int, folder: Path) -> AsyncIterator[list[_Lane]]:
    """The server as a process, and a connection for each lane, until the block ends.

    Raises Unavailable when it does not start, as an older version that does not have all of the options.
    """
    output = folder / f"{peer.binary}.log"
    with output.open("wb") as log:
        child = await asyncio.create_subprocess_exec(binary, *peer.arguments(port, folder), stdout=log, stderr=log)
    lanes: list[_Lane] = []
    clock = SystemClock()
    until_s = clock.monotonic_s() + READY_S
    try:
        async with asyncio.timeout(READY_S + ANSWER_S):
            while len(lanes) < LANES:
                if child.returncode is not None or clock.monotonic_s() > until_s:
                    said = output.read_text(errors="replace").strip().splitlines()
                    raise Unavailable(f"{peer.binary} did not start: {said[-1] if said else 'it printed nothing'}")
                try:
                    lane = _Lane(*await asyncio.open_connection(HOST, port))
                except OSError:
                    await clock.sleep(0.05)
                    continue
                await lane.ask(peer.hello(len(lanes)), peer.hello_lines)
                lanes.append(lane)
        yield lanes
    finally:
        for lane in lanes:
            lane.close()
        if child.returncode is None:
            child.terminate()
            await child.wait()


async def peer_checks(
    environment: BenchEnvironment, folder: Path, take_port: Callable[[], int], ours: Callable[[int], Contender]
) -> list[Check]:
    """`ours` gives the contender that appends as many requests, over as many lanes, and gives records a second."""
    requests = LANES * (20 if environment.quick else 60)
    found = {peer: binary for peer in PEERS if (binary := shutil.which(peer.binary)) is not None}
    for peer in PEERS:
        if peer not in found:
            environment.report(f"{peer.name} is not measured: {peer.binary} is not installed ({peer.package})")
    async with AsyncExitStack() as stack:
        contenders = {"ours": ours(requests)}
        for peer, binary in list(found.items()):
            try:
                lanes = await stack.enter_async_context(_running(peer, binary, take_port(), folder))
            except Unavailable as error:
                environment.report(f"{peer.name} is not measured: {error.message} ({peer.package})")
                del found[peer]
            else:
                contenders[peer.name] = _contender(peer, lanes, requests)
        environment.report("requests of 100 records of 1 KiB over 8 lanes: the log and its peers, in turn")
        await rounds_of(1, contenders)
        rates = await rounds_of(environment.rounds, contenders)
    name = "100 records of 1 KiB a request, 8 lanes"
    checks = [measured(f"{name}: {of}", some, "records/s") for of, some in rates.items()]
    return checks + [
        at_least(f"{name}: ours ÷ {peer.name}", rates["ours"], rates[peer.name], peer.bar) for peer in found
    ]


def _contender(peer: Peer, lanes: Sequence[_Lane], requests: int) -> Contender:
    async def work() -> float:
        clock = SystemClock()
        waiting = iter(range(requests))

        async def in_turn(number: int, lane: _Lane) -> None:
            data = peer.request(number)
            for _ in waiting:
                await lane.ask(data, peer.lines)

        began_s = clock.monotonic_s()
        await asyncio.gather(*(in_turn(number, lane) for number, lane in enumerate(lanes)))
        return requests * RECORDS / (clock.monotonic_s() - began_s)

    return work

"""Standard input as a source: JSON lines, one sample per line.

    {"metric": "temperature", "value": 21.5, "labels": {"room": "a"}, "kind": "gauge", "time_ms": 1760000000000}

`labels`, `kind` (gauge, counter, delta, untyped) and the time are optional; the time may be `time_ns` instead, and is
now when absent. Lines read but not yet on disk (at most `batch_interval_s` old) are lost with a kill -9: a pipe cannot
be read again. A writer that must know sets `stdin_acks` and repeats what was not acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Callable
from typing import BinaryIO, Literal, Protocol

import msgspec

from lakebed.agent.batcher import BadSampleReporter, Batcher, checked
from lakebed.batches.model import Kind, Sample
from lakebed.core.errors import Invalid
from lakebed.core.runtime import Runtime


class SampleLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metric: str
    value: float
    labels: dict[str, str] = {}
    kind: Literal["gauge", "counter", "delta", "untyped"] = "gauge"
    time_ms: int | None = None
    time_ns: int | None = None


_DECODER = msgspec.json.Decoder(SampleLine)
_KINDS = {"gauge": Kind.GAUGE, "counter": Kind.COUNTER, "delta": Kind.DELTA, "untyped": Kind.UNTYPED}


def sample_of(line: bytes, *, now_ns: int) -> Sample:
    try:
        decoded = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(str(error)) from error
    if decoded.time_ms is not None and decoded.time_ns is not None:
        raise Invalid("time_ms and time_ns are both given")
    time_ns = (
        decoded.time_ns
        if decoded.time_ns is not None
        else now_ns
        if decoded.time_ms is None
        else decoded.time_ms * 1_000_000
    )
    return checked(decoded.metric, time_ns, decoded.value, _KINDS[decoded.kind], decoded.labels)


CHUNK_BYTES = 64 * 1024
PENDING_ACKS_MAX = 10_000
LINES_AT_ONCE = 200  # put, and acknowledged, together


class StdinSource:
    """Reads to the end of input. `acks` gets one JSON line whenever more lines have become durable."""

    def __init__(
        self, runtime: Runtime, batcher: Batcher, *, line_bytes_max: int, acks: Callable[[bytes], None] | None = None
    ) -> None:
        clock, metrics = runtime.clock, runtime.metrics
        self._batcher, self._clock, self._acks = batcher, clock, acks
        self._line_bytes_max = line_bytes_max
        self._bad_samples = BadSampleReporter("stdin", metrics)
        self._number = 0
        self._tickets: asyncio.Queue[tuple[int, int]] = asyncio.Queue(PENDING_ACKS_MAX)
        self._input: StdinReader | None = None
        self._stopped = False

    async def run(self, stream: BinaryIO | None = None) -> None:
        """Returns when input has ended and everything of it is on disk."""
        self._input = await _connect(stream or sys.stdin.buffer)
        acker = asyncio.ensure_future(self._acknowledge()) if self._acks else None
        try:
            await self._read(self._input)
            self._batcher.flush_now()
            await self._batcher.durable(await self._batcher.put(()))
            if acker:
                await self._tickets.join()
        finally:
            if acker:
                acker.cancel()

    def stop(self) -> None:
        """Takes no more input; what was read goes to disk and `run` returns."""
        self._stopped = True
        if self._input is not None:
            self._input.stop()

    async def _read(self, reader: StdinReader) -> None:
        rest, skipping = b"", False
        while chunk := await reader.read():
            *lines, rest = (rest + chunk).split(b"\n")
            if skipping and lines:
                lines, skipping = lines[1:], False  # the end of a line that was too long
            await self._take(lines)
            if len(rest) > self._line_bytes_max:
                if not skipping:
                    await self._take([rest])  # reported once, as too long
                rest, skipping = b"", True
        if rest and not skipping and not self._stopped:  # after a stop the rest of this line was never read
            await self._take([rest])

    async def _take(self, lines: list[bytes]) -> None:
        for at in range(0, len(lines), LINES_AT_ONCE):
            await self._put(lines[at : at + LINES_AT_ONCE])

    async def _put(self, lines: list[bytes]) -> None:
        samples: list[Sample] = []
        bad: list[tuple[int, str]] = []
        now_ns = self._clock.now_ns()
        for line in lines:
            self._number += 1
            if not line.strip():
                continue
            try:
                if len(line) > self._line_bytes_max:
                    raise Invalid(f"a line is longer than {self._line_bytes_max} bytes")
                samples.append(sample_of(line, now_ns=now_ns))
            except Invalid as error:
                bad.append((self._number, error.message))
        self._bad_samples.report(bad)
        ticket = await self._batcher.put(samples)
        if self._acks:
            await self._tickets.put((ticket, self._number))

    async def _acknowledge(self) -> None:
        assert self._acks is not None
        while True:
            ticket, number = await self._tickets.get()
            await self._batcher.durable(ticket)
            # Those that became durable by the same fsync need one line together.
            taken = 1
            while not self._tickets.empty() and self._peek() <= self._batcher.settled:
                number, taken = self._tickets.get_nowait()[1], taken + 1
            self._acks(msgspec.json.encode({"durable_lines": number}) + b"\n")
            for _ in range(taken):
                self._tickets.task_done()

    def _peek(self) -> int:
        waiting: tuple[int, int] = self._tickets._queue[0]  # type: ignore[attr-defined]
        return waiting[0]


class StdinReader(Protocol):
    async def read(self) -> bytes:
        """Some bytes; none at the end."""

    def stop(self) -> None:
        """What was taken from the stream is still read, and then it ends."""


class _PipeInput(asyncio.Protocol):
    """A pipe, socket or terminal. Holds at most a chunk or two: a slow reader stops the writer."""

    def __init__(self) -> None:
        self._transport: asyncio.ReadTransport | None = None
        self._held = bytearray()
        self._ended = False
        self._changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.ReadTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        if self._transport is not None and len(self._held) >= CHUNK_BYTES:
            self._transport.pause_reading()
        self._changed.set()

    def eof_received(self) -> None:
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    async def read(self) -> bytes:
        while not self._held and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        data, self._held = bytes(self._held), bytearray()
        if self._transport is not None and not self._ended:
            self._transport.resume_reading()
        return data

    def stop(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._changed.set()


class _FileInput:
    """A regular file, or a device that no event loop can watch."""

    def __init__(self, stream: BinaryIO) -> None:
        self._fd = stream.fileno()
        self._ended = False

    async def read(self) -> bytes:
        return b"" if self._ended else await asyncio.to_thread(os.read, self._fd, CHUNK_BYTES)

    def stop(self) -> None:
        self._ended = True


async def _connect(stream: BinaryIO) -> StdinReader:
    mode = os.fstat(stream.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(stream.fileno())):
        return _FileInput(stream)
    _, pipe = await asyncio.get_running_loop().connect_read_pipe(_PipeInput, stream)
    return pipe

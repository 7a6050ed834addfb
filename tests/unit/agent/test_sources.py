from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from lakebed.agent.batcher import Batcher, BatchLimits, checked
from lakebed.agent.model import AppendResult, Frame
from lakebed.agent.sources.host import HostSource, cpu, disks, load, memory, network
from lakebed.agent.sources.stdin import StdinSource, sample_of
from lakebed.batches.codec.frame import decode
from lakebed.batches.model import Kind, Sample
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid
from lakebed.core.metrics import Metrics
from support.runtimes import runtime_of

NOW_NS = 1_760_000_000_000_000_000


def test_a_line_is_a_sample_with_sensible_defaults() -> None:
    """Metric and value are enough; time and kind can be given."""
    assert Sample("m", NOW_NS, 2.0, Kind.GAUGE, {}) == sample_of(b'{"metric":"m","value":2}', now_ns=NOW_NS)
    line = b'{"metric":"m","value":0.5,"labels":{"a":"b","empty":""},"kind":"counter","time_ms":1000}'
    assert Sample("m", 1_000_000_000, 0.5, Kind.COUNTER, {"a": "b"}) == sample_of(line, now_ns=NOW_NS)
    assert sample_of(b'{"metric":"m","value":1,"time_ns":77}', now_ns=NOW_NS).time_ns == 77


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"metric":"m"}',
        b'{"metric":"","value":1}',
        b'{"metric":"m","value":"1"}',
        b'{"metric":"m","value":NaN}',
        b'{"metric":"m","value":1,"typo":2}',
        b'{"metric":"m","value":1,"kind":"histogram"}',
        b'{"metric":"m","value":1,"time_ms":1,"time_ns":1}',
        b'{"metric":"m","value":1,"time_ns":-1}',
        b'{"metric":"m","value":1,"time_ms":9223372036854775807}',
        b'{"metric":"\xff","value":1}',
        b'{"metric":"m","value":1,"labels":{"a":1}}',
    ],
)
def test_what_is_not_a_sample_is_invalid(line: bytes) -> None:
    """Nothing is guessed."""
    with pytest.raises(Invalid):
        sample_of(line, now_ns=NOW_NS)


def test_a_sample_no_frame_could_carry_is_stopped_alone() -> None:
    """The limits of a frame are checked before a sample can spoil its batch."""
    for metric, labels in (
        ("m" * 256, {}),
        ("m", {"": "x"}),
        ("m", {"a" * 256: "x"}),
        ("m", {"a": "x" * 1025}),
        ("m", {f"l{n}": "x" for n in range(65)}),
        ("\ud800", {}),
        ("é" * 128, {}),
    ):
        with pytest.raises(Invalid):
            checked(metric, NOW_NS, 1.0, Kind.GAUGE, labels)


class Shelf:
    def __init__(self) -> None:
        self.frames: list[Frame] = []

    async def __call__(self, frames: Sequence[Frame]) -> AppendResult:
        self.frames += frames
        return AppendResult(())

    @property
    def values(self) -> list[float]:
        return [value for frame in self.frames for value in decode(frame.data).columns.values.tolist()]


async def feed(data: bytes, *, acks: list[bytes] | None = None) -> tuple[Shelf, Metrics]:
    """Runs the source over a pipe that holds `data`, to its end."""
    disk_queue, metrics = Shelf(), Metrics()
    batcher = Batcher(
        runtime_of(SystemClock(), metrics=metrics), "a", "b", BatchLimits(100_000, 1000, 0.05), disk_queue
    )
    running = asyncio.ensure_future(batcher.run())
    source = StdinSource(
        runtime_of(SystemClock(), metrics=metrics),
        batcher,
        line_bytes_max=1000,
        acks=None if acks is None else acks.append,
    )
    read_fd, write_fd = os.pipe()

    def write() -> None:
        with os.fdopen(write_fd, "wb") as out:
            out.write(data)

    writing = asyncio.ensure_future(asyncio.to_thread(write))
    with os.fdopen(read_fd, "rb") as stream:
        await source.run(stream)
    await writing
    batcher.stop()
    await running
    return disk_queue, metrics


async def test_standard_input_is_read_to_its_end_and_bad_lines_cost_only_themselves() -> None:
    """Every good line arrives once, in order; the last needs no newline; too long ones are counted once."""
    lines = [f'{{"metric":"m","value":{n}}}'.encode() for n in range(3000)]
    lines[10:10] = [b"bad", b"", b'{"metric":"' + b"x" * 200_000 + b'"}']

    disk_queue, metrics = await feed(b"\n".join(lines))

    assert [float(n) for n in range(3000)] == disk_queue.values
    assert metrics.value("lakebed_agent_bad_samples_total", source="stdin") == 2


async def test_lines_are_acknowledged_once_they_are_on_disk() -> None:
    """The last acknowledgement counts every line, bad and empty ones too."""
    acks: list[bytes] = []

    await feed(b'{"metric":"m","value":1}\nbad\n\n{"metric":"m","value":2}\n', acks=acks)

    assert acks[-1] == b'{"durable_lines":4}\n'


async def test_a_regular_file_can_stand_for_standard_input(tmp_path: Path) -> None:
    """`< file` works as well as a pipe."""
    path = tmp_path / "lines"
    path.write_bytes(b'{"metric":"m","value":1}\n{"metric":"m","value":2}')
    disk_queue, metrics = Shelf(), Metrics()
    batcher = Batcher(
        runtime_of(SystemClock(), metrics=metrics), "a", "b", BatchLimits(100_000, 1000, 0.01), disk_queue
    )
    running = asyncio.ensure_future(batcher.run())

    with path.open("rb") as stream:
        await StdinSource(runtime_of(SystemClock(), metrics=metrics), batcher, line_bytes_max=1000).run(stream)

    assert disk_queue.values == [1.0, 2.0]
    running.cancel()


def test_proc_files_are_read_into_their_numbers() -> None:
    """Each parser on a few lines as the kernel writes them."""
    stat = "cpu  10 0 5 100 0 0 0 0 0 0\ncpu0 250 1 5 100 2 0 3 4 0 0\nintr 5\nbtime 7\n"
    assert next(cpu(stat)) == ("host_cpu_seconds_total", 2.5, Kind.COUNTER, {"cpu": "0", "mode": "user"})
    assert len(list(cpu(stat))) == 8
    assert list(memory("MemTotal:  2 kB\nX: 1\n")) == [("host_memory_bytes", 2048.0, Kind.GAUGE, {"state": "MemTotal"})]
    assert [value for _, value, _, _ in load("0.50 1.25 2.00 1/99 1234\n")] == [0.5, 1.25, 2.0]
    line = " 254 0 vda 100 0 80 5 200 0 160 9 0 1500 14 0 0 0 0\n   7 0 loop0 1 0 1 1 1 0 1 1 0 1 1\n"
    assert {name: value for name, value, _, _ in disks(line)} == {
        "host_disk_reads_total": 100.0,
        "host_disk_read_bytes_total": 80 * 512.0,
        "host_disk_writes_total": 200.0,
        "host_disk_written_bytes_total": 160 * 512.0,
        "host_disk_busy_seconds_total": 1.5,
    }
    net = "head\nhead\n  eth0: 1000 10 1 0 0 0 0 0 2000 20 2 0 0 0 0 0\n"
    assert [value for _, value, _, _ in network(net)] == [1000.0, 10.0, 1.0, 2000.0, 20.0, 2.0]


def test_a_missing_proc_file_costs_only_its_own_metrics(tmp_path: Path) -> None:
    """A strange kernel is no reason to stop."""
    (tmp_path / "loadavg").write_text("0.50 1.25 2.00 1/99 1234\n")
    (tmp_path / "meminfo").write_text("garbage\n")
    metrics = Metrics()
    batcher = Batcher(runtime_of(SystemClock(), metrics=metrics), "a", "b", BatchLimits(1, 1, 1.0), Shelf())

    samples = HostSource(runtime_of(SystemClock(), metrics=metrics), batcher, interval_s=1.0, proc=tmp_path).read()

    assert {"host_load", "host_filesystem_bytes"} == {sample.metric for sample in samples}
    assert metrics.value("lakebed_agent_bad_samples_total", source="host") == 4


async def test_no_line_is_acknowledged_before_it_is_on_disk() -> None:
    """At each acknowledgement the disk has every line up to it, while the lines behind it still wait."""
    stored = 0

    async def slow(frames: Sequence[Frame]) -> AppendResult:
        nonlocal stored
        for _ in range(3):
            await asyncio.sleep(0)
        stored += sum(frame.identity.samples for frame in frames)
        return AppendResult(())

    runtime = runtime_of(SystemClock(), metrics=Metrics())
    batcher = Batcher(runtime, "a", "b", BatchLimits(100_000, 50, 0.0), slow)
    seen: list[tuple[int, int]] = []

    def acked(line: bytes) -> None:
        seen.append((msgspec.json.decode(line)["durable_lines"], stored))

    source = StdinSource(runtime, batcher, line_bytes_max=1000, acks=acked)
    for _ in range(20):
        await source._take([b'{"metric":"m","value":1}'] * 100)
    batcher.stop()
    acknowledging = asyncio.ensure_future(source._acknowledge())
    await batcher.run()
    await source._tickets.join()
    acknowledging.cancel()

    assert all(lines <= disk for lines, disk in seen)
    assert 2000 == seen[-1][0] and len(seen) > 3

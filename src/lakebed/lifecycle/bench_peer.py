"""A pass over the same mixed contents by SeaweedFS's own lifecycle worker and by ours: CPU of worker and server, wall.

Both work on one server, each on buckets of its own that hold the same: the rules of one pass see no other buckets.
Entries are created at the filer with times in the past and with their bytes inline, so neither pass has volumes to
clean. What is left afterwards is compared with what the rules say.
"""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from lakebed.bench.harness import BenchEnvironment, Check, at_most, measured
from lakebed.core.errors import NotFound
from lakebed.core.runtime import Runtime
from lakebed.embedded.weed import Weed, find_weed
from lakebed.filer import s3
from lakebed.filer.client import FilerClient
from lakebed.filer.model import Attributes, FilerEntry, Mutation, MutationKind, Transaction
from lakebed.filer.settings import FilerSettings
from lakebed.lifecycle.model import DAY_S, SECOND_NS, Rule
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.workers import open_services
from lakebed.store.settings import StoreSettings

CPU_BAR = WALL_BAR = 1.0  # ours ÷ SeaweedFS's
OLD_S, YOUNG_S = 5 * DAY_S, DAY_S // 2
FOLDER_MODE, FILE_MODE = 0o20000000775, 0o660
SHELL_S = 900.0

RULES = (
    Rule("prefix", prefix="logs/", expiration_days=1),
    Rule("tag", prefix="tagged/", tags=(("state", "done"),), expiration_days=1),
    Rule("tags", prefix="two/", tags=(("a", "1"), ("b", "2")), expiration_days=1),
    Rule("size", prefix="sized/", size_greater_than=100, expiration_days=1),
    Rule("date", prefix="dated/", expiration_date_ns=1_600_000_000 // DAY_S * DAY_S * SECOND_NS),
    Rule("off", prefix="off/", enabled=False, expiration_days=1),
    Rule("uploads", prefix="up/", abort_days=1),
)
VERSION_RULES = (Rule("noncurrent", noncurrent_days=1), Rule("markers", expired_delete_marker=True))


class _Cost(msgspec.Struct, frozen=True):
    cpu_s: float
    wall_s: float
    left: int


class _Contents:
    """The same entries for each pass, under buckets named after it. `scale` × 17,000 entries."""

    def __init__(self, name: str, scale: float, now_ns: int) -> None:
        self.plain, self.versioned = f"{name}-plain", f"{name}-versioned"
        self._scale, self._now_ns = scale, now_ns // SECOND_NS * SECOND_NS
        self.due = 0

    def _many(self, count: int) -> range:
        return range(int(count * self._scale))

    def _entry(self, name: str, old: bool, tags: dict[str, str] | None = None, size: int = 64) -> FilerEntry:
        at_ns = self._now_ns - (OLD_S if old else YOUNG_S) * SECOND_NS
        extended = {s3.TAG + key: value.encode() for key, value in (tags or {}).items()}
        seen = Attributes(size, at_ns, at_ns, FILE_MODE, "application/octet-stream")
        return FilerEntry(name, attributes=seen, extended=extended, content=b"x" * size)

    def buckets(self) -> Iterator[tuple[str, FilerEntry]]:
        """The buckets as they are before and after a pass, with their rules."""
        for name, rules, more in (
            (self.plain, RULES, {}),
            (self.versioned, VERSION_RULES, {s3.VERSIONING: b"Enabled"}),
        ):
            seen = Attributes(0, self._now_ns, self._now_ns, FOLDER_MODE)
            yield s3.BUCKETS, FilerEntry(name, True, seen, extended={s3.LIFECYCLE: render_xml(rules), **more})

    def entries(self) -> Iterator[tuple[str, FilerEntry]]:
        """Folders and entries; counts what is due."""
        yield from self._objects()
        yield from self._uploads()
        yield from self._versions()

    def _objects(self) -> Iterator[tuple[str, FilerEntry]]:
        for number in self._many(10_000):
            old = number % 2 == 0
            folder, tags, size, due = (
                ("logs/a b", {}, 64, old),
                ("logs/ü", {"x": "y"}, 64, old),
                ("tagged", {"state": "done" if number % 4 == 0 else "open"}, 64, old and number % 4 == 0),
                ("two", {"a": "1", "b": "2"} if number % 4 == 0 else {"a": "1"}, 64, old and number % 4 == 0),
                ("sized", {}, 200 if number % 4 == 0 else 50, old and number % 4 == 0),
                ("dated", {}, 64, True),
                ("off", {}, 64, False),
                ("other", {}, 64, False),
            )[number // 4 % 8]
            self.due += due
            yield f"{s3.bucket_path(self.plain)}/{folder}", self._entry(f"{number:06d}", old, tags, size)

    def _uploads(self) -> Iterator[tuple[str, FilerEntry]]:
        for number in self._many(200):
            old = number % 2 == 0
            at_ns = self._now_ns - (OLD_S if old else YOUNG_S) * SECOND_NS
            self.due += old
            seen = Attributes(0, at_ns, at_ns, FOLDER_MODE)
            key = {s3.UPLOAD_KEY: f"up/{number}".encode()}
            yield s3.uploads_path(self.plain), FilerEntry(f"{number:032x}", True, seen, extended=key)

    def _versions(self) -> Iterator[tuple[str, FilerEntry]]:
        """Three versions of a key, the oldest two noncurrent; or a delete marker that is alone."""
        for number in self._many(2_400):
            key = s3.object_path(self.versioned, f"{number % 7}/{number:05d}")
            alone, old = number % 6 == 0, number % 2 == 0
            ages_s = [OLD_S] if alone else [3 * OLD_S, 2 * OLD_S, OLD_S if old else YOUNG_S]
            files = [self._version(age_s, number, marker=alone) for age_s in ages_s]
            self.due += 1 if alone else 2 if old else 1
            yield s3.split(key)[0], self._pointer(f"{s3.split(key)[1]}{s3.VERSIONS}", files[-1])
            for file in files:
                yield key + s3.VERSIONS, file

    def _version(self, age_s: int, number: int, *, marker: bool) -> FilerEntry:
        at_ns = self._now_ns - age_s * SECOND_NS
        version_id = s3.new_version_id(at_ns, f"{number:016x}")
        more = {s3.DELETE_MARKER: b"true"} if marker else {}
        seen = Attributes(0 if marker else 64, at_ns, at_ns, s3.MARKER_MODE if marker else FILE_MODE)
        return FilerEntry(
            f"{s3.VERSION_FILE}{version_id}",
            attributes=seen,
            extended={s3.VERSION_ID: version_id.encode(), **more},
            content=b"" if marker else b"x" * 64,
        )

    def _pointer(self, name: str, latest: FilerEntry) -> FilerEntry:
        at_ns = latest.attributes.mtime_ns
        marker = s3.is_marker(latest)
        said = {
            s3.LATEST_ID: latest.extended[s3.VERSION_ID],
            s3.LATEST_FILE: latest.name.encode(),
            s3.LATEST_MTIME: str(at_ns // SECOND_NS).encode(),
            s3.LATEST_SIZE: str(latest.attributes.file_size).encode(),
            s3.LATEST_MARKER: b"true" if marker else b"false",
        }
        return FilerEntry(name, True, Attributes(0, at_ns, at_ns, FOLDER_MODE), extended=said)


async def peer_checks(environment: BenchEnvironment) -> Sequence[Check]:
    """Empty where the `weed` program is not installed."""
    try:
        find_weed()
    except NotFound:
        return []
    scale, rounds = (0.25, 1) if environment.quick else (1.0, 3)
    ours: list[_Cost] = []
    theirs: list[_Cost] = []
    async with _server(environment) as (weed, filer):
        for number in range(rounds):
            for name in ("weed", "lakebed") if number % 2 == 0 else ("lakebed", "weed"):
                contents = _Contents(f"{name}{number}", scale, environment.context().clock.now_ns())
                environment.report(f"a pass of {name} over {scale * 17_000:,.0f} mixed entries")
                entries = await _fill(filer, contents)
                cost = await (_theirs(weed) if name == "weed" else _ours(environment, weed))
                left = len(entries) - await _left(filer, entries)
                (theirs if name == "weed" else ours).append(msgspec.structs.replace(cost, left=contents.due - left))
                await _clear(filer, contents)
    return [
        measured("mixed pass, SeaweedFS's worker: CPU of worker and server", [one.cpu_s for one in theirs], "s"),
        measured("mixed pass, ours: CPU of worker and server", [one.cpu_s for one in ours], "s"),
        at_most("mixed pass, CPU beside SeaweedFS's worker", *_both(ours, theirs, "cpu_s"), CPU_BAR),
        at_most("mixed pass, time beside SeaweedFS's worker", *_both(ours, theirs, "wall_s"), WALL_BAR),
        measured("mixed pass, due entries that SeaweedFS's worker left", [one.left for one in theirs], "entries"),
        Check(
            "mixed pass, due entries that we left",
            max(one.left for one in ours),
            "entries",
            0.0,
            all(one.left == 0 for one in ours),
        ),
    ]


def _both(ours: Sequence[_Cost], theirs: Sequence[_Cost], field: str) -> tuple[list[float], list[float]]:
    return [getattr(one, field) for one in ours], [getattr(one, field) for one in theirs]


@asynccontextmanager
async def _server(environment: BenchEnvironment) -> AsyncIterator[tuple[Weed, FilerClient]]:
    """A server of its own: nothing else costs its CPU."""
    context = environment.context()
    runtime = Runtime(context.clock, context.ids, context.metrics)
    with tempfile.TemporaryDirectory(prefix="lakebed-") as folder:
        weed = Weed(Path(folder), runtime=runtime)
        endpoints = await weed.start()
        try:
            async with FilerClient([endpoints.filer_grpc], runtime) as filer:
                yield weed, filer
        finally:
            await weed.stop(grace_s=0.0)


async def _fill(filer: FilerClient, contents: _Contents) -> list[str]:
    """Creates everything, the buckets with their rules last; returns the paths of all entries."""
    paths: list[str] = []
    places = list(contents.entries())
    for begin in range(0, len(places), 1000):
        await asyncio.gather(*(_create(filer, *place) for place in places[begin : begin + 1000]))
    paths += [f"{folder}/{entry.name}" for folder, entry in places if not entry.name.endswith(s3.VERSIONS)]
    for folder, bucket in contents.buckets():
        await _create(filer, folder, bucket)
    return paths


async def _create(filer: FilerClient, folder: str, entry: FilerEntry) -> None:
    path = f"{folder}/{entry.name}"
    await filer.transact(Transaction(path, (), (Mutation(MutationKind.PUT, folder, entry.name, entry),)))


async def _left(filer: FilerClient, paths: Sequence[str]) -> int:
    """How many of the entries are still there."""
    found = 0
    for folder in {s3.split(path)[0] for path in paths}:
        wanted = {s3.split(path)[1] for path in paths if s3.split(path)[0] == folder}
        found += len([entry async for entry in filer.entries(folder) if entry.name in wanted])
    return found


async def _clear(filer: FilerClient, contents: _Contents) -> None:
    for folder, bucket in contents.buckets():
        await filer.delete(folder, bucket.name, recursive=True)


def _server_cpu_s(weed: Weed) -> float:
    """User and system time of the server so far."""
    fields = Path(f"/proc/{weed.child.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def _theirs(weed: Weed) -> _Cost:
    """One pass of SeaweedFS's worker over all its shards, as its shell runs it."""
    ports = weed.ports
    began, server, children = time.monotonic(), _server_cpu_s(weed), _children_cpu_s()
    server_address = f"127.0.0.1:{ports['s3.grpc']}"
    command = f"s3.lifecycle.run-shard -shards 0-15 -s3 {server_address} -events 0\nexit\n"
    shell = await asyncio.create_subprocess_exec(
        str(find_weed()),
        "-logtostderr=true",
        "shell",
        f"-master=127.0.0.1:{ports['master']}.{ports['master.grpc']}",
        f"-filer=127.0.0.1:{ports['filer']}.{ports['filer.grpc']}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    await asyncio.wait_for(shell.communicate(command.encode()), SHELL_S)
    worker = _children_cpu_s() - children
    return _Cost(worker + _server_cpu_s(weed) - server, time.monotonic() - began, 0)


async def _ours(environment: BenchEnvironment, weed: Weed) -> _Cost:
    """One round of ours, with the settings as they are by default."""
    at = weed.endpoints
    settings = environment.settings.having(at.store_settings(prefix=environment.context().ids.token()))
    context = msgspec.structs.replace(
        environment, settings=settings.having(FilerSettings(grpc=at.filer_grpc))
    ).context()
    assert settings.of(StoreSettings).endpoint == at.s3
    began, server, own = time.monotonic(), _server_cpu_s(weed), time.process_time()
    async with open_services(context) as services:
        await services.enforcer.run_round()
    worker = time.process_time() - own
    return _Cost(worker + _server_cpu_s(weed) - server, time.monotonic() - began, 0)

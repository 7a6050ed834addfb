"""The doctor's own checks, where the store does not do what is asked."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from lakebed.clock import ManualClock
from lakebed.context import Context, Diagnosis
from lakebed.doctor import checks
from lakebed.doctor.checks import clock_skew, disk, examine
from lakebed.errors import Unavailable
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.settings import Settings
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, Written


class StuckStore(MemoryStore):
    """A store that reads and never ends a write, as a cluster with too few servers for its copies."""

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


async def test_a_store_that_takes_no_write_is_told_of_and_not_waited_for() -> None:
    """The doctor ends with what to look at, where a command would wait through all its retries."""
    clock = ManualClock()
    context = Context("node", Settings({}, {}), StuckStore(clock=clock), clock, Ids.seeded(1), Metrics())

    found = await clock_skew(context, write_s=0.05)

    assert (found.name, found.verdict) == ("store", "fail")
    assert "took no write" in found.seen
    assert "copies" in found.fix


class OffStore(MemoryStore):
    """A store whose clock is so many milliseconds from ours."""

    off_ms = 0

    async def head(self, key: str) -> ObjectInfo:
        found = await super().head(key)
        return msgspec.structs.replace(found, modified_ms=found.modified_ms + self.off_ms)


@pytest.mark.parametrize(
    ("off_ms", "verdict"),
    [
        (0, "pass"),
        (1_999, "pass"),
        (2_000, "warn"),
        (29_999, "warn"),
        (30_000, "fail"),
        (-2_999, "pass"),  # a stamp in whole seconds may be a second early
        (-3_000, "warn"),
        (-30_999, "warn"),
        (-31_000, "fail"),
    ],
)
async def test_a_clock_is_judged_by_how_far_it_is_from_the_stores(off_ms: int, verdict: str) -> None:
    """Within two seconds is well, from 30 on leases fail; the scratch object is removed."""
    clock = ManualClock()
    store = OffStore(clock=clock)
    store.off_ms = off_ms
    context = Context("node", Settings({}, {}), store, clock, Ids.seeded(1), Metrics())

    found = await clock_skew(context)

    assert (found.name, found.verdict) == ("clock", verdict)
    assert verdict == "pass" or f"{(abs(off_ms) - 1000 * (off_ms < 0)) / 1000:.1f} s" in found.seen
    assert [] == [info.key async for info in store.list("")]


@pytest.mark.parametrize(
    ("free", "verdict"),
    [(1024**3 - 1, "fail"), (1024**3, "warn"), (5 * 1024**3 - 1, "warn"), (5 * 1024**3, "pass")],
)
def test_a_disk_is_judged_by_its_free_space(
    free: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under 1 GiB fails, under 5 GiB warns, with a way out; a folder that is not there yet is its parent's disk."""
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(total=10**12, used=10**12 - free, free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)

    found = disk(tmp_path / "not" / "yet")

    assert (found.verdict, bool(found.fix)) == (verdict, verdict != "pass")
    assert asked == [tmp_path]


async def test_a_store_that_refuses_is_not_examined_further() -> None:
    """Without a store the machine is still looked at, and nothing behind the store is."""
    clock = ManualClock()

    class Away(MemoryStore):
        async def create(self, key: str, data: bytes) -> Written:
            raise Unavailable("nobody answers", hint="start it")

    context = Context("node", Settings({}, {}), Away(clock=clock), clock, Ids.seeded(1), Metrics())
    told: list[Diagnosis] = []

    found = await examine(context, Path(), told.append)

    assert found == told
    assert [each.name for each in found] == ["python", "java", "ports", "disk", "store"]
    assert (found[-1].verdict, found[-1].seen, found[-1].fix) == ("fail", "nobody answers", "start it")


async def test_a_clock_that_is_a_little_off_does_not_end_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is no failure: the path and the proof are still looked at."""
    clock = ManualClock()
    store = OffStore(clock=clock)
    store.off_ms = 5_000
    context = Context("node", Settings({}, {}), store, clock, Ids.seeded(1), Metrics())

    async def well(*_: object) -> Diagnosis:
        return Diagnosis("proof", "pass", "")

    async def none(*_: object) -> list[Diagnosis]:
        return []

    monkeypatch.setattr(checks, "store_proof", well)
    monkeypatch.setattr(checks, "diagnose", none)
    monkeypatch.setattr(checks, "_doors", lambda *_: [])

    found = await examine(context, Path(), lambda _: None)

    assert [(each.name, each.verdict) for each in found[-2:]] == [("clock", "warn"), ("proof", "pass")]

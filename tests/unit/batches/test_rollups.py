"""Windows over HTTP: from rollups, live state, the spool and samples, with what they were read from."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakebed.batches import paths
from lakebed.batches.model import Sample
from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.rollups.paths import rollup_folder
from lakebed.rollups.workers import workers
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections
from support.batches_gateway import collector
from support.rollup_fixtures import accept, ask, by_hand, frame, make_roller

HOUR_NS = 1_760_000_400_000_000_000  # a full hour
SECOND_NS = 10**9
ASKED = {"metric": "disk/used %", "window_s": 60, "from": HOUR_NS, "to": HOUR_NS + 3600 * SECOND_NS}


def some(agent: int, minute: int) -> list[Sample]:
    at_ns = HOUR_NS + minute * 60 * SECOND_NS
    return [Sample("disk/used %", at_ns + n * SECOND_NS, n + agent / 10, labels={"host": "h0"}) for n in range(10)]


def buckets(reported: list[tuple[str, Sample]]) -> dict[str, list[list[object]]]:
    return {
        dict(series)["agent_id"]: [list(windows[start]) for start in sorted(windows)]
        for series, windows in by_hand(reported, "disk/used %", 60).items()
    }


async def test_an_answer_says_what_it_was_read_from() -> None:
    """Rolled up, late, live and spooled batches are one answer, that names its resolution and each source."""
    clock = ManualClock(HOUR_NS + 3500 * SECOND_NS)
    store = MemoryStore(clock=clock)
    reported = []
    for number in range(4):
        if number == 2:
            await make_roller(store, clock).run()
        held = some(number, number)
        await accept(store, frame(f"a{number}", 0, held), clock.now_ns() - (number + 1) * SECOND_NS)
        reported += [(f"a{number}", sample) for sample in held]

    async with collector(store, clock=clock, query_collector=True, follow_interval_s=30.0) as (client, part):
        await part.follower.poll()
        sent = some(9, 9)
        assert 200 == (await client.post("/v1/batches", content=frame("a9", 0, sent))).status_code
        answer = (await client.get("/v1/query/range", params=ASKED | {"q": ["0", "0.5", "1"]})).json()
        odd = (
            await client.get("/v1/query/range", params=ASKED | {"window_s": 7, "from": HOUR_NS - 7 * SECOND_NS})
        ).json()
        wrong = await client.get("/v1/query/range", params=ASKED | {"q": "2"})

    reported += [("a9", sample) for sample in sent]
    found = {series["labels"]["agent_id"]: [b[:8] for b in series["buckets"]] for series in answer["series"]}
    assert buckets(reported) == found
    assert (60, {"rollup": 1, "live": 3, "spool": 0, "raw": 0}) == (answer["resolution_s"], answer["sources"])
    assert (False, [], [0.0, 0.5, 1.0]) == (answer["partial"], answer["why_partial"], answer["quantiles"])
    low, middle, high = answer["series"][0]["buckets"][0][8]
    assert (0.0, 9.0) == (low, high) and abs(middle - 4.0) <= 0.04
    assert (0, 0) == (odd["resolution_s"], odd["sources"]["rollup"])
    assert 50 == sum(bucket[1] for series in odd["series"] for bucket in series["buckets"])
    assert 400 == wrong.status_code


async def test_what_is_spooled_and_not_landed_is_in_the_answer(tmp_path: Path) -> None:
    """A batch on a collector's disk counts before it is landed, and once while it lands and is rolled up."""
    clock = ManualClock(HOUR_NS + 3500 * SECOND_NS)
    store = MemoryStore(clock=clock)
    first, second = some(0, 0), some(1, 1)
    await accept(store, frame("a0", 0, first), clock.now_ns() - SECOND_NS)
    await make_roller(store, clock).run()
    reported = [("a0", sample) for sample in first] + [("a1", sample) for sample in second]

    async with collector(store, clock=clock, acceptance="local_spool", spool_dir=str(tmp_path)) as (client, part):
        assert 200 == (await client.post("/v1/batches", content=frame("a1", 0, second))).status_code
        before = (await client.get("/v1/query/range", params=ASKED)).json()
        assert part._lander is not None
        await part._lander.land()
        part.derived_writes._stopping = True
        await clock.advance(10)
        await make_roller(store, clock).run()
        after = (await client.get("/v1/query/range", params=ASKED)).json()

    for answer in (before, after):
        found = {series["labels"]["agent_id"]: [b[:8] for b in series["buckets"]] for series in answer["series"]}
        assert buckets(reported) == found
    assert 1 == before["sources"]["live"] + before["sources"]["spool"]
    assert {"rollup": 2, "live": 0, "spool": 0, "raw": 0} == after["sources"]


async def test_a_damaged_chunk_is_told() -> None:
    """What cannot be read makes the answer partial, and the rest is answered."""
    clock = ManualClock(HOUR_NS + 3500 * SECOND_NS)
    store = MemoryStore(clock=clock)
    for number in range(2):
        await accept(store, frame(f"a{number}", 0, some(number, number)), clock.now_ns() - SECOND_NS)
        await make_roller(store, clock).run()
        await clock.advance(5)
    folder = rollup_folder(60, paths.hour_of(HOUR_NS), "disk/used %")
    key = min([info.key async for info in store.list(folder)])
    await store.delete(key)
    await store.create(key, b"damaged")
    await store.create(f"{folder}{99:012d}-x-000.lmrollup.zst", b"of a generation that nobody committed")

    answer = await ask(store, clock, "disk/used %", 60, HOUR_NS, HOUR_NS + 3600 * SECOND_NS)

    assert ["a1"] == [series.labels["agent_id"] for series in answer.series]
    assert "1 rollup or index chunks cannot be read" in answer.why_partial


async def test_a_metric_with_more_rows_than_one_chunk_takes_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows go into several chunks, every row into exactly one."""
    monkeypatch.setattr("lakebed.rollups.aggregate.CHUNK_ROWS_MAX", 3)
    clock = ManualClock(HOUR_NS + 3500 * SECOND_NS)
    store = MemoryStore(clock=clock)
    held = [sample for minute in range(10) for sample in some(0, minute)]
    await accept(store, frame("a0", 0, held), clock.now_ns() - SECOND_NS)
    await make_roller(store, clock).run()

    answer = await ask(store, clock, "disk/used %", 60, HOUR_NS, HOUR_NS + 3600 * SECOND_NS)

    assert (4, [10] * 10) == (answer.sources["rollup"], [b.count for each in answer.series for b in each.buckets])


async def test_names_that_fit_no_folder_are_told_apart() -> None:
    """Long metric names are shortened with a hash, and no other metric can have the shortened name."""
    long = "é" * 100
    folder = rollup_folder(60, "date=2025-10-09/hour=09", long)
    name = folder.split("metric=")[1].rstrip("/")

    assert all(len(segment.encode()) <= 255 for segment in folder.split("/"))
    assert folder != rollup_folder(60, "date=2025-10-09/hour=09", name)
    assert folder != rollup_folder(60, "date=2025-10-09/hour=09", long + "é")


@pytest.mark.parametrize("window_s", [60, 3600])
async def test_windows_begin_inside_the_range(window_s: int) -> None:
    """A window counts whole when it begins in the range, and not at all when it begins before."""
    clock = ManualClock(HOUR_NS + 7000 * SECOND_NS)
    store = MemoryStore(clock=clock)
    held = some(0, 0) + some(0, 30) + some(0, 70)
    await accept(store, frame("a", 0, held), clock.now_ns() - SECOND_NS)

    for _ in range(2):  # from samples, then from rollups
        answer = await ask(store, clock, "disk/used %", window_s, HOUR_NS + SECOND_NS, HOUR_NS + 3601 * SECOND_NS)
        counted = (
            {bucket.start_ns - HOUR_NS: bucket.count for bucket in answer.series[0].buckets} if answer.series else {}
        )
        wanted = {30 * 60 * SECOND_NS: 10} if window_s == 60 else {3600 * SECOND_NS: 10}
        assert wanted == counted
        await make_roller(store, clock).run()


async def test_the_worker_rolls_up_by_itself_and_one_bad_batch_does_not_stop_it() -> None:
    """Every interval what came since; without an interval there is no worker. An error ends a round, not the worker."""
    clock = ManualClock(HOUR_NS + 3500 * SECOND_NS)
    store: Any = Unsteady(MemoryStore(clock=clock))
    flags = {"store.url": "memory:", "rollups.interval_s": 60.0, "rollups.engine": "local"}
    context = Context(
        node="node", settings=load(sections(), flags=flags), store=store, clock=clock, ids=Ids(), metrics=Metrics()
    )
    assert [] == workers(
        msgspec.structs.replace(
            context, settings=load(sections(), flags={"store.url": "memory:", "rollups.interval_s": 0})
        )
    )
    bad = await accept(store, frame("bad", 0, some(8, 8)), clock.now_ns() - SECOND_NS)
    await store.delete(bad.raw_blob_key)
    (worker,) = workers(context)
    running = asyncio.create_task(worker.run())
    reported = []
    for number in range(3):
        store.away = number == 1  # the bucket does not answer for a round
        held = some(number, number)
        await accept(store, frame(f"a{number}", 0, held), clock.now_ns() - SECOND_NS)
        reported += [(f"a{number}", sample) for sample in held]
        await clock.advance(61)
    store.away = False
    await clock.advance(61)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    answer = await ask(store, clock, "disk/used %", 60, HOUR_NS, HOUR_NS + 3600 * SECOND_NS)
    found = {series.labels["agent_id"]: len(series.buckets) for series in answer.series}
    assert ("rollup", {"a0": 1, "a1": 1, "a2": 1}) == (worker.name, found)
    assert (60, 0) == (answer.resolution_s, answer.sources["raw"])
    assert answer.sources["rollup"] >= 2


class Unsteady:
    """A store that does not answer while it is away."""

    def __init__(self, store: MemoryStore) -> None:
        self._store, self.away = store, False

    def __getattr__(self, verb: str) -> Any:
        if self.away and verb == "replace":
            raise Unavailable("the bucket is away")
        return getattr(self._store, verb)

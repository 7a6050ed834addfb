"""The roller: every batch in exactly one generation, whatever crashes, comes late, cannot be read or is taken over."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lakebed.batches import paths
from lakebed.batches.model import Sample
from lakebed.batches.reconciler import Reconciler
from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Conflict, Fenced, Invalid, LakebedError, Overloaded, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runs import ActiveRun
from lakebed.rollups import generations
from lakebed.rollups.generations import abandon, advance, begin, commit, generation
from lakebed.rollups.local_job import LocalJob
from lakebed.rollups.model import Generation, RollupManifest, RollupState, StoredChunk
from lakebed.rollups.paths import (
    INDEX,
    MANIFESTS,
    ROLLER,
    ROLLER_LEASE,
    ROLLER_PLANS,
    ROLLER_STATE,
    ROLLER_UNREADABLE,
    ROLLUP,
)
from lakebed.rollups.roller import RollupReport, UnreadableObject
from lakebed.store.lease import HeldByAnother, Lease
from lakebed.store.memory import MemoryStore
from lakebed.store.model import Version, Written, read_record
from support.crashing_store import Died, Dying
from support.rollup_fixtures import Failing, accept, ask, by_hand, frame, make_roller, make_sources, shown
from support.runtimes import runtime_on

HOUR_NS = 1_760_000_400_000_000_000  # a full hour
END_NS = HOUR_NS + 3 * 3600 * 10**9
SECOND_NS = 10**9


def some(agent: int, first: int, count: int = 40) -> list[Sample]:
    """Samples of two series over some minutes around the turn of an hour."""
    return [
        Sample(
            "cpu", HOUR_NS + 3400 * SECOND_NS + (first + n) * 7 * SECOND_NS, 0.1 * (n + agent), labels={"c": str(n % 2)}
        )
        for n in range(count)
    ]


async def keys(store: MemoryStore, prefix: str) -> list[str]:
    return [info.key async for info in store.list(prefix)]


SIZES = ((45, 0), (60, 60), (300, 300), (600, 300), (3600, 3600), (7200, 3600))


async def agrees(
    store: MemoryStore, clock: ManualClock, reported: list[tuple[str, Sample]], sizes: Any = SIZES
) -> dict[str, int]:
    """Asserts that windows of these sizes are what the samples come to; gives what the last answer was read from."""
    for window_s, resolution_s in sizes:
        answer = await ask(store, clock, "cpu", window_s, HOUR_NS - 7200 * SECOND_NS, END_NS)
        assert by_hand(reported, "cpu", window_s) == shown(answer), window_s
        assert answer.resolution_s == (resolution_s if answer.sources["rollup"] else answer.resolution_s)
    return answer.sources


async def test_batches_become_chunks_under_the_keys_of_the_protocol(manual_clock: ManualClock) -> None:
    """Chunks, index chunks and a manifest stand where the protocol puts them, and the manifest lists them all."""
    store = MemoryStore(clock=manual_clock)
    reported = some(0, 0)
    await accept(store, frame("a", 0, reported), manual_clock.now_ns() - SECOND_NS)

    report = await make_roller(store, manual_clock).run()

    chunks, index = await keys(store, ROLLUP), await keys(store, INDEX)
    (manifest_key,) = await keys(store, MANIFESTS)
    manifest = read_record(await store.get(manifest_key), RollupManifest)
    name = f"{manifest.generation.id}-000"
    assert f"rollup/v1/window=60s/date=2025-10-09/hour=09/metric=cpu/{name}.lmrollup.zst" in chunks
    assert f"index/v1/date=2025-10-09/hour=09/{name}.lmindex.zst" in index
    assert f"{MANIFESTS}{paths.hour_of(manual_clock.now_ns())}/{manifest.generation.id}.json" == manifest_key
    assert sorted(chunks) == [chunk.key for chunk in manifest.chunks]
    assert sorted(index) == [chunk.key for chunk in manifest.index]
    assert (1, 40, 40, len(chunks)) == (len(manifest.covers), manifest.samples, report.samples, report.chunks)
    assert (await make_roller(store, manual_clock).run()).samples == 0


async def test_a_run_that_takes_longer_than_its_lease_keeps_it(manual_clock: ManualClock) -> None:
    """Another roller waits however long the engine works, also when the store misses a renewal."""

    class Missing(MemoryStore):
        misses = 1

        async def replace(self, key: str, data: bytes, etag: Version) -> Written:
            if key == ROLLER_LEASE and manual_clock.monotonic_s() > began_s and self.misses:
                self.misses -= 1
                raise Unavailable("no answer")
            return await super().replace(key, data, etag)

    began_s = manual_clock.monotonic_s()
    store, go = Missing(clock=manual_clock), asyncio.Event()
    await accept(store, frame("a", 0, some(0, 0)), manual_clock.now_ns() - SECOND_NS)

    class Long(LocalJob):
        async def write(self, generation_id: str) -> list[StoredChunk]:
            await go.wait()
            return await super().write(generation_id)

    working = asyncio.create_task(make_roller(store, manual_clock, job=Long(store), owner="one").run())
    await settle()
    for _ in range(10):
        await manual_clock.advance(30.0)  # half a lease
        with pytest.raises(HeldByAnother):
            await make_roller(store, manual_clock, owner="two").run()
    go.set()

    assert (1, 0) == ((report := await working).generations, report.abandoned)


async def test_what_is_read_in_several_groups_counts_once(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation of more samples than are decoded at once is the same as one that fits."""
    monkeypatch.setattr("lakebed.rollups.local_job.READS_AT_ONCE", 2)
    monkeypatch.setattr("lakebed.rollups.local_job.GROUP_SAMPLES", 60)
    store = MemoryStore(clock=manual_clock)
    told = [(f"a{n}", sample) for n in range(7) for sample in some(n, 0)]
    for n in range(7):
        await accept(store, frame(f"a{n}", 0, some(n, 0)), manual_clock.now_ns() - SECOND_NS)

    report = await make_roller(store, manual_clock).run()

    assert (7, 280) == (report.batches, report.samples)
    await agrees(store, manual_clock, told)


async def test_an_index_entry_that_names_the_blob_of_another_batch_is_no_batch(manual_clock: ManualClock) -> None:
    """The other one's samples do not count twice, and the damaged entry is told by its key."""
    store = MemoryStore(clock=manual_clock)
    good = await accept(store, frame("good", 0, some(0, 0)), manual_clock.now_ns() - SECOND_NS)
    bad = await accept(store, frame("bad", 0, some(1, 0)), manual_clock.now_ns() - SECOND_NS)
    key = paths.accepted_by_time_key(bad.identity, bad.accepted_at_unix_ns)
    entry = (await store.get(key)).data.replace(bad.raw_blob_key.encode(), good.raw_blob_key.encode())
    store.bucket.overwrite(key, entry.replace(bad.frame_sha256.encode(), good.frame_sha256.encode()))

    report = await make_roller(store, manual_clock).run()

    assert (1, 1) == (report.batches, len(report.unreadable))
    assert "another identity" in report.unreadable[0].problem


samples = st.lists(
    st.builds(
        Sample,
        metric=st.sampled_from(["cpu", "mem/é %"]),
        time_ns=st.integers(HOUR_NS, END_NS - 1),
        value=st.sampled_from([math.nan, -0.0, 1e300, math.inf, 0.1]) | st.floats(width=64),
        labels=st.dictionaries(st.sampled_from(["c", "\x1f", "\x1e"]), st.sampled_from(["", "x", "\x1eb"]), max_size=2),
    ),
    min_size=1,
    max_size=12,
)
batches = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), samples, st.integers(0, 3), st.booleans()), min_size=1, max_size=6
)


@given(batches=batches, window_s=st.sampled_from([60, 300, 3600, 7200, 7]))
@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
async def test_chunks_late_chunks_and_samples_answer_as_samples_alone(
    batches: list[tuple[str, list[Sample], int, bool]], window_s: int
) -> None:
    """However batches are spread over runs, late ones and ones not rolled up yet: the answer is that of the samples."""
    clock = ManualClock(END_NS)
    store = MemoryStore(clock=clock)
    reported: list[tuple[str, Sample]] = []
    roller = make_roller(store, clock)
    for turn in range(4):  # batches of turn 3 are never rolled up
        for number, (agent, held, when, late) in enumerate(batches):
            if when == turn:
                data = frame(agent, number * 100, held)
                await accept(store, data, clock.now_ns() - (7200 if late else 1) * SECOND_NS, late=late)
                reported += [(agent, sample) for sample in held]
        if turn < 3:
            await roller.run()
            await clock.advance(600)

    for metric in ("cpu", "mem/é %"):
        answer = await ask(store, clock, metric, window_s, HOUR_NS - 7200 * SECOND_NS, END_NS, q=[0.5])
        assert by_hand(reported, metric, window_s) == shown(answer)


async def test_a_crash_anywhere_counts_nothing_twice(manual_clock: ManualClock) -> None:
    """Killed before or behind any call to the store: queries agree at once, and the next run leaves nothing out."""
    point, ended = 0, False
    while not ended:
        point += 1
        clock = ManualClock(END_NS)
        store = MemoryStore(clock=clock)
        reported = []
        for number in range(3):  # one rolled up before, one in time and one late
            if number == 1:
                await make_roller(store, clock).run()
            held = some(number, 30 + number, 8)
            at_ns = clock.now_ns() - (9000 if number == 2 else 1) * SECOND_NS
            await accept(store, frame(f"agent-{number}", 0, held), at_ns, late=number == 2)
            reported += [(f"agent-{number}", sample) for sample in held]
        dying: Any = Dying(store, point)

        try:
            await make_roller(dying, clock, job=LocalJob(dying)).run()
            ended = True
        except (Died, LakebedError):  # a register tells those who wait for it that the outcome is unknown
            assert dying.dead
        await agrees(store, clock, reported, [(60, 60)])
        await clock.advance(62)
        report = await make_roller(store, clock).run()

        sources = await agrees(store, clock, reported, [(300, 300)])
        assert (0, 0) == (report.abandoned, sources["raw"])
        state = read_record(await store.get(ROLLER_STATE), RollupState)
        assert (2, None) == (state.committed, state.pending)
        assert [] == await keys(store, ROLLER_UNREADABLE)
        assert [] == await keys(store, ROLLER_PLANS)
    assert point > 40


async def test_an_owner_that_was_taken_over_changes_nothing(manual_clock: ManualClock) -> None:
    """Paused in the middle of writing, taken over, woken again: it is fenced, and what it stores is the same."""
    store = MemoryStore(clock=manual_clock)
    first = some(0, 0)
    await accept(store, frame("a", 0, first), manual_clock.now_ns() - SECOND_NS)
    pausing = Pausing(store)
    old = asyncio.create_task(make_roller(store, manual_clock, job=pausing, owner="old").run())
    await pausing.reached.wait()
    with pytest.raises(HeldByAnother):
        await make_roller(store, manual_clock, owner="impatient").run()

    manual_clock._elapsed_ns += 120 * SECOND_NS  # a pause of the whole process: not even the renewing task ran
    second = some(1, 3)
    await accept(store, frame("b", 0, second), manual_clock.now_ns() - SECOND_NS)
    report = await make_roller(store, manual_clock, owner="new").run()
    pausing.go.set()
    with pytest.raises((Fenced, LakebedError)):
        await old

    assert (2, 1) == (report.generations, report.resumed)
    await agrees(store, manual_clock, [("a", each) for each in first] + [("b", each) for each in second])


async def test_unreadable_batches_are_set_aside_and_taken_up_when_mended(manual_clock: ManualClock) -> None:
    """A missing, a damaged and a half-written blob are told by key, the rest is rolled up, and a mended one joins."""
    store = MemoryStore(clock=manual_clock)
    reported = {}
    for number, agent in enumerate(("good", "missing", "damaged", "torn")):
        held = some(number, 0)
        accepted = await accept(store, frame(agent, 0, held), manual_clock.now_ns() - (number + 1) * SECOND_NS)
        reported[agent] = (accepted, held)
    blobs = {agent: (await store.get(accepted.raw_blob_key)) for agent, (accepted, _) in reported.items()}
    for agent, data in (("missing", None), ("damaged", b"x" * 500), ("torn", blobs["torn"].data[:100])):
        await store.delete(blobs[agent].key)
        if data is not None:
            await store.create(blobs[agent].key, data)

    report = await make_roller(store, manual_clock).run()
    answer = await ask(store, manual_clock, "cpu", 60, HOUR_NS, END_NS)

    assert sorted(blobs[agent].key for agent in ("missing", "damaged", "torn")) == sorted(
        each.key for each in report.unreadable
    )
    assert 40 == report.samples
    assert by_hand([("good", each) for each in reported["good"][1]], "cpu", 60) == shown(answer)
    assert "3 accepted batches cannot be read: see repairs/v1/" in answer.why_partial
    await manual_clock.advance(4000)
    assert 3 == len((await make_roller(store, manual_clock).run()).unreadable)
    await store.delete(blobs["torn"].key)
    await store.create(blobs["torn"].key, blobs["torn"].data)
    again = await make_roller(store, manual_clock).run()
    assert (40, 1, 2) == (again.samples, again.late, len(again.unreadable))
    both = [(agent, each) for agent in ("good", "torn") for each in reported[agent][1]]
    assert by_hand(both, "cpu", 60) == shown(await ask(store, manual_clock, "cpu", 60, HOUR_NS, END_NS))


async def test_a_generation_that_cannot_be_finished_as_begun_never_counts(manual_clock: ManualClock) -> None:
    """A batch that is lost between a crash and the next run makes the generation abandoned, and a new one made."""
    store = MemoryStore(clock=manual_clock)
    kept, lost = some(0, 0), some(1, 0)
    await accept(store, frame("a", 0, kept), manual_clock.now_ns() - SECOND_NS)
    gone = await accept(store, frame("b", 0, lost), manual_clock.now_ns() - SECOND_NS)
    broken: Any = Failing(store)
    with pytest.raises(LakebedError):
        await make_roller(store, manual_clock, job=broken).run()
    assert await keys(store, ROLLUP)
    await store.delete(gone.raw_blob_key)

    report = await make_roller(store, manual_clock).run()

    assert (1, 1, 40) == (report.abandoned, len(report.unreadable), report.samples)
    await agrees(store, manual_clock, [("a", each) for each in kept])


async def test_a_batch_that_was_indexed_late_is_rolled_up_late(
    manual_clock: ManualClock, ids: Ids, metrics: Metrics
) -> None:
    """A batch whose collector died is found by the reconciler, waits as work, and ends in a late chunk of its hour."""
    store = MemoryStore(clock=manual_clock)
    early, late = some(0, 0), some(1, 0)
    await accept(store, frame("a", 0, early), manual_clock.now_ns() - SECOND_NS)
    await accept(store, frame("b", 0, late), manual_clock.now_ns() - SECOND_NS, indexed=False)
    await make_roller(store, manual_clock).run()
    await manual_clock.advance(7200)
    await make_roller(store, manual_clock).run()
    mender = Reconciler(runtime_on(store, manual_clock, ids=ids, metrics=metrics), overlap_s=900.0, concurrency=4)
    await mender.audit()
    both = [("a", each) for each in early] + [("b", each) for each in late]
    await agrees(store, manual_clock, both)

    report = await make_roller(store, manual_clock).run()

    assert (1, 40) == (report.late, report.samples)
    sources = await agrees(store, manual_clock, both)
    assert 0 == sources["raw"]
    assert 0 == (await make_roller(store, manual_clock).run(cold=True)).samples


async def test_what_comes_late_before_anything_is_rolled_up_is_answered(manual_clock: ManualClock) -> None:
    """A roller that found nothing has passed by all the same: what is noted as late after it is looked for."""
    store = MemoryStore(clock=manual_clock)
    await make_roller(store, manual_clock).run()
    late = some(0, 0)
    await accept(store, frame("a", 0, late), manual_clock.now_ns() - 7200 * SECOND_NS, late=True)

    await agrees(store, manual_clock, [("a", each) for each in late])
    report = await make_roller(store, manual_clock).run()

    assert (1, 40) == (report.late, report.samples)


async def test_a_cold_run_finds_what_the_steady_one_has_passed(manual_clock: ManualClock) -> None:
    """An index entry that appears behind the overlap without requesting work is found by looking at all of it."""
    store = MemoryStore(clock=manual_clock)
    await accept(store, frame("a", 0, some(0, 0)), manual_clock.now_ns() - SECOND_NS)
    await make_roller(store, manual_clock).run()
    await manual_clock.advance(7200)
    await make_roller(store, manual_clock).run()
    await accept(store, frame("b", 0, some(1, 0)), manual_clock.now_ns() - 7100 * SECOND_NS)

    steady = await make_roller(store, manual_clock).run()
    cold = await make_roller(store, manual_clock).run(cold=True)

    assert (0, 40) == (steady.samples, cold.samples)
    assert 0 == (await make_roller(store, manual_clock).run(cold=True)).samples


async def test_windows_are_fixed_by_the_first_run(manual_clock: ManualClock) -> None:
    """A window that older rollups do not have is refused, with what to do: rollups are derived, and made anew."""
    store = MemoryStore(clock=manual_clock)
    await accept(store, frame("a", 0, some(0, 0)), manual_clock.now_ns() - SECOND_NS)
    await make_roller(store, manual_clock).run()

    other = make_roller(store, manual_clock, windows_s=(10, 60))

    with pytest.raises(Invalid, match="stored rollups have"):
        await other.run()
    for prefix in (ROLLER, MANIFESTS, ROLLUP, INDEX):
        for key in await keys(store, prefix):
            await store.delete(key)
    report = await other.run()

    assert 40 == report.samples
    reported = [("a", each) for each in some(0, 0)]
    await agrees(store, manual_clock, reported, [(10, 10), (30, 10), (120, 60)])


def test_the_state_refuses_what_was_not_begun() -> None:
    """Only the generation under way can be committed; one that was abandoned never counts, and its number is gone."""
    name = f"{5:020d}-{'0' * 32}"
    first = generation(RollupState(), [name], (60,))
    begun = begin(RollupState(), first, (60,))
    second = generation(abandon(begun), [name], (60,))

    with pytest.raises(Conflict):
        commit(RollupState(), first)
    with pytest.raises(Conflict):
        begin(begun, second, (60,))
    after = commit(begin(abandon(begun), second, (60,)), second)
    assert (2, False, True, False) == (second.sequence, after.counts(1), after.counts(2), after.counts(3))


def test_the_state_stays_small_enough_to_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many generations in the overlap, and as many that were abandoned, as their limits say; more is refused."""
    monkeypatch.setattr(generations, "RECENT_MAX", 2)
    monkeypatch.setattr(generations, "ABANDONED_MAX", 2)
    state, names = RollupState(), [f"{5:020d}-{'0' * 32}"]

    def begun() -> tuple[RollupState, Generation]:
        made = generation(state, names, (60,))
        return begin(state, made, (60,)), made

    for _ in range(2):
        state = abandon(begun()[0])
    for _ in range(2):
        state = commit(*begun())

    assert (2, (1, 2)) == (len(state.recent), state.abandoned)
    with pytest.raises(Overloaded):
        abandon(begun()[0])
    with pytest.raises(Overloaded):
        commit(*begun())


async def test_what_one_generation_has_no_room_for_is_in_the_next_however_old_it_is(manual_clock: ManualClock) -> None:
    """A backlog far behind the overlap is rolled up in pieces, and nothing of it is taken for settled before."""
    store = MemoryStore(clock=manual_clock)
    metrics = Metrics()
    reported = []
    for agent in range(5):
        held = some(agent, 0)
        await accept(store, frame(f"agent-{agent}", 0, held), manual_clock.now_ns() - (7200 - agent) * SECOND_NS)
        reported += [(f"agent-{agent}", sample) for sample in held]

    report = await make_roller(store, manual_clock, batches_max=2, metrics=metrics).run()

    assert (3, 5, len(reported)) == (report.generations, report.batches, report.samples)
    assert 0.0 == metrics.value("lakebed_rollup_lag_seconds")
    await agrees(store, manual_clock, reported)


async def test_a_run_that_has_lost_its_lease_ends_while_its_engine_still_works(manual_clock: ManualClock) -> None:
    """Hours of Spark are not spent on what another owner makes."""
    store = MemoryStore(clock=manual_clock)
    await accept(store, frame("a", 0, some(0, 0)), manual_clock.now_ns() - SECOND_NS)
    job = Pausing(store)
    running = asyncio.create_task(make_roller(store, manual_clock, job=job, lease_s=60.0).run())
    await job.reached.wait()
    await store.delete(ROLLER_LEASE)
    await Lease(runtime_on(store, manual_clock), ROLLER_LEASE, owner="other", lease_s=60.0).acquire()
    await manual_clock.advance(20.0)

    with pytest.raises(Fenced):
        await asyncio.wait_for(running, 10)
    assert not job.go.is_set()


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (RollupReport(), (0, 0, True, False, "0 batches")),
        (RollupReport(batches=2, samples=20, rows=6), (20, 6, False, False, "2 batches")),
        (
            RollupReport(unreadable=[UnreadableObject("k", "corrupt")]),
            (0, 0, True, True, "0 batches, 1 are unreadable"),
        ),
    ],
)
def test_a_run_that_had_nothing_to_do_is_idle_and_one_that_left_batches_out_has_failed(
    report: RollupReport, expected: tuple[int, int, bool, bool, str]
) -> None:
    run = ActiveRun("rollups", "rollups", "batches", {})
    report.report_to(run)

    assert expected == (run.rows_in, run.rows_out, run.idle, run.failed, run.reason)


async def test_more_generations_than_one_run_makes_are_made_by_the_next_ones(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run ends, the lag says that there is more, and nothing of it is passed over."""
    monkeypatch.setattr("lakebed.rollups.roller.GENERATIONS_MAX", 2)
    store, metrics = MemoryStore(clock=manual_clock), Metrics()
    reported = []
    for agent in range(5):
        held = some(agent, 0)
        await accept(store, frame(f"agent-{agent}", 0, held), manual_clock.now_ns() - (7200 - agent) * SECOND_NS)
        reported += [(f"agent-{agent}", sample) for sample in held]
    found = []
    for _ in range(3):
        report = await make_roller(store, manual_clock, batches_max=1, metrics=metrics).run()
        found.append((report.batches, metrics.value("lakebed_rollup_lag_seconds")))

    assert [(2, 7199.0), (2, 7197.0), (1, 0.0)] == found
    await agrees(store, manual_clock, reported)


async def test_a_run_counts_what_it_rolled_up_and_shows_what_it_left_out(manual_clock: ManualClock) -> None:
    """Samples and chunks of every run; unreadable batches of the last one, until they are repaired."""
    store, metrics = MemoryStore(clock=manual_clock), Metrics()
    await accept(store, frame("a", 0, some(0, 0)), manual_clock.now_ns() - 2 * SECOND_NS)
    damaged = await accept(store, frame("b", 0, some(1, 0, 30)), manual_clock.now_ns() - SECOND_NS)
    blob = await store.get(damaged.raw_blob_key)
    await store.delete(blob.key)

    first = await make_roller(store, manual_clock, metrics=metrics).run()
    left_out = metrics.value("lakebed_rollup_unreadable_batches")
    await store.create(blob.key, blob.data)
    second = await make_roller(store, manual_clock, metrics=metrics).run()

    assert (1, 0) == (left_out, metrics.value("lakebed_rollup_unreadable_batches"))
    assert (40, 30) == (first.samples, second.samples) and first.chunks and second.chunks
    assert 70 == metrics.value("lakebed_rollup_samples_total")
    assert first.chunks + second.chunks == metrics.value("lakebed_rollup_chunks_total")
    assert len(await keys(store, ROLLUP)) == first.chunks + second.chunks


async def test_the_roller_shows_how_far_it_is_behind(manual_clock: ManualClock) -> None:
    """Time that passes while it works is time that it lags."""
    store = MemoryStore(clock=manual_clock)
    metrics = Metrics()
    await accept(store, frame("a", 0, some(0, 0)), manual_clock.now_ns() - SECOND_NS)
    job = Pausing(store)
    running = asyncio.create_task(make_roller(store, manual_clock, job=job, metrics=metrics).run())
    await job.reached.wait()
    await manual_clock.advance(7)
    job.go.set()
    await running

    assert 7.0 == metrics.value("lakebed_rollup_lag_seconds")


async def test_the_lag_of_rollups_grows_while_runs_fail(manual_clock: ManualClock) -> None:
    """From the start, or the last run that ended; where another owner is at it, how far that one has come."""
    store = MemoryStore(clock=manual_clock)
    metrics, others = Metrics(), Metrics()
    await accept(store, frame("a", 0, some(0, 0)), manual_clock.now_ns() - SECOND_NS)
    failing = make_roller(store, manual_clock, job=Failing(store), metrics=metrics)
    await manual_clock.advance(100)
    with pytest.raises(LakebedError):
        await failing.run()
    at_first = metrics.value("lakebed_rollup_lag_seconds")
    job = Pausing(store)
    other = make_roller(store, manual_clock, owner="other")
    await other.run()
    await manual_clock.advance(50)
    await accept(store, frame("b", 0, some(1, 0)), manual_clock.now_ns() - SECOND_NS)
    running = asyncio.create_task(make_roller(store, manual_clock, job=job, owner="other", metrics=others).run())
    await job.reached.wait()
    with pytest.raises(HeldByAnother):
        await failing.run()
    held = metrics.value("lakebed_rollup_lag_seconds")
    job.go.set()
    await running
    await manual_clock.advance(30)

    assert (100.0, 50.0) == (at_first, held)
    assert (80.0, 30.0) == tuple(each.value("lakebed_rollup_lag_seconds") for each in (metrics, others))


async def test_the_index_leads_to_the_blobs_that_matter(manual_clock: ManualClock) -> None:
    """One series among fifty agents costs one blob, not fifty: counted in reads of the store."""
    store = MemoryStore(clock=manual_clock)
    for agent in range(50):
        await accept(store, frame(f"agent-{agent}", 0, some(agent, 0)), manual_clock.now_ns() - (agent + 1) * SECOND_NS)
    await make_roller(store, manual_clock).run()
    await manual_clock.advance(3600)
    await make_roller(store, manual_clock).run()
    counting: Any = Counting(store)
    from lakebed.batches.matchers import Selector, parse
    from lakebed.batches.query import Querier

    querier = Querier(make_sources(counting, manual_clock), points_max=10_000, clock=manual_clock)
    answer = await querier.range(Selector("cpu", [parse("agent_id=agent-7"), parse("c=1")]), HOUR_NS, END_NS)

    (series,) = answer.series
    assert (20, {"live": 0, "spool": 0, "raw": 1}) == (len(series.points), answer.sources)
    assert 1 == len([key for key in counting.gets if key.startswith(paths.RAW_BLOBS)])
    assert [] == [key for key in counting.gets if key.startswith(paths.ACCEPTED_BY_TIME)]
    assert len(counting.gets) <= 5  # the state, an index chunk of each of two hours, the blob


class Counting:
    """A store that notes what is read."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.gets: list[str] = []

    async def get(self, key: str) -> Any:
        self.gets.append(key)
        return await self._store.get(key)

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._store, verb)


class Pausing(LocalJob):
    """An engine that stops before it writes."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def write(self, generation_id: str) -> list[StoredChunk]:
        self.reached.set()
        await self.go.wait()
        return await super().write(generation_id)


async def test_a_note_is_found_whose_store_has_a_slower_clock(manual_clock: ManualClock) -> None:
    """Notes have the store's time: one that comes after a run, dated before it, is taken by the next."""
    behind = ManualClock(manual_clock.now_ns() - 60 * SECOND_NS)
    store = MemoryStore(clock=behind)
    await accept(store, frame("a", 0, some(0, 0)), manual_clock.now_ns() - SECOND_NS)
    await make_roller(store, manual_clock).run()
    await manual_clock.advance(3 * 3600)
    await behind.advance(3 * 3600)
    await make_roller(store, manual_clock).run()
    late = some(1, 0)
    await accept(store, frame("late", 0, late), manual_clock.now_ns() - 2 * 3600 * SECOND_NS, late=True)

    report = await make_roller(store, manual_clock).run()

    assert (1, len(late)) == (report.late, report.samples)


def test_a_generation_is_recent_while_one_of_its_batches_is_not_settled() -> None:
    """A batch that was accepted at the very instant of what is settled is looked up among the recent ones."""
    made = [Generation(n, "d", at_ns, at_ns) for n, at_ns in enumerate((99, 100, 101), 1)]
    state = RollupState(committed=3, recent=tuple(made))

    after = advance(state, 150, 0, 50)

    assert (100, tuple(made[1:])) == (after.settled_ns, after.recent)

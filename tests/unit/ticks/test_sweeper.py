"""What is cleared away and what is not: abandoned uploads, parts in bronze, orphans, old states."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Unavailable
from lakebed.ticks.adapters import open_audit, open_queue
from lakebed.ticks.audit import COMMITTED
from lakebed.ticks.model import TickId
from lakebed.ticks.receiver import register_of
from lakebed.ticks.sweeper import TickSweeper
from lakebed.ticks.workers import workers
from support.tick_fixtures import ORG, PROJECT, TICK, Service, context_of, manifest, parquet

DAY_S = 86_400.0
OF = TickId(ORG, PROJECT, TICK)


@pytest.fixture
async def service(manual_clock: ManualClock) -> Service:
    made = Service(context_of(clock=manual_clock))
    await made.issue()
    return made


async def parts(service: Service) -> list[str]:
    return [info.key async for info in service.context.store.list("ticks/v1/parts/")]


async def test_an_abandoned_upload_expires_and_can_be_begun_again(service: Service, manual_clock: ManualClock) -> None:
    """After its time the parts are gone and the state gives the reason; a new PUT opens the tick again."""
    manifest_ = await service.upload()
    sweeper = TickSweeper(service.context)
    await manual_clock.advance(6 * DAY_S)
    await sweeper.round()
    kept = await parts(service)
    await manual_clock.advance(2 * DAY_S)

    await sweeper.round()
    state = (await register_of(service.context, OF).read()).value
    gone = await parts(service)
    lost = await service.finalize(manifest_)
    await service.upload()
    again = await service.finalize(manifest_)

    assert (2, []) == (len(kept), gone)
    assert ("failed", "expired") == (state.state, state.failure and state.failure.error_class)
    assert (409, [1, 2], 200) == (lost.status_code, lost.json()["missing"], again.status_code)


async def test_what_is_no_ticks_is_left_alone_and_stops_nothing(service: Service, manual_clock: ManualClock) -> None:
    """Somebody's file among the states or the parts: what the sweep is for is swept all the same."""
    names = ("state/note.txt", "state/acme/note.txt", "parts/note.txt", "parts/a/b.txt")
    others = {f"ticks/v1/{name}" for name in names}
    for key in others:
        await service.context.store.create(key, b"mine")
    await service.upload()
    await manual_clock.advance(31 * DAY_S)

    await TickSweeper(service.context).round()

    assert "failed" == (await register_of(service.context, OF).read()).value.state
    assert {key for key in others if "/parts/" in key} == set(await parts(service))


async def test_parts_of_a_committed_tick_go_and_its_answer_stays(service: Service, manual_clock: ManualClock) -> None:
    """A day after the commit the parts are only in bronze; a month later the answer still comes."""
    manifest_ = await service.upload()
    first = await service.finalize(manifest_)
    sweeper = TickSweeper(service.context)
    await sweeper.round()
    kept = await parts(service)

    await manual_clock.advance(1.1 * DAY_S)
    await sweeper.round()
    gone = await parts(service)
    await manual_clock.advance(31 * DAY_S)
    await sweeper.round()
    states = [info.key async for info in service.context.store.list("ticks/v1/state/")]

    assert (2, [], []) == (len(kept), gone, states)
    assert first.json() == (await service.finalize(manifest_)).json()


async def test_only_orphans_older_than_any_upload_are_swept(service: Service, manual_clock: ManualClock) -> None:
    """Bytes that a slow writer has not registered yet stay; those of a dead one go; named parts always stay."""
    await service.put(1, parquet([1]))
    await service.context.store.create("ticks/v1/parts/acme/p-1/other/000001-a-b.parquet", b"half a tick")
    sweeper = TickSweeper(service.context)
    await sweeper.round()
    young = await parts(service)

    await manual_clock.advance(DAY_S)
    await sweeper.round()

    assert (2, 1) == (len(young), len(await parts(service)))
    assert 1 == service.context.metrics.value("lakebed_ticks_swept_total", why="orphan")


async def test_parts_are_kept_a_day_from_the_commit_however_old_they_are(
    service: Service, manual_clock: ManualClock
) -> None:
    """A tick that was uploaded days before its finalize keeps its parts as long as any other."""
    manifest_ = await service.upload()
    await manual_clock.advance(3 * DAY_S)
    assert 200 == (await service.finalize(manifest_)).status_code
    sweeper = TickSweeper(service.context)

    await manual_clock.advance(0.9 * DAY_S)
    await sweeper.round()
    kept = await parts(service)
    await manual_clock.advance(0.2 * DAY_S)
    await sweeper.round()

    assert (2, []) == (len(kept), await parts(service))


async def test_a_tick_that_was_opened_again_after_it_expired_expires_again(
    service: Service, manual_clock: ManualClock
) -> None:
    """What a sweeper remembers of a tick is over as soon as the tick changes."""
    sweeper = TickSweeper(service.context)
    await service.upload()
    for _ in range(3):  # expires, is swept, and is remembered as settled
        await manual_clock.advance(8 * DAY_S)
        await sweeper.round()
    await service.upload()
    await manual_clock.advance(8 * DAY_S)

    await sweeper.round()

    state = (await register_of(service.context, OF).read()).value
    assert ("failed", {}, 2) == (
        state.state, state.parts, service.context.metrics.value("lakebed_ticks_expired_total"),
    )  # fmt: skip
    assert [] == await parts(service)


@pytest.mark.parametrize("whose", [("acme", "p-2"), ("zeta", PROJECT), ("aaaa", PROJECT)])
async def test_a_tick_of_the_same_name_in_another_project_keeps_its_parts(
    service: Service, manual_clock: ManualClock, whose: tuple[str, str]
) -> None:
    """One was committed long ago, the other, of another project or org, is being uploaded: its parts stay."""
    org, project = whose
    await service.issue(org, project)
    assert 200 == (await service.finalize(await service.upload())).status_code
    manifest_ = await service.upload(org=org, project=project)
    await manual_clock.advance(2 * DAY_S)

    await TickSweeper(service.context).round()
    left = await parts(service)
    late = await service.finalize(manifest_, org=org, project=project)

    assert 2 == len(left) and all(key.startswith(f"ticks/v1/parts/{org}/{project}/") for key in left)
    assert 200 == late.status_code


@pytest.mark.parametrize("step", ["bronze", "queue", "committed"])
async def test_a_finalize_that_nobody_comes_back_to_is_finished(
    service: Service, manual_clock: ManualClock, step: str
) -> None:
    """Bronze was written, or the record was, and the agent is gone: the sweeper's loop commits it, once."""
    seam = {"bronze": service.bronze, "queue": service.queue, "committed": service.committed}[step]
    seam.before = {"send": 1, "create": 1}
    seam.after = {"commit": 1}
    manifest_ = await service.upload()
    assert 503 == (await service.finalize(manifest_)).status_code
    seam.before.clear()
    sweep = next(each for each in workers(service.context, service.bronze)
                 if each.name == "ticks-sweeper")  # fmt: skip
    task = asyncio.create_task(sweep.run())

    await manual_clock.advance(600.0)
    young = (await register_of(service.context, OF).read()).value.state
    await manual_clock.advance(900.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    state = (await register_of(service.context, OF).read()).value
    late = await service.finalize(manifest_)

    assert ("finalizing", "committed") == (young, state.state)
    assert (200, 5, 5) == (late.status_code, late.json()["rows_inserted"], len(await service.rows()))
    assert 1 == service.context.metrics.value("lakebed_ticks_finished_total")
    assert await open_audit(service.context, COMMITTED).get(OF) is not None
    assert 1 <= (await open_queue(service.context).depth()).waiting


async def test_a_finish_that_failed_is_tried_again_by_the_next_round(
    service: Service, manual_clock: ManualClock
) -> None:
    """A tick that could not be swept is not taken for one that nothing changes any more."""
    service.bronze.after = {"commit": 1}
    assert 503 == (await service.finalize(await service.upload())).status_code
    outages = [Unavailable("bronze is away")]

    async def finish(of: TickId, body: bytes) -> None:
        if outages:
            raise outages.pop()
        assert 200 == (await service.finalize(body, tick=of.tick_id)).status_code

    sweeper, states = TickSweeper(service.context, finish=finish), list[str]()
    await manual_clock.advance(DAY_S)
    for _ in range(2):
        await sweeper.round()
        states.append((await register_of(service.context, OF).read()).value.state)
        await manual_clock.advance(60.0)

    assert ["finalizing", "committed"] == states


async def test_a_late_finalize_with_other_parts_is_refused_when_only_the_record_is_left(
    service: Service, manual_clock: ManualClock
) -> None:
    """A month later: the same parts get their answer, others get the error that this tick was another."""
    manifest_ = await service.upload()
    first = await service.finalize(manifest_)
    await manual_clock.advance(32 * DAY_S)
    await TickSweeper(service.context).round()
    other = {1: parquet([9]), 2: parquet([8])}
    for seq, data in other.items():
        await service.put(seq, data)

    refused = await service.finalize(manifest(other, {1: 1, 2: 1}))

    assert (422, "other_manifest") == (refused.status_code, refused.json()["error_class"])
    assert first.json() == (await service.finalize(manifest_)).json()


@pytest.mark.parametrize("after_s", [0.0, 31 * DAY_S, 400 * DAY_S])
async def test_changed_parts_and_another_manifest_of_a_committed_tick_are_refused_for_ever(
    service: Service, manual_clock: ManualClock, after_s: float
) -> None:
    """Also once its state was swept, and again after a repeat that recreated it: the commit record decides."""
    manifest_ = await service.upload()
    first = await service.finalize(manifest_)
    renamed = {**manifest_, "tables": [{**manifest_["tables"][0], "name": "other"}]}
    await manual_clock.advance(after_s)
    await TickSweeper(service.context).round()

    changed = await service.put(1, parquet([9]))
    added = await service.put(7, parquet([9]))
    same = await service.put(1, parquet([1, 2, 3]))
    answers = [await service.finalize(each) for each in (renamed, b"no json", manifest_, renamed, b"no json")]

    assert (409, 409, 200) == (changed.status_code, added.status_code, same.status_code)
    assert [422, 422, 200, 422, 422] == [each.status_code for each in answers]
    assert first.json() == answers[2].json()
    assert [] == [key for key in await parts(service) if after_s]


async def test_a_state_without_its_manifest_is_compared_by_the_commit_record(service: Service) -> None:
    """Earlier versions did not pin the manifest: another one is refused all the same."""
    manifest_ = await service.upload()
    first = await service.finalize(manifest_)
    (key,) = [info.key async for info in service.context.store.list("ticks/v1/state/")]
    stored = await service.context.store.get(key)
    state = {**msgspec.json.decode(stored.data), "manifest": None}
    await service.context.store.replace(key, msgspec.json.encode(state), stored.etag)
    renamed = {**manifest_, "tables": [{**manifest_["tables"][0], "name": "other"}]}

    answers = [await service.finalize(each) for each in (renamed, manifest_)]

    assert [422, 200] == [each.status_code for each in answers]
    assert first.json() == answers[1].json()


async def test_notes_of_commits_expire_with_their_audit_rows(service: Service, manual_clock: ManualClock) -> None:
    """The audit's retention is theirs."""
    await service.finalize(await service.upload())
    kept = [info.key async for info in service.context.store.list("ticks/v1/audit/times/")]
    await manual_clock.advance(31 * DAY_S)

    await TickSweeper(service.context, audits=[open_audit(service.context, COMMITTED)]).round()

    assert (1, []) == (len(kept), [info.key async for info in service.context.store.list("ticks/v1/audit/times/")])

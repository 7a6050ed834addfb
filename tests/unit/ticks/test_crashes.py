"""Each row of the scenario table that a failing step can show: the agent's retry finishes what was begun, once.

The ones that need a process to die are in tests/integration/test_ticks_processes.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Unavailable
from lakebed.core.runs import RunReader
from lakebed.gateway.state import state_of
from lakebed.ticks import paths
from lakebed.ticks.audit import COMMITTED, AuditRow
from lakebed.ticks.audit.bucket import BucketAudit
from lakebed.ticks.fakes import FakeBronze
from lakebed.ticks.finalizer import FOOTERS_AT_ONCE
from lakebed.ticks.model import TickId
from lakebed.ticks.queue.sqs import SqsQueue
from lakebed.ticks.receiver import register_of
from lakebed.ticks.routes import FINALIZE_S
from lakebed.ticks.settings import TicksSettings
from support.tick_fixtures import ORG, PROJECT, TICK, CountingBronze, Service, context_of, manifest, parquet, serving

OF = TickId(ORG, PROJECT, TICK)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving(context_of()) as made:
        yield made


async def messages(service: Service) -> list[Any]:
    return [each.message() for each in await service.queue.inner.receive(10)]


async def audit(service: Service) -> AuditRow | None:
    return await BucketAudit(service.context, COMMITTED).get(OF)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("seam", "step"), [("bronze", "commit"), ("queue", "send"), ("committed", "create")])
async def test_a_step_that_fails_is_5xx_and_the_retry_finishes_once(
    service: Service, seam: str, step: str, when: str
) -> None:
    """Whichever step fails, and whether it had taken place: the retry answers 200 with the rows counted once."""
    manifest_ = await service.upload()
    getattr(getattr(service, seam), when)[step] = 1

    failed = await service.finalize(manifest_)
    retried, again = await service.finalize(manifest_), await service.finalize(manifest_)

    assert (503, 200, 200) == (failed.status_code, retried.status_code, again.status_code)
    assert (5, 0) == (retried.json()["rows_inserted"], retried.json()["rows_replaced"])
    (run,) = await RunReader(service.context, "ticks").latest(9)
    assert ("finalize", "failed", OF.path) == (run.kind, run.state, run.subject)
    assert retried.content == again.content
    assert 5 == len(await service.rows())
    sent = await messages(service)
    assert {TICK} == {message.tick_id for message in sent}
    row = await audit(service)
    assert row is not None
    assert 5 == row.fields["rows_inserted"]


async def test_the_lag_of_a_finalize_that_was_finished_later_counts_from_its_commit(
    manual_clock: ManualClock,
) -> None:
    """The audit row carries the moment of the commit record, however long after it the retry wrote the row."""
    async with serving(context_of(clock=manual_clock)) as service:
        said = await service.upload()
        service.committed.before["create"] = 1
        committed_ms = manual_clock.now_ns() // 10**6
        failed = await service.finalize(said)
        await manual_clock.advance(1800.0)

        retried = await service.finalize(said)
        row = await audit(service)

    assert (503, 200) == (failed.status_code, retried.status_code)
    assert row is not None
    assert committed_ms == row.at_ms


async def test_nothing_is_sent_or_written_before_bronze_is(service: Service) -> None:
    """Bronze fails: no commit record, no message, no audit row."""
    manifest_ = await service.upload()
    service.bronze.before["commit"] = 1

    await service.finalize(manifest_)

    assert ([], None) == (await messages(service), await audit(service))
    assert [] == [info.key async for info in service.context.store.list("ticks/v1/commits/")]


async def test_the_message_carries_the_version_that_was_committed(service: Service) -> None:
    """The seed's body, with the table's version where it has the etag."""
    await service.finalize(await service.upload())

    (message,) = await messages(service)

    assert ("1.0", ORG, PROJECT, TICK, "delta") == (
        message.schema_version, message.org_id, message.project_id, message.tick_id, message.mode,
    )  # fmt: skip
    assert {"orders": 0} == message.versions
    assert f"tables/bronze/ticks/{ORG}/{PROJECT}" == message.bronze_db_key


async def test_parts_that_were_there_before_a_crash_are_not_sent_again(service: Service) -> None:
    """Another replica, knowing nothing but the bucket, takes the rest of the parts and finalizes."""
    data = {1: parquet([1]), 2: parquet([2])}
    await service.put(1, data[1])
    other = Service(context_of(service.context.store, node="node-2", seed=2))
    other.secrets = service.secrets

    present, missing = await other.put(1, data[1]), await other.put(2, data[2])
    done = await other.finalize(manifest(data, {1: 1, 2: 1}))
    await other.routes.stop()

    assert (200, 202, 200) == (present.status_code, missing.status_code, done.status_code)
    assert 2 == done.json()["rows_inserted"]


async def test_footers_of_many_parts_are_read_side_by_side(service: Service) -> None:
    """A tick of 2,000 parts must be verified within the time of a finalize: one by one they alone take longer."""
    bodies = {seq: parquet([seq]) for seq in range(1, 25)}
    for seq, data in bodies.items():
        assert 202 == (await service.put(seq, data)).status_code
    store: Any = service.context.store
    at_once = most = 0
    get_range = store.get_range

    async def slow(*given: Any) -> bytes:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        found: bytes = await get_range(*given)
        return found

    store.get_range = slow
    answer = await service.finalize(manifest(bodies, dict.fromkeys(bodies, 1)))

    assert (200, 24) == (answer.status_code, answer.json()["rows_inserted"])
    assert FOOTERS_AT_ONCE == most


async def test_a_part_whose_bytes_are_gone_is_missing_and_can_be_put_again(service: Service) -> None:
    """Even when the bucket lost it: 409 names it, a PUT brings it back."""
    manifest_ = await service.upload()
    state = (await register_of(service.context, OF).read()).value
    await service.context.store.delete(state.parts["2"].key)

    lost = await service.finalize(manifest_)
    put = await service.put(2, parquet([4, 5]))
    done = await service.finalize(manifest_)

    assert (409, [2]) == (lost.status_code, lost.json()["missing"])
    assert (202, 200) == (put.status_code, done.status_code)


async def test_a_commit_record_without_its_state_still_answers(service: Service) -> None:
    """States are swept after a month; the record gives the same counts to a very late retry."""
    manifest_ = await service.upload()
    first = await service.finalize(manifest_)
    await service.context.store.delete(paths.state(OF))

    late = await service.finalize(manifest_)

    assert (200, first.json()) == (late.status_code, late.json())
    assert 1 == service.bronze.calls["commit"]


async def test_a_replica_that_lost_its_project_is_fenced_and_the_other_commits_once() -> None:
    """A replica sleeps in the middle of its commit past its lease; the next owner finishes; the sleeper is told 503."""
    clock = ManualClock()
    context = context_of(clock=clock, lease_s=2.0, retry_after_s=0.1)
    going, may_end = asyncio.Event(), asyncio.Event()
    inner = FakeBronze(context)

    class Sleeper:
        async def commit(self, tick: Any) -> Any:
            going.set()
            await may_end.wait()
            return await inner.commit(tick)

    slow = Service(context, bronze=Sleeper())  # its keeper does not run: the lease is not renewed
    await slow.issue()
    other = Service(context_of(context.store, clock=clock, node="node-2", seed=2, lease_s=2.0))
    other.secrets = slow.secrets
    manifest_ = await slow.upload()
    first = asyncio.create_task(slow.finalize(manifest_))
    await going.wait()

    early = await other.finalize(manifest_)
    for _ in range(100):
        if (taken := await other.finalize(manifest_)).status_code != 425:
            break
        await clock.advance(0.1)
    may_end.set()
    late = await first
    again = await slow.finalize(manifest_)

    assert (425, 200, 503) == (early.status_code, taken.status_code, late.status_code)
    assert taken.content == again.content
    assert 5 == len(await other.rows())


async def test_a_finalize_under_way_at_a_stop_has_30_seconds_and_is_then_left_to_another_replica() -> None:
    """Only a stop limits it: then 503 after 30 s, and while the first still drains another replica commits once."""
    clock = ManualClock()
    context = context_of(clock=clock)
    going = asyncio.Event()

    class Endless:
        async def commit(self, tick: Any) -> Any:
            going.set()
            await asyncio.Event().wait()

    async with serving(context, bronze=Endless()) as stopped:
        other = Service(context_of(context.store, clock=clock, node="node-2", seed=2))
        other.secrets = stopped.secrets
        manifest_ = await stopped.upload()
        first = asyncio.create_task(stopped.finalize(manifest_))
        await going.wait()
        await clock.advance(100.0)
        unlimited = not first.done()

        state_of(stopped.app).stopping.set()
        await clock.advance(FINALIZE_S - 0.1)
        within = not first.done()
        await clock.advance(0.2)
        assert first.done()
        early = await other.finalize(manifest_)
        await clock.advance(TicksSettings().lease_s)
        taken = await other.finalize(manifest_)

    assert (True, True, 30.0) == (unlimited, within, FINALIZE_S)
    assert (503, "unavailable") == ((await first).status_code, (await first).json()["code"])
    assert (425, 200, 5) == (early.status_code, taken.status_code, len(await other.rows()))


async def test_a_finalize_that_ends_within_the_drain_answers_as_ever() -> None:
    """A stop does not cut it, and nothing of the budget is left behind."""
    clock = ManualClock()
    context = context_of(clock=clock)
    going, may_end = asyncio.Event(), asyncio.Event()
    inner = FakeBronze(context)

    class Slow:
        async def commit(self, tick: Any) -> Any:
            going.set()
            await may_end.wait()
            return await inner.commit(tick)

    async with serving(context, bronze=Slow()) as service:
        before = asyncio.all_tasks()
        manifest_ = await service.upload()
        first = asyncio.create_task(service.finalize(manifest_))
        await going.wait()
        state_of(service.app).stopping.set()
        await clock.advance(FINALIZE_S - 1)
        may_end.set()

        assert (200, 5) == ((await first).status_code, (await first).json()["rows_inserted"])
        assert before == asyncio.all_tasks()


async def test_ten_finalizes_of_one_org_run_one_after_another() -> None:
    """All its projects take turns in a replica, counted at the bronze seam."""
    context = context_of()
    bronze = CountingBronze(FakeBronze(context))
    async with serving(context, bronze=bronze) as service:
        projects = [f"p-{n}" for n in range(10)]
        for project in projects:
            await service.issue(ORG, project)
        manifest_ = {project: await service.upload(project=project) for project in projects}

        answers = await asyncio.gather(*(service.finalize(manifest_[p], project=p) for p in projects))

    assert [200] * 10 == [answer.status_code for answer in answers]
    assert (10, 1) == (bronze.commits, bronze.most_of_an_org)


async def test_ten_orgs_run_beside_each_other() -> None:
    """No org waits for another: all ten are in bronze at the same moment."""
    context = context_of()
    together = asyncio.Barrier(10)
    bronze = CountingBronze(FakeBronze(context), together.wait)
    async with serving(context, bronze=bronze) as service, asyncio.timeout(100):
        orgs = [f"org-{n}" for n in range(10)]
        for org in orgs:
            await service.issue(org, PROJECT)
        manifest_ = {org: await service.upload(org=org) for org in orgs}

        answers = await asyncio.gather(*(service.finalize(manifest_[org], org=org) for org in orgs))

    assert [200] * 10 == [answer.status_code for answer in answers]
    assert (10, 1) == (bronze.most, bronze.most_of_an_org)


async def test_once_bronze_may_have_the_rows_another_manifest_is_refused(service: Service) -> None:
    """Bronze took the tick and the answer was lost: no other manifest, wrong or right, takes its place."""
    manifest_ = await service.upload()
    service.bronze.after["commit"] = 1
    assert 503 == (await service.finalize(manifest_)).status_code

    wrong = await service.finalize(b"{}")
    changed = {**manifest_, "agent": "another"}
    other, part = await service.finalize(changed), await service.delete(2)
    first = await service.finalize(manifest_)

    assert (422, 422, 425) == (wrong.status_code, other.status_code, part.status_code)
    assert "other_manifest" == other.json()["error_class"]
    assert (200, 5) == (first.status_code, first.json()["rows_inserted"])


class DyingSqs:
    """Dead letters and what was sent, of a client whose process dies at one of its calls: before it, or behind it."""

    def __init__(self, letters: list[str], dies_at: int, *, done: bool) -> None:
        self.dead, self.sent = list(letters), list[str]()
        self._left, self._done = dies_at, done

    def _call(self, effect: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left == 0 and not self._done:
            raise BotoCoreError()
        found = effect()
        if self._left == 0:
            raise BotoCoreError()
        return found

    def receive_message(self, **_: Any) -> Any:
        def received() -> Any:
            return {"Messages": [{"MessageId": one, "ReceiptHandle": one, "Body": one} for one in self.dead]}

        return self._call(received)

    def send_message(self, *, MessageBody: str, **_: Any) -> Any:
        return self._call(lambda: self.sent.append(MessageBody))

    def delete_message(self, *, ReceiptHandle: str, **_: Any) -> Any:
        return self._call(lambda: self.dead.remove(ReceiptHandle))

    def change_message_visibility(self, **_: Any) -> Any:
        return self._call(lambda: None)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("dies_at", range(1, 7))
async def test_a_replay_on_sqs_that_dies_at_any_call_loses_no_message(dies_at: int, done: bool) -> None:
    """Each dead letter is in the queue again or still a dead letter; at worst it is both."""
    letters = ["a", "b"]
    sqs = DyingSqs(letters, dies_at, done=done)
    queue = SqsQueue(TicksSettings())
    queue._opened = (sqs, "queue", "dead")

    with suppress(Unavailable):
        await queue.replay(count=2)

    assert set(letters) == {*sqs.sent, *sqs.dead}

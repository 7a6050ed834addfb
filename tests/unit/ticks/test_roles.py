"""The roles of ticks: what they count, show, keep and send again, on a clock that moves on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Conflict, Denied, Invalid, NotFound, TooLarge, Unauthenticated, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Secret
from lakebed.store.lease import Lease
from lakebed.ticks import dispatcher, paths, uploader, view
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import COMMITTED, DISPATCHED, AuditRow
from lakebed.ticks.auditor import DispatchAuditor
from lakebed.ticks.dispatcher import Dispatcher
from lakebed.ticks.fakes import FakeSilverJob
from lakebed.ticks.folder_uploader import PAUSE_CAP_S, REFUSED, SENT, STUCK, FolderUploader
from lakebed.ticks.model import (
    BronzeResult,
    CommitRecord,
    FinalizeResult,
    StoredPart,
    TickFailure,
    TickId,
    TickMessage,
    TickState,
)
from lakebed.ticks.outbox import Outbox, OutboxTick
from lakebed.ticks.packing import PackedTick
from lakebed.ticks.receiver import register_of
from lakebed.ticks.sweeper import TickSweeper
from lakebed.ticks.uploader import FailedManual, Uploader
from lakebed.ticks.view import project_status
from support.tick_fixtures import ORG, PROJECT, Service, context_of, parquet, serving, sha
from support.tick_folders import Site
from support.tick_uploads import NoWait


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(context_of()) as service:
        yield Site(service, tmp_path)


def ticks_of(site: Site, outcome: str) -> float:
    return site.service.context.metrics.value("lakebed_agent_ticks_total", outcome=outcome)


def waiting_of(site: Site, state: str) -> float:
    return site.service.context.metrics.value("lakebed_agent_waiting_ticks", project=PROJECT, state=state)


async def test_a_courier_counts_what_it_brought_and_what_waits(site: Site) -> None:
    """Committed and refused ticks by outcome, waiting ones by state; the alert names how many."""
    site.drop("t-1", [1])
    (site.drop("t-2", [2]) / "orders.parquet").write_text("no parquet")
    (site.drop("t-3", [3]) / "orders.parquet").write_text("no parquet")
    folder_uploader_ = site.courier()
    await folder_uploader_.round()
    await folder_uploader_.round()

    assert (1.0, 2.0) == (ticks_of(site, "committed"), ticks_of(site, "failed_manual"))
    assert (0.0, 2.0) == (waiting_of(site, "ready"), waiting_of(site, "failed_manual"))
    assert f"2 ticks of {PROJECT} were refused" == site.alerts[REFUSED]


async def test_what_waits_is_ready_while_the_service_is_gone(site: Site) -> None:
    """The alert gives the reason; nothing after the failing tick is tried in this round."""
    for name in ("t-1", "t-2"):
        site.drop(name, [1])
    for wire in site.wires:
        wire.bend = lambda request: None
    folder_uploader_ = site.courier()

    assert 0 == await folder_uploader_.round()
    assert (2.0, [STUCK]) == (waiting_of(site, "ready"), list(site.alerts))
    assert [1, 0] == [each.tries for each in site.outbox.waiting()]
    assert "failed 3 times" in site.alerts[STUCK]


async def test_a_tick_that_is_denied_holds_up_no_other(site: Site) -> None:
    """It waits for the right secret; the next one gets through, and the alert stays on."""
    site.drop("t-1", [1]), site.drop("t-2", [2])

    def bend(request: httpx2.Request) -> httpx2.Request:
        if "t-1" in request.url.path:
            request.headers["x-api-secret"] = "wrong"
        return request

    site.wires[0].bend = bend
    folder_uploader_ = site.courier()
    committed = await folder_uploader_.round()
    site.wires[0].bend = lambda request: request
    after = (committed, list(site.alerts), await folder_uploader_.round())

    assert (1, [STUCK], 1) == after
    assert {} == site.alerts


async def test_folders_are_packed_with_the_couriers_keys_mode_and_day(site: Site) -> None:
    """The folder's name is the tick's id, the day is that of the clock."""
    site.drop("t-1", [1])
    site.wires[0].bend = lambda request: None
    runtime = Runtime(clock=ManualClock(), ids=Ids(), metrics=site.service.context.metrics)
    one = site.courier()
    made = FolderUploader(
        site.folder, site.outbox, one._uploaders, runtime, project_id=PROJECT, keys={"orders": ["note"]}, mode="full",
    )  # fmt: skip
    await made.round()

    (waiting,) = site.outbox.waiting()
    manifest_ = msgspec.json.decode(waiting.packed.manifest)
    assert ("t-1", PROJECT, "20251009") == (manifest_["tick_id"], manifest_["project_id"], manifest_["dt"])
    assert ("full", ["note"]) == (manifest_["tables"][0]["mode"], manifest_["tables"][0]["primary_keys"])
    assert str(site.folder / "t-1") == waiting.folder


async def test_two_folders_cannot_bring_one_tick(site: Site) -> None:
    """The second is refused under its own name, and nothing of it is sent."""
    from lakebed.ticks.packing import MANIFEST_FILE, find, pack

    for name in ("a", "b"):
        folder = site.drop(name, [1], ready=False)
        reported = pack(find([folder]), project_id=PROJECT, tick_id="same", dt="20261115", keys={"": ["id"]})
        (folder / MANIFEST_FILE).write_text(reported.manifest)
    site.wires[0].bend = site.wires[1].bend = lambda request: None
    await site.courier().round()

    found = {each.packed.tick_id: (each.state, each.message) for each in site.outbox.waiting()}
    assert ("ready", "") == found["same"]
    assert ("failed_manual", "tick same waits already, from another folder") == found["b"]


async def test_a_kept_folder_replaces_the_one_of_the_same_name(site: Site) -> None:
    """What a kill left in the folder of sent ticks is cleared, unless it is kept."""
    stale = site.folder / SENT / "t-1"
    stale.mkdir(parents=True)
    (stale / "old").touch()
    site.drop("t-1", [1])
    await site.courier(keep=True).round()
    kept = [path.name for path in stale.iterdir()]
    await site.courier(keep=False).round()

    assert "orders.parquet" in kept and "old" not in kept
    assert not stale.exists()


async def test_pauses_grow_while_nothing_gets_through(site: Site) -> None:
    """Doubled each time up to a minute; an interval of its own when longer; the first after a success again."""
    pauses: list[float] = []

    class Clock(NoWait):
        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 8:
                site.wires[0].bend = site.wires[1].bend = lambda request: request
            if len(pauses) == 10:
                raise asyncio.CancelledError

    site.drop("t-1", [1])
    site.wires[0].bend = site.wires[1].bend = lambda request: None
    one = site.courier()
    for interval_s, expected in ((5.0, [10.0, 20.0, 40.0, 60.0, 60.0, 60.0, 60.0, 60.0, 5.0, 5.0]), (90.0, [90.0])):
        pauses.clear()
        made = FolderUploader(
            site.folder, site.outbox, one._uploaders, Runtime(clock=Clock(), ids=Ids(), metrics=Metrics()),
            project_id=PROJECT, keys={"": ["id"]}, interval_s=interval_s,
        )  # fmt: skip
        with pytest.raises(asyncio.CancelledError):
            await made.run()
        assert expected == pauses[: len(expected)]
    assert 60.0 == PAUSE_CAP_S


async def test_the_status_of_a_project_has_every_field(manual_clock: ManualClock) -> None:
    """Counts by state, the size of parts, rows of committed ticks, why one failed, and who owns the project."""
    context = context_of(clock=manual_clock)
    part = StoredPart("a" * 64, 10, 5, "k")
    states = [
        TickState(tick_id="20250101T000001__a", state="uploading", parts={"1": part, "2": part}, updated_at_ms=7),
        TickState(tick_id="20250101T000002__b", state="committed", result=FinalizeResult("b", "committed", 3, 1, "at")),
        TickState(tick_id="20250101T000003__c", state="failed", failure=TickFailure("bad", "no")),
        TickState(tick_id="", state="uploading"),
    ]
    for number, state in enumerate(states):
        of = TickId(ORG, PROJECT, state.tick_id or f"20250101T00000{number}__x")
        await register_of(context, of).change(lambda _, state=state: (state, None))  # type: ignore[misc]
    unowned = await project_status(context, ORG, PROJECT)
    lease = Lease(
        msgspec.structs.replace(context, clock=manual_clock), paths.lease(ORG, PROJECT), owner="node-9", lease_s=10.0
    )
    await lease.acquire()
    owned = (await project_status(context, ORG, PROJECT)).owner
    await manual_clock.advance(11.0)
    expired = (await project_status(context, ORG, PROJECT)).owner

    failed, committed, uploading = unowned.ticks
    assert (ORG, PROJECT, "") == (unowned.org_id, unowned.project_id, unowned.owner)
    assert {"uploading": 1, "committed": 1, "failed": 1} == unowned.states
    assert ("uploading", 2, 20, 7, None, None) == (
        uploading.state, uploading.parts, uploading.size_bytes, uploading.updated_at_ms, uploading.rows_inserted,
        uploading.error_class,
    )  # fmt: skip
    assert (3, 1, None) == (committed.rows_inserted, committed.rows_replaced, committed.message)
    assert ("bad", "no", None) == (failed.error_class, failed.message, failed.rows_inserted)
    assert ("node-9", "") == (owned, expired)
    assert ("19700101T000000", "20251009T085320") == (view._stamp(-5.0), view._stamp(1_760_000_000.0))


def requests(answers: list[httpx2.Response | Exception]) -> tuple[Uploader, list[httpx2.Request], list[float]]:
    """An uploader whose service answers by script; its requests and its pauses."""
    seen: list[httpx2.Request] = []
    pauses: list[float] = []

    async def handler(request: httpx2.Request) -> httpx2.Response:
        await request.aread()
        seen.append(request)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    class Clock(NoWait):
        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)

    class Jitter(Ids):
        def jitter_s(self, attempt: int, *, base_s: float, cap_s: float) -> float:
            return min(cap_s, base_s * 2.0**attempt)

    http = httpx2.AsyncClient(transport=httpx2.MockTransport(handler), base_url="http://gw")
    return Uploader(http, Runtime(clock=Clock(), ids=Jitter(), metrics=Metrics()), tries_max=4), seen, pauses


OK = httpx2.Response(200, json=msgspec.to_builtins(FinalizeResult("t-1", "committed", 1, 0, "at")))
EMPTY = PackedTick("t-1", "shop", '{"tables":[]}', {})


async def test_requests_are_tried_again_with_growing_pauses(manual_clock: ManualClock) -> None:
    """Broken lines, 5xx, 408, 425 and 429; a Retry-After that is longer counts, up to a minute."""
    wait = [
        httpx2.Response(503, headers={"retry-after": "9"}),
        httpx2.Response(429, headers={"retry-after": "900"}),
        httpx2.ConnectError("cut"),
        OK,
    ]
    made, seen, pauses = requests([*wait])
    result = await made.upload(EMPTY)

    assert ("t-1", 4, [9.0, 60.0, 2.0]) == (result.tick_id, len(seen), pauses)
    assert ("POST", "/v1/projects/shop/ticks/t-1/finalize", b'{"tables":[]}') == (
        seen[0].method, seen[0].url.path, seen[0].content,
    )  # fmt: skip
    for status in (408, 425, 500, 599):
        made, seen, pauses = requests([httpx2.Response(status, json={"message": "not now"})])
        with pytest.raises(Unavailable, match=f"failed 4 times: {status} not now"):
            await made.upload(EMPTY)
        assert (4, [0.5, 1.0, 2.0, 4.0]) == (len(seen), pauses)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, Denied),
        (403, Denied),
        (404, NotFound),
        (409, Conflict),
        (413, TooLarge),
        (422, FailedManual),
        (400, Invalid),
    ],
)
async def test_a_refusal_is_not_tried_again(status: int, error: type[Exception]) -> None:
    """Its kind reports what to do, its message what the service reported."""
    made, seen, _ = requests([httpx2.Response(status, json={"message": "no way", "error_class": "rows_refused"})])
    with pytest.raises(error, match="no way") as caught:
        await made.upload(EMPTY)

    assert (1, error) == (len(seen), type(caught.value))
    if isinstance(caught.value, FailedManual):
        assert "rows_refused" == caught.value.detail["error_class"]


@pytest.mark.parametrize("status", [200, 409, 422])
async def test_an_answer_that_no_gateway_gives_is_not_of_this_tick(status: int) -> None:
    """The page of a proxy or a hotel's network: never committed, and never for a person; it is tried again."""
    page = httpx2.Response(status, text="<html>Sign in</html>")
    made, seen, pauses = requests([page, OK])
    result = await made.upload(EMPTY)
    always, _, _ = requests([page])
    with pytest.raises(Unavailable, match="not of a gateway") as caught:
        await always.upload(EMPTY)

    assert ("t-1", 2, [0.5]) == (result.tick_id, len(seen), pauses)
    assert uploader.is_away(caught.value)  # no hour of it makes the tick failed_manual, and another address is tried


async def test_a_retry_after_may_be_a_date_or_nonsense() -> None:
    """Proxies send dates; what cannot be read is no reason to end."""
    clock_s = NoWait().now_ns() / 1e9
    for text, least in ((format_datetime(datetime.fromtimestamp(clock_s + 30, UTC), usegmt=True), 20.0), ("soon", 0.5)):
        made, _, pauses = requests([httpx2.Response(503, headers={"retry-after": text}), OK])
        result = await made.upload(EMPTY)

        assert "t-1" == result.tick_id
        assert least <= pauses[0] <= least + 11


async def test_a_tick_that_is_never_whole_is_for_a_person() -> None:
    """After so many rounds of named parts; each round deletes what is unlisted."""
    named = httpx2.Response(409, json={"missing": [], "mismatched_sha": [], "unlisted": [7]})
    made, seen, _ = requests([named])
    with pytest.raises(FailedManual, match=f"after {uploader.ROUNDS_MAX} finalizes"):
        await made.upload(EMPTY)

    assert ["POST", "DELETE"] * uploader.ROUNDS_MAX == [request.method for request in seen]
    assert "/v1/projects/shop/ticks/t-1/parts/7" == seen[1].url.path


async def test_a_file_that_changed_since_it_was_packed_is_for_a_person(tmp_path: Path) -> None:
    """Nothing of it is sent; its class reports whether it is gone or another."""
    data = parquet([1])
    part = {"file_seq": 1, "sha256": sha(data), "rows": 1, "bytes": len(data)}
    table = {
        "name": "t",
        "mode": "full",
        "schema": [{"name": "id", "type": "long"}],
        "row_count": 1,
        "parquets": [part],
    }
    manifest = msgspec.json.encode({"tables": [table]}).decode()
    file = tmp_path / "x.parquet"
    packed = PackedTick("t-1", "shop", manifest, {1: str(file)})
    classes = []
    for content in (None, data + b"x"):
        if content is not None:
            file.write_bytes(content)
        made, seen, _ = requests([OK])
        with pytest.raises(FailedManual) as caught:
            await made.upload(packed)
        classes.append((caught.value.detail["error_class"], len(seen)))
    file.write_bytes(data)
    made, seen, _ = requests([httpx2.Response(202, json={}), OK])
    sizes: list[int] = []
    made._sent = sizes.append
    await made.upload(packed)

    assert [("file_gone", 0), ("file_changed", 0)] == classes
    assert (sha(data), str(len(data)), data) == (
        seen[0].headers["x-sha256"], seen[0].headers["content-length"], seen[0].content,
    )  # fmt: skip
    assert [len(data)] == sizes


async def test_a_begun_tick_is_on_disk_before_its_first_byte_and_resumed(tmp_path: Path) -> None:
    """Its tries are counted; a refusal is marked with its class."""
    outbox = Outbox(tmp_path)
    outbox.put(OutboxTick(EMPTY))
    made, seen, _ = requests([httpx2.Response(422, json={"message": "no", "error_class": "bad_day"})])
    (waiting,) = outbox.waiting()
    result = await made.deliver(outbox, waiting)
    (after,) = outbox.waiting()

    assert (None, 1, "failed_manual", "bad_day", "no", 1) == (
        result, after.tries, after.state, after.error_class, after.message, len(seen),
    )  # fmt: skip
    assert {} == await made.drain(outbox)


def test_a_client_sends_its_org_and_secret() -> None:
    """With a time limit on everything."""
    made = uploader.client("http://gw", "acme", Secret("s3cret"))

    assert ("acme", "s3cret") == (made.headers["x-api-key"], made.headers["x-api-secret"])
    assert (120.0, 10.0) == (made.timeout.read, made.timeout.connect)


class Fleet:
    def __init__(self, clock: ManualClock, **more: Any) -> None:
        self.context = context_of(clock=clock, visibility_timeout_s=60, batch_window_s=2.0, **more)
        self.queue = open_queue(self.context)
        self.committed, self.dispatched = open_audit(self.context, COMMITTED), open_audit(self.context, DISPATCHED)
        self.auditor = DispatchAuditor(
            self.context, queue=self.queue, committed=self.committed, dispatched=self.dispatched
        )
        self.jobs = FakeSilverJob(self.context)
        self.dispatcher = Dispatcher(self.context, queue=self.queue, dispatched=self.dispatched, job=self.jobs)

    async def commit(self, tick: str, at_ms: int, *, project: str = PROJECT) -> TickId:
        of = TickId(ORG, project, tick)
        record = CommitRecord(
            "s", ORG, project, tick, "20261115", "delta", "0" * 64, {}, BronzeResult(1, 0, {"t": 4}), "at", at_ms, "x"
        )
        await self.context.store.create(paths.commit(of), msgspec.json.encode(record))
        await self.committed.create(
            AuditRow(ORG, project, tick, "committed", "a", at_ms, 2**40, {"committed_at": "at"})
        )
        return of

    async def send(self, tick: str, *, project: str = PROJECT) -> None:
        await self.queue.send(TickMessage(ORG, project, tick, "delta", "20261115", "k", "t=4", "now"))


async def test_the_gauges_show_messages_undispatched_ticks_and_the_lag(manual_clock: ManualClock) -> None:
    """A finished tick counts no more; without any the lag is zero."""
    fleet = Fleet(manual_clock)
    metrics, now = fleet.context.metrics, manual_clock.now_ns() // 1_000_000
    await fleet.commit("t-1", now - 30_000)
    await fleet.commit("t-2", now - 10_000)
    await fleet.send("t-1")
    await fleet.send("t-2")
    await fleet.queue.receive(1)
    await fleet.auditor.measure()
    gauges = [metrics.value("lakebed_ticks_queue_messages", state=state) for state in ("waiting", "in_flight", "dead")]
    before = (metrics.value("lakebed_ticks_undispatched"), metrics.value("lakebed_ticks_lag_seconds"))
    for tick in ("t-1", "t-2"):
        await fleet.dispatched.create(AuditRow(ORG, PROJECT, tick, "done", "d", now, 2**40, {}))
    await fleet.auditor.measure()

    assert ([1.0, 1.0, 0.0], (2.0, 30.0)) == (gauges, before)
    assert (0.0, 0.0) == (metrics.value("lakebed_ticks_undispatched"), metrics.value("lakebed_ticks_lag_seconds"))


async def test_undispatched_ticks_are_listed_oldest_first_with_how_they_stand(manual_clock: ManualClock) -> None:
    """From a least age on; a failed or running job is no finished one."""
    fleet, now = Fleet(manual_clock), manual_clock.now_ns() // 1_000_000
    for tick, age_s in (("a", 10), ("b", 30), ("c", 20)):
        await fleet.commit(tick, now - age_s * 1000)
    await fleet.dispatched.create(AuditRow(ORG, PROJECT, "c", "failed", "d", now, 2**40, {}))
    every, old = await fleet.auditor.undispatched(), await fleet.auditor.undispatched(older_than_s=20.0)

    assert [("b", 30.0, "", "at"), ("c", 20.0, "failed", "at"), ("a", 10.0, "", "at")] == [
        (each.tick_id, each.age_s, each.state, each.committed_at) for each in every
    ]
    assert ["b", "c"] == [each.tick_id for each in old]
    assert {(ORG, PROJECT)} == {(each.org_id, each.project_id) for each in every}


async def test_a_replay_leaves_a_note_and_clears_the_row(manual_clock: ManualClock) -> None:
    """A resend does neither, and its message is no replay."""
    fleet, now = Fleet(manual_clock), manual_clock.now_ns() // 1_000_000
    of = await fleet.commit("a", now)
    await fleet.dispatched.create(AuditRow(ORG, PROJECT, "a", "done", "d", now, 2**40, {}))
    await fleet.auditor.resend(of)
    kept = await fleet.dispatched.get(of)
    await fleet.auditor.replay(of, "fixed")
    notes = [info.key async for info in fleet.context.store.list(f"{paths.REPLAYS}/")]
    note = msgspec.json.decode((await fleet.context.store.get(notes[0])).data)
    messages = [each.message() for each in await fleet.queue.receive(10)]

    assert kept is not None and await fleet.dispatched.get(of) is None
    assert (1, "fixed", "node-1", "2025-10-09T08:53:20Z") == (len(notes), note["reason"], note["by"], note["at"])
    assert notes[0].startswith(f"{paths.REPLAYS}/{of.path}/{now}-")
    assert [msgspec.UNSET, True] == [message.replay for message in messages]


async def test_a_round_waits_for_more_messages_up_to_its_window_or_a_batch(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes within the window is in the same job; a full batch does not wait; an empty queue neither."""
    monkeypatch.setattr(dispatcher, "BATCH_MAX", 3)
    fleet = Fleet(manual_clock)
    empty = await fleet.dispatcher.round()
    await fleet.send("t-1")
    running = asyncio.ensure_future(fleet.dispatcher.round())
    await settle()
    waits = not running.done()
    await fleet.send("t-2")
    await manual_clock.advance(2.5)
    first = await running
    for number in range(3, 6):
        await fleet.send(f"t-{number}")
    full = asyncio.ensure_future(fleet.dispatcher.round())
    await settle()

    runs = (await fleet.jobs.register(ORG, PROJECT).read()).value.runs
    assert (0, True, 2, True) == (empty, waits, first, full.done())
    assert (("t-1", "t-2"), {"t-3", "t-4", "t-5"}) == (runs[0], set(runs[1]))
    metrics = fleet.context.metrics
    assert (5.0, 2.0) == (
        metrics.value("lakebed_ticks_dispatched_total", outcome="done"),
        metrics.value("lakebed_ticks_jobs_total", outcome="done"),
    )
    row = await fleet.dispatched.get(TickId(ORG, PROJECT, "t-1"))
    assert row is not None and ("done", "node-1", 1, "t=4", '{"ticks":2}') == (
        row.state, row.fields["by"], row.fields["tries"], row.fields["bronze_db_etag"], row.fields["detail"],
    )  # fmt: skip
    assert round(row.at_ms / 1000 + 30 * 86_400) == row.expires_at_s
    assert 0 == (await fleet.queue.depth()).waiting + (await fleet.queue.depth()).in_flight


async def test_a_commit_is_counted_and_audited(manual_clock: ManualClock) -> None:
    """Rows by change, finalizes by outcome, the row of the audit with every field."""
    async with serving(context_of(clock=manual_clock)) as service:
        manifest = await service.upload()
        await service.finalize(manifest)
        await service.finalize(manifest)
        changed = {**manifest, "dt": "20261116"}
        refused = await service.finalize(changed)
        row = await service.committed.get(TickId(ORG, PROJECT, manifest["tick_id"]))
        parts = service.context.metrics.value("lakebed_ticks_parts_total", outcome="stored")
        read = await _metrics_of(service)

    assert 422 == refused.status_code
    assert (5.0, 0.0, 1.0, 1.0, 2.0) == (*read, parts)
    assert ("committed", "delta", "20261115", 5, 0, "orders=0", "2025-10-09T08:53:20Z") == (
        row.state, row.fields["mode"], row.fields["dt"], row.fields["rows_inserted"], row.fields["rows_replaced"],
        row.fields["bronze_db_etag"], row.fields["committed_at"],
    )  # fmt: skip
    assert row.at_ms // 1000 + 30 * 86_400 == row.expires_at_s


async def _metrics_of(service: Service) -> tuple[float, float, float, float]:
    value = service.context.metrics.value
    return (
        value("lakebed_ticks_rows_total", change="inserted"),
        value("lakebed_ticks_rows_total", change="replaced"),
        value("lakebed_ticks_finalized_total", outcome="committed"),
        value("lakebed_ticks_finalized_total", outcome="cached"),
    )


async def test_the_sweeper_leaves_young_states_unread_and_remembers_settled_ones(manual_clock: ManualClock) -> None:
    """A committed state goes after its retention, a commit record stays."""
    async with serving(context_of(clock=manual_clock, state_retention_s=1000.0, finalizing_s=100.0)) as service:
        await service.finalize(await service.upload())
        reads: list[str] = []
        store: Any = service.context.store
        get = store.get

        async def counted(key: str) -> Any:
            reads.append(key)
            return await get(key)

        store.get = counted
        sweeper = TickSweeper(service.context)

        def states() -> int:
            return sum("/state/" in key for key in reads)

        await sweeper.round()
        young = states()
        await manual_clock.advance(100.0)
        await sweeper.round()
        old = states()
        await sweeper.round()
        settled = states()
        await manual_clock.advance(900.0)
        await sweeper.round()
        keys = [info.key async for info in store.list("ticks/v1/")]

    assert (0, True, old) == (young, old > 0, settled)
    assert [] == [key for key in keys if "/state/" in key]
    assert 1 == sum("/commits/" in key for key in keys)


async def test_a_sweep_reads_what_may_still_change_however_many_states_are_kept(manual_clock: ManualClock) -> None:
    """A settled state is read once; nothing is remembered of it, so there is no number of ticks that is too many."""
    async with serving(context_of(clock=manual_clock, finalizing_s=100.0)) as service:
        for number in range(5):
            assert 200 == (await service.finalize(await service.upload(f"t-{number}"), tick=f"t-{number}")).status_code
        await service.upload("open")
        store: Any = service.context.store
        reads: list[str] = []
        get = store.get

        async def counted(key: str) -> Any:
            reads.append(key)
            return await get(key)

        store.get = counted
        sweeper = TickSweeper(service.context)
        await manual_clock.advance(101.0)
        await sweeper.round()
        first = {key for key in reads if "/state/" in key}
        reads.clear()
        await manual_clock.advance(101.0)
        await sweeper.round()
        second = {key for key in reads if "/state/" in key}
        await service.upload("late")
        await manual_clock.advance(101.0)
        reads.clear()
        await sweeper.round()

    assert (6, {paths.state(TickId(ORG, PROJECT, "open"))}) == (len(first), second)
    third = {key for key in reads if "/state/" in key}
    assert {paths.state(TickId(ORG, PROJECT, name)) for name in ("open", "late")} == third
    assert 2 == len(sweeper._open)


async def test_a_vault_tells_no_stranger_what_was_wrong(manual_clock: ManualClock) -> None:
    """No key is unauthenticated; a wrong org, project or secret is one and the same answer."""
    context = context_of(clock=manual_clock)
    vault = open_vault(context)
    secret = await vault.issue(ORG, PROJECT)
    reported = set()
    for org, project, sent in (
        (ORG, PROJECT, "x"),
        ("other", PROJECT, secret),
        (ORG, "other", secret),
        (ORG, PROJECT, "-" * 40),
    ):
        with pytest.raises(Denied) as caught:
            await vault.admit(org, project, sent)
        reported.add(str(caught.value))
    for missing in ((None, secret), ("", secret), (ORG, None), (ORG, "")):
        with pytest.raises(Unauthenticated):
            await vault.admit(missing[0], PROJECT, missing[1])

    assert (1, ORG) == (len(reported), await vault.admit(ORG, PROJECT, secret))
    with pytest.raises(Invalid):
        await vault.admit("../x", PROJECT, secret)


async def test_a_remembered_secret_costs_no_read_until_its_time_is_over(manual_clock: ManualClock) -> None:
    """Half a minute by default."""
    context = context_of(clock=manual_clock)
    vault = open_vault(context)
    secret = await vault.issue(ORG, PROJECT)
    reads: list[str] = []
    store: Any = context.store
    get = store.get

    async def counted(key: str) -> Any:
        reads.append(key)
        return await get(key)

    store.get = counted
    counts = []
    for pause_s in (0.0, 29.9, 0.2):
        await manual_clock.advance(pause_s)
        await vault.admit(ORG, PROJECT, secret)
        counts.append(len(reads))

    assert [1, 1, 2] == counts


async def test_a_refused_upload_that_was_looked_at_before_expires_in_its_time(manual_clock: ManualClock) -> None:
    """An early round does not put it off until the retention of states."""
    async with serving(context_of(clock=manual_clock)) as service:
        manifest = await service.upload()
        refused = await service.finalize({**manifest, "dt": "no day"})
    sweeper = TickSweeper(service.context)
    await manual_clock.advance(1000.0)
    await sweeper.round()
    early = service.context.metrics.value("lakebed_ticks_expired_total")
    await manual_clock.advance(7 * 86_400.0)
    await sweeper.round()

    assert (422, 0.0, 1.0) == (
        refused.status_code,
        early,
        service.context.metrics.value("lakebed_ticks_expired_total"),
    )


async def test_a_tick_of_both_modes_is_mixed(manual_clock: ManualClock) -> None:
    """In its record, and so in its message."""
    async with serving(context_of(clock=manual_clock)) as service:
        manifest = await service.upload()
        other = parquet([9])
        await service.put(3, other)
        table = {**manifest["tables"][0], "name": "stock", "mode": "full", "row_count": 1, "parquets": [
            {"file_seq": 3, "sha256": sha(other), "rows": 1, "bytes": len(other)},
        ]}  # fmt: skip
        await service.finalize({**manifest, "tables": [*manifest["tables"], table]})
        (message,) = await service.queue.receive(10)

    assert "mixed" == message.message().mode


async def test_a_part_as_large_as_the_limit_is_taken(manual_clock: ManualClock) -> None:
    """One byte more is not, whether its length was declared or not."""
    data = parquet([1])
    async with serving(context_of(clock=manual_clock, part_bytes_max=len(data))) as service:
        whole, over = await service.put(1, data), await service.put(2, data + b"x")

        async def streamed() -> AsyncIterator[bytes]:
            yield data
            yield b"x"

        headers = {"x-sha256": sha(data + b"x")}
        unknown = await service.ask("PUT", f"ticks/{'t-9'}/parts/3", headers=headers, content=streamed())

    assert [202, 413, 413] == [whole.status_code, over.status_code, unknown.status_code]


async def test_two_uploads_of_one_part_leave_one_object(manual_clock: ManualClock) -> None:
    """The second finds the first in the register when it has streamed its bytes, and takes its own away."""
    from lakebed.ticks.receiver import Receiver

    context = context_of(clock=manual_clock)
    receiver, of, data, gate = Receiver(context), TickId(ORG, PROJECT, "t-1"), parquet([1]), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        await gate.wait()
        yield data

    async def quick() -> AsyncIterator[bytes]:
        yield data

    late = asyncio.ensure_future(receiver.put(of, 1, sha(data), slow()))
    await settle()
    first = await receiver.put(of, 1, sha(data), quick())
    gate.set()
    second = await late
    keys = [info.key async for info in context.store.list("ticks/v1/parts/")]

    assert (False, True, 1) == (first.already_present, second.already_present, len(keys))
    assert keys == [part.key for part in (await register_of(context, of).read()).value.parts.values()]


async def test_the_secret_that_was_read_longest_ago_is_forgotten_first(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded by a number of projects."""
    monkeypatch.setattr("lakebed.ticks.vault.REMEMBERED_MAX", 2)
    context = context_of(clock=manual_clock)
    vault = open_vault(context)
    secrets = {project: await vault.issue(ORG, project) for project in ("a", "b", "c")}
    for project, secret in secrets.items():
        await vault.admit(ORG, project, secret)

    assert [(ORG, "b"), (ORG, "c")] == list(vault._known)


async def test_a_fresh_tick_sends_its_parts_first_and_a_begun_one_asks_what_is_missing(tmp_path: Path) -> None:
    """Only what the answer names is sent again."""
    data = parquet([1])
    part = {"file_seq": 1, "sha256": sha(data), "rows": 1, "bytes": len(data)}
    table = {"name": "t", "mode": "full", "schema": [{"name": "id", "type": "long"}], "row_count": 1}
    manifest = msgspec.json.encode({"tables": [{**table, "parquets": [part]}]}).decode()
    (tmp_path / "x").write_bytes(data)
    packed = PackedTick("t-1", "shop", manifest, {1: str(tmp_path / "x")})
    methods = []
    for tries in (0, 1):
        made, seen, _ = requests([OK])
        await made.deliver(Outbox(tmp_path / "out"), OutboxTick(packed, tries=tries))
        methods.append([request.method for request in seen])

    assert [["PUT", "POST"], ["POST"]] == methods


async def test_a_part_of_more_rows_than_the_limit_is_refused_before_bronze_reads_it() -> None:
    """`ticks.part_rows_max` holds at finalize, whatever the manifest says; a part with that many rows is committed."""
    for rows_max, status in ((2, 422), (3, 200)):
        async with serving(context_of(part_rows_max=rows_max)) as service:
            listed = await service.upload()  # a part of three rows and one of two
            answer = await service.finalize(listed)
            rows = await service.rows()

        assert (status, 200 == status) == (answer.status_code, bool(rows))
        assert status == 200 or "part_too_large" in answer.text

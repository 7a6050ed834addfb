"""Acting: every action asks, needs a reason where it matters, goes on the trail, and does what the part's role does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.batches.conflicts import ConflictReview
from lakebed.console.pages import ACTIONS
from lakebed.console.routes import REASON_CHARS_MAX
from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.lifecycle import page as lifecycle_page
from lakebed.lifecycle.memory import MemoryLake
from lakebed.lifecycle.model import Position, StreamKind, StreamResolution
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.state import ActionState, Blocker, BlockerState, BucketLifecycle, Stream
from lakebed.lifecycle.workers import state_of
from lakebed.pipeline.audit import page as audit_page
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.ticks.adapters import open_queue
from support import tick_fixtures as ticks_kit
from support.batch_frames import frame_of
from support.batches_gateway import collector
from support.console_site import KEYS, OPERATOR, Site, site


async def bury(here: Site) -> str:
    queue = Queue.of(here.context, "jobs")
    await (await queue.ingestor().ingest([KeyValueEntry(b"k", b"v")])).await_durable()
    collector = queue.collector("c-1")
    batch = await collector.next_batch()
    assert batch is not None
    await queue.dead_letters.bury(batch.claimed, await queue.consumer.reject(batch.claimed, "no schema", last=True))
    await collector.close()
    return (await anext(queue.dead_letters.letters())).id


async def block(here: Site) -> None:
    stream = Stream(StreamKind.ORIGINAL, 10, Position(5, 0))
    blocker = Blocker("b1", stream, "landing", "a<b>.csv", "lock", "locked", 1, 1, 3)
    await state_of(here.context).blockers.change(lambda _: (BlockerState(blockers={"b1": blocker}), None))


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit that is started here ends at once."""
    monkeypatch.setattr(audit_page, "audit", lambda context, quick, run: None)


@pytest.mark.parametrize("name", ACTIONS)
async def test_every_action_asks_before_it_acts(name: str) -> None:
    """The dialog reports what will happen and to what; a reason is requested where the act cannot be seen otherwise."""
    action = ACTIONS[name]
    async with site() as here:
        fields = {field: f"<b>{field}</b>" for field in action.fields}
        dialog = await here.browser.client.get(f"/console/ask/{name}", params=fields)

    assert dialog.status_code == 200
    assert action.title in dialog.text and action.button in dialog.text
    assert ('name="reason"' in dialog.text) == action.needs_reason
    assert "<b>" not in dialog.text
    assert action.right(dict.fromkeys(action.fields, "x")).count(":") >= 1


async def test_every_action_leaves_a_line_on_the_trail() -> None:
    """Whatever it is and however it ends: there is one way to act, and it writes before it acts."""
    left: dict[str, list[str]] = {}
    async with site() as here:
        await here.browser.open("/queue")
        for name, action in ACTIONS.items():
            before = len(await here.context.trail.latest())
            form = dict.fromkeys(action.fields, "none") | {"reason": "because"}
            await here.browser.post(f"/console/do/{name}", form)
            new = await here.context.trail.latest()
            left[name] = [recorded_action.what for recorded_action in new[: len(new) - before]]

    assert {name: [name] for name in ACTIONS} == left


async def test_a_dead_letter_is_replayed_and_the_trail_says_who_and_why() -> None:
    """From the button to the bucket and back: confirmed, done, recorded, shown."""
    async with site(keys=KEYS) as here:
        letter = await bury(here)
        await here.browser.sign_in(OPERATOR)
        page = await here.browser.open("/queue?queue=jobs")

        form = {"queue": "jobs", "letter": letter, "reason": "the <schema> is mended"}
        done = await here.browser.post("/console/do/queue.replay", form)

        left = [one async for one in Queue.of(here.context, "jobs").dead_letters.letters()]
        (recorded_action,) = await here.console.data.trail.latest()
        audit = await here.browser.open("/audit")

    assert "no schema" in page.text
    assert done.status_code == 200 and done.headers["hx-trigger"] == "lakebed-changed"
    assert left == []
    assert (recorded_action.who, recorded_action.what, recorded_action.reason, recorded_action.outcome) == (
        "operator",
        "queue.replay",
        "the <schema> is mended",
        "done",
    )
    assert "the &lt;schema&gt; is mended" in audit.text


async def test_without_a_reason_nothing_is_done() -> None:
    """The dialog comes back with what is missing; nothing is recorded, for nothing was begun."""
    async with site() as here:
        await block(here)
        await here.browser.open("/lifecycle")

        answer = await here.browser.post("/console/do/lifecycle.quarantine", {"blocker": "b1", "reason": "  "})

        assert answer.status_code == 400 and "a reason is required" in answer.text
        assert "b1" in (await state_of(here.context).blockers.read()).value.blockers
        assert [] == await here.console.data.trail.latest()


async def test_a_reason_that_the_trail_could_not_keep_is_refused() -> None:
    """As long as the limit it is taken; one character more and nothing is done."""
    async with site() as here:
        await block(here)
        await here.browser.open("/lifecycle")

        long = {"blocker": "b1", "reason": "x" * (REASON_CHARS_MAX + 1)}
        refused = await here.browser.post("/console/do/lifecycle.quarantine", long)
        kept = "b1" in (await state_of(here.context).blockers.read()).value.blockers
        long["reason"] = long["reason"][1:]
        done = await here.browser.post("/console/do/lifecycle.quarantine", long)

        assert (400, True, 200) == (refused.status_code, kept, done.status_code)
        assert [long["reason"]] == [deed.reason for deed in await here.console.data.trail.latest()]


async def test_a_blocker_is_quarantined_with_its_reason() -> None:
    async with site() as here:
        await block(here)
        await here.browser.open("/lifecycle")

        answer = await here.browser.post("/console/do/lifecycle.quarantine", {"blocker": "b1", "reason": "kept by law"})

        known = (await state_of(here.context).blockers.read()).value
        assert answer.status_code == 200
        assert known.blockers == {}
        (decision,) = known.quarantined
        assert decision.split(" ")[1] == "anybody" and decision.endswith(" kept by law")


async def test_an_act_that_fails_is_on_the_trail_too() -> None:
    """The record was made before the act, and reports how it ended."""
    async with site() as here:
        await here.browser.open("/queue")

        answer = await here.browser.post(
            "/console/do/queue.discard", {"queue": "jobs", "letter": "none", "reason": "x"}
        )

        (recorded_action,) = await here.console.data.trail.latest()
        assert answer.status_code == 400 and "<textarea" in answer.text
        assert recorded_action.outcome == "invalid"


async def test_a_read_only_gateway_offers_nothing_to_do() -> None:
    async with site(read_only=True) as here:
        await block(here)
        page = await here.browser.open("/lifecycle")
        answer = await here.browser.post("/console/do/lifecycle.resume", {"blocker": "b1", "reason": "x"})

    assert "landing/a&lt;b&gt;.csv" in page.text and "Quarantine</button>" not in page.text
    assert answer.status_code in (404, 405)


async def test_an_action_that_is_none_is_not_found() -> None:
    async with site() as here:
        await here.browser.open("/")
        assert (await here.browser.post("/console/do/everything.delete")).status_code == 404


async def test_a_conflict_is_decided_with_the_deciders_name() -> None:
    """The decision is in the bucket as the command would have put it, by the key that signed in."""
    async with site(keys=KEYS) as here:
        async with collector(here.context.store) as (client, _):
            assert (await client.post("/v1/batches", content=frame_of())).status_code == 200
            assert (await client.post("/v1/batches", content=frame_of(value=9.0))).status_code == 409
        (conflict,) = await ConflictReview(here.context).list()
        await here.browser.sign_in(OPERATOR)
        await here.browser.open("/batches")

        form = {"conflict_id": conflict.conflict_id, "reason": "a restored disk"}
        done = await here.browser.post("/console/do/batches.quarantine-boot", form)

        (after,) = await ConflictReview(here.context).list()
        page = await here.browser.open("/batches")

    assert done.status_code == 200
    assert after.resolution is not None
    assert (after.resolution.action, after.resolution.resolved_by) == ("quarantine_boot", "operator")
    assert "a restored disk" in page.text


async def test_a_tick_is_sent_to_silver_again() -> None:
    """A replay clears what was dispatched and sends the tick's message; the way on the page starts anew."""
    context = ticks_kit.context_of()
    async with ticks_kit.serving(context) as service, site(context.store) as here:
        output = await service.upload()
        assert (await service.finalize(output)).status_code == 200
        page = await here.browser.open("/ticks")

        fields = {"org": ticks_kit.ORG, "project": ticks_kit.PROJECT, "tick": ticks_kit.TICK}
        done = await here.browser.post("/console/do/ticks.replay", {**fields, "reason": "a new contract"})

        depth = await open_queue(here.context).depth()

    assert ticks_kit.TICK in page.text and "5 inserted, 0 replaced" in page.text
    assert done.status_code == 200, done.text
    assert depth.waiting == 2


async def test_an_action_of_lifecycle_is_paused_and_goes_on() -> None:
    async with site() as here:
        state = BucketLifecycle(actions={"abc/EXPIRATION_DAYS": ActionState("old", bootstrap_complete=True)})
        await state_of(here.context).bucket("landing").change(lambda _: (state, None))
        await here.browser.open("/lifecycle")
        form = {"bucket": "landing", "action": "abc/EXPIRATION_DAYS", "reason": "an audit"}

        paused = await here.browser.post("/console/do/lifecycle.pause", form)
        during = await here.browser.open("/lifecycle")
        resumed = await here.browser.post("/console/do/lifecycle.go-on", form)
        after = await here.browser.open("/lifecycle")

    assert (paused.status_code, resumed.status_code) == (200, 200)
    assert "operator paused" in during.text and "Resume</button>" in during.text
    assert "operator paused" not in after.text and "Pause</button>" in after.text


async def test_the_doctor_tells_verdicts_as_they_fall() -> None:
    """Called from the page, it runs beside the gateway, once at a time, and its verdicts are the command's."""
    async with site() as here, asyncio.timeout(300):
        await here.browser.open("/status")
        called = await here.browser.post("/console/do/status.doctor")
        again = here.console.data.status.doctor_runner.begin()
        while here.console.data.status.doctor_runner.report.running:
            await asyncio.sleep(0.05)
        here.console.data.samples.forget()
        twin = (await here.browser.client.get("/status.json")).json()["doctor"]

    assert called.status_code == 200 and again.running
    assert {"python", "disk", "clock"} <= {one["name"] for one in twin["diagnoses"]}
    assert {one["verdict"] for one in twin["diagnoses"]} <= {"pass", "warn", "fail"}


@pytest.mark.parametrize("name", sorted(ACTIONS))
def test_the_right_to_act_is_given_for_the_thing_that_is_acted_on(name: str) -> None:
    """Who may act on one queue, project or bucket may not act on another, and a project belongs to its org."""
    action = ACTIONS[name]
    fields = dict.fromkeys(action.fields, "a")
    subjects = [field for field in action.fields if field in ("queue", "org", "project", "bucket", "topic")]

    for subject in subjects:
        assert action.right(fields) != action.right({**fields, subject: "b"}), subject
    if not subjects:
        assert action.right(fields).endswith((":*", ":admin", ":doctor", ":run"))


async def test_a_dead_letter_is_discarded_and_the_answer_names_it() -> None:
    async with site() as here:
        letter = await bury(here)
        await here.browser.open("/queue")

        done = await here.browser.post(
            "/console/do/queue.discard", {"queue": "jobs", "letter": letter, "reason": "old"}
        )

        left = [one async for one in Queue.of(here.context, "jobs").dead_letters.letters()]
        depth = await Queue.of(here.context, "jobs").status()
    assert (200, True) == (done.status_code, "discarded sequence 1" in done.text)
    assert ([], 0) == (left, depth.pending)


async def test_a_conflict_is_resolved_by_keeping_what_was_accepted() -> None:
    async with site() as here:
        async with collector(here.context.store) as (client, _):
            await client.post("/v1/batches", content=frame_of())
            await client.post("/v1/batches", content=frame_of(value=9.0))
        review = ConflictReview(here.context)
        (conflict,) = await review.list()
        await here.browser.open("/batches")

        form = {"conflict_id": conflict.conflict_id, "reason": "a restored disk"}
        done = await here.browser.post("/console/do/batches.accept-existing", form)
        (after,) = await review.list()

    assert "resolved as accept_existing" in done.text
    assert after.resolution is not None
    assert ("accept_existing", "a restored disk", "anybody") == (
        after.resolution.action, after.resolution.reason, after.resolution.resolved_by,
    )  # fmt: skip


async def test_a_blocker_is_resumed_and_a_walk_is_asked_for() -> None:
    async with site() as here:
        await block(here)
        await here.browser.open("/lifecycle")

        resumed = await here.browser.post("/console/do/lifecycle.resume", {"blocker": "b1", "reason": "unlocked"})
        walked = await here.browser.post("/console/do/lifecycle.walk", {"bucket": "landing"})

        assert (200, 200) == (resumed.status_code, walked.status_code)
        assert "a&lt;b&gt;.csv: the worker retries" in resumed.text
        assert {} == (await state_of(here.context).blockers.read()).value.blockers
        assert (await state_of(here.context).bucket("landing").read()).value != BucketLifecycle()


def lifecycle_of(monkeypatch: pytest.MonkeyPatch, **more: Any) -> MemoryLake:
    """The page's actions work on this lake, in which `lake/` of the bucket `landing` is Lakebed's own."""
    lake = MemoryLake(ManualClock())

    @asynccontextmanager
    async def opened(context: Context) -> AsyncIterator[Any]:
        yield SimpleNamespace(lake=lake, reserved=ReservedKeys("landing", "lake/"), **more)

    async def warnings(services: Any, rules: Any) -> list[str]:
        return ["the log is short"]

    monkeypatch.setattr(lifecycle_page, "open_services", opened)
    monkeypatch.setattr(lifecycle_page.view, "put_warnings", warnings)
    return lake


async def test_rules_are_put_as_by_the_command_and_reach_nothing_of_lakebed_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """JSON is kept as XML, warnings are shown; what could delete Lakebed's own data, or is no policy, is refused."""
    lake = lifecycle_of(monkeypatch)

    def form(prefix: str, bucket: str = "landing", **named: Any) -> dict[str, str]:
        rule = {"ID": "r1", "Status": "Enabled", "Filter": {"Prefix": prefix}, "Expiration": {"Days": 1}, **named}
        return {"bucket": bucket, "policy": json.dumps({"Rules": [rule]}), "reason": "agreed"}

    async with site() as here:
        await here.browser.open("/lifecycle")
        place = "/console/do/lifecycle.put"
        fine = await here.browser.post(place, form("logs/"))
        kept = dict(lake.policies)
        refused = [await here.browser.post(place, form(prefix)) for prefix in ("lake/x/", "", "la")]
        unknown = await here.browser.post(place, form("logs/", Expire="1"))
        elsewhere = await here.browser.post(place, form("", bucket="other"))
        deeds = [(deed.what, deed.outcome) for deed in await here.context.trail.latest()]

    assert (200, 200) == (fine.status_code, elsewhere.status_code)
    assert "1 rules are in force in landing; the log is short" in fine.text
    assert kept["landing"].lstrip().startswith(b"<") and {"landing", "other"} == set(lake.policies)
    assert kept["landing"] == lake.policies["landing"]
    assert all(400 <= each.status_code < 500 and "could delete Lakebed" in each.text for each in refused)
    assert 400 <= unknown.status_code < 500 and "Expire" in unknown.text
    assert {"lifecycle.put"} == {what for what, _ in deeds}
    assert 2 == sum(outcome == "done" for _, outcome in deeds)


@pytest.mark.parametrize("resolved", [True, False])
async def test_a_retry_says_whether_the_blocker_is_gone(monkeypatch: pytest.MonkeyPatch, resolved: bool) -> None:
    """By the live object and the policies as they are now."""
    tried: list[Any] = []

    async def retry(ident: str, resolver: Any, snapshot: Any) -> StreamResolution:
        tried.append((ident, resolver, snapshot))
        return StreamResolution.DONE if resolved else StreamResolution.RETRY_LATER

    async def compiled() -> str:
        return "snapshot"

    enforcer = SimpleNamespace(resolver="resolver", compile=compiled)
    lifecycle_of(monkeypatch, operator=SimpleNamespace(retry=retry), enforcer=enforcer)

    async with site() as here:
        await here.browser.open("/lifecycle")
        answer = await here.browser.post("/console/do/lifecycle.retry", {"blocker": "b1", "object": "k"})

    assert (200, [("b1", "resolver", "snapshot")]) == (answer.status_code, tried)
    assert resolved is ("still blocked" not in answer.text)
    assert (StreamResolution.DONE if resolved else StreamResolution.RETRY_LATER).value in answer.text


async def test_up_to_a_hundred_messages_are_sent_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int] = []

    class Dead:
        async def replay(self, count: int) -> int:
            requested.append(count)
            return 3

    monkeypatch.setattr("lakebed.ticks.page.open_queue", lambda _: Dead())
    async with site() as here:
        await here.browser.open("/ticks")
        done = await here.browser.post("/console/do/ticks.redrive", {"reason": "a new contract"})

    assert ([100], True) == (requested, "3 dead letters replayed" in done.text)


async def test_messages_that_silver_could_not_work_on_are_sent_back() -> None:
    async with site() as here:
        await here.browser.open("/ticks")

        done = await here.browser.post("/console/do/ticks.redrive", {"reason": "a new contract"})

    assert (200, True) == (done.status_code, "0 dead letters replayed" in done.text)


AGREED = {
    "batches.accept-existing": ("batches:admin", True, False),
    "batches.quarantine-boot": ("batches:admin", True, True),
    "queue.replay": ("queue:admin:x", True, False),
    "queue.discard": ("queue:admin:x", True, True),
    "queue.replay-all": ("queue:admin:x", True, False),
    "log.produce": ("log:produce:x", False, False),
    "log.seek": ("log:consume:x", True, False),
    "log.create": ("log:admin:x", False, False),
    "log.configure": ("log:admin:x", True, True),
    "lifecycle.put": ("lifecycle:operate:x", True, True),
    "audit.run": ("audit:run", False, False),
    "runs.again": ("console:run", False, False),
    "ticks.replay": ("ticks:operate:x/x", True, False),
    "ticks.redrive": ("ticks:operate:*", True, False),
    "lifecycle.retry": ("lifecycle:operate:*", False, False),
    "lifecycle.resume": ("lifecycle:operate:*", True, False),
    "lifecycle.quarantine": ("lifecycle:operate:*", True, True),
    "lifecycle.pause": ("lifecycle:operate:x", True, False),
    "lifecycle.go-on": ("lifecycle:operate:x", True, False),
    "lifecycle.walk": ("lifecycle:operate:x", False, False),
    "status.doctor": ("console:doctor", False, False),
}


@pytest.mark.parametrize("name", sorted(ACTIONS))
def test_each_action_has_the_right_the_reason_and_the_warning_that_were_agreed(name: str) -> None:
    """What cannot be undone is shown as dangerous; what changes data needs a reason."""
    action = ACTIONS[name]

    assert AGREED[name] == (action.right(dict.fromkeys(action.fields, "x")), action.needs_reason, action.danger)


async def test_a_read_only_gateway_asks_for_nothing() -> None:
    """The dialog reports what it would do and offers no way to do it."""
    async with site(read_only=True) as here:
        dialog = await here.browser.client.get("/console/ask/lifecycle.resume?blocker=b1")

    assert 200 == dialog.status_code
    assert "This gateway is read-only." in dialog.text
    assert "<textarea" not in dialog.text and 'type="submit"' not in dialog.text

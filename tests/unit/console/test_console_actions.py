"""Acting: every action asks, needs a reason where it matters, goes on the trail, and does what the part's role does."""

from __future__ import annotations

import asyncio

import pytest
from console_kit import KEYS, OPERATOR, Site, site

import ticks_kit
from batches_frames import frame_of
from batches_gateway import collector
from lakebed.batches.conflicts import ConflictDesk
from lakebed.console.actions import ACTIONS
from lakebed.lifecycle.model import Position, StreamKind
from lakebed.lifecycle.state import ActionState, Blocker, BucketState, Stream, Troubles
from lakebed.lifecycle.workers import shelf_of
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.queue import Queue
from lakebed.ticks.adapters import open_queue


async def bury(here: Site) -> str:
    queue = Queue.of(here.context, "jobs")
    await (await queue.ingestor().ingest([KeyValueEntry(b"k", b"v")])).await_durable()
    collector = queue.collector("c-1")
    batch = await collector.next_batch()
    while batch is not None and not await collector.reject(batch, "no schema"):
        batch = await collector.next_batch()
    await collector.close()
    return (await anext(queue.dead_letters.letters())).id


async def block(here: Site) -> None:
    stream = Stream(StreamKind.ORIGINAL, 10, Position(5, 0))
    blocker = Blocker("b1", stream, "landing", "a<b>.csv", "lock", "locked", 1, 1, 3)
    await shelf_of(here.context).troubles.change(lambda _: (Troubles(blockers={"b1": blocker}), None))


@pytest.mark.parametrize("name", ACTIONS)
async def test_every_action_asks_before_it_acts(name: str) -> None:
    """The dialog says what will happen and to what; a reason is asked for where the act cannot be seen otherwise."""
    action = ACTIONS[name]
    async with site() as here:
        fields = {field: f"<b>{field}</b>" for field in action.fields}
        dialog = await here.browser.client.get(f"/console/ask/{name}", params=fields)

    assert dialog.status_code == 200
    assert action.title in dialog.text and action.button in dialog.text
    assert ("<textarea" in dialog.text) == action.needs_reason
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
            left[name] = [deed.what for deed in new[: len(new) - before]]

    assert {name: [name] for name in ACTIONS} == left


async def test_a_dead_letter_is_replayed_and_the_trail_says_who_and_why() -> None:
    """From the button to the bucket and back: asked, done, recorded, shown."""
    async with site(keys=KEYS) as here:
        letter = await bury(here)
        await here.browser.sign_in(OPERATOR)
        page = await here.browser.open("/queue?queue=jobs")

        form = {"queue": "jobs", "letter": letter, "reason": "the <schema> is mended"}
        done = await here.browser.post("/console/do/queue.replay", form)

        left = [one async for one in Queue.of(here.context, "jobs").dead_letters.letters()]
        (deed,) = await here.console.look.trail.latest()
        audit = await here.browser.open("/audit")

    assert "no schema" in page.text
    assert done.status_code == 200 and done.headers["hx-trigger"] == "lakebed-changed"
    assert left == []
    assert (deed.who, deed.what, deed.reason, deed.outcome) == (
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

        assert answer.status_code == 400 and "a reason is needed" in answer.text
        assert "b1" in (await shelf_of(here.context).troubles.read()).value.blockers
        assert [] == await here.console.look.trail.latest()


async def test_a_blocker_is_quarantined_with_its_reason() -> None:
    async with site() as here:
        await block(here)
        await here.browser.open("/lifecycle")

        answer = await here.browser.post("/console/do/lifecycle.quarantine", {"blocker": "b1", "reason": "kept by law"})

        known = (await shelf_of(here.context).troubles.read()).value
        assert answer.status_code == 200
        assert known.blockers == {}
        assert "kept by law" in str(known.quarantined)


async def test_an_act_that_fails_is_on_the_trail_too() -> None:
    """The record was made before the act, and says how it ended."""
    async with site() as here:
        await here.browser.open("/queue")

        answer = await here.browser.post(
            "/console/do/queue.discard", {"queue": "jobs", "letter": "none", "reason": "x"}
        )

        (deed,) = await here.console.look.trail.latest()
        assert answer.status_code == 400 and "<textarea" in answer.text
        assert deed.outcome == "invalid"


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
    """The decision lies in the bucket as the command would have put it, by the key that signed in."""
    async with site(keys=KEYS) as here:
        async with collector(here.context.store) as (client, _):
            assert (await client.post("/v1/batches", content=frame_of())).status_code == 200
            assert (await client.post("/v1/batches", content=frame_of(value=9.0))).status_code == 409
        (conflict,) = await ConflictDesk(here.context.store, here.context.clock).list()
        await here.browser.sign_in(OPERATOR)
        await here.browser.open("/batches")

        form = {"conflict_id": conflict.conflict_id, "reason": "a restored disk"}
        done = await here.browser.post("/console/do/batches.quarantine-boot", form)

        (after,) = await ConflictDesk(here.context.store, here.context.clock).list()
        page = await here.browser.open("/batches")

    assert done.status_code == 200
    assert after.resolution is not None
    assert (after.resolution.action, after.resolution.resolved_by) == ("quarantine_boot", "operator")
    assert "a restored disk" in page.text


async def test_a_tick_is_sent_to_silver_again() -> None:
    """A replay clears what was dispatched and sends the tick's message; the way on the page starts anew."""
    context = ticks_kit.context_of()
    async with ticks_kit.serving(context) as service, site(context.store) as here:
        said = await service.upload()
        assert (await service.finalize(said)).status_code == 200
        page = await here.browser.open("/ticks")

        fields = {"org": ticks_kit.ORG, "project": ticks_kit.PROJECT, "tick": ticks_kit.TICK}
        done = await here.browser.post("/console/do/ticks.replay", {**fields, "reason": "a new contract"})

        depth = await open_queue(here.context).depth()

    assert ticks_kit.TICK in page.text and "5 inserted, 0 replaced" in page.text
    assert done.status_code == 200, done.text
    assert depth.waiting == 2


async def test_an_action_of_lifecycle_is_paused_and_goes_on() -> None:
    async with site() as here:
        state = BucketState(actions={"abc/EXPIRATION_DAYS": ActionState("old", bootstrap_complete=True)})
        await shelf_of(here.context).bucket("landing").change(lambda _: (state, None))
        await here.browser.open("/lifecycle")
        form = {"bucket": "landing", "action": "abc/EXPIRATION_DAYS", "reason": "an audit"}

        paused = await here.browser.post("/console/do/lifecycle.pause", form)
        during = await here.browser.open("/lifecycle")
        resumed = await here.browser.post("/console/do/lifecycle.go-on", form)
        after = await here.browser.open("/lifecycle")

    assert (paused.status_code, resumed.status_code) == (200, 200)
    assert "operator paused" in during.text and "Go on</button>" in during.text
    assert "operator paused" not in after.text and "Pause</button>" in after.text


async def test_the_doctor_tells_verdicts_as_they_fall() -> None:
    """Called from the page, it runs beside the gateway, once at a time, and its verdicts are the command's."""
    async with site() as here, asyncio.timeout(300):
        await here.browser.open("/status")
        called = await here.browser.post("/console/do/status.doctor")
        again = here.console.look.checkup.begin()
        while here.console.look.checkup.findings.running:
            await asyncio.sleep(0.05)
        here.console.look.samples.forget()
        twin = (await here.browser.client.get("/status.json")).json()["doctor"]

    assert called.status_code == 200 and again.running
    assert {"python", "disk", "clock"} <= {one["name"] for one in twin["diagnoses"]}
    assert {one["verdict"] for one in twin["diagnoses"]} <= {"pass", "warn", "fail"}


@pytest.mark.parametrize("name", sorted(ACTIONS))
def test_the_right_to_act_is_given_for_the_thing_that_is_acted_on(name: str) -> None:
    """Who may act on one queue, project or bucket may not act on another, and a project belongs to its org."""
    action = ACTIONS[name]
    fields = dict.fromkeys(action.fields, "a")
    subjects = [field for field in action.fields if field in ("queue", "org", "project", "bucket")]

    for subject in subjects:
        assert action.right(fields) != action.right({**fields, subject: "b"}), subject
    if not subjects:
        assert action.right(fields).endswith((":*", ":admin", ":doctor"))

"""Acting: every action asks, needs a reason where it matters, goes on the trail, and does what the part's role does."""

from __future__ import annotations

import pytest
from console_kit import KEYS, OPERATOR, Site, site

from lakebed.console.actions import ACTIONS
from lakebed.lifecycle.model import Position, StreamKind
from lakebed.lifecycle.state import Blocker, Stream, Troubles
from lakebed.lifecycle.workers import shelf_of
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.queue import Queue


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

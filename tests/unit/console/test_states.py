"""States that are true: grey without evidence, amber and red by the limits that the alerts have, with the reason."""

from __future__ import annotations

import asyncio
import re

import pytest

from lakebed.console.dashboards.alerts import ALERTS
from lakebed.console.dashboards.thresholds import THRESHOLDS, Threshold, above
from lakebed.console.diagram import BOXES, states
from lakebed.console.pages import PAGES, getting_started, levels
from lakebed.console.rendering import Assets, environment
from lakebed.console.states import UNKNOWN, PartState, judge, worst_of
from lakebed.core.context import Health
from lakebed.lifecycle.view import StreamRow
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from support.console_site import site

OK = Health("ok")


def test_without_evidence_every_state_is_grey() -> None:
    """No health report and no level: nothing is green, and the whole is not either."""
    found = states(None, levels(lambda key: None))

    assert {"quiet"} == {one.state for one in found.values()}
    assert "quiet" == worst_of(found)
    assert all(one.reason.startswith("Not heard from") for one in found.values())


@pytest.mark.parametrize("one", THRESHOLDS, ids=lambda one: one.alert)
def test_a_state_and_its_alert_have_one_limit(one: Threshold) -> None:
    """Green at the limit, amber for a ticket or red for a page just above it, with the alert's words and name."""
    (alert,) = [each for each in ALERTS if each.name == one.alert]

    at_limit = judge("", (one.level,), {}, {one.level: one.limit})
    over = judge("", (one.level,), {}, {one.level: one.limit + 1})

    assert above(one.alert) in alert.expr
    assert "ok" == at_limit.state
    assert ("down" if alert.severity == "page" else "degraded", one.alert) == (over.state, over.alert)
    assert alert.summary in over.reason and one.noun in over.reason


def test_every_limit_is_shown_by_a_box() -> None:
    """A level with a limit that no box watches would be green for ever."""
    assert {one.level for one in THRESHOLDS} <= {name for box in BOXES for name in box.watches}


def test_a_component_that_is_down_is_red_with_its_own_words() -> None:
    found = judge("queue", ("queue_dead",), {"queue": Health("down", "no answer within 2 s")}, {"queue_dead": 3.0})

    assert PartState("down", "no answer within 2 s") == found


def test_a_gateway_without_the_part_shows_what_waits_for_an_operator_and_else_grey() -> None:
    assert "degraded" == judge("queue", ("queue_dead",), {}, {"queue_dead": 2.0}).state
    assert "quiet" == judge("queue", ("queue_dead",), {}, {"queue_dead": 0.0}).state
    assert "quiet" == judge("queue", ("queue_dead",), {"queue": Health("odd")}, {}).state  # type: ignore[arg-type]


def test_a_worker_is_green_only_when_its_level_is_known() -> None:
    assert PartState("quiet", UNKNOWN) == judge("", ("queue_oldest_s",), {"queue": OK}, {"queue_oldest_s": None})
    assert "ok" == judge("", ("queue_oldest_s",), {"queue": OK}, {"queue_oldest_s": 899.0}).state


def test_expiration_that_is_late_is_amber() -> None:
    """22 minutes are within the limit of the alert; two hours are not."""

    def found(behind_s: float) -> PartState:
        streams = [StreamRow("delay 1 d", 86_400.0, 0, behind_s)]
        known = levels({"lifecycle.streams": streams, "lifecycle.blockers": []}.get)
        return states({"lifecycle": OK}, known)["lifecycle"]

    assert ("ok", "") == (found(22 * 60).state, found(22 * 60).alert)
    assert ("degraded", "LifecycleBehind") == (found(7200).state, found(7200).alert)


async def test_a_problem_is_named_with_a_link_to_its_runbook_entry() -> None:
    """The overview has the reason in words; the link leads to a section of the runbook page that exists."""
    async with site() as here:
        await here.console.data.samples.get("ticks.silver", 60.0, _late)
        page = (await here.browser.open("/")).text
        runbook = (await here.browser.open("/runbook")).text

    assert 'href="/runbook#tickssilverbehind"' in page
    assert "A committed tick has waited for silver for more than 30 minutes." in page
    assert all(f'<section id="{alert.name.lower()}">' in runbook for alert in ALERTS)


async def _late() -> dict[str, float]:
    return {"undispatched": 1, "lag_s": 4000.0, "dead": 0, "waiting": 0, "in_flight": 0}


def test_the_first_steps_are_ticked_off_and_go_when_all_are_done() -> None:
    """An empty lake shows three commands; while it is not known what is there, none."""
    known: dict[str, float | None] = {"agents": 0.0, "log_partitions": 0.0, "queues": 0.0}

    empty = getting_started(known)
    begun = getting_started(known | {"queues": 1.0})

    assert ([False, False, False], [False, False, True]) == ([s.done for s in empty], [s.done for s in begun])
    assert all("lakebed " in step.command for step in empty)
    assert [] == getting_started(dict.fromkeys(known, 2.0)) == getting_started({})


async def test_an_empty_lake_shows_three_commands_to_copy_and_ticks_off_what_has_arrived() -> None:
    """Each with its own button; what was sent by any process counts, here an entry of a queue."""
    async with site() as here, asyncio.timeout(30):
        while "0 of 3 done" not in (empty := (await here.browser.open("/")).text):
            await asyncio.sleep(0.01)
        await (await Queue.of(here.context, "work").ingestor().ingest([KeyValueEntry(b"k", b"v")])).await_durable()
        while "1 of 3 done" not in (begun := (await here.browser.open("/")).text):
            here.console.data.samples.forget()
            await asyncio.sleep(0.01)

    for number in (1, 2, 3):
        assert f'<code id="step-{number}">' in empty and f'data-do="copy" data-from="step-{number}"' in empty
    assert [3, 2] == [page.count('<li class="open">') for page in (empty, begun)]
    assert re.search(r'<li class="done"><div><strong>Put an entry into a queue', begun)


def test_every_live_number_has_its_unit_and_a_rate_its_second() -> None:
    """In the boxes of the overview and the lines of the charts; a form of its own writes the unit of bytes and ages."""
    made = environment(Assets())
    assert made.loader is not None
    text = "".join(made.loader.get_source(made, f"{page.name}.html")[0] for page in PAGES)
    charts = re.findall(r'ui\.chart\("[^"]+", "([^"]+)"', text)
    shown = [(line.key, line.label) for box in BOXES for line in (box.first, box.second)]
    for line in ",".join(charts).split(","):
        key, label = line.split("|")
        shown.append((key, label))

    rates = [(key, label) for key, label in shown if key.startswith(("lake.", "rate."))]
    assert len(charts) >= 11 and all(label for _, label in shown)
    assert [] == [one for one in rates if not one[1].endswith("/s")]
    assert [] == [one for one in shown if one not in rates and one[1].endswith("/s")]

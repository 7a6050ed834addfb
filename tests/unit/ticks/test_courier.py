"""The agent's uploader: folders become ticks, leave when they are committed, and wait for a person when refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lakebed.ticks.folder_uploader import REFUSED, SENT, STUCK
from lakebed.ticks.packing import MANIFEST_FILE, find, pack
from support.tick_fixtures import PROJECT, context_of, serving
from support.tick_folders import Site


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(context_of()) as service:
        yield Site(service, tmp_path)


async def test_a_ready_folder_is_committed_and_goes(site: Site) -> None:
    """Its name is the tick's id; a folder that is still being filled is left alone."""
    done, filling = site.drop("t-1", [1, 2]), site.drop("t-2", [3], ready=False)

    committed = await site.courier().round()

    assert (1, {"1", "2"}) == (committed, {key.strip("[]") for key in await site.service.rows()})
    assert (False, True, False) == (done.exists(), filling.exists(), (site.folder / SENT / "t-1").exists())
    assert ([], {}) == (list(site.outbox.waiting()), site.alerts)


async def test_a_folder_with_its_own_manifest_is_sent_as_that_says(site: Site) -> None:
    """The manifest's tick id counts; with keep the folder is moved aside instead of deleted."""
    folder = site.drop("anything", [1], ready=False)
    told = pack(find([folder]), project_id=PROJECT, tick_id="told", dt="20261115", keys={"": ["id"]})
    (folder / MANIFEST_FILE).write_text(told.manifest)

    committed = await site.courier(keep=True).round()

    assert (1, ["anything"]) == (committed, [each.name for each in (site.folder / SENT).iterdir()])
    commits = [info.key async for info in site.service.context.store.list("ticks/v1/commits/")]
    assert ["ticks/v1/commits/acme/p-1/told.json"] == commits


async def test_a_refused_folder_waits_for_a_person_and_holds_up_nobody(site: Site) -> None:
    """422 of the service, and what cannot be packed at all: failed_manual, with an alert; moved away, it is over."""
    bad = site.drop("a-bad", [1])
    (bad / "orders.parquet").write_text("no parquet")
    keyless = site.drop("b-lying", [2], ready=False)
    told = pack(find([keyless]), project_id=PROJECT, tick_id="b-lying", dt="20261115", keys={"": ["id"]})
    lies = told.manifest.replace('"rows":1', '"rows":2').replace('"row_count":1', '"row_count":2')
    (keyless / MANIFEST_FILE).write_text(lies)
    site.drop("c-good", [3])
    courier = site.courier()

    committed = await courier.round()
    waiting = {each.packed.tick_id: (each.state, each.error_class) for each in site.outbox.waiting()}
    alerts = set(site.alerts)
    bad.rename(site.root / "mended"), keyless.rename(site.root / "mended-too")
    await courier.round()

    assert 1 == committed
    assert {"a-bad": ("failed_manual", "invalid"), "b-lying": ("failed_manual", "row_count_mismatch")} == waiting
    assert ({REFUSED}, [], {}) == (alerts, list(site.outbox.waiting()), site.alerts)


async def test_a_service_that_is_gone_is_tried_by_another_way_and_later(site: Site) -> None:
    """One address fails: the next round takes the other; what was sent before is not sent again."""
    site.drop("t-1", [1])
    site.wires[0].bend = lambda request: None
    courier = site.courier()

    first = await courier.round()
    alerts = dict(site.alerts)
    second = await courier.round()

    assert (0, 1) == (first, second)
    assert ([STUCK], {}) == (list(alerts), site.alerts)


async def test_a_commit_whose_folder_survived_a_kill_is_only_put_away(site: Site) -> None:
    """Killed between the commit and the removal: the next run gets the first answer and clears up."""
    folder = site.drop("t-1", [1])
    first = site.courier()
    first._settle = lambda waiting, result: False  # type: ignore[method-assign]  # the kill
    await first.round()
    assert folder.exists()

    committed = await site.courier().round()

    assert (1, False, []) == (committed, folder.exists(), list(site.outbox.waiting()))
    assert 1 == site.service.bronze.calls["commit"]


async def test_another_content_under_a_committed_name_is_refused_not_lost(site: Site) -> None:
    """The service answers 422: rows that are not in bronze are never called committed."""
    site.drop("t-1", [1])
    courier = site.courier()
    await courier.round()
    again = site.drop("t-1", [7, 8])

    committed = await courier.round()

    (left,) = site.outbox.waiting()
    assert (0, True, "other_manifest") == (committed, again.exists(), left.error_class)
    assert 1 == len(await site.service.rows())


async def test_a_name_that_is_no_ticks_is_told(site: Site) -> None:
    """It cannot be put into the outbox, but nobody is left to wonder."""
    site.drop("no name", [1])

    committed = await site.courier().round()

    assert (0, [STUCK]) == (committed, list(site.alerts))

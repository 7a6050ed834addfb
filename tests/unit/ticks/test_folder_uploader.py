"""The agent's uploader: folders become ticks, leave when they are committed, and wait for a person when refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt
from lakebed.ticks.folder_uploader import REFUSED, SENT, STUCK
from lakebed.ticks.model import BronzeTick
from lakebed.ticks.outbox import REFUSALS_MAX, REFUSED_MS, Outbox
from lakebed.ticks.packing import MANIFEST_FILE, READY_FILE, find, pack
from support.tick_fixtures import PROJECT, context_of, parquet, serving
from support.tick_folders import Site
from support.tick_uploads import NoWait


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
    reported = pack(find([folder]), project_id=PROJECT, tick_id="told", dt="20261115", keys={"": ["id"]})
    (folder / MANIFEST_FILE).write_text(reported.manifest)

    committed = await site.courier(keep=True).round()

    assert (1, ["anything"]) == (committed, [each.name for each in (site.folder / SENT).iterdir()])
    commits = [info.key async for info in site.service.context.store.list("ticks/v1/commits/")]
    assert ["ticks/v1/commits/acme/p-1/told.json"] == commits


async def test_a_refused_folder_waits_for_a_person_and_holds_up_nobody(site: Site) -> None:
    """422 of the service, and what cannot be packed at all: failed_manual, with an alert; moved away, it is over."""
    bad = site.drop("a-bad", [1])
    (bad / "orders.parquet").write_text("no parquet")
    keyless = site.drop("b-lying", [2], ready=False)
    reported = pack(find([keyless]), project_id=PROJECT, tick_id="b-lying", dt="20261115", keys={"": ["id"]})
    wrong_answers = reported.manifest.replace('"rows":1', '"rows":2').replace('"row_count":1', '"row_count":2')
    (keyless / MANIFEST_FILE).write_text(wrong_answers)
    site.drop("c-good", [3])
    uploader = site.courier()

    committed = await uploader.round()
    waiting = {each.packed.tick_id: (each.state, each.error_class) for each in site.outbox.waiting()}
    alerts = set(site.alerts)
    bad.rename(site.root / "mended"), keyless.rename(site.root / "mended-too")
    await uploader.round()

    assert 1 == committed
    assert {"a-bad": ("failed_manual", "invalid"), "b-lying": ("failed_manual", "row_count_mismatch")} == waiting
    assert ({REFUSED}, [], {}) == (alerts, list(site.outbox.waiting()), site.alerts)


async def test_a_service_that_is_gone_is_tried_by_another_way_and_later(site: Site) -> None:
    """One address fails: the next round takes the other; what was sent before is not sent again."""
    site.drop("t-1", [1])
    site.wires[0].bend = lambda request: None
    uploader = site.courier()

    first = await uploader.round()
    alerts = dict(site.alerts)
    second = await uploader.round()

    assert (0, 1) == (first, second)
    assert ([STUCK], {}) == (list(alerts), site.alerts)


async def test_the_alerts_of_the_run_before_end_with_the_first_good_round(site: Site) -> None:
    """They outlive a restart of the agent; what was wrong may have been put right meanwhile."""
    site.alerts.update({STUCK: "the service is away", REFUSED: "1 ticks were refused"})

    await site.courier().round()

    assert {} == site.alerts


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


async def test_a_kill_while_a_committed_folder_is_put_away_needs_nobody_the_day_after(site: Site) -> None:
    """The outbox still has the tick as it was sent, with its day: packed again it would be another manifest."""

    class Killed(BaseException): ...

    def killed(folder: Path) -> None:
        raise Killed

    day_ns, days = 86_400_000_000_000, [20_000]
    site.clock = NoWait(lambda: days[-1] * day_ns)
    folder = site.drop("t-1", [1])
    first = site.courier()
    first._remove_folder = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        await first.round()
    assert folder.exists()

    days.append(20_001)
    committed = await site.courier().round()

    assert (1, False, []) == (committed, folder.exists(), list(site.outbox.waiting()))
    assert (1, {}) == (site.service.bronze.calls["commit"], site.alerts)


async def test_another_content_under_a_committed_name_is_refused_not_lost(site: Site) -> None:
    """The service answers 422: rows that are not in bronze are never called committed."""
    site.drop("t-1", [1])
    uploader = site.courier()
    await uploader.round()
    again = site.drop("t-1", [7, 8])

    committed = await uploader.round()

    (left,) = site.outbox.waiting()
    assert (0, True, "other_manifest") == (committed, again.exists(), left.error_class)
    assert 1 == len(await site.service.rows())


async def test_a_name_that_is_no_ticks_is_told(site: Site) -> None:
    """It cannot be put into the outbox, but nobody is left to wonder."""
    site.drop("no name", [1])

    committed = await site.courier().round()

    assert (0, [STUCK]) == (committed, list(site.alerts))


async def test_a_tick_that_the_service_fails_on_delays_no_other(site: Site) -> None:
    """Its finalize is a 500 every time: the second tick is committed in the same round, and later ones come first."""
    site.drop("a-bad", [1])
    site.drop("b-good", [2])
    site.service.bronze.bend = _crash_on("a-bad")
    uploader = site.courier()

    first = await uploader.round()
    site.drop("c-good", [3])
    for wire in site.wires:
        wire.sent.clear()
    second = await uploader.round()

    finalizes = [name for wire in site.wires for method, name, status in wire.sent if status == 200]
    assert (1, 1) == (first, second)
    assert ["finalize"] == finalizes
    assert 500 not in [status for wire in site.wires for _, _, status in wire.sent[:2]]
    (left,) = site.outbox.waiting()
    assert ("a-bad", "ready", 2) == (left.packed.tick_id, left.state, left.refusals)


async def test_a_tick_that_is_refused_for_an_hour_is_failed_manual(site: Site, manual_clock: ManualClock) -> None:
    """A persistent 500 needs a person; until then, and for a service that is away, the tick is retried."""
    site.drop("a-bad", [1])
    site.service.bronze.bend = _crash_on("a-bad")
    site.clock = NoWait(lambda: manual_clock.now_ns())
    uploader = site.courier()
    for _ in range(REFUSALS_MAX + 5):
        await uploader.round()
    (waiting,) = site.outbox.waiting()

    await manual_clock.advance(REFUSED_MS / 1000)
    await uploader.round()

    (left,) = site.outbox.waiting()
    assert ("ready", "failed_manual", "refused_persistently") == (waiting.state, left.state, left.error_class)
    assert [REFUSED] == list(site.alerts)


@pytest.mark.parametrize("status", [502, 503, 504, 425, 429, 408, 401, 403])
async def test_a_service_that_is_busy_is_never_a_refusal(site: Site, manual_clock: ManualClock, status: int) -> None:
    """Hours of it, and of a secret that is refused, which is the project's matter: the tick stays ready."""
    site.drop("t-1", [1])
    site.clock = NoWait(lambda: manual_clock.now_ns())
    for wire in site.wires:
        wire.answer = lambda request: httpx2.Response(status, json={"message": "busy"})
    uploader = site.courier()
    for _ in range(REFUSALS_MAX + 2):
        await manual_clock.advance(REFUSED_MS / 1000)
        await uploader.round()

    (left,) = site.outbox.waiting()
    assert ("ready", 0) == (left.state, left.refusals)


async def test_a_file_changed_in_place_is_failed_manual_at_once(site: Site) -> None:
    """The same size, other bytes: sent once, not for ever, and the tick behind it is committed."""
    bad = site.drop("a-bad", [1])
    uploader = site.courier()
    await asyncio.to_thread(uploader._pack_ready)
    file = bad / "orders.parquet"
    data = bytearray(file.read_bytes())
    data[10] ^= 1
    file.write_bytes(bytes(data))
    site.drop("b-good", [2])

    committed = await uploader.round()

    (left,) = site.outbox.waiting()
    assert (1, "failed_manual", "file_changed") == (committed, left.state, left.error_class)
    assert {0: 1} == site.outbox.attempts("a-bad")


async def test_a_file_of_the_outbox_that_does_not_decode_delays_no_other(site: Site) -> None:
    """Of a damaged disk, or of a later version of the agent: it is told, kept, and the others are committed."""
    site.drop("a-bad", [1])
    uploader = site.courier()
    await asyncio.to_thread(uploader._pack_ready)
    (file,) = (site.root / "outbox").glob("*.tick.json")
    file.write_bytes(b"{half")
    site.drop("b-good", [2])

    committed = await uploader.round()
    again = await uploader.round()

    assert (1, 0, b"{half") == (committed, again, file.read_bytes())
    assert (True, [STUCK]) == ("does not decode" in site.alerts[STUCK], list(site.alerts))
    with pytest.raises(Corrupt):
        list(site.outbox.waiting())  # a command says so


async def test_a_folder_that_cannot_be_removed_delays_no_other(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's, or on a disk that fails: its tick is committed and stays, with the reason, until it can go."""
    folder, uploader = site.drop("a-kept", [1]), site.courier()
    site.drop("b-good", [2])
    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self == folder:
            raise PermissionError("not yours")
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refused)
        committed = await uploader.round()
    kept = [waiting.packed.tick_id for waiting in site.outbox.waiting()]
    reason = site.alerts[STUCK]
    again = await uploader.round()

    assert (1, ["a-kept"], 1) == (committed, kept, again)
    assert "not yours" in reason and str(folder) in reason
    assert [] == list(site.outbox.waiting()) and not folder.exists()


async def test_attempts_are_counted_for_each_part_and_survive_the_process(site: Site) -> None:
    """Parts that were sent once, twice and three times have so many attempts; another process reads the same, sends
    only the part that is missing, and counts on.
    """
    folder = site.drop("t-1", [1], ready=False)
    for table in ("people", "sales"):
        (folder / f"{table}.parquet").write_bytes(parquet([1]))
    (folder / READY_FILE).touch()
    cut = Counter({"1": 1, "2": 6})  # requests of each part that are lost; a round sends one up to three times

    def bend(request: httpx2.Request) -> httpx2.Request | None:
        part = request.url.path.rsplit("/", 1)[-1]
        cut[part] -= 1
        return None if request.method == "PUT" and cut[part] >= 0 else request

    site.wires[0].bend = bend

    counted, committed = [], []
    for _ in range(3):
        committed.append(await site.courier().round())
        site.outbox = Outbox(site.root / "outbox")  # of the next process
        counted.append(site.outbox.attempts("t-1"))

    assert [{0: 1, 1: 2, 2: 3}, {0: 1, 1: 2, 2: 6}, {}] == counted
    assert [0, 0, 1] == committed


async def test_a_tick_that_cannot_be_read_any_more_delays_no_other(site: Site) -> None:
    """Its manifest in the outbox is of a version that this agent refuses: the tick behind it is committed."""
    site.drop("a-bad", [1])
    uploader = site.courier()
    await asyncio.to_thread(uploader._pack_ready)
    (bad,) = site.outbox.waiting()
    manifest = bad.packed.manifest.replace('"schema_version":"1.0"', '"schema_version":"0.9"')
    site.outbox.put(msgspec.structs.replace(bad, packed=msgspec.structs.replace(bad.packed, manifest=manifest)))
    site.drop("b-good", [2])

    committed = await uploader.round()

    (left,) = site.outbox.waiting()
    assert (1, "a-bad", 1) == (committed, left.packed.tick_id, left.refusals)


def _crash_on(tick_id: str) -> Callable[[BronzeTick], None]:
    def crash(tick: BronzeTick) -> None:
        if tick.tick_id == tick_id:
            raise RuntimeError("a bug")

    return crash

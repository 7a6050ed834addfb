"""The configuration snapshot: its shape, its copy on disk, and what a failing URL changes (nothing)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lakebed.agent.alerts import Alerts, read_alerts
from lakebed.agent.failover import SendLimits, SendOrder
from lakebed.agent.settings import AgentSettings, TickFolder
from lakebed.agent.snapshot import FILE, STALE, AgentConfig, ConfigSnapshot, read_config
from lakebed.core import private
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Contradiction
from lakebed.wiring.agent_commands import pointed


class Hub:
    """A URL whose body a test sets; None: it is away."""

    def __init__(self, *urls: str) -> None:
        self.body: bytes | None = msgspec.json.encode({"datalake_url": list(urls), "more": 1})

    async def fetch(self, url: str) -> bytes:
        if self.body is None:
            raise Unavailable(f"{url} cannot be read")
        return self.body


def snapshot_of(hub: Hub, folder: Path) -> ConfigSnapshot:
    runtime = Runtime(clock=ManualClock(), ids=Ids.seeded(1), metrics=Metrics())
    return ConfigSnapshot("http://hub/config", folder, hub.fetch, runtime, refresh_s=60.0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"{}",
        b'{"datalake_url": 7}',
        b'{"datalake_url": []}',
        b'{"datalake_url": ""}',
        b'{"datalake_url": "https://"}',
        b'{"datalake_url": "ftp://x"}',
        b'{"datalake_url": "http://a", "schema": "lakebed.agent-config.v9"}',
        msgspec.json.encode({"datalake_url": ["http://a"] * 17}),
    ],
)
async def test_what_is_no_snapshot_is_refused_and_the_last_good_one_stays(tmp_path: Path, body: bytes) -> None:
    """Whatever the URL returns: the agent goes where it went, also after a restart, and an alert says why."""
    hub = Hub("http://one", "https://two/")
    snapshot = snapshot_of(hub, tmp_path)
    good = await snapshot.refresh()
    alerts: list[tuple[str, bool]] = []
    snapshot.alert = lambda kind, message: alerts.append((kind, message is not None))

    hub.body = body
    kept = await snapshot.refresh()
    hub.body = None
    restarted = snapshot_of(hub, tmp_path)

    with pytest.raises(Invalid):
        read_config(body)
    assert good == kept == restarted.current == await restarted.refresh()
    assert kept is not None and ("http://one", "https://two/") == kept.urls
    assert [(STALE, True)] == alerts


async def test_the_alert_of_the_run_before_ends_with_the_first_success(tmp_path: Path) -> None:
    """It was stale at the stop, and its alert outlived the restart: the next snapshot that is good ends it."""
    hub, alerts = Hub("http://one"), Alerts(tmp_path, metrics=Metrics(), now_ms=lambda: 5)
    alerts.on(STALE, "not refreshed")
    snapshot = snapshot_of(hub, tmp_path)
    snapshot.alert = lambda kind, message: alerts.on(kind, message) if message else alerts.off(kind)

    await snapshot.refresh()

    assert [] == read_alerts(tmp_path)


async def test_a_change_is_passed_on_once_and_kept_before(tmp_path: Path) -> None:
    """Listeners get a new address; the same again is no change; the alert of a failure ends."""
    hub = Hub("http://one")
    snapshot = snapshot_of(hub, tmp_path)
    passed: list[tuple[AgentConfig, bytes]] = []
    alerts: list[tuple[str, bool]] = []
    snapshot.alert = lambda kind, message: alerts.append((kind, message is not None))

    async def changed(config: AgentConfig) -> None:
        passed.append((config, (tmp_path / FILE).read_bytes()))

    snapshot.listen(changed)
    for body in (hub.body, hub.body, None, b'{"datalake_url": "http://elsewhere"}'):
        hub.body = body
        await snapshot.refresh()

    assert [("http://one",), ("http://elsewhere",)] == [config.urls for config, _ in passed]
    assert all(config == read_config(kept) for config, kept in passed)
    assert [False, False, True, False] == [on for _, on in alerts]


async def test_a_change_that_a_listener_could_not_take_is_passed_on_again(tmp_path: Path) -> None:
    """One folder of ticks must not stay pointed at the old address while the agent believes that it has changed."""
    snapshot = snapshot_of(Hub("http://one"), tmp_path)
    taken: list[str] = []

    async def fails_once(config: AgentConfig) -> None:
        taken.append("tried")
        if len(taken) == 1:
            raise OSError("the certificate cannot be read")

    async def other(config: AgentConfig) -> None:
        taken.append("other")

    snapshot.listen(fails_once)
    snapshot.listen(other)
    for _ in range(3):
        await snapshot.refresh()

    assert ["tried", "tried", "other"] == taken


async def test_a_damaged_copy_is_like_none(tmp_path: Path) -> None:
    """The agent then starts with its own settings until the URL answers."""
    (tmp_path / FILE).write_bytes(b"{half")

    snapshot = snapshot_of(Hub("http://one"), tmp_path)

    assert snapshot.current is None
    assert ("http://one",) == (await snapshot.refresh() or AgentConfig("")).urls


def test_a_sender_that_is_pointed_elsewhere_keeps_what_it_knows_of_the_others() -> None:
    """A collector that stays keeps its pause; one that left gets no new request; a new one is used at once."""
    limits = SendLimits(4, 1.0, 60.0, 300.0, 60.0, 0.2)
    order = SendOrder(("http://old", "http://stays"), limits, Ids.seeded(1))
    stays = next(each for each in order.collectors if each.url == "http://stays")
    order.failed(stays, 0.0)

    order.point(("http://new/", "http://stays"))

    assert ["http://new", "http://stays"] == [each.url for each in order.collectors]
    assert stays is order.collectors[1]
    chosen = order.collector(0.0)
    assert chosen is not None and "http://new" == chosen.url


def test_the_addresses_replace_those_of_batches_and_of_every_tick_folder() -> None:
    """A fleet is pointed elsewhere as a whole."""
    folders = (TickFolder(Path("a"), "p", urls=("http://own",)), TickFolder(Path("b"), "q"))
    settings = AgentSettings(collectors=("http://old",), ticks=folders)

    moved = pointed(settings, ("http://new",))

    assert (("http://new",), [("http://new",)] * 2) == (moved.collectors, [each.urls for each in moved.ticks])


@pytest.mark.parametrize("wrong", [{"config_url": "hub/config"}, {"config_refresh_s": 0.5}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    """An address without a scheme, and a refresh without a pause."""
    with pytest.raises(Contradiction):
        msgspec.structs.replace(AgentSettings(), **wrong).check()


async def test_a_kept_snapshot_is_written_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss the file is the old snapshot or the new one, never an empty one."""
    written: list[Path] = []
    real = private.write
    monkeypatch.setattr(private, "write", lambda file, data: (written.append(file), real(file, data)))

    await snapshot_of(Hub("http://one"), tmp_path).refresh()

    assert [tmp_path / FILE] == written

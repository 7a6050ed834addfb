"""The hourly check of a running process: when it looks, what its health reports, what it changes."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.store.guarded import ConditionsIgnored, GuardedStore
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from lakebed.wiring.boot import AGAIN_S, CHECK_EVERY_S, PathWatch, path_watch
from support.gateway_fixtures import context_with
from support.runtimes import runtime_of


class Path(MemoryStore):
    """A bucket whose path can begin to ignore conditions, or stop answering."""

    ignores = False
    away = False

    async def replace(self, key: str, data: bytes, etag: str) -> ObjectInfo:
        if self.away:
            raise Unavailable("no answer")
        return self.bucket.overwrite(key, data) if self.ignores else await super().replace(key, data, etag)


@pytest.fixture
def path(manual_clock: ManualClock) -> Path:
    return Path(clock=manual_clock)


@pytest.fixture
def guarded(path: Path, manual_clock: ManualClock) -> GuardedStore:
    return GuardedStore(path, runtime_of(manual_clock, Ids.seeded(1)))


async def test_a_path_that_begins_to_ignore_conditions_is_found_within_the_hour(
    path: Path, guarded: GuardedStore, manual_clock: ManualClock
) -> None:
    """Health is down and writes are refused from that check on; the first check that holds ends both."""
    assert CHECK_EVERY_S <= 3600
    await guarded.create("a", b"1")
    watch = PathWatch(guarded, manual_clock)
    await watch.start()
    await manual_clock.advance(CHECK_EVERY_S)
    assert (await watch.health()).status == "ok"

    path.ignores = True
    await manual_clock.advance(CHECK_EVERY_S)

    assert (await watch.health()).status == "down"
    assert "stale_replace_is_refused" in (await watch.health()).detail
    with pytest.raises(ConditionsIgnored):
        await guarded.create("b", b"1")

    path.ignores = False
    await manual_clock.advance(AGAIN_S)

    assert (await watch.health()).status == "ok"
    await guarded.create("b", b"1")
    await watch.stop()


async def test_a_store_that_is_away_is_asked_again_soon_and_refuses_nothing(
    path: Path, guarded: GuardedStore, manual_clock: ManualClock
) -> None:
    """No answer reports nothing about the path; the check comes again after seconds, not after an hour."""
    await guarded.create("a", b"1")
    watch = PathWatch(guarded, manual_clock)
    await watch.start()
    path.away = True
    await manual_clock.advance(CHECK_EVERY_S)
    assert (await watch.health()).status == "ok"
    await guarded.create("b", b"1")

    path.away, path.ignores = False, True
    await manual_clock.advance(AGAIN_S)

    assert (await watch.health()).status == "down"
    await watch.stop()


async def test_a_watch_that_has_ended_is_not_well(guarded: GuardedStore, manual_clock: ManualClock) -> None:
    """A process that no longer checks its path does not call itself healthy."""
    watch = PathWatch(guarded, manual_clock)
    await watch.start()
    assert watch._task is not None
    watch._task.cancel()
    await manual_clock.advance(1)

    assert (await watch.health()).status == "down"


def test_only_processes_that_write_are_watched(guarded: GuardedStore) -> None:
    """A read-only gateway and pages alone leave no scratch objects in the bucket."""

    def context(**flags: str) -> Context:
        return msgspec.structs.replace(context_with(**flags), store=guarded)

    assert len(path_watch(context(), ())) == 1
    assert path_watch(context(), ("console",)) == []
    assert path_watch(context(read_only="true"), ()) == []

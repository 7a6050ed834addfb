"""Real processes race on the real bucket: no update is lost, one winner at a time, a fenced owner cannot write."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process

import msgspec
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Fenced
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Settings, env_name
from lakebed.store.demo import Tally, tally
from lakebed.store.lease import HeldByAnother, Lease
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

PROCESSES = 4
DEADLINE_S = 200


@pytest.fixture
def context(bucket: Store, clock: SystemClock, ids: Ids, metrics: Metrics) -> Context:
    return Context(node="test", settings=Settings({}, {}), store=bucket, clock=clock, ids=ids, metrics=metrics)


async def racer(settings: StoreSettings, *arguments: str) -> Process:
    env = {env_name(key): str(value) for key, value in settings.as_layer().items()}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lakebed.store.demo", *arguments, env={**os.environ, **env}, stdout=PIPE
    )


async def line_of(process: Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)).decode().strip()


async def test_processes_racing_on_a_register_lose_no_update(context: Context, bucket_settings: StoreSettings) -> None:
    """Four processes changing one register at once are all counted, each change once."""
    racers = [await racer(bucket_settings, "count", "r/tally.json", f"r{n}", "12") for n in range(PROCESSES)]

    codes = [await asyncio.wait_for(process.wait(), DEADLINE_S) for process in racers]

    assert codes == [0] * PROCESSES
    assert {f"r{n}": 12 for n in range(PROCESSES)} == (await tally(context, "r/tally.json").read()).value.counts


@pytest.mark.full
async def test_a_racer_killed_half_way_has_counted_whole_numbers(
    context: Context, bucket_settings: StoreSettings
) -> None:
    """kill -9 in the middle leaves a register that decodes, with every other racer's count whole."""
    victim = await racer(bucket_settings, "count", "r/tally.json", "victim", "100000")
    other = await racer(bucket_settings, "count", "r/tally.json", "other", "20")
    register = tally(context, "r/tally.json")
    async with asyncio.timeout(DEADLINE_S):
        while (await register.read()).value.counts.get("victim", 0) < 3:
            await asyncio.sleep(0.02)

    victim.kill()
    await victim.wait()

    assert await asyncio.wait_for(other.wait(), DEADLINE_S) == 0
    assert (await register.read()).value.counts["other"] == 20


@pytest.mark.full
async def test_of_processes_racing_for_a_lease_one_holds_it_and_the_killed_is_replaced(
    context: Context, bucket_settings: StoreSettings
) -> None:
    """A held lease is refused; after kill -9 another takes it under a higher epoch, and the old epoch is fenced."""
    first = await racer(bucket_settings, "hold", "l/lease.json", "first", "10")
    epoch = int((await line_of(first)).removeprefix("held "))
    rival = Lease(context, "l/lease.json", owner="rival", lease_s=5, skew_s=0.1)
    with pytest.raises(HeldByAnother):
        await rival.acquire()

    first.kill()
    await first.wait()
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                held = await rival.acquire()
                break
            except HeldByAnother:
                await asyncio.sleep(0.1)

    assert held.epoch > epoch
    guarded = tally(context, "l/guarded.json")
    await guarded.change(lambda now: (Tally({"rival": 1}), None), epoch=held.epoch)
    with pytest.raises(Fenced):
        await guarded.change(lambda now: (Tally({"first": 1}), None), epoch=epoch)
    assert (await guarded.read()).value.counts == {"rival": 1}


@pytest.mark.full
async def test_many_processes_ask_for_a_free_lease_and_exactly_one_gets_it(
    context: Context, bucket_settings: StoreSettings
) -> None:
    """Of four processes querying at once exactly one reports that it holds the lease."""
    racers = [await racer(bucket_settings, "hold", "l/lease.json", f"r{n}", "300") for n in range(PROCESSES)]
    try:
        output = await asyncio.gather(*(line_of(process) for process in racers))  # a loser's line is its end: empty

        assert [line for line in output if line] == ["held 1"]
        holder = msgspec.json.decode((await context.store.get("l/lease.json")).data)
        assert holder["owner"] == f"r{output.index('held 1')}"
    finally:
        for process in racers:
            if process.returncode is None:
                process.kill()
            await process.wait()

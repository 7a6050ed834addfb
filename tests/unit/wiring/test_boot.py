"""Before it serves: the right bucket, a store that keeps its promises, parts that exist."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.core.context import Context
from lakebed.core.errors import Conflict, Invalid
from lakebed.core.settings import load
from lakebed.store.memory import MemoryBucket, MemoryStore
from lakebed.store.prover import REPORTS, SCRATCH, demand, prove
from lakebed.wiring import boot as module
from lakebed.wiring import parts
from lakebed.wiring.boot import PROOF_CLIENTS, boot, needs_proof, proven
from lakebed.wiring.part import Part
from support.gateway_fixtures import context_with
from support.store_without_conditions import careless_store

WRITER = Part("writer", "writes under conditions", component="nowhere:component")
PAGES = Part("pages", "only shows", component="nowhere:component", active_active=False)


def context_on(store: MemoryStore, **flags: str) -> Context:
    settings = load(parts.sections(), flags={"store.url": "memory:", **flags})
    return msgspec.structs.replace(context_with(), store=store, settings=settings)


@pytest.fixture(autouse=True)
def two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARTS", (WRITER, PAGES))


async def reports(context: Context) -> list[str]:
    return [info.key async for info in context.store.list(REPORTS)]


async def test_the_first_start_proves_the_store_and_the_second_believes_it() -> None:
    """Racing costs seconds on a real store: it is done once per bucket."""
    context = context_on(MemoryStore(clock=context_with().clock))

    first = await boot(context)
    after_first = await reports(context)
    second = await boot(context)

    assert first == second
    assert len(after_first) == 1
    assert await reports(context) == after_first


async def test_a_store_that_ignores_conditions_is_refused() -> None:
    """In words a person can act on, and again at the next start."""
    context = context_on(careless_store(context_with().clock))

    for _ in range(2):
        with pytest.raises(Invalid, match="does not support concurrent writers") as caught:
            await proven(context)
        assert "conditional PUT" in caught.value.hint


async def test_a_store_that_was_mended_is_raced_again() -> None:
    """A stored failure is not believed for ever, and the race that passed is: the next start believes it."""
    careless = careless_store(context_with().clock)
    with pytest.raises(Invalid):
        await proven(context_on(careless))
    bucket = MemoryBucket(clock=context_with().clock)
    for stored in careless.bucket.objects.values():
        await bucket.put(stored.key, stored.data, None)
    context = context_on(MemoryStore(clock=context_with().clock, bucket=bucket))
    assert len(await reports(context)) == 1

    await proven(context)
    after_race = await reports(context)
    await proven(context)

    assert 2 == len(after_race)
    assert after_race == await reports(context)


async def test_a_store_that_failed_its_last_race_is_not_believed_for_an_earlier_one() -> None:
    """Of the reports the newest counts: a store, or the way to it, can lose what it once had."""
    bucket = MemoryBucket(clock=context_with().clock)
    await proven(context_on(MemoryStore(clock=context_with().clock, bucket=bucket)))
    careless = context_on(careless_store(context_with().clock))
    for stored in bucket.objects.values():
        await careless.store.create(stored.key, stored.data)
    with pytest.raises(Invalid):
        demand(await prove([careless.store] * PROOF_CLIENTS, careless, rounds=1, keep_report=True))
    before = await reports(careless)

    with pytest.raises(Invalid, match="does not support concurrent writers"):
        await proven(careless)

    assert (2, 3) == (len(before), len(await reports(careless)))


async def test_no_proof_is_asked_for_when_nothing_is_written() -> None:
    """A read-only gateway leaves the store alone."""
    context = context_on(careless_store(context_with().clock), **{"gateway.read_only": "true"})

    await boot(context)

    assert await reports(context) == []


async def test_no_race_is_run_when_told_but_the_path_is_still_checked() -> None:
    """`gateway.prove = "never"` saves the race of a good store; it never lets a bad one in."""
    never = {"gateway.prove": "never"}
    good = context_on(MemoryStore(clock=context_with().clock), **never)

    await boot(good)

    assert await reports(good) == []
    with pytest.raises(Invalid, match="stale_replace_is_refused"):
        await boot(context_on(careless_store(context_with().clock), **never))


async def test_a_proof_that_was_made_through_another_endpoint_is_not_enough() -> None:
    """The bucket was proven; the path of this process ignores conditions: it does not start."""
    good = context_on(MemoryStore(clock=context_with().clock))
    await boot(good)
    stripping = careless_store(context_with().clock)
    async for info in good.store.list(""):
        await stripping.create(info.key, (await good.store.get(info.key)).data)

    with pytest.raises(Invalid, match="second_create_is_refused") as caught:
        await boot(context_on(stripping))

    assert "If-None-Match" in caught.value.hint
    assert [info.key async for info in stripping.list(SCRATCH)] == []


def test_a_store_is_raced_by_clients_of_their_own() -> None:
    """One client would queue its own requests: that is no race. A store in memory has no second one."""
    flags = {"store.url": "s3://lake", "store.endpoint": "http://127.0.0.1:9"}
    settings = load(parts.sections(), flags={**flags, "store.access_key_id": "a", "store.secret_access_key": "s"})
    far = msgspec.structs.replace(context_with(), settings=settings)
    near = context_on(MemoryStore(clock=context_with().clock))

    rivals, alone = module._rivals(far), module._rivals(near)

    assert (module.PROOF_CLIENTS, module.PROOF_CLIENTS) == (len({id(each) for each in rivals}), len(alone))
    assert far.store is rivals[0] and {id(near.store)} == {id(each) for each in alone}


def test_only_parts_that_write_need_a_proof() -> None:
    """Pages alone start on any store."""
    assert needs_proof(())
    assert needs_proof(("writer",))
    assert not needs_proof(("pages",))


async def test_another_authority_is_refused() -> None:
    """A gateway that was configured with another bucket's id does not start."""
    context = context_on(MemoryStore(clock=context_with().clock))
    first = await boot(context, ["pages"])
    other = context_on(context.store, **{"store.authority": "another"})  # type: ignore[arg-type]

    with pytest.raises(Conflict) as caught:
        await boot(other, ["pages"])

    assert first.authority_id in caught.value.message


async def test_an_unknown_part_is_refused_with_the_known_ones_named() -> None:
    """A typing mistake never starts half a gateway."""
    with pytest.raises(Invalid, match="no part is named wirter") as caught:
        await boot(context_on(MemoryStore(clock=context_with().clock)), ["wirter"])

    assert "writer" in caught.value.hint

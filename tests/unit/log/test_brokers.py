"""The registry of brokers: who is alive, and which broker a partition is best sent to."""

from __future__ import annotations

from lakebed.core.clock import settle
from lakebed.log import brokers
from lakebed.log.brokers import BrokerRecord, BrokerRegistry
from lakebed.log.model import TopicPartition
from support.log_host import Host

TPS = [TopicPartition("orders", number) for number in range(600)]


def record(name: str, zone: str = "") -> BrokerRecord:
    return BrokerRecord(name, f"http://{name}:1", zone=zone)


def registry(host: Host, name: str) -> BrokerRegistry:
    return BrokerRegistry(host.context(), host.meta(), record(name))


async def test_brokers_see_each_other_and_one_that_died_leaves_after_its_lease(host: Host) -> None:
    """A broker that stops removes its record at once; one that dies is gone when its lease ends."""
    one, two, three = (registry(host, name) for name in ("a", "b", "c"))
    for each in (one, two, three, one):
        await each.refresh()
    assert ["a", "b", "c"] == [broker.id for broker in one.living]
    assert ["b", "c"] == [broker.id for broker in one.others]

    await two.close()
    await one.refresh()
    assert ["a", "c"] == [broker.id for broker in one.living]
    assert three._session is not None
    three._session._beating.cancel()  # type: ignore[attr-defined]
    for _ in range(4):
        await host.clock.advance(brokers.LEASE_S / 3)
        await settle(20)
    await one.refresh()

    assert ["a"] == [broker.id for broker in one.living]


async def test_a_broker_whose_lease_was_lost_registers_again(host: Host) -> None:
    """A pause longer than the lease costs it the record; the next refresh puts it back."""
    one, two = registry(host, "a"), registry(host, "b")
    await one.refresh()
    host.state.sessions.clear()
    host.state.remove(brokers.key_of("a"))
    await host.clock.advance(brokers.LEASE_S + 1)
    await settle(20)

    await one.refresh()
    await two.refresh()

    assert ["a", "b"] == [broker.id for broker in two.living]


def test_partitions_are_spread_and_only_those_of_a_lost_broker_move() -> None:
    """Rendezvous hashing: each of four owns about a quarter, and the other three keep what they have."""
    four = [record(name) for name in "abcd"]
    before = {tp: brokers.owner(tp, four) for tp in TPS}
    after = {tp: brokers.owner(tp, four[:3]) for tp in TPS}

    counts = [sum(found is broker for found in before.values()) for broker in four]
    assert all(100 <= count <= 200 for count in counts), counts
    assert all(before[tp] == after[tp] for tp in TPS if before[tp] != four[3])
    assert before == {tp: brokers.owner(tp, four[::-1]) for tp in TPS}


def test_a_zone_is_preferred_where_it_has_brokers() -> None:
    """A client of a zone gets a broker of its zone, and any broker where the zone has none."""
    some = [record("a", "z1"), record("b", "z1"), record("c", "z2")]

    assert {"c"} == {found.id for tp in TPS if (found := brokers.owner(tp, some, zone="z2"))}
    assert {"a", "b", "c"} == {found.id for tp in TPS if (found := brokers.owner(tp, some, zone="z9"))}
    assert brokers.owner(TPS[0], []) is None


async def test_the_owner_follows_the_registry(host: Host) -> None:
    """What is remembered of owners is dropped when a broker comes."""
    one, two = registry(host, "a"), registry(host, "b")
    await one.refresh()
    assert {"a"} == {found.id for tp in TPS if (found := one.owner(tp))}
    await two.refresh()
    await one.refresh()

    assert {"a", "b"} == {found.id for tp in TPS if (found := one.owner(tp))}
    assert [one.owner(tp) for tp in TPS] == [two.owner(tp) for tp in TPS]

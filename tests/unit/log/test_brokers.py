"""The registry of brokers: who is alive, and which broker a partition is best sent to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import settle
from lakebed.core.errors import Unavailable
from lakebed.log import brokers
from lakebed.log.brokers import BrokerRecord, BrokerRegistry
from lakebed.log.model import TopicPartition
from lakebed.meta.model import MetaEntry
from support.log_host import Host

TPS = [TopicPartition("orders", number) for number in range(600)]


def record(name: str, zone: str = "") -> BrokerRecord:
    return BrokerRecord(name, f"http://{name}:1", zone=zone)


def registry(host: Host, name: str) -> BrokerRegistry:
    return BrokerRegistry(host.context(), host.meta(), record(name))


async def test_brokers_see_each_other_and_one_that_died_leaves_after_its_lease(host: Host) -> None:
    """A broker that stops removes its record at once; one that dies is gone when its lease ends. The gauge shows it."""
    context = host.context()
    one, two, three = BrokerRegistry(context, host.meta(), record("a")), registry(host, "b"), registry(host, "c")
    alone = context.metrics.value("lakebed_log_brokers")
    for each in (one, two, three, one):
        await each.refresh()
    assert (1, 3) == (alone, context.metrics.value("lakebed_log_brokers"))
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
    assert 1 == context.metrics.value("lakebed_log_brokers")


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
    before = {tp: brokers.preferred(str(tp), four) for tp in TPS}
    after = {tp: brokers.preferred(str(tp), four[:3]) for tp in TPS}

    counts = [sum(found is broker for found in before.values()) for broker in four]
    assert all(100 <= count <= 200 for count in counts), counts
    assert all(before[tp] == after[tp] for tp in TPS if before[tp] != four[3])
    assert before == {tp: brokers.preferred(str(tp), four[::-1]) for tp in TPS}


def test_a_zone_is_preferred_where_it_has_brokers() -> None:
    """A client of a zone gets a broker of its zone, and any broker where the zone has none."""
    some = [record("a", "z1"), record("b", "z1"), record("c", "z2")]

    assert {"c"} == {found.id for tp in TPS if (found := brokers.preferred(str(tp), some, zone="z2"))}
    assert {"a", "b", "c"} == {found.id for tp in TPS if (found := brokers.preferred(str(tp), some, zone="z9"))}
    assert brokers.preferred("k", []) is None


async def test_the_owner_follows_the_registry(host: Host) -> None:
    """What is remembered of owners is dropped when a broker comes."""
    one, two = registry(host, "a"), registry(host, "b")
    await one.refresh()
    assert {"a"} == {found.id for tp in TPS if (found := one.owner(tp))}
    await two.refresh()
    await one.refresh()

    assert {"a", "b"} == {found.id for tp in TPS if (found := one.owner(tp))}
    assert [one.owner(tp) for tp in TPS] == [two.owner(tp) for tp in TPS]


async def test_a_broker_that_only_reads_owns_no_partition_for_producers(host: Host) -> None:
    """And one that only writes none for consumers; a record of an older version does both."""
    one = registry(host, "a")
    one.me = msgspec.structs.replace(one.me, reads=False)
    for each in (registry(host, "b"), registry(host, "c")):
        each.me = msgspec.structs.replace(each.me, writes=each.me.id == "c")
        await each.refresh()
    await one.refresh()

    assert {"a", "c"} == {found.id for tp in TPS if (found := one.owner(tp))}
    assert {"b", "c"} == {found.id for tp in TPS if (found := one.owner(tp, writes=False))}
    assert msgspec.json.decode(b'{"id": "old"}', type=brokers.BrokerRecord).writes


async def test_a_broker_has_one_record_for_http_and_kafka_clients(host: Host) -> None:
    """Its number for Kafka clients is made of its address: the same after a restart, and no other broker's."""
    one, two, three = (registry(host, name) for name in ("a", "b", "c"))
    await one.serve_kafka("127.0.0.1", 9001)
    await two.serve_kafka("127.0.0.1", 9002)
    await three.refresh()
    before = one.me.kafka_id
    assert [("a", 9001), ("b", 9002)] == sorted((each.id, each.kafka_port) for each in await three.kafka_brokers())
    assert ["a", "b", "c"] == [each.id for each in await brokers.living(host.meta())]

    await one.close()
    again = registry(host, "a2")
    await again.serve_kafka("127.0.0.1", 9001)
    assert before == again.me.kafka_id
    clash = registry(host, "d")
    host.state.remove(brokers.key_of("b"))
    forged = BrokerRecord("f", kafka="elsewhere:1", kafka_id=two.me.kafka_id)
    await host.meta().put(brokers.key_of("f"), msgspec.json.encode(forged), partition_key=brokers.GROUP)
    await clash.serve_kafka("127.0.0.1", 9002)
    assert two.me.kafka_id + 1 == clash.me.kafka_id
    for each in (two, again, clash):
        await each.close()


async def test_a_broker_that_was_killed_has_its_number_again_while_its_former_record_is_there(host: Host) -> None:
    """Clients know the address by that number. Of the two records, they get one."""
    killed, again = registry(host, "a"), registry(host, "a2")
    await killed.serve_kafka("127.0.0.1", 9001)
    await again.serve_kafka("127.0.0.1", 9001)

    assert ["a", "a2"] == [each.id for each in await brokers.living(host.meta())]
    assert killed.me.kafka_id == again.me.kafka_id
    assert [9001] == [each.kafka_port for each in await again.kafka_brokers()]
    for each in (killed, again):
        await each.close()


async def test_kafka_clients_see_a_change_within_half_a_second_and_the_last_list_while_meta_is_away(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients ask when a broker does not respond, so an old list would send them to it again."""
    one, two = registry(host, "a"), registry(host, "b")
    await one.serve_kafka("h", 1)
    await two.serve_kafka("h", 2)
    await host.clock.advance(brokers.FRESH_S + 0.1)
    assert {1, 2} == {each.kafka_port for each in await one.kafka_brokers()}
    await two.close()
    await host.clock.advance(brokers.FRESH_S + 0.1)

    assert {1} == {each.kafka_port for each in await one.kafka_brokers()}

    async def away(*_: object, **__: object) -> None:
        raise Unavailable("meta is away")

    monkeypatch.setattr(one._meta, "range", away)
    await host.clock.advance(brokers.FRESH_S + 0.1)
    assert {1} == {each.kafka_port for each in await one.kafka_brokers()}
    await one.close()


async def test_a_list_of_brokers_is_as_old_as_its_request(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta was slow to answer, and a broker went meanwhile: who asks next does not get that list."""
    one, two = registry(host, "a"), registry(host, "b")
    await one.serve_kafka("h", 1)
    await two.serve_kafka("h", 2)
    await host.clock.advance(brokers.FRESH_S + 0.1)
    real = one._meta.range

    async def slow(*args: Any, **options: Any) -> Sequence[MetaEntry]:
        found = await real(*args, **options)
        await two.close()
        await host.clock.advance(brokers.FRESH_S + 0.1)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(one._meta, "range", slow)
        await one.kafka_brokers()

    assert [1] == [each.kafka_port for each in await one.kafka_brokers()]
    await one.close()

"""Kafka's own clients on a gateway: librdkafka, kafka-python, aiokafka and kcat, beside HTTP."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiokafka
import aiokafka.errors
import confluent_kafka
import httpx2
import kafka
import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from lakebed.log.checker import Send
from lakebed.store.settings import StoreSettings
from support.kafka_gateway import QUIET, KafkaHistory, consume, consumer, produce, producer
from support.log_processes import crew_of, settings_of

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
SECRET = "0123456789abcdef0123"
MEMBER = """
import confluent_kafka, sys
own = {"group.id": "team", "auto.offset.reset": "earliest", "session.timeout.ms": 6000, "enable.auto.commit": False}
made = confluent_kafka.Consumer({"bootstrap.servers": sys.argv[1], **own})
made.subscribe(["shared"])
while True:
    made.poll(1.0)
"""
IN_MEMORY = StoreSettings(url="memory:")


class Gateway:
    def __init__(self, url: str, servers: str) -> None:
        self.url, self.servers = url, servers
        self.admin = AdminClient({"bootstrap.servers": servers, **QUIET})

    def create(self, topic: str, partitions: int) -> None:
        self.admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)

    def post(self, path: str, body: Any) -> Any:
        return httpx2.post(f"{self.url}{path}", json=body, timeout=30).json()

    def records(self, topic: str, partition: int = 0, offset: int = 1) -> list[Any]:
        wanted = {"topic": topic, "partition": partition, "fetch_offset": offset}
        return list(self.post("/v1/consume", {"topic_partitions": [wanted]})["results"][0]["records"])


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """One process, whose store is its memory: what is tested here is between it and its clients."""
    async with crew_of(tmp_path, settings_of(IN_MEMORY, tmp_path)) as (supervised, ports):
        await supervised.start("b0", "serve", ports[0], "--kafka-port", str(ports[1]))
        await supervised.ready("b0")
        yield Gateway(supervised.urls["b0"], f"127.0.0.1:{ports[1]}")


def test_every_client_reads_what_every_other_one_wrote(gateway: Gateway) -> None:
    """librdkafka with each compression, kafka-python (with gzip alone), aiokafka and HTTP, in one topic."""
    for codec in CODECS:
        made = producer(gateway.servers, compression_type=codec)
        records = [{"value": f"{codec}-{n}", "key": "k", "headers": {"h": codec}} for n in range(20)]
        produce(made, "all", records)
    theirs = kafka.KafkaProducer(bootstrap_servers=gateway.servers, compression_type="gzip")
    theirs.send("all", b"kafka-python", key=b"k").get(30)
    theirs.close()
    asyncio.run(_aiokafka_produces(gateway.servers))
    plain = {"topic": "all", "partition": 0, "records": ["http", {"value": "http-keyed", "key": "k"}]}
    gateway.post("/v1/produce", {"topic_partitions": [plain]})
    expected = [f"{codec}-{n}" for codec in CODECS for n in range(20)]
    expected += ["kafka-python", "aiokafka", "http", "http-keyed"]

    reading = consumer(gateway.servers, "rdkafka")
    reading.subscribe(["all"])
    found = consume(reading, len(expected))
    reading.close()
    again = kafka.KafkaConsumer(bootstrap_servers=gateway.servers, group_id=None, consumer_timeout_ms=60_000)
    again.assign([kafka.TopicPartition("all", 0)])
    again.seek(kafka.TopicPartition("all", 0), 101)  # behind what it has no libraries for
    by_python = [next(again) for _ in expected[100:]]
    again.close()

    assert expected == [message.value().decode() for message in found]
    assert list(range(1, len(expected) + 1)) == [message.offset() for message in found]
    assert ([("h", b"zstd")], b"k") == (found[99].headers(), found[99].key())
    assert expected[100:] == [message.value.decode() for message in by_python]
    assert expected == asyncio.run(_aiokafka_consumes(gateway.servers, len(expected)))
    assert expected == [one if isinstance(one, str) else one["value"] for one in gateway.records("all")]


@pytest.fixture(scope="session")
def kcat() -> str:
    found = shutil.which("kcat")
    if found is None:
        pytest.skip("kcat is not installed (apt-get install kcat): it is not tested")
    return found


def test_kcat_writes_and_reads_keys_headers_and_every_compression(kcat: str, gateway: Gateway) -> None:
    """What it writes the others read, and it reads their records; as a member of a group too."""

    def run(*arguments: str, sent: str = "") -> list[str]:
        shown = subprocess.run(
            [kcat, "-b", gateway.servers, "-q", *arguments],
            input=sent, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert 0 == shown.returncode, shown.stderr
        return shown.stdout.splitlines()

    for codec in CODECS:
        lines = "".join(f"k{n}:{codec}-{n}\n" for n in range(20))
        run("-P", "-t", "cat", "-K:", "-H", f"codec={codec}", "-H", "from=kcat", "-z", codec, sent=lines)
    produce(producer(gateway.servers), "cat", [{"value": "librdkafka", "key": "k", "headers": {"from": "librdkafka"}}])
    plain = {"topic": "cat", "partition": 0, "records": [{"value": "http", "key": "k"}]}
    gateway.post("/v1/produce", {"topic_partitions": [plain]})
    expected = [(f"k{n}", f"{codec}-{n}", f"codec={codec},from=kcat") for codec in CODECS for n in range(20)]
    expected += [("k", "librdkafka", "from=librdkafka"), ("k", "http", "")]

    shown = run("-C", "-t", "cat", "-e", "-f", "%o|%k|%s|%h\n")
    of_group = run(
        "-G", "cats", "-X", "auto.offset.reset=earliest", "-c", f"{len(expected)}", "-f", "%k|%s|%h\n", "cat"
    )
    reading = consumer(gateway.servers, "rdkafka")
    reading.subscribe(["cat"])
    found = consume(reading, len(expected))
    reading.close()

    assert [f"{at}|{'|'.join(one)}" for at, one in enumerate(expected, 1)] == shown
    assert list(map("|".join, expected)) == of_group
    assert [(key, value) for key, value, _ in expected] == [(m.key().decode(), m.value().decode()) for m in found]
    assert [("codec", b"zstd"), ("from", b"kcat")] == found[99].headers()


async def _aiokafka_produces(servers: str) -> None:
    made = aiokafka.AIOKafkaProducer(bootstrap_servers=servers, enable_idempotence=True)
    await made.start()
    await made.send_and_wait("all", b"aiokafka", key=b"k")
    await made.stop()


async def _aiokafka_consumes(servers: str, count: int) -> list[str]:
    made = aiokafka.AIOKafkaConsumer("all", bootstrap_servers=servers, group_id="aio", auto_offset_reset="earliest")
    await made.start()
    found = [(await asyncio.wait_for(made.getone(), 60)).value.decode() for _ in range(count)]
    await made.stop()
    return found


@pytest.mark.full
def test_members_of_a_group_share_the_partitions_and_rebalance_while_records_come(gateway: Gateway) -> None:
    """Three members: one is killed with -9, one leaves, and the others get what was not committed.

    The history of the producer and of the two that live has no anomaly: nothing is lost, repeated, reordered or passed
    over, and each member goes on where its assignment began.
    """
    gateway.create("shared", 6)
    done, history = threading.Event(), KafkaHistory()

    def keep_producing() -> None:
        made, number = producer(gateway.servers, enable_idempotence=True), 0
        while not done.is_set():
            for record in (f"r{number + n}" for n in range(10)):
                made.produce("shared", record, key=record, on_delivery=history.report("p", record))
            assert 0 == made.flush(60)
            number += 10
            time.sleep(0.05)

    feeding = threading.Thread(target=keep_producing)
    feeding.start()
    third = subprocess.Popen([sys.executable, "-c", MEMBER, gateway.servers])
    members = [consumer(gateway.servers, "team", enable_auto_commit=False) for _ in range(2)]
    try:
        for number, member in enumerate(members):
            history.subscribe(member, f"m{number}", "shared")
        _poll_until(members, history.take, lambda: [2, 2] == sorted(map(_assigned, members)))
        third.kill()
        _poll_until(members, history.take, lambda: [3, 3] == sorted(map(_assigned, members)))
        members.pop().close()
        _poll_until(members, history.take, lambda: [6] == list(map(_assigned, members)))
        done.set()
        feeding.join(60)
        _poll_until(members, history.take, lambda: history.counts[1] >= history.counts[0])
    finally:
        done.set()
        third.kill()
        third.wait()
        for member in members:
            member.close()

    sent, read = history.counts
    assert [] == history.anomalies()
    assert {"ok"} == {one.outcome for one in history.operations if isinstance(one, Send)}
    assert sent == read > 0
    described = gateway.admin.describe_consumer_groups(["team"])["team"].result(30)
    assert "EMPTY" == described.state.name


@pytest.mark.full
def test_members_read_again_from_where_an_operator_moved_the_running_group_and_commit(gateway: Gateway) -> None:
    """Both members, the one that leads and the other, of one partition each; the group was moved many times."""
    gateway.create("moved", 2)
    produce(producer(gateway.servers), "moved", [{"value": f"v{n}", "partition": n % 2} for n in range(20)])
    members = [consumer(gateway.servers, "movers", enable_auto_commit=False) for _ in range(2)]
    got = set[str]()

    def take(_: Any, message: Any) -> None:
        got.add(message.value().decode())

    def committed() -> list[int]:
        rows = httpx2.get(f"{gateway.url}/v1/topics/moved/groups/movers", timeout=30).json()["groups"]
        return [row["offset"] for row in rows]

    try:
        for member in members:
            member.subscribe(["moved"])
        _poll_until(members, take, lambda: [1, 1] == list(map(_assigned, members)) and [11, 11] == committed())
        for _ in range(60):
            parts = [{"topic": "moved", "partition": number, "offset": 5, "seek": True} for number in range(2)]
            gateway.post("/v1/groups/movers/commit", {"topic_partitions": parts})
        assert [5, 5] == committed()
        got.clear()
        produce(producer(gateway.servers), "moved", [{"value": f"late{n}", "partition": n} for n in range(2)])
        _poll_until(members, take, lambda: [12, 12] == committed())
    finally:
        for member in members:
            member.close()

    assert {f"v{n}" for n in range(8, 20)} | {"late0", "late1"} == got


def _assigned(member: Any) -> int:
    return len(member.assignment())


def _poll_until(
    members: list[Any], take: Callable[[Any, Any], None], ready: Callable[[], bool], s: float = 90.0
) -> None:
    """Each member in turn takes what it has, one message after another, and commits it."""
    deadline = time.monotonic() + s
    while not ready():
        assert time.monotonic() < deadline, [_assigned(member) for member in members]
        for member in members:
            wait_s = 0.05
            while (message := member.poll(wait_s)) is not None:
                if message.error() is None:
                    take(member, message)
                    member.commit(message, asynchronous=True)
                wait_s = 0.0


async def test_a_consumer_of_many_partitions_with_large_records_gets_them_all(tmp_path: Path) -> None:
    """librdkafka refuses an answer that is much larger than it asked for, and asks for the same again for ever."""
    settings = {**settings_of(IN_MEMORY, tmp_path), "log.cache_bytes": "1000"}  # all is read from the bucket
    async with crew_of(tmp_path, settings) as (supervised, ports):
        await supervised.start("b0", "serve", ports[0], "--kafka-port", str(ports[1]))
        await supervised.ready("b0")
        servers, wide = f"127.0.0.1:{ports[1]}", 30

        def check() -> list[int]:
            admin = AdminClient({"bootstrap.servers": servers, **QUIET})
            admin.create_topics([NewTopic("wide", wide, 1)])["wide"].result(30)
            records = [{"value": b"x" * 30_000, "partition": number} for number in range(wide)]
            produce(producer(servers), "wide", records)
            sizes = {"receive_message_max_bytes": 200_000, "fetch_max_bytes": 100_000}
            reading = consumer(servers, "narrow", **sizes, max_partition_fetch_bytes=50_000, message_max_bytes=50_000)
            reading.assign([confluent_kafka.TopicPartition("wide", number, 1) for number in range(wide)])
            found = consume(reading, wide)
            reading.close()
            return sorted(message.partition() for message in found)

        assert list(range(wide)) == await asyncio.to_thread(check)


def test_a_group_goes_on_where_it_committed_and_where_an_operator_put_it(gateway: Gateway) -> None:
    """Offsets of Kafka clients and of HTTP are the same ones."""
    produce(producer(gateway.servers), "resumed", [{"value": f"v{n}"} for n in range(10)])
    first = consumer(gateway.servers, "g", enable_auto_commit=False)
    first.subscribe(["resumed"])
    consume(first, 4)
    first.commit(asynchronous=False)
    first.close()

    (row,) = httpx2.get(f"{gateway.url}/v1/topics/resumed/groups/g", timeout=30).json()["groups"]
    second = consumer(gateway.servers, "g", enable_auto_commit=False)
    second.subscribe(["resumed"])
    (message,) = consume(second, 1)
    second.close()
    seek = {"topic": "resumed", "partition": 0, "offset": 2, "seek": True}
    gateway.post("/v1/groups/g/commit", {"topic_partitions": [seek]})
    third = consumer(gateway.servers, "g", enable_auto_commit=False)
    third.subscribe(["resumed"])
    (moved,) = consume(third, 1)
    third.close()

    assert (5, 6) == (row["offset"], row["lag"])
    assert (5, b"v4") == (message.offset(), message.value())
    assert (2, b"v1") == (moved.offset(), moved.value())


def test_an_administrator_sees_and_changes_topics_and_groups(gateway: Gateway) -> None:
    """Partitions, retention, records, offsets by time, groups, and the end of a topic."""
    admin, topic = gateway.admin, "managed"
    gateway.create(topic, 2)
    resource = ConfigResource(ResourceType.TOPIC, topic)
    before_ms = int(time.time() * 1000)
    produce(producer(gateway.servers), topic, [{"value": f"v{n}", "partition": 0} for n in range(5)])

    with pytest.raises(confluent_kafka.KafkaException, match="TOPIC_ALREADY_EXISTS"):
        gateway.create(topic, 2)
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
    entry = ConfigEntry("retention.ms", "3600000", incremental_operation=AlterConfigOpType.SET)
    admin.incremental_alter_configs([ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])])[
        resource
    ].result(30)
    configs = admin.describe_configs([resource])[resource].result(30)
    tp = confluent_kafka.TopicPartition(topic, 0)
    latest = admin.list_offsets({tp: OffsetSpec.latest()})[tp].result(30)
    by_time = admin.list_offsets({tp: OffsetSpec.for_timestamp(before_ms)})[tp].result(30)
    trimmed = admin.delete_records([confluent_kafka.TopicPartition(topic, 0, 3)])[tp].result(30)
    earliest = admin.list_offsets({tp: OffsetSpec.earliest()})[tp].result(30)

    assert 3 == len(admin.list_topics(topic, timeout=30).topics[topic].partitions)
    assert ("3600000", "delete") == (configs["retention.ms"].value, configs["cleanup.policy"].value)
    assert 3600 == httpx2.get(f"{gateway.url}/v1/topics/{topic}", timeout=30).json()["config"]["retention_s"]
    assert (6, 1, 3, 3) == (latest.offset, by_time.offset, trimmed.low_watermark, earliest.offset)

    reading = consumer(gateway.servers, "watchers")
    reading.subscribe([topic])
    consume(reading, 3)
    reading.close()
    assert "watchers" in {one.group_id for one in admin.list_consumer_groups().result(30).valid}
    admin.delete_consumer_groups(["watchers"])["watchers"].result(30)
    assert "watchers" not in {one.group_id for one in admin.list_consumer_groups().result(30).valid}
    admin.delete_topics([topic])[topic].result(30)
    assert topic not in admin.list_topics(timeout=30).topics


def test_transactions_are_refused_at_once_by_every_client(gateway: Gateway) -> None:
    """A fatal error that names the reason, not a wait for a coordinator that never comes."""
    made = producer(gateway.servers, transactional_id="t")
    with pytest.raises(confluent_kafka.KafkaException, match="transactions are not supported"):
        made.init_transactions(30)
    python = kafka.KafkaProducer(bootstrap_servers=gateway.servers, transactional_id="t", max_block_ms=30_000)
    try:
        with pytest.raises(kafka.errors.TransactionalIdAuthorizationFailedError):
            python.init_transactions()
    finally:
        python.close(0)

    async def theirs() -> None:
        other = aiokafka.AIOKafkaProducer(bootstrap_servers=gateway.servers, transactional_id="t")
        try:
            with pytest.raises(aiokafka.errors.TransactionalIdAuthorizationFailed):
                await asyncio.wait_for(other.start(), 30)
        finally:
            await other.stop()

    asyncio.run(theirs())


async def test_a_client_needs_a_key_and_its_rights(tmp_path: Path) -> None:
    """A wrong secret is refused, and a key does no more than it may."""
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "app"\nsecret = "{SECRET}"\nrights = ["log:*:mine", "log:group:g"]\n')
    keys.chmod(0o600)
    settings = {**settings_of(IN_MEMORY, tmp_path), "gateway.keys_file": str(keys)}
    async with crew_of(tmp_path, settings) as (supervised, ports):
        await supervised.start("b0", "serve", ports[0], "--kafka-port", str(ports[1]))
        await supervised.ready("b0")
        servers = f"127.0.0.1:{ports[1]}"

        def sasl(password: str) -> dict[str, Any]:
            own = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanisms": "PLAIN"}
            return {**own, "sasl_username": "app", "sasl_password": password}

        def check() -> None:
            refused: list[Any] = []
            wrong = producer(servers, **sasl("wrong"), error_cb=refused.append)
            deadline = time.monotonic() + 30
            while not refused and time.monotonic() < deadline:
                wrong.poll(0.1)
            assert "_AUTHENTICATION" in {error.name() for error in refused}
            with pytest.raises(confluent_kafka.KafkaException):
                AdminClient({"bootstrap.servers": servers, **QUIET}).list_topics(timeout=3)
            good = producer(servers, **sasl(SECRET))
            assert [(0, 1)] == produce(good, "mine", [{"value": "a"}])
            outcome: list[Any] = []
            try:
                good.produce("other", b"a", on_delivery=lambda error, _: outcome.append(error))
                good.flush(30)
            except confluent_kafka.KafkaException as error:  # the metadata came before the record was handed over
                outcome.append(error.args[0])
            assert ["TOPIC_AUTHORIZATION_FAILED"] == [error.name() for error in outcome]
            reading = consumer(servers, "g", **sasl(SECRET))
            reading.subscribe(["mine"])
            assert [b"a"] == [message.value() for message in consume(reading, 1)]
            reading.close()

        await asyncio.to_thread(check)

"""Notices between brokers: a consumer at another broker sees a record without waiting for its poll."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from httpx2 import ASGITransport, AsyncClient

from lakebed.core.clock import ManualClock, settle
from lakebed.core.http_connection import HttpConnection
from lakebed.gateway.app import build
from lakebed.log import notices
from lakebed.log.broker import Broker
from lakebed.log.brokers import REFRESH_S, BrokerRecord
from lakebed.log.model import TopicPartition
from lakebed.log.notices import MovedNotice, NoticeConnection, NoticeSender
from lakebed.log.routes import LogRoutes
from lakebed.meta.bucket.backend import BucketMeta
from support.log_host import TP, Host

ASKED = {"topic": "orders", "partition": 0, "fetch_offset": 1}


class Gateway:
    """A gateway with an address, whose notices to others are recorded instead of sent."""

    def __init__(self, host: Host, name: str) -> None:
        self.context = msgspec.structs.replace(host.context(poll_s=0.25), node=name, url=f"http://{name}:1")
        self.routes = LogRoutes(self.context, host.meta())
        self.broker = self.routes.broker
        self.client = AsyncClient(
            transport=ASGITransport(app=build(self.context, [self.routes])), base_url="http://127.0.0.1"
        )
        self.peers = self.broker.peers

    async def hear(self, high_watermark: int, *, token: str | None = None, tp: TopicPartition = TP) -> int:
        headers = {notices.TOKEN_HEADER: self.peers.registry.me.token if token is None else token}
        body = msgspec.json.encode(MovedNotice([notices.MovedPartition(tp.topic, tp.partition, high_watermark)]))
        return (await self.client.post(notices.PATH, content=body, headers=headers)).status_code


@pytest.fixture
async def pair(host: Host) -> AsyncIterator[tuple[Gateway, Gateway]]:
    one, two = Gateway(host, "one"), Gateway(host, "two")
    for each in (one, two, one):
        await each.peers.registry.refresh()
    yield one, two
    for each in (one, two):
        await each.broker.stop()


async def test_a_consumer_at_another_broker_wakes_when_it_is_told(host: Host, pair: tuple[Gateway, Gateway]) -> None:
    """No time passes between the notice and the records; without a notice it is the poll that finds them."""
    one, two = pair
    await host.append(one.broker, b"a")
    await host.fetch(two.broker, 1)
    waiting = asyncio.ensure_future(host.fetch(two.broker, 2, wait_s=10.0))
    await settle(60)
    await host.append(one.broker, b"b")
    await settle(60)
    assert not waiting.done()

    assert 200 == await two.hear(2)
    await settle(60)

    assert waiting.done() and 2 == waiting.result().next_offset - 1
    assert [b"b"] == [record for part in waiting.result().parts for record in part]


async def test_a_notice_is_a_hint_and_changes_nothing_by_itself(host: Host, pair: tuple[Gateway, Gateway]) -> None:
    """A high watermark that is not true gives no records and no error, and a partition nobody reads is not read."""
    one, two = pair
    await host.append(one.broker, b"a")
    assert 200 == await two.hear(99, tp=TopicPartition("nobody", 7))
    await host.fetch(two.broker, 1)

    assert 200 == await two.hear(99)
    found = await host.fetch(two.broker, 2)

    assert 0 == found.count and 1 == found.high_watermark


async def test_only_a_broker_of_the_lake_is_heard(pair: tuple[Gateway, Gateway]) -> None:
    """Its token is in the registry: another one, or none, is refused."""
    one, two = pair

    assert [401, 401] == [await two.hear(1, token=token) for token in ("", one.peers.registry.me.token)]
    assert 0 == two.context.metrics.value("lakebed_log_notices_total", direction="in")


async def test_an_append_is_told_to_every_other_broker(host: Host, pair: tuple[Gateway, Gateway]) -> None:
    """With its partition and high watermark, after it is committed; not to itself."""
    one, two = pair
    told: list[Any] = []
    for each in pair:
        each.peers._sender = lambda broker: Told(broker.id, told)  # type: ignore[assignment, misc, return-value]

    await host.produce(one.broker, b"a", b"b")
    await host.produce(two.broker, b"c")

    assert [("two", {TP: 2}), ("one", {TP: 3})] == told


class Told:
    spacing_s = 0.0

    def __init__(self, name: str, told: list[Any]) -> None:
        self._name, self._told = name, told

    def moved(self, ends: Any) -> None:
        self._told.append((self._name, ends))


async def test_what_moves_while_a_notice_is_under_way_goes_into_the_next_one() -> None:
    """However many appends there are, one notice follows another, with the last high watermarks."""
    sent: list[list[tuple[str, int, int]]] = []
    gate = asyncio.Event()

    async def send(notice: MovedNotice) -> None:
        sent.append([(one.topic, one.partition, one.high_watermark) for one in notice.moved])
        await gate.wait()

    clock = ManualClock()
    sender = NoticeSender(send, clock)
    for end in range(1, 50):
        sender.moved({TP: end, TopicPartition("clicks", 1): 2 * end})
        await settle(3)
    gate.set()
    await clock.advance(1.0)

    assert [[("orders", 0, 1), ("clicks", 1, 2)], [("orders", 0, 49), ("clicks", 1, 98)]] == sent


async def test_a_broker_that_does_not_answer_is_left_alone_for_a_while() -> None:
    """What is not delivered is dropped: the other has polled meanwhile. Later notices are tried again."""
    tries: list[float] = []
    clock = ManualClock()

    async def send(notice: MovedNotice) -> None:
        tries.append(clock.monotonic_s())
        raise ConnectionRefusedError

    sender = NoticeSender(send, clock)
    for number in range(40):
        sender.moved({TP: number})
        await clock.advance(0.1)

    assert 4 == len(tries)


def count_requests(host: Host) -> list[str]:
    """The verbs that reach the store from now on."""
    requests: list[str] = []
    for verb in ("get", "get_range", "head", "create", "replace", "list"):
        call = getattr(host.store, verb)

        def seen(*arguments: Any, _verb: str = verb, _call: Any = call, **options: Any) -> Any:
            requests.append(_verb)
            return _call(*arguments, **options)

        setattr(host.store, verb, seen)
    return requests


async def test_waiting_consumers_and_registered_brokers_ask_the_bucket_nothing(
    host: Host, pair: tuple[Gateway, Gateway]
) -> None:
    """Half a minute of long polls at two brokers, with leases renewed: no request to the bucket."""
    one = pair[0]
    await host.append(one.broker, b"a")
    for each in pair:
        await host.fetch(each.broker, 1)
        each.peers.start()
    waiting = [asyncio.ensure_future(host.fetch(each.broker, 2, wait_s=25.0)) for each in pair]
    requests = count_requests(host)
    await host.clock.advance(30.0)

    assert [] == requests and all(each.done() for each in waiting)
    assert ["one", "two"] == [broker.id for broker in one.peers.registry.living]
    await host.append(one.broker, b"b")
    await host.fetch(pair[1].broker, 2)
    assert ["create", "get_range"] == requests  # what is not idle is seen here


async def test_on_bucket_meta_a_registered_broker_costs_what_the_page_says(host: Host) -> None:
    """Every 3 s a write, a read of the list, and one of each living broker's session; nothing else while idle."""
    brokers: list[Broker] = []
    for name in ("one", "two", "three"):
        context = msgspec.structs.replace(host.context(), node=name, url=f"http://{name}:1")
        brokers.append(Broker(context, BucketMeta(context, "llog-meta", layout="bins")))
    for each in brokers:
        each.peers.start()
    await host.clock.advance(31.0)
    requests = count_requests(host)
    for _ in range(600):
        await host.clock.advance(0.1)
    found = Counter(requests)
    for each in brokers:
        await each.stop()

    refreshes = 3 * 60 / REFRESH_S
    assert set(found) == {"replace", "get"}
    assert found["replace"] <= refreshes + 3 and found["get"] <= (refreshes + 3) * (1 + 3), found


async def test_a_response_names_the_broker_that_owns_the_partitions(host: Host, pair: tuple[Gateway, Gateway]) -> None:
    """Another broker's address where it owns all of them, and no header where this one does; both serve it."""
    named: dict[str, set[str]] = {}
    for gateway in pair:
        for number in range(8):
            part = {"topic": "orders", "partition": number, "records": ["x"]}
            body = msgspec.json.encode({"topic_partitions": [part]})
            producing = asyncio.ensure_future(gateway.client.post("/v1/produce", content=body))
            await host.clock.advance(0.02)  # where requests are billed, blobs leave one delay apart
            answer = await producing
            assert 200 == answer.status_code
            owner = gateway.peers.registry.owner(TopicPartition("orders", number))
            assert owner is not None
            expected = "" if owner.id == gateway.context.node else owner.http
            assert expected == answer.headers.get(notices.OWNER_HEADER, "")
            asked = msgspec.json.encode({"topic_partitions": [{**ASKED, "partition": number}]})
            found = await gateway.client.post("/v1/consume", content=asked)
            assert "x" == found.json()["results"][0]["records"][0]
            assert expected == found.headers.get(notices.OWNER_HEADER, "")
            named.setdefault(gateway.context.node, set()).add(expected)

    assert {"one": {"", "http://two:1"}, "two": {"", "http://one:1"}} == named


async def test_what_does_not_fit_into_a_notice_is_left_to_the_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a broker that answers slowly costs bounded memory here; what is waiting already goes."""
    monkeypatch.setattr(notices, "PENDING_MAX", 3)
    sent: list[list[str]] = []
    gate = asyncio.Event()

    async def send(notice: MovedNotice) -> None:
        sent.append([one.topic for one in notice.moved])
        await gate.wait()

    clock = ManualClock()
    sender = NoticeSender(send, clock)
    for topics in (["first"], ["a", "b"], ["c", "d"], ["e"], ["f"]):
        sender.moved({TopicPartition(topic, 0): 1 for topic in topics})
        await settle(3)
    gate.set()
    await clock.advance(1.0)

    assert [["first"], ["a", "b", "e"]] == sent


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError(), TimeoutError(), ConnectionError("no HTTP"), OSError("401")]
)
async def test_after_a_notice_that_failed_only_what_moves_later_is_sent(error: Exception) -> None:
    """However it failed. What moved in the pause was found by the other's polls, so nothing is kept for it."""
    sent: list[list[int]] = []

    async def send(notice: MovedNotice) -> None:
        sent.append([one.partition for one in notice.moved])
        if len(sent) == 1:
            raise error

    clock = ManualClock()
    sender = NoticeSender(send, clock)
    for partition in range(3):
        sender.moved({TopicPartition("orders", partition): 1})
        await clock.advance(0.6 * notices.PAUSE_S)

    assert [[0], [2]] == sent


async def test_the_more_brokers_there_are_the_rarer_are_the_notices_to_each(
    host: Host, pair: tuple[Gateway, Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that all of them together cost a broker a bounded number a second."""
    monkeypatch.setattr(notices, "SPACING_S", 1.0)
    peer, peers = Peer(monkeypatch, *[OK] * 4), pair[0].peers
    third = Gateway(host, "three")
    for each in (third.peers, peers):
        await each.registry.refresh()

    counts = []
    for end, after_s in enumerate((0.1, 1.5, 0.5), 1):
        peers.moved({TP: end})
        await host.clock.advance(after_s)
        counts.append(len(peer.requests))
    await third.broker.stop()

    assert [2, 2, 4] == counts


class Peer:
    """Another broker without a socket: answers each request with the next of `answers`; none closes the connection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: bytes) -> None:
        self._answers = list(answers)
        self.requests: list[bytes] = []
        self.wires: list[Wire] = []
        monkeypatch.setattr(HttpConnection, "open", self._open)

    async def _open(self, *_: Any, **__: Any) -> HttpConnection:
        connection = HttpConnection(asyncio.get_running_loop())
        self.wires.append(Wire(self, connection))
        return connection

    def answer(self, request: bytes) -> bytes | None:
        self.requests.append(request)
        return self._answers.pop(0) if self._answers else None

    @property
    def closed(self) -> list[bool]:
        return [each.closed for each in self.wires]


class Wire(asyncio.Transport):
    """What is written to a connection that has ended is lost."""

    def __init__(self, peer: Peer, connection: HttpConnection) -> None:
        super().__init__()
        self._peer, self.connection, self.closed = peer, connection, False
        connection.connection_made(self)

    def writelines(self, parts: Any) -> None:
        if self.closed or self.connection.is_closed:
            return
        answer = self._peer.answer(b"".join(parts))
        loop = asyncio.get_running_loop()
        if answer is not None:
            loop.call_soon(self.connection.data_received, answer)
        if answer is None or not answer.endswith(OK):
            loop.call_soon(self.connection.connection_lost, None)

    def close(self) -> None:
        self.closed = True


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
OTHER = BrokerRecord("two", http="http://two:1", token="the token")
NOTICE = MovedNotice([notices.MovedPartition("orders", 0, 7)])


async def test_notices_to_a_broker_share_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a whole request with the other's token and the partitions' high watermarks."""
    peer = Peer(monkeypatch, OK, OK)
    connection = NoticeConnection(OTHER)

    await connection.post(NOTICE)
    await connection.post(NOTICE)
    connection.close()

    body = msgspec.json.encode(NOTICE)
    head = b"POST /v1/brokers/moved HTTP/1.1\r\nhost: two:1\r\nx-lakebed-broker-token: the token\r\n"
    assert 2 * [head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body] == (
        peer.requests
    )
    assert [True] == peer.closed


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 500 Internal Server Error\r\n\r\n",
    ],
)
async def test_a_connection_on_which_a_notice_failed_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """However it failed: the rest of an answer would be taken for that of the next notice, which needs a new one."""
    peer = Peer(monkeypatch, answer, OK)
    connection = NoticeConnection(OTHER)

    with pytest.raises(OSError):
        await connection.post(NOTICE)
    after_failure = peer.closed
    await connection.post(NOTICE)

    assert ([True], [True, False]) == (after_failure, peer.closed)


async def test_a_broker_that_does_not_answer_in_time_gets_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its late answer would be taken for that of the next notice."""
    peer = Peer(monkeypatch)
    monkeypatch.setattr(Wire, "writelines", lambda self, parts: None)
    monkeypatch.setattr(notices, "TIMEOUT_S", 0.0)
    connection = NoticeConnection(OTHER)

    for _ in range(2):
        with pytest.raises(TimeoutError):
            await connection.post(NOTICE)

    assert [True, True] == peer.closed


@pytest.mark.parametrize("error", [None, ConnectionResetError()])
async def test_a_connection_that_the_other_broker_has_ended_meanwhile_costs_no_notice(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Gateways close what is idle for a minute: where records are rare, every second notice would be lost."""
    peer = Peer(monkeypatch, OK, OK)
    connection = NoticeConnection(OTHER)
    await connection.post(NOTICE)
    peer.wires[0].connection.connection_lost(error)

    await connection.post(NOTICE)

    assert (2, 2) == (len(peer.wires), len(peer.requests))


async def test_connections_to_brokers_that_are_gone_are_closed(
    host: Host, pair: tuple[Gateway, Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the next append, and all of them when this broker stops: others come and go while one lives."""
    peer, one = Peer(monkeypatch, *[OK] * 4), pair[0]
    third = Gateway(host, "three")
    for each in (third, one):
        await each.peers.registry.refresh()
    await host.produce(one.broker, b"a")
    await host.clock.advance(0.1)
    open_to_both = peer.closed
    await third.broker.stop()
    await one.peers.registry.refresh()
    await host.produce(one.broker, b"b")
    await host.clock.advance(0.1)
    after_one_left = peer.closed
    await one.broker.stop()

    assert [False, False] == open_to_both
    assert ([False, True], [True, True], 3) == (sorted(after_one_left), peer.closed, len(peer.requests))


async def test_partitions_of_several_brokers_have_no_better_one(pair: tuple[Gateway, Gateway]) -> None:
    """Nor has a request without any. A broker that does not read is no better one for a consumer."""
    peers = pair[0].peers
    tps = [TopicPartition("orders", number) for number in range(16)]
    of: dict[str, list[TopicPartition]] = {"one": [], "two": []}
    for tp in tps:
        owner = peers.registry.owner(tp)
        assert owner is not None
        of[owner.id].append(tp)

    better = [peers.better(asked, writes=True) for asked in (of["one"], of["two"], tps, [])]
    pair[1].peers.registry.me = msgspec.structs.replace(pair[1].peers.registry.me, reads=False)
    for each in pair[::-1]:
        await each.peers.registry.refresh()

    assert ["", "http://two:1", "", ""] == better
    assert ("http://two:1", "") == (peers.better(of["two"], writes=True), peers.better(of["two"], writes=False))

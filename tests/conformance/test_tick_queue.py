"""One contract for every queue of ticks: hidden while it is in progress, counted, a dead letter after five receives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.ids import Ids
from lakebed.store.memory import MemoryStore
from lakebed.store.protocol import Store
from lakebed.ticks.adapters import open_queue
from lakebed.ticks.model import TickMessage
from lakebed.ticks.queue import ReceivedMessage, TickQueue
from support.aws_servers import aws_server
from support.tick_fixtures import context_of

HIDDEN_S = 3  # where a message must come back by itself; longer than what is done with it while it is in hand
KEPT_S = 300  # elsewhere: it must not
DEADLINE_S = 60.0
KINDS = ("memory", "bucket", "ministack", "moto")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """What it runs on, and its address where it has one."""
    if request.param in ("memory", "bucket"):
        yield request.param, ""
        return
    with aws_server(request.param) as url:
        yield request.param, url


@pytest.fixture
def queue(kind: tuple[str, str], request: pytest.FixtureRequest) -> TickQueue:
    """One that keeps a message in progress hidden for good."""
    return opened(kind, request, KEPT_S)


@pytest.fixture
def quick(kind: tuple[str, str], request: pytest.FixtureRequest) -> TickQueue:
    """One whose messages come back soon."""
    return opened(kind, request, HIDDEN_S)


def opened(kind: tuple[str, str], request: pytest.FixtureRequest, hidden_s: int) -> TickQueue:
    name, url = kind
    more: dict[str, Any] = {"visibility_timeout_s": hidden_s, "batch_window_s": 0.5}
    store: Store = MemoryStore(clock=SystemClock())
    if name == "bucket":
        store = request.getfixturevalue("bucket")
    if url:
        more |= {
            "queue": "sqs", "aws_endpoint": url, "sqs_queue": f"q-{Ids().token()}",
            "aws_access_key_id": "test", "aws_secret_access_key": "test",
        }  # fmt: skip
    return open_queue(context_of(store, **more))


def message(tick: str, project: str = "p") -> TickMessage:
    return TickMessage("o", project, tick, "delta", "20261115", "tables/bronze/o/p", "orders=3", "2026-11-15T12:00:00Z")


async def receive(queue: TickQueue, count: int, deadline_s: float = DEADLINE_S) -> list[ReceivedMessage]:
    """Receives until that many came, or the deadline is over."""
    taken: list[ReceivedMessage] = []
    until = SystemClock().monotonic_s() + deadline_s
    while len(taken) < count and SystemClock().monotonic_s() < until:
        taken += await queue.receive(10)
        await asyncio.sleep(0.02)
    return taken


async def test_the_body_is_the_seeds_json(queue: TickQueue) -> None:
    """Version 1.0, with exactly the fields that silver knows."""
    await queue.send(message("t1"))

    (received,) = await receive(queue, 1)

    assert {
        "schema_version": "1.0",
        "org_id": "o",
        "project_id": "p",
        "tick_id": "t1",
        "mode": "delta",
        "dt": "20261115",
        "bronze_db_key": "tables/bronze/o/p",
        "bronze_db_etag": "orders=3",
        "emitted_at": "2026-11-15T12:00:00Z",
    } == msgspec.json.decode(received.body)
    assert message("t1") == received.message()


async def test_an_empty_queue_gives_nothing(queue: TickQueue) -> None:
    """No message is no error."""
    assert [] == list(await queue.receive(10))


async def test_a_message_in_hand_is_hidden_and_comes_back_counted(quick: TickQueue) -> None:
    """Nobody else gets it until the visibility timeout is over; then it comes with its count one higher."""
    await quick.send(message("t1"))
    (first,) = await receive(quick, 1)

    hidden = await quick.receive(10)
    (again,) = await receive(quick, 1)

    assert ([], 1, 2) == (list(hidden), first.receive_count, again.receive_count)
    assert first.message_id == again.message_id


async def test_a_deleted_message_never_comes_back(quick: TickQueue) -> None:
    """Done is done, and deleting twice does nothing."""
    await quick.send(message("t1"))
    (received,) = await receive(quick, 1)

    await quick.delete(received.receipt)
    await quick.delete(received.receipt)

    assert [] == await receive(quick, 1, HIDDEN_S + 0.5)


async def test_a_released_message_comes_back_at_once(queue: TickQueue) -> None:
    """Hidden for 0 seconds is visible."""
    await queue.send(message("t1"))
    (received,) = await receive(queue, 1)

    await queue.hide(received.receipt, 0)

    assert ["t1"] == [each.message().tick_id for each in await receive(queue, 1)]


@pytest.mark.full
async def test_a_message_can_be_kept_hidden_longer(quick: TickQueue) -> None:
    """A long job keeps its message."""
    await quick.send(message("t1"))
    (received,) = await receive(quick, 1)

    await quick.hide(received.receipt, KEPT_S)

    assert [] == await receive(quick, 1, HIDDEN_S + 0.5)


async def test_every_message_is_received(queue: TickQueue) -> None:
    """Sends of many projects at once, all handed out, none twice while hidden."""
    await asyncio.gather(*(queue.send(message(f"t{n}", f"p{n % 5}")) for n in range(15)))

    taken = await receive(queue, 15)
    for each in taken:
        await queue.delete(each.receipt)

    assert {f"t{n}" for n in range(15)} == {each.message().tick_id for each in taken}
    assert (0, 0, 0) == msgspec.structs.astuple(await queue.depth())


async def test_after_five_receives_a_message_is_a_dead_letter_until_it_is_replayed(queue: TickQueue) -> None:
    """Five tries, not six; then it is listed, sent back on demand, and counted anew."""
    await queue.send(message("bad"))
    counts: list[int] = []
    for _ in range(5):
        (received,) = await receive(queue, 1)
        counts.append(received.receive_count)
        await queue.hide(received.receipt, 0)

    sixth = await receive(queue, 1, 1.5)
    listed = await queue.dead_letters()
    depth = await queue.depth()
    other, moved = await queue.replay(tick_id="another"), await queue.replay(tick_id="bad")
    (back,) = await receive(queue, 1)

    assert ([1, 2, 3, 4, 5], []) == (counts, sixth)
    assert (["bad"], 1) == ([letter.message().tick_id for letter in listed], depth.dead)
    assert (0, 1) == (other, moved)
    assert ("bad", 1) == (back.message().tick_id, back.receive_count)
    assert [] == list(await queue.dead_letters())

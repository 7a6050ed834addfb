"""What the adapter makes of each answer a real S3 may give, on a server scripted to give exactly that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lakebed.clock import SystemClock
from lakebed.errors import AlreadyExists, Denied, NotFound, OutcomeUnknown, Stale, Unavailable
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.store.bucket import BucketStore, open_bucket
from lakebed.store.connect import connect
from lakebed.store.protocol import Store
from scripted_s3 import ScriptedS3, Step

StoreOn = Callable[..., Store]


@pytest.fixture(params=["short way", "general client"])
def store_on(request: pytest.FixtureRequest) -> StoreOn:
    """A store on such a server, by either of the ways a conditional write can take."""

    def made(server: ScriptedS3, **settings: object) -> Store:
        told = server.settings(**settings)
        if request.param == "short way":
            return connect(told, clock=SystemClock(), ids=Ids(), metrics=Metrics())
        return BucketStore(open_bucket(told), clock=SystemClock(), ids=Ids(), metrics=Metrics())

    return made


async def test_a_409_on_create_is_not_taken_for_existence(store_on: StoreOn) -> None:
    """409 ConditionalRequestConflict on an absent key is tried again until it is created."""
    async with ScriptedS3([Step(409, "ConditionalRequestConflict")] * 2) as server:
        created = await store_on(server).create("a/b", b"mine")

        assert created.size == 4
        assert server.objects["a/b"] == b"mine"


async def test_a_409_on_create_with_anothers_object_is_already_exists(store_on: StoreOn) -> None:
    """409 followed by an observed different object is AlreadyExists, carrying what was seen."""
    async with ScriptedS3([Step(409, "ConditionalRequestConflict")], objects={"a/b": b"theirs"}) as server:
        with pytest.raises(AlreadyExists) as caught:
            await store_on(server).create("a/b", b"mine")

        assert caught.value.current.data == b"theirs"


@pytest.mark.parametrize("step", [Step(503, "SlowDown", apply=True), Step(apply=True, reset=True)])
async def test_a_412_after_our_own_lost_create_is_success(store_on: StoreOn, step: Step) -> None:
    """A create that took effect but was answered 503 or by a reset succeeds, although its retry meets 412."""
    async with ScriptedS3([step]) as server:
        created = await store_on(server).create("a/b", b"mine")

        assert created.size == 4
        assert server.count("PUT") <= 2


@pytest.mark.parametrize("step", [Step(503, "SlowDown", apply=True), Step(apply=True, reset=True)])
async def test_a_412_after_our_own_lost_replace_is_success(store_on: StoreOn, step: Step) -> None:
    """A replace that took effect but lost its answer succeeds, although its retry meets 412."""
    async with ScriptedS3(objects={"a/b": b"old"}) as server:
        store = store_on(server)
        etag = (await store.head("a/b")).etag
        server.script.append(step)

        await store.replace("a/b", b"new-nonce-1", etag)

        assert server.objects["a/b"] == b"new-nonce-1"


async def test_a_412_on_replace_with_anothers_object_is_stale(store_on: StoreOn) -> None:
    """A replace that meets another's object raises Stale with it, and changes nothing."""
    async with ScriptedS3(objects={"a/b": b"theirs"}) as server:
        with pytest.raises(Stale) as caught:
            await store_on(server).replace("a/b", b"mine", '"0123"')

        assert caught.value.current.data == b"theirs"
        assert server.objects["a/b"] == b"theirs"


async def test_replacing_what_is_gone_is_stale_without_current(store_on: StoreOn) -> None:
    """A replace of a deleted object raises Stale with nothing in `current`."""
    async with ScriptedS3() as server:
        with pytest.raises(Stale) as caught:
            await store_on(server).replace("a/b", b"mine", '"0123"')

        assert caught.value.current is None


async def test_a_put_result_feeds_the_next_replace(store_on: StoreOn) -> None:
    """The etag a create returns is accepted by replace, although the store gives no version."""
    async with ScriptedS3() as server:
        store = store_on(server)
        first = await store.create("a/b", b"one")

        second = await store.replace("a/b", b"two", first.etag)

        assert second.etag != first.etag
        assert server.objects["a/b"] == b"two"


async def test_a_hang_after_the_write_is_resolved_by_reading(store_on: StoreOn) -> None:
    """A create that was applied and then hung past the timeout is found to be ours by reading."""
    async with ScriptedS3([Step(apply=True, hang_s=60)] * 3) as server:
        created = await store_on(server, timeout_s=1.0).create("a/b", b"mine")

        assert created.size == 4


async def test_a_store_that_answers_neither_yes_nor_no_is_outcome_unknown(store_on: StoreOn) -> None:
    """When neither the write nor the read is answered, the caller is told OutcomeUnknown, not failure."""
    script = [Step(503, "SlowDown") for _ in range(60)] + [Step(503, "SlowDown", method="GET") for _ in range(60)]
    async with ScriptedS3(script) as server:
        with pytest.raises(OutcomeUnknown):
            await store_on(server).create("a/b", b"mine")


async def test_a_read_that_stays_unanswered_is_unavailable(store_on: StoreOn) -> None:
    """A read that keeps failing is Unavailable, with a hint."""
    async with ScriptedS3([Step(503, "SlowDown", method="GET") for _ in range(20)]) as server:
        with pytest.raises(Unavailable) as caught:
            await store_on(server).get("a/b")

        assert caught.value.hint


async def test_a_missing_object_is_not_found(store_on: StoreOn) -> None:
    """obstore's FileNotFoundError becomes NotFound."""
    async with ScriptedS3() as server:
        with pytest.raises(NotFound):
            await store_on(server).get("a/b")


async def test_a_refused_key_is_denied(store_on: StoreOn) -> None:
    """403 becomes Denied, naming the settings to look at."""
    async with ScriptedS3([Step(403, "AccessDenied", method="GET")]) as server:
        with pytest.raises(Denied) as caught:
            await store_on(server).get("a/b")

        assert "store.access_key_id" in caught.value.hint


async def test_a_refused_write_is_denied(store_on: StoreOn) -> None:
    """403 on a write becomes Denied at once, naming the settings to look at, and nothing is written."""
    async with ScriptedS3([Step(403, "AccessDenied")]) as server:
        with pytest.raises(Denied) as caught:
            await store_on(server).create("a/b", b"mine")

        assert "store.access_key_id" in caught.value.hint
        assert (1, {}) == (server.count("PUT"), server.objects)


async def test_small_writes_carry_their_condition_too(store_on: StoreOn) -> None:
    """What holds for megabytes holds for a few bytes, on a connection that is used again."""
    async with ScriptedS3() as server:
        store = store_on(server)
        first = await store.create("a=b/c d", b"one")
        await store.replace("a=b/c d", b"two", first.etag)

        puts = [request for request in server.seen if request.method == "PUT"]
        assert ["*", None] == [put.headers.get("if-none-match") for put in puts]
        assert [None, first.etag] == [put.headers.get("if-match") for put in puts]
        assert server.objects == {"a=b/c d": b"two"}


async def test_conditional_writes_are_single_puts_carrying_their_condition(store_on: StoreOn) -> None:
    """Every create says If-None-Match: * and every replace says If-Match, in one PUT even for megabytes."""
    async with ScriptedS3() as server:
        store = store_on(server)
        first = await store.create("a/b", b"x" * 12_000_000)
        await store.replace("a/b", b"y" * 12_000_000, first.etag)

        puts = [request for request in server.seen if request.method == "PUT"]
        assert [put.headers.get("if-none-match") for put in puts] == ["*", None]
        assert [None, first.etag] == [put.headers.get("if-match") for put in puts]

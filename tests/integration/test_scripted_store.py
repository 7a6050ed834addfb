"""What the adapter makes of each answer a real S3 may give, on a server scripted to give exactly that."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from lakebed.core.errors import AlreadyExists, Corrupt, Denied, NotFound, OutcomeUnknown, Stale, Unavailable
from lakebed.store.connect import connect
from lakebed.store.protocol import Store
from support.runtimes import runtime_of
from support.scripted_s3 import ScriptedS3, Step

StoreOn = Callable[..., Store]


@pytest.fixture(params=[True, False], ids=["fast-path", "obstore"])
def store_on(request: pytest.FixtureRequest) -> StoreOn:
    """A store on such a server, with the fast path on, and off."""

    def made(server: ScriptedS3, **settings: object) -> Store:
        chosen = server.settings(fast_path=request.param, **settings)
        return connect(chosen, runtime_of())

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


@pytest.mark.parametrize("size", [10, 600_000])
async def test_a_refusal_says_whether_the_request_was_repeated(store_on: StoreOn, size: int) -> None:
    """One request that was refused leaves no doubt; a retry inside the client, or a second attempt, leaves one."""
    async with ScriptedS3(objects={"a/b": b"theirs"}) as server:
        store = store_on(server)
        with pytest.raises(Stale) as once:
            await store.replace("a/b", b"m" * size, '"0123"')
        server.script.append(Step(503, "SlowDown"))
        with pytest.raises(Stale) as twice:
            await store.replace("a/b", b"m" * size, '"0123"')
        with pytest.raises(AlreadyExists) as created:
            await store.create("a/b", b"m" * size)

        assert (False, True, False) == (once.value.repeated, twice.value.repeated, created.value.repeated)


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
    """When neither the write nor the read is answered, the caller gets OutcomeUnknown, not failure."""
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
    """Every create reports If-None-Match: * and every replace reports If-Match, in one PUT even for megabytes."""
    async with ScriptedS3() as server:
        store = store_on(server)
        first = await store.create("a/b", b"x" * 12_000_000)
        await store.replace("a/b", b"y" * 12_000_000, first.etag)

        puts = [request for request in server.seen if request.method == "PUT"]
        assert [put.headers.get("if-none-match") for put in puts] == ["*", None]
        assert [None, first.etag] == [put.headers.get("if-match") for put in puts]


def lost(step_method: str = "PUT") -> Step:
    """A request that takes effect and whose answer is lost."""
    return Step(method=step_method, apply=True, reset=True)


def rival(data: bytes) -> Step:
    """A GET that is answered truly, and another client's acknowledged write right behind it."""

    def write(server: ScriptedS3) -> None:
        server.objects["a/b"] = data

    return Step(status=0, method="GET", then=write)


@pytest.mark.parametrize("size", [10, 1_000_000])
async def test_a_rival_write_behind_the_look_is_never_overwritten(store_on: StoreOn, size: int) -> None:
    """After a lost answer the version is that of the bytes that were compared: the next replace meets the rival."""
    async with ScriptedS3(objects={"a/b": b"old"}) as server:
        store = store_on(server, retries=0)
        before = await store.get("a/b")
        server.script += [lost(), rival(b"the rival's, acknowledged")]

        ours = await store.replace("a/b", b"1" * size, before.etag)

        server.objects["a/b"] = b"the rival's, acknowledged"  # large objects are compared by HEAD: the rival comes now
        with pytest.raises(Stale):
            await store.replace("a/b", b"2" * size, ours.etag)
        assert b"the rival's, acknowledged" == server.objects["a/b"]


async def test_a_rival_write_behind_a_lost_create_is_never_overwritten(store_on: StoreOn) -> None:
    """The same for an object that was created."""
    async with ScriptedS3() as server:
        store = store_on(server, retries=0)
        server.script += [lost(), rival(b"the rival's, acknowledged")]

        ours = await store.create("a/b", b"first")

        with pytest.raises(Stale):
            await store.replace("a/b", b"second", ours.etag)
        assert b"the rival's, acknowledged" == server.objects["a/b"]


async def test_a_refusal_behind_a_lost_answer_is_decided_by_reading(store_on: StoreOn) -> None:
    """A write that took effect, was repeated and then refused is a success: the bytes are there."""
    async with ScriptedS3([Step(503, "SlowDown", apply=True), Step(403, "AccessDenied")]) as server:
        created = await store_on(server).create("a/b", b"mine")

        assert (4, b"mine") == (created.size, server.objects["a/b"])


@pytest.mark.parametrize("status", [200, 204])
async def test_an_answer_without_a_version_is_decided_by_reading(store_on: StoreOn, status: int) -> None:
    """A proxy that drops the ETag does not make the next replace a blind one."""
    async with ScriptedS3([Step(status, apply=True)]) as server:
        store = store_on(server, retries=0)

        created = await store.create("a/b", b"mine")

        assert (await store.get("a/b")).etag == created.etag


async def test_an_upload_answers_with_its_own_version(store_on: StoreOn) -> None:
    """No second request is requested the version of an upload: a rival may have written in between."""
    async with ScriptedS3() as server:
        stored = await store_on(server).upload("a/b", one(b"mine"))

        assert 0 == server.count("HEAD") + server.count("GET")
        assert (4, (await store_on(server).get("a/b")).etag) == (stored.size, stored.etag)


@pytest.mark.parametrize("cuts", [1, 20])
async def test_a_read_that_is_cut_short_is_asked_for_again_or_unavailable(store_on: StoreOn, cuts: int) -> None:
    """Half an object is never handed out, and never called Corrupt."""
    whole = bytes(range(256)) * 400
    async with ScriptedS3(objects={"a/b": whole}) as server:
        store = store_on(server)
        for read in (lambda: store.get("a/b"), lambda: store.get_range("a/b", 100, 50_000)):
            server.script[:] = [Step(method="GET", cut=True) for _ in range(cuts)]
            if cuts > 1:
                with pytest.raises(Unavailable):
                    await read()
                continue
            got = await read()
            assert got in (whole[100:50_100],) if isinstance(got, bytes) else got.data == whole


@pytest.mark.parametrize("cuts", [1, 20])
async def test_a_404_that_is_cut_short_is_asked_for_again_or_unavailable(store_on: StoreOn, cuts: int) -> None:
    """Half of "no such key" does not stop a process that reads what may be absent."""
    async with ScriptedS3() as server:
        store = store_on(server)
        for read in (lambda: store.get("a/b"), lambda: store.get_range("a/b", 100, 50_000)):
            server.script[:] = [Step(method="GET", cut=True) for _ in range(cuts)]
            if cuts > 1:
                server.script += [Step(503, "SlowDown", method="HEAD") for _ in range(cuts)]
            with pytest.raises(Unavailable if cuts > 1 else NotFound):
                await read()


@pytest.mark.parametrize("cuts", [1, 20])
async def test_a_page_that_is_cut_short_is_asked_for_again_or_unavailable(store_on: StoreOn, cuts: int) -> None:
    """A listing has every key once, also when its later pages are cut; it never ends early."""
    keys = [f"a/{number:04}" for number in range(150)]
    async with ScriptedS3(objects=dict.fromkeys(keys, b"x"), page_keys=60) as server:
        store = store_on(server)

        async def listed() -> list[str]:
            found = []
            async for info in store.list("a/", after="a/0001"):
                if info.key == "a/0040":  # on the first page; the next one is not requested yet
                    server.script[:] = [Step(method="GET", cut=True) for _ in range(cuts)]
                found.append(info.key)
                assert len(found) <= len(keys), "the listing began again"
            return found

        server.script[:] = [Step(method="GET", cut=True)]
        if cuts > 1:
            with pytest.raises(Unavailable):
                await listed()
            server.script[:] = [Step(method="GET", cut=True) for _ in range(cuts)]
            with pytest.raises(Unavailable):
                await store.children("a/")
        else:
            assert keys[2:] == await listed()
            server.script[:] = [Step(method="GET", cut=True)]
            assert [] == await store.children("a/")


async def test_a_range_that_fails_is_not_corrupt_whatever_its_key_says(store_on: StoreOn) -> None:
    """Numbers in a key are no statuses: only an object that is really shorter is Corrupt."""
    key = "llog/wal/416-Requested-range"
    async with ScriptedS3(objects={key: b"0123456789"}) as server:
        server.script += [Step(503, "SlowDown", method="GET") for _ in range(20)]
        with pytest.raises(Unavailable):
            await store_on(server).get_range(key, 2, 4)

        server.script.clear()
        for start in (8, 10, 11):
            with pytest.raises(Corrupt):
                await store_on(server).get_range(key, start, 4)


async def test_a_delete_without_an_answer_is_outcome_unknown(store_on: StoreOn) -> None:
    """The object may be gone: nobody is informed that nothing happened."""
    async with ScriptedS3(objects={"a/b": b"x"}) as server:
        server.script += [Step(503, "SlowDown", method="POST") for _ in range(20)]
        with pytest.raises(OutcomeUnknown):
            await store_on(server).delete("a/b")


async def one(data: bytes) -> AsyncIterator[bytes]:
    yield data

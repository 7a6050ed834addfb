"""The store seam on a client that answers as it is told: what is decided from each answer, and what is counted."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from lakebed.core import errors
from lakebed.core.clock import ManualClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.store.bucket import COMPARE_BY_HASH_BYTES, DOUBTS_MAX, BucketStore
from lakebed.store.model import ObjectInfo, StoredObject, Version
from support.runtimes import runtime_of

KEY = "a/b"
Answers = list[Callable[[], Exception | None]]


class Hurried(ManualClock):
    """Counts pauses and sleeps no time at all."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses = 0

    async def sleep(self, seconds: float) -> None:
        self.pauses += 1
        await asyncio.sleep(0)


class Scripted:
    """Holds objects in memory; `instead` and `afterwards` are raised by PUTs without and with their effect."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.instead: list[Exception] = []
        self.afterwards: list[Exception] = []
        self.reads: list[Exception] = []
        self.later_reads: list[Exception] = []  # of reads after the first
        self.asked: list[str] = []
        self.etag_of: Callable[[bytes], str] = lambda data: f'"{hashlib.md5(data).hexdigest()}"'
        self.short = 0
        self.broken_range: Exception | None = None

    def info(self, key: str) -> ObjectInfo:
        if self.reads:
            raise self.reads.pop(0)
        if key not in self.objects:
            raise errors.NotFound(key)
        self.reads, self.later_reads = self.later_reads, []
        return ObjectInfo(key, len(self.objects[key]), self.etag_of(self.objects[key]), 7)

    async def get(self, key: str) -> StoredObject:
        self.asked.append("get")
        return StoredObject(self.info(key), self.objects[key])

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        if self.broken_range:
            raise self.broken_range
        return self.objects[key][start : start + length][: length - self.short]

    async def head(self, key: str) -> ObjectInfo:
        self.asked.append("head")
        return self.info(key)

    async def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectInfo]]:
        found = [self.info(key) for key in sorted(self.objects) if key.startswith(prefix) and key > after]
        for start in range(0, len(found), 2):
            yield found[start : start + 2]

    async def children(self, prefix: str) -> Sequence[str]:
        return ["z", "a"]

    async def put(self, key: str, data: bytes, instead_of: Version | None) -> Version:
        self.asked.append("put")
        if self.instead:
            raise self.instead.pop(0)
        there = self.etag_of(self.objects[key]) if key in self.objects else None
        if there != instead_of:
            raise errors.Conflict("412")
        self.objects[key] = data
        if self.afterwards:
            raise self.afterwards.pop(0)
        return Version(self.etag_of(data))

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        if self.instead:
            raise self.instead.pop(0)
        self.objects[key] = b"".join([chunk async for chunk in chunks])
        return self.info(key)

    async def delete(self, key: str) -> None:
        if self.instead:
            raise self.instead.pop(0)
        if self.objects.pop(key, None) is None:
            raise errors.NotFound(key)


class Env:
    def __init__(self) -> None:
        self.client, self.clock, self.metrics = Scripted(), Hurried(), Metrics()
        self.store = BucketStore(self.client, runtime_of(self.clock, Ids.seeded(1), self.metrics))

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"lakebed_store_{name}_total", labels) or 0.0


@pytest.fixture
def env() -> Env:
    return Env()


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_requests_bytes_and_failures_are_counted_by_verb(env: Env) -> None:
    """What is written counts as in, what is read as out, a failure by its verb and code."""
    written = await env.store.create(KEY, b"four")
    await env.store.replace(KEY, b"sixsix", written.etag)
    await env.store.upload("a/c", chunks(b"12", b"3"))
    await env.store.get(KEY)
    await env.store.get_range(KEY, 1, 2)
    with pytest.raises(errors.NotFound):
        await env.store.head("a/none")

    assert env.counted("bytes", direction="in") == 4 + 6 + 3
    assert env.counted("bytes", direction="out") == 6 + 2
    assert [env.counted("requests", verb=verb) for verb in ("create", "replace", "upload", "get", "head")] == [1] * 5
    assert env.counted("failures", verb="head", kind="not_found") == 1
    assert env.counted("doubts") == 0


async def test_a_write_that_was_answered_is_not_looked_at(env: Env) -> None:
    written = await env.store.create(KEY, b"mine")

    assert (written.size, written.etag) == (4, env.client.etag_of(b"mine"))
    assert env.client.asked == ["put"]


@pytest.mark.parametrize("lost", [errors.Unavailable("reset"), errors.Conflict("own first try"), errors.Denied("late")])
async def test_a_create_whose_answer_was_lost_is_found_by_reading(env: Env, lost: Exception) -> None:
    env.client.afterwards.append(lost)

    written = await env.store.create(KEY, b"mine")

    assert written.etag == env.client.etag_of(b"mine")
    assert (env.client.asked, env.counted("doubts")) == (["put", "get"], 1)


async def test_a_create_that_meets_other_bytes_brings_them_along(env: Env) -> None:
    env.client.objects[KEY] = b"their"

    with pytest.raises(errors.AlreadyExists) as caught:
        await env.store.create(KEY, b"mine!")  # as many bytes

    assert caught.value.current is not None and caught.value.current.data == b"their"
    assert env.client.objects[KEY] == b"their"


async def test_a_create_without_an_answer_is_tried_again_so_often_and_then_unknown(env: Env) -> None:
    """DOUBTS_MAX looks, with a pause before each further try; never a plain failure."""
    env.client.instead = [errors.Unavailable("503")] * DOUBTS_MAX

    with pytest.raises(errors.OutcomeUnknown):
        await env.store.create(KEY, b"mine")

    assert (env.client.asked.count("put"), env.client.asked.count("get")) == (DOUBTS_MAX, DOUBTS_MAX)
    assert env.clock.pauses == DOUBTS_MAX


async def test_the_last_try_counts(env: Env) -> None:
    env.client.instead = [errors.Conflict("409")] * (DOUBTS_MAX - 1)

    assert (await env.store.create(KEY, b"mine")).size == 4


async def test_a_refusal_of_an_absent_object_is_final(env: Env) -> None:
    env.client.instead = [errors.Denied("no")]

    with pytest.raises(errors.Denied):
        await env.store.create(KEY, b"mine")

    assert env.client.asked == ["put", "get"]


async def test_a_refusal_after_a_doubtful_try_is_unknown(env: Env) -> None:
    """The first try may still be carried out: "denied" would report that nothing was written."""
    env.client.instead = [errors.Unavailable("503"), errors.Denied("no")]

    with pytest.raises(errors.OutcomeUnknown):
        await env.store.create(KEY, b"mine")


@pytest.mark.parametrize("verb", ["create", "replace"])
async def test_a_refusal_that_cannot_be_looked_at_after_a_doubtful_try_is_unknown(env: Env, verb: str) -> None:
    """The key was revoked between two tries: neither writing nor reading is allowed, and the first may still land."""
    env.client.instead = [errors.Unavailable("503"), errors.Denied("no")]
    if verb == "create":
        env.client.reads = [errors.NotFound(KEY), errors.Denied("no")]
        written = env.store.create(KEY, b"mine")
    else:
        env.client.objects[KEY] = b"theirs"
        env.client.later_reads = [errors.Denied("no")]
        written = env.store.replace(KEY, b"mine", Version(env.client.etag_of(b"theirs")))

    with pytest.raises(errors.OutcomeUnknown):
        await written


@pytest.mark.parametrize(
    ("cause", "read", "raised"),
    [
        (errors.Denied("no"), errors.Denied("no"), errors.Denied),
        (errors.Unavailable("503"), errors.Denied("no"), errors.OutcomeUnknown),
        (errors.Conflict("412"), errors.Unavailable("503"), errors.OutcomeUnknown),
        (errors.Denied("no"), errors.Unavailable("503"), errors.OutcomeUnknown),
    ],
)
async def test_what_cannot_be_read_leaves_the_doubt(
    env: Env, cause: Exception, read: Exception, raised: type[Exception]
) -> None:
    env.client.instead, env.client.reads = [cause], [read]

    with pytest.raises(raised) as caught:
        await env.store.create(KEY, b"mine")

    assert type(caught.value) is raised


async def test_a_replace_is_decided_by_what_stands_there(env: Env) -> None:
    """Gone and changed are Stale, with what was seen; the old object means that it is tried again."""
    old = (await env.store.create(KEY, b"old")).etag
    env.client.instead = [errors.Unavailable("503")] * 2
    new = await env.store.replace(KEY, b"new", old)
    assert (env.client.objects[KEY], env.clock.pauses) == (b"new", 2)

    with pytest.raises(errors.Stale) as changed:
        await env.store.replace(KEY, b"late", old)
    assert changed.value.current is not None and changed.value.current.data == b"new"

    del env.client.objects[KEY]
    with pytest.raises(errors.Stale) as gone:
        await env.store.replace(KEY, b"late", new.etag)
    assert gone.value.current is None


async def test_a_replace_without_an_answer_ends_as_unknown(env: Env) -> None:
    old = (await env.store.create(KEY, b"old")).etag
    env.client.instead = [errors.Unavailable("503")] * DOUBTS_MAX

    with pytest.raises(errors.OutcomeUnknown):
        await env.store.replace(KEY, b"new", old)


@pytest.mark.parametrize(("size", "requested"), [(COMPARE_BY_HASH_BYTES, "get"), (COMPARE_BY_HASH_BYTES + 1, "head")])
async def test_a_large_object_of_ours_is_known_by_its_hash(env: Env, size: int, requested: str) -> None:
    env.client.afterwards.append(errors.Unavailable("reset"))

    written = await env.store.create(KEY, bytes(size))

    assert (env.client.asked, written.size) == (["put", requested], size)


async def test_a_large_object_of_the_same_size_is_another(env: Env) -> None:
    env.client.objects[KEY] = b"x" * (COMPARE_BY_HASH_BYTES + 1)

    with pytest.raises(errors.AlreadyExists):
        await env.store.create(KEY, bytes(COMPARE_BY_HASH_BYTES + 1))


async def test_a_large_object_whose_etag_is_no_hash_is_compared_by_its_bytes(env: Env) -> None:
    env.client.etag_of = lambda data: f'"{len(data)}-2"'
    env.client.afterwards.append(errors.Unavailable("reset"))

    await env.store.create(KEY, bytes(COMPARE_BY_HASH_BYTES + 1))

    assert env.client.asked == ["put", "head", "get"]


async def test_a_short_answer_is_judged_by_the_objects_size(env: Env) -> None:
    """The object ends before: Corrupt. It does not: the answer was cut short, and may be requested again."""
    env.client.objects[KEY] = b"0123456789"
    assert await env.store.get_range(KEY, 0, 10) == b"0123456789"
    with pytest.raises(errors.Corrupt):
        await env.store.get_range(KEY, 1, 10)
    env.client.short = 1
    with pytest.raises(errors.Unavailable):
        await env.store.get_range(KEY, 0, 10)
    env.client.broken_range = errors.Unavailable("416")
    with pytest.raises(errors.Unavailable):
        await env.store.get_range(KEY, 0, 10)
    with pytest.raises(errors.Corrupt):
        await env.store.get_range(KEY, 0, 11)
    env.client.reads = [errors.Unavailable("away")]
    with pytest.raises(errors.Unavailable):
        await env.store.get_range(KEY, 0, 11)
    assert env.counted("bytes", direction="out") == 10  # what came whole


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, 0), (0, -1)])
async def test_what_is_no_range_is_refused(env: Env, start: int, length: int) -> None:
    with pytest.raises(errors.Invalid):
        await env.store.get_range(KEY, start, length)


async def test_a_write_without_a_condition_and_without_an_answer_is_unknown(env: Env) -> None:
    """Also its hint and its Retry-After reach the caller; a kind that reports more is passed on."""
    env.client.instead = [errors.Unavailable("503", retry_after_s=4.0)]
    with pytest.raises(errors.OutcomeUnknown) as upload:
        await env.store.upload(KEY, chunks(b"x"))
    assert upload.value.retry_after_s == 4.0
    assert "doctor" in upload.value.hint

    env.client.instead = [errors.Unavailable("503")]
    with pytest.raises(errors.OutcomeUnknown):
        await env.store.delete(KEY)

    class Closed(errors.Unavailable):
        code = "closed"

    env.client.instead = [Closed("said so")]
    with pytest.raises(Closed):
        await env.store.delete(KEY)


async def test_deleting_what_is_gone_is_no_error(env: Env) -> None:
    await env.store.delete(KEY)


async def test_a_listing_goes_through_all_pages_behind_its_start(env: Env) -> None:
    env.client.objects = {f"f/{number}": b"" for number in range(5)}

    assert [info.key async for info in env.store.list("f/", after="f/0")] == ["f/1", "f/2", "f/3", "f/4"]
    assert env.counted("requests", verb="list") == 3  # two pages, and the end
    assert list(await env.store.children("f/")) == ["a", "z"]


@pytest.mark.parametrize("verb", ["create", "replace"])
async def test_a_conflict_behind_a_try_without_an_answer_is_no_plain_one(env: Env, verb: str) -> None:
    """The first request may have been carried out late and overwritten: the refusal of the second is no proof."""
    single = errors.Conflict("412")
    single.repeated = False
    env.client.instead = [errors.Unavailable("503"), single]
    if verb == "replace":
        env.client.objects[KEY] = b"old"

    async def rival(_: float) -> None:
        env.client.objects[KEY] = b"theirs"

    env.clock.sleep = rival  # type: ignore[method-assign]
    with pytest.raises(errors.Conflict) as raised:
        if verb == "create":
            await env.store.create(KEY, b"mine")
        else:
            await env.store.replace(KEY, b"mine", Version(env.client.etag_of(b"old")))

    assert raised.value.repeated

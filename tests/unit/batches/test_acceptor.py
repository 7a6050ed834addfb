"""The accept path on a bucket in memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptance import Submission
from lakebed.batches.acceptor import Acceptor
from lakebed.batches.codec.index import decode_segment, single_objects
from lakebed.batches.derived_writes import FLUSH_S
from lakebed.batches.model import AcceptedBatch, BatchIdentity, ConflictRecord, IdentityConflict
from lakebed.batches.reader import RawBatches
from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import OutcomeUnknown, Overloaded, Unavailable
from lakebed.core.metrics import Metrics
from lakebed.store.memory import MemoryStore
from lakebed.store.model import HashedBytes, ObjectInfo
from support.batch_frames import frame_of, submit

MakeAcceptor = Callable[..., Acceptor]

IDENTITY = BatchIdentity("agent-a", "boot-1", 0, 9)


async def keys(store: MemoryStore, prefix: str = "") -> list[str]:
    return [info.key async for info in store.list(prefix)]


async def test_a_new_batch_is_accepted_with_every_field_of_its_manifest(
    store: MemoryStore, make_acceptor: MakeAcceptor
) -> None:
    """An accepted batch has its blob under its hash and a manifest with every field of the schema."""
    frame = frame_of()
    submitted = submit(frame)
    sha = submitted.sha256

    answer = await make_acceptor(store).accept(submitted)

    assert not answer.duplicate
    stored = await store.get(paths.accepted_key(IDENTITY))
    manifest = msgspec.json.decode(stored.data)
    assert manifest.pop("attempt_id")
    assert manifest == {
        "schema": "lightmetrics.accepted_batch.v1",
        "agent_id": "agent-a",
        "boot_id": "boot-1",
        "seq_start": 0,
        "seq_end": 9,
        "frame_sha256": submitted.sha256,
        "frame_bytes": len(frame),
        "raw_blob_key": f"raw-blobs/v1/sha256/{sha[:2]}/{sha[2:4]}/{sha}.lmbatch",
        "accepted_at_unix_ns": answer.accepted_at_unix_ns,
        "collector_id": "collector-1",
        "wire_version": 1,
        "frame_version": 1,
    }
    assert (await store.get(manifest["raw_blob_key"])).data == frame


async def test_derived_indexes_follow_the_answer(
    store: MemoryStore, make_acceptor: MakeAcceptor, manual_clock: ManualClock
) -> None:
    """One segment appears after an acceptance, and its row says what the three single objects said."""
    submitted = submit(frame_of())

    answer = await make_acceptor(store).accept(submitted)
    before = await keys(store, paths.ACCEPTED_INDEX)
    await manual_clock.advance(FLUSH_S)
    (key,) = await keys(store, paths.ACCEPTED_INDEX)

    (row,) = decode_segment(key, (await store.get(key)).data).rows
    manifest = acceptance.manifest(
        submitted, at_ns=answer.accepted_at_unix_ns, collector_id="collector-1", attempt_id="any"
    )
    single = acceptance.derived(manifest, acceptance.span_of(submitted.batch))
    assert [] == before
    assert [(write.key, write.data) for write in single] == list(single_objects(row))


async def test_the_same_bytes_again_are_a_duplicate_on_any_collector(
    store: MemoryStore, make_acceptor: MakeAcceptor
) -> None:
    """A second upload answers duplicate=true and reaches nobody's live state, here or elsewhere."""
    on_accepted: list[Submission] = []
    first, second = (
        make_acceptor(store, on_accepted=on_accepted),
        make_acceptor(store, "collector-2", on_accepted=on_accepted),
    )
    submitted = submit(frame_of())

    answers = [await first.accept(submitted), await first.accept(submitted), await second.accept(submitted)]

    assert [answer.duplicate for answer in answers] == [False, True, True]
    assert len({answer.accepted_at_unix_ns for answer in answers}) == 1
    assert len(on_accepted) == 1


async def test_other_bytes_under_the_same_identity_are_refused_and_recorded(
    store: MemoryStore, make_acceptor: MakeAcceptor
) -> None:
    """A conflict answers with both hashes, after the quarantine manifest and its reverse reference are stored."""
    accepted, submitted = submit(frame_of()), submit(frame_of(value=2.0))
    await make_acceptor(store).accept(accepted)

    with pytest.raises(IdentityConflict) as refused:
        await make_acceptor(store, "collector-2").accept(submitted)

    detail = refused.value.detail
    assert (accepted.sha256, submitted.sha256) == (detail["accepted_frame_sha256"], detail["submitted_frame_sha256"])
    assert detail["quarantined"]
    stored = await store.get(paths.quarantine_key(IDENTITY, submitted.sha256))
    record = msgspec.json.decode(stored.data, type=ConflictRecord)
    assert ("collector-2", accepted.blob_key, submitted.blob_key) == (
        record.collector_id,
        record.accepted_raw_blob_key,
        record.submitted_raw_blob_key,
    )
    assert [paths.quarantine_by_blob_key(submitted.sha256, IDENTITY)] == await keys(store, paths.QUARANTINE_BY_BLOB)
    assert (await store.get(submitted.blob_key)).data == submitted.frame


async def test_a_conflict_seen_again_keeps_its_first_record(
    store: MemoryStore, make_acceptor: MakeAcceptor, manual_clock: ManualClock
) -> None:
    """First seen stays first seen, however often the agent tries."""
    acceptor = make_acceptor(store)
    await acceptor.accept(submit(frame_of()))
    submitted = submit(frame_of(value=2.0))
    seen = []

    for _ in range(2):
        await manual_clock.advance(60)
        with pytest.raises(IdentityConflict) as refused:
            await acceptor.accept(submitted)
        seen.append(refused.value.detail["observed_at_unix_ns"])

    assert seen[0] == seen[1]


class Slow(MemoryStore):
    """Yields once per create, so that others get their turn."""

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        await asyncio.sleep(0)
        return await super().create(key, data)


class Unlucky(MemoryStore):
    """Answers the k-th create of a prefix with an error, having done it or not."""

    def __init__(self, clock: ManualClock, prefix: str, errors: list[Exception | None], *, done: bool) -> None:
        super().__init__(clock=clock)
        self.prefix, self.errors, self.done = prefix, errors, done

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        if key.startswith(self.prefix) and self.errors:
            error = self.errors.pop(0)
            if error is not None:
                if self.done:
                    await super().create(key, data)
                raise error
        return await super().create(key, data)


class Noting(MemoryStore):
    """Keeps the bytes of each create, by key."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.created: dict[str, bytes] = {}

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        self.created[key] = data
        return await super().create(key, data)


async def test_a_frame_is_hashed_once(manual_clock: ManualClock, make_acceptor: MakeAcceptor) -> None:
    """The blob carries the hash that its key has: the store signs with it and does not compute it again."""
    store = Noting(manual_clock)
    frame = frame_of()

    await make_acceptor(store).accept(submit(frame))

    blob = store.created[paths.blob_key(hashlib.sha256(frame).hexdigest())]
    assert isinstance(blob, HashedBytes)
    assert (frame, hashlib.sha256(frame).hexdigest()) == (blob, blob.sha256)


@pytest.mark.parametrize("done", [True, False])
async def test_a_lost_answer_to_the_manifest_is_resolved_and_stays_ours(
    manual_clock: ManualClock, make_acceptor: MakeAcceptor, done: bool
) -> None:
    """Whether or not the doubtful create took effect, the answer is duplicate=false and one manifest exists."""
    store = Unlucky(manual_clock, paths.ACCEPTED, [OutcomeUnknown("lost")], done=done)
    on_accepted: list[Submission] = []

    accepting = asyncio.create_task(make_acceptor(store, on_accepted=on_accepted).accept(submit(frame_of())))
    await manual_clock.advance(3)
    answer = await accepting

    assert not answer.duplicate
    assert len(on_accepted) == 1
    assert len(await keys(store, paths.ACCEPTED)) == 1


async def test_a_store_that_never_says_gives_503_and_the_retry_is_safe(
    manual_clock: ManualClock, make_acceptor: MakeAcceptor
) -> None:
    """Unknown to the end is Unavailable with a wait, never a duplicate; the next upload learns the truth."""
    store = Unlucky(manual_clock, paths.ACCEPTED, [OutcomeUnknown("lost")] * 3, done=True)
    acceptor = make_acceptor(store)

    accepting = asyncio.create_task(acceptor.accept(submit(frame_of())))
    await manual_clock.advance(4)
    with pytest.raises(Unavailable) as failed:
        await accepting
    answer = await acceptor.accept(submit(frame_of()))

    assert failed.value.retry_after_s == 2.0
    assert answer.duplicate
    assert len(await keys(store, paths.ACCEPTED)) == 1


async def test_a_store_that_hangs_or_holds_a_damaged_manifest_is_a_failed_upload_to_retry(
    store: MemoryStore, make_acceptor: MakeAcceptor, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 with a wait and counted as failed, never an internal error; it takes no room afterwards."""
    await store.create(paths.accepted_key(IDENTITY), b"half a manifest")
    acceptor = make_acceptor(store, timeout_s=0.05, accepting_max=1)
    with pytest.raises(Unavailable) as damaged:
        await acceptor.accept(submit(frame_of()))

    async def hanging(key: str, data: bytes) -> Any:
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(store, "create", hanging)
        with pytest.raises(Unavailable, match="did not respond") as hung:
            await acceptor.accept(submit(frame_of(10, 19)))
    answer = await acceptor.accept(submit(frame_of(10, 19)))

    assert [2.0, 2.0] == [each.value.retry_after_s for each in (damaged, hung)]
    assert not answer.duplicate
    assert [2, 1] == [metrics.value("lakebed_batches_uploads_total", outcome=each) for each in ("failed", "accepted")]


async def test_the_same_upload_twice_at_once_is_stored_once(
    store: MemoryStore, make_acceptor: MakeAcceptor, metrics: Metrics
) -> None:
    """The second waits for the first and is answered from what that one learned."""
    created: list[str] = []
    create = store.create

    async def counted(key: str, data: bytes) -> Any:
        created.append(key)
        await settle()
        return await create(key, data)

    store.create = counted  # type: ignore[method-assign]
    acceptor = make_acceptor(store)
    answers = await asyncio.gather(*(acceptor.accept(submit(frame_of())) for _ in range(3)))

    assert [False, True, True] == [each.duplicate for each in answers]
    assert 1 == created.count(paths.accepted_key(IDENTITY))
    assert 10 == metrics.value("lakebed_batches_samples_total")


async def test_the_blob_of_an_upload_that_failed_is_found_without_a_full_scan(
    manual_clock: ManualClock, make_acceptor: MakeAcceptor
) -> None:
    """Its manifest was never created: the index names the blob, so that the cheap sweep sees it."""
    store = Unlucky(manual_clock, paths.ACCEPTED, [OutcomeUnknown("lost")] * 3, done=False)
    acceptor = make_acceptor(store)
    submitted = submit(frame_of())

    accepting = asyncio.create_task(acceptor.accept(submitted))
    await manual_clock.advance(4)
    with pytest.raises(Unavailable):
        await accepting
    await manual_clock.advance(10)

    found = [orphan.sha256 async for orphan in RawBatches(store).index.orphans(manual_clock.now_ns())]
    assert [submitted.sha256] == found
    assert [] == await keys(store, paths.ACCEPTED)


async def test_a_blob_that_cannot_be_written_accepts_nothing(
    manual_clock: ManualClock, make_acceptor: MakeAcceptor
) -> None:
    """Without its blob no manifest is ever created."""
    store = Unlucky(manual_clock, paths.RAW_BLOBS, [Unavailable("down")], done=False)

    with pytest.raises(Unavailable):
        await make_acceptor(store).accept(submit(frame_of()))

    assert await keys(store, paths.ACCEPTED) == []


async def test_a_conflict_is_answered_even_when_it_cannot_be_recorded(
    manual_clock: ManualClock, make_acceptor: MakeAcceptor
) -> None:
    """The agent must hear 409 even if the quarantine prefix is out of reach."""
    store = Unlucky(manual_clock, "quarantine", [Unavailable("down")] * 9, done=False)
    acceptor = make_acceptor(store)
    await acceptor.accept(submit(frame_of()))

    with pytest.raises(IdentityConflict) as refused:
        await acceptor.accept(submit(frame_of(value=2.0)))

    assert not refused.value.detail["quarantined"]


async def test_a_damaged_blob_is_mended_before_its_batch_is_accepted(
    store: MemoryStore, make_acceptor: MakeAcceptor
) -> None:
    """Bytes that do not match their hash never be behind an accepted manifest."""
    submitted = submit(frame_of())
    await store.create(submitted.blob_key, b"rotten")

    await make_acceptor(store).accept(submitted)

    assert (await store.get(submitted.blob_key)).data == submitted.frame


async def test_uploads_over_the_limit_are_told_to_wait(manual_clock: ManualClock, make_acceptor: MakeAcceptor) -> None:
    """A collector that is full reports it at once instead of queueing without end."""
    acceptor = make_acceptor(Slow(clock=manual_clock), accepting_max=1)

    results = await asyncio.gather(
        *(acceptor.accept(submit(frame_of(n * 10, n * 10 + 9))) for n in range(3)), return_exceptions=True
    )

    assert sum(isinstance(result, Overloaded) for result in results) == 2


async def test_one_process_never_races_itself(
    store: MemoryStore, make_acceptor: MakeAcceptor, metrics: Metrics
) -> None:
    """Ten uploads of one batch at once in one collector give one acceptance and nine duplicates."""
    acceptor = make_acceptor(store)

    answers = await asyncio.gather(*(acceptor.accept(submit(frame_of())) for _ in range(10)))

    assert sum(answer.duplicate for answer in answers) == 9
    assert metrics.value("lakebed_batches_uploads_total", outcome="accepted") == 1


async def test_racing_collectors_with_different_bytes_have_one_winner(
    store: MemoryStore, make_acceptor: MakeAcceptor
) -> None:
    """Whichever bytes win, every other collector reports a conflict against exactly those."""
    collectors = [make_acceptor(store, f"collector-{n}") for n in range(4)]

    results = await asyncio.gather(
        *(c.accept(submit(frame_of(value=float(n)))) for n, c in enumerate(collectors)), return_exceptions=True
    )

    winners = [r for r in results if not isinstance(r, BaseException)]
    losers = [r for r in results if isinstance(r, IdentityConflict)]
    assert (len(winners), len(losers)) == (1, 3)
    existing = msgspec.json.decode((await store.get(paths.accepted_key(IDENTITY))).data, type=AcceptedBatch)
    assert (
        {winners[0].frame_sha256}
        == {loser.detail["accepted_frame_sha256"] for loser in losers}
        == {existing.frame_sha256}
    )


class Gated(MemoryStore):
    """Creates of manifests wait for the gate, and every create lets others go on."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        if key.startswith(paths.ACCEPTED):
            self.reached.set()
            await self.gate.wait()
        await settle()
        return await super().create(key, data)


async def test_an_upload_that_waits_for_another_and_is_given_up_leaves_that_one_alone(
    manual_clock: ManualClock, make_acceptor: MakeAcceptor
) -> None:
    """An agent that closes its second connection gets the answer on its first."""
    gated = Gated(manual_clock)
    acceptor = make_acceptor(gated, timeout_s=600.0)
    first, second = (asyncio.create_task(acceptor.accept(submit(frame_of()))) for _ in range(2))
    await gated.reached.wait()
    await settle()

    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gated.gate.set()

    assert not (await first).duplicate


async def test_uploads_that_wait_for_one_of_their_identity_follow_one_by_one(
    manual_clock: ManualClock, make_acceptor: MakeAcceptor
) -> None:
    """Each is judged by the manifest that is there: other bytes are a conflict for all of them."""
    gated = Gated(manual_clock)
    acceptor = make_acceptor(gated, timeout_s=600.0)
    uploads = [asyncio.create_task(acceptor.accept(submit(frame_of(value=float(n))))) for n in range(3)]
    await gated.reached.wait()
    await settle()

    gated.gate.set()
    first, *others = await asyncio.gather(*uploads, return_exceptions=True)

    assert not first.duplicate  # type: ignore[union-attr]
    assert [IdentityConflict] * 2 == [type(each) for each in others]


async def test_a_blob_is_noted_as_an_orphan_when_its_upload_is_given_up_before_the_manifest_is_there(
    manual_clock: ManualClock, make_acceptor: MakeAcceptor
) -> None:
    """A timeout, or a client that goes away: garbage collection must find the blob all the same."""
    reached = asyncio.Event()

    class Hanging(MemoryStore):
        async def create(self, key: str, data: bytes) -> ObjectInfo:
            if key.startswith(paths.ACCEPTED):
                reached.set()
                await asyncio.Event().wait()
            return await super().create(key, data)

    acceptor = make_acceptor(Hanging(clock=manual_clock), timeout_s=600.0)
    noted: list[str] = []
    acceptor._derived_writes.put_orphan = lambda sha256, at_ns, place: noted.append(sha256)  # type: ignore[method-assign]
    submitted = submit(frame_of())

    upload = asyncio.create_task(acceptor.accept(submitted))
    await reached.wait()
    upload.cancel()
    await asyncio.gather(upload, return_exceptions=True)

    assert [submitted.sha256] == noted

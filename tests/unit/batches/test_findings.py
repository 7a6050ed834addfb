"""Findings of an audit as work: repaired once, believed never, and a proof only when they are whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptor import store_conflict
from lakebed.batches.findings import FindingsRepairer
from lakebed.batches.model import AcceptedBatch, write_record
from lakebed.batches.packer import write_blob
from lakebed.batches.reconciler import Reconciler, ReconcileReport
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.store.memory import MemoryStore
from support.batch_frames import frame_of, submit
from support.runtimes import runtime_on

AUDIT_ID = f"{1_760_000_000_000_000_000:020d}-0123456789abcdef"


@pytest.fixture
def reconciler(store: MemoryStore, manual_clock: ManualClock, ids: Ids, metrics: Metrics) -> Reconciler:
    return Reconciler(runtime_on(store, manual_clock, ids=ids, metrics=metrics), overlap_s=900.0, concurrency=4)


@pytest.fixture
def mender(
    store: MemoryStore, reconciler: Reconciler, manual_clock: ManualClock, ids: Ids, metrics: Metrics
) -> FindingsRepairer:
    return FindingsRepairer(runtime_on(store, manual_clock, ids=ids, metrics=metrics), reconciler)


async def left_bare(store: MemoryStore, frame: bytes) -> AcceptedBatch:
    submitted = submit(frame)
    await write_blob(store, submitted)
    accepted = acceptance.manifest(submitted, at_ns=1_760_000_000_000_000_000, collector_id="c", attempt_id="a")
    await store.create(paths.accepted_key(accepted.identity), write_record(accepted))
    return accepted


async def publish(
    store: MemoryStore, keys: list[str], *, whole: bool = True, lines: int | None = None, do: str = "mend"
) -> None:
    """An audit's objects, as docs/formats/audit.md reports."""
    work = f"audit/v1/{AUDIT_ID}/tasks/mend-1.jsonl"
    output = [json.dumps({"do": do, "key": key, "finding": "unindexed"}) for key in keys]
    await store.create(work, ("\n".join(output) + "\n").encode())
    record: dict[str, Any] = {
        "schema": "lakebed.audit.v1",
        "audit_id": AUDIT_ID,
        "work": [{"key": work, "do": do, "lines": len(keys) if lines is None else lines}],
        "proof": {"through_ns": 17, "source": "list", "accepted": 5, "quarantined": 0, "whole": whole},
    }
    await store.create(f"audit/v1/{AUDIT_ID}/audit.json", json.dumps(record).encode())
    await store.create("audit/v1/last.json", json.dumps({"audit_id": AUDIT_ID, "ok": False}).encode())


async def test_findings_are_mended_once_and_prove_the_audit(
    store: MemoryStore, mender: FindingsRepairer, reconciler: Reconciler
) -> None:
    """Entries come back, the register reports how far was audited, and the second time there is nothing to do."""
    accepted = await left_bare(store, frame_of())
    await publish(store, [paths.accepted_key(accepted.identity), "accepted/v1/agent=61/boot=62/not-there.json"])

    report = await mender.repair()
    again = await mender.repair()

    assert report is not None
    assert report.repaired == {"indexed": 1, "rollup_work": 1}
    assert again is None
    assert (await reconciler.audits.read()).value.audited_through_ns == 17


async def test_a_blob_that_is_good_again_is_no_longer_marked_as_damaged(
    store: MemoryStore, mender: FindingsRepairer, reconciler: Reconciler
) -> None:
    """An operator who restored a blob and ran an audit finds nothing under repairs/v1/ any more."""
    accepted = await left_bare(store, frame_of())
    frame = (await store.get(accepted.raw_blob_key)).data
    await store.delete(accepted.raw_blob_key)
    await reconciler.repair(paths.accepted_key(accepted.identity), ReconcileReport("hot"))
    mark = paths.repair_key(accepted.identity)
    assert [mark] == [info.key async for info in store.list("repairs/v1/")]

    await store.create(accepted.raw_blob_key, frame)
    await publish(store, [paths.accepted_key(accepted.identity)])
    report = await mender.repair()

    assert report is not None and 1 == report.repaired["unmarked_blob"]
    assert [] == [info.key async for info in store.list("repairs/v1/")]


async def test_work_that_was_cut_short_proves_nothing(
    store: MemoryStore, mender: FindingsRepairer, reconciler: Reconciler
) -> None:
    """An audit that had to leave work out is repaired, but garbage collection does not hear of it."""
    accepted = await left_bare(store, frame_of())
    await publish(store, [paths.accepted_key(accepted.identity)], whole=False)

    assert await mender.repair() is not None

    assert (await reconciler.audits.read()).value.audited_through_ns == 0


async def test_a_proof_never_goes_back(store: MemoryStore, mender: FindingsRepairer, reconciler: Reconciler) -> None:
    """An audit from an old report does not undo what a newer one has proven."""
    await reconciler.audit()
    before = (await reconciler.audits.read()).value
    await publish(store, ["accepted/v1/agent=61/boot=62/not-there.json"])

    await mender.repair()

    assert before == (await reconciler.audits.read()).value


async def test_a_file_of_work_that_lacks_lines_is_corrupt_and_nothing_is_proven(
    store: MemoryStore, mender: FindingsRepairer, reconciler: Reconciler
) -> None:
    """Half a file must not look like all the work."""
    accepted = await left_bare(store, frame_of())
    await publish(store, [paths.accepted_key(accepted.identity)], lines=2)

    with pytest.raises(Corrupt, match="1 lines, not 2"):
        await mender.repair()

    assert (await reconciler.audits.read()).value.audited_through_ns == 0


async def test_more_findings_than_are_repaired_together_are_repaired_once_each(
    store: MemoryStore, mender: FindingsRepairer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many groups they make, the last one too."""
    monkeypatch.setattr("lakebed.batches.findings.GROUP", 2)
    accepted = [await left_bare(store, frame_of(n * 10, n * 10 + 9)) for n in range(5)]
    await publish(store, [paths.accepted_key(each.identity) for each in accepted])

    report = await mender.repair()

    assert report is not None
    assert (5, {"indexed": 5, "rollup_work": 5}) == (report.checked, report.repaired)


@pytest.mark.parametrize("damage", ["record", "line", "missing"])
async def test_an_audit_that_cannot_be_read_is_corrupt_and_not_done(
    store: MemoryStore, mender: FindingsRepairer, damage: str
) -> None:
    """Its record, a line of its work, or a record that is not there: the same error until it is there again."""
    accepted = await left_bare(store, frame_of())
    await publish(store, [paths.accepted_key(accepted.identity)])
    record, work = f"audit/v1/{AUDIT_ID}/audit.json", f"audit/v1/{AUDIT_ID}/tasks/mend-1.jsonl"
    if damage == "missing":
        await store.delete(record)
    else:
        store.bucket.overwrite(record if damage == "record" else work, b"{ no json")

    for _ in range(2):
        with pytest.raises(Corrupt):
            await mender.repair()


async def test_references_of_quarantined_batches_are_repaired_too(store: MemoryStore, mender: FindingsRepairer) -> None:
    """Without its reverse reference a conflict's bytes have one guard less against garbage collection."""
    accepted = await left_bare(store, frame_of())
    refused = submit(frame_of(value=2.0))
    await store_conflict(store, acceptance.conflict(accepted, refused.sha256, at_ns=9, collector_id="c"))
    (reference,) = [info.key async for info in store.list(paths.QUARANTINE_BY_BLOB)]
    await store.delete(reference)
    await publish(store, [paths.quarantine_key(refused.batch.identity, refused.sha256)], do="mend_quarantine")

    report = await mender.repair()

    assert report is not None and {"quarantine_by_blob": 1} == report.repaired
    assert [reference] == [info.key async for info in store.list(paths.QUARANTINE_BY_BLOB)]


async def test_without_an_audit_there_is_nothing_to_mend(mender: FindingsRepairer) -> None:
    """A bucket that was never audited is fine."""
    assert await mender.repair() is None
    assert await mender._files.work() is None

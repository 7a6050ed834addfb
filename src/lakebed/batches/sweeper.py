"""Deletes raw blobs that can never be accepted, under the credentials of the garbage collection role, and stores a
report of what was deleted and why. `judge` is pure: evidence in, verdict out.

Why a delete can never hit an accepted batch: a frame carries its identity, so only one key can ever refer to a blob,
the accepted manifest of that identity. It is created if absent and never changes. A blob is deleted only when that
manifest exists **for other bytes**: no writer, however long it stalled between blob and manifest, can then make it
accepted, and a delayed delete does no harm. A blob whose identity is undecided is never deleted, because a stalled
writer may still accept it; past the horizon its acceptance is completed instead, or it is kept.

The proof needs no audit and no index: the two keys that can refer to a blob follow from the frame in it, and both are
read, with the store's strong consistency, just before the decision.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from lakebed.batches import acceptance, paths
from lakebed.batches.codec.frame import identity_of_head
from lakebed.batches.codec.pack import PackedFrame
from lakebed.batches.findings import AuditFiles
from lakebed.batches.index import AcceptedIndex, write_rows
from lakebed.batches.model import AcceptedBatch, BatchIdentity, BlobSeen, FramePlace, write_record
from lakebed.batches.packer import accepted_at, read_table
from lakebed.batches.reader import read_frame, verified
from lakebed.batches.settled import SettledBoots
from lakebed.core.errors import AlreadyExists, Corrupt, Invalid, NotFound
from lakebed.core.feed import ahead
from lakebed.core.logs import logger
from lakebed.core.traces import traced
from lakebed.store.model import ObjectInfo, read_record
from lakebed.store.protocol import exists
from lakebed.store.runtime import StoreRuntime

Verdict = Literal["delete", "finish", "keep"]


class Evidence(msgspec.Struct, frozen=True):
    """What was found out about one blob."""

    sha256: str
    modified_ns: int
    now_ns: int
    horizon_ns: int
    problem: str = ""  # why its frame cannot be read
    malformed: str = ""  # why the manifest at its identity cannot be read
    existing_sha256: str = ""  # hash in the manifest at its identity; empty: undecided
    quarantined: bool = False  # a quarantine manifest of its identity and hash, or a reverse reference, exists
    boot_held: bool = False
    settled: bool = False  # retention has removed its batch
    elsewhere: bool = False  # the manifest at its identity refers to another object, even if it is of the same bytes


class Judgement(msgspec.Struct, frozen=True):
    verdict: Verdict
    reason: str


def judge(found: Evidence, undecided: Literal["finish", "keep"]) -> Judgement:
    """The conditions in their order: age, references of accepted and quarantine manifests, then the one that makes
    a delete safe."""
    ripe_ns = found.modified_ns + found.horizon_ns
    if found.now_ns < ripe_ns:
        left_s = (ripe_ns - found.now_ns) // 1_000_000_000
        return Judgement("keep", f"younger than the retry horizon, for another {left_s} s")
    if found.problem:
        return Judgement("keep", f"its frame cannot be read, so its identity is unknown: {found.problem}")
    if found.malformed:
        return Judgement("keep", f"the manifest at its identity cannot be read: {found.malformed}")
    if found.existing_sha256 == found.sha256 and not found.elsewhere:
        return Judgement("keep", "an accepted manifest refers to it")
    if found.quarantined:
        return Judgement("keep", "a quarantine manifest refers to it")
    if found.existing_sha256 == found.sha256:
        return Judgement("delete", "its identity was accepted from another blob of the same bytes")
    if found.existing_sha256:
        return Judgement("delete", f"its identity was accepted with other bytes, {found.existing_sha256}")
    if found.settled:
        return Judgement("delete", "retention has removed its batch")
    if found.boot_held:
        return Judgement("keep", "its boot is held for investigation")
    if undecided == "finish":
        return Judgement("finish", "neither accepted nor rejected within the horizon: its acceptance is completed")
    return Judgement("keep", "undecided: a writer could still accept it")


GROUP = 256  # blobs judged together
IDENTITY_BYTES_MAX = 512  # of a frame's head: prefix, header and two ids of 120 bytes
ROWS_MAX = 10_000  # judgements one report lists; the counts go on

log = logger("batches")


class BlobRow(msgspec.Struct, frozen=True):
    key: str
    bytes: int
    age_s: int
    verdict: str
    reason: str


class GcReport(msgspec.Struct, frozen=True):
    """What one run found. In a dry run the verdicts were not applied."""

    schema: str
    dry_run: bool
    source: str
    at_unix_ns: int
    counts: dict[str, int]
    rows: list[BlobRow]


class BlobSweeper:
    def __init__(
        self,
        runtime: StoreRuntime,
        *,
        horizon_s: float,
        undecided: Literal["finish", "keep"],
        name: str,
    ) -> None:
        store, clock, ids, metrics = runtime.store, runtime.clock, runtime.ids, runtime.metrics
        self._store = store
        self._horizon_ns, self._undecided, self._name = round(horizon_s * 1e9), undecided, name
        self._clock, self._ids = clock, ids
        self._findings, self._settled = AuditFiles(runtime), SettledBoots(runtime)
        self._blobs = metrics.counter("lakebed_batches_gc_blobs_total")

    @traced("batches gc")
    async def sweep(self, *, dry_run: bool, source: Literal["all", "by_time", "audit"] = "all") -> GcReport:
        """Judges blobs and deletes or finishes those it may, several at a time.

        `by_time`: the blobs that collectors recorded as undecided; `audit`: the candidates of the last audit over a
        listing. They are only found sooner: each is judged like any other.
        """
        await self._settled.refresh()
        now_ns = self._clock.now_ns()
        counts: dict[str, int] = {}
        rows: list[BlobRow] = []
        blobs = {
            "all": lambda: self._store.list(paths.RAW_BLOBS),
            "by_time": lambda: self._by_time(now_ns, dry_run),
            "audit": self._candidates,
        }[source]()
        async for info, judgement in self._judged(blobs, now_ns, dry_run):
            counts[judgement.verdict] = counts.get(judgement.verdict, 0) + 1
            if not dry_run:
                self._blobs.labels(verdict=judgement.verdict).inc()
            if len(rows) < ROWS_MAX:
                age_s = max(0, now_ns // 1_000_000 - info.modified_ms) // 1000
                rows.append(BlobRow(info.key, info.size, age_s, judgement.verdict, judgement.reason))
        report = GcReport("lightmetrics.gc_report.v1", dry_run, source, now_ns, counts, rows)
        if counts.get("delete") or counts.get("finish"):
            await self._keep(report)
        return report

    async def _judged(
        self, blobs: AsyncIterator[ObjectInfo], now_ns: int, dry_run: bool
    ) -> AsyncIterator[tuple[ObjectInfo, Judgement]]:
        async def one(info: ObjectInfo) -> tuple[ObjectInfo, Judgement]:
            return info, await self._one(info, now_ns, dry_run)

        group: list[ObjectInfo] = []
        async for info in blobs:
            group.append(info)
            if len(group) == GROUP:
                async for each in ahead(group, one):
                    yield each
                group = []
        async for each in ahead(group, one):
            yield each

    async def _one(self, info: ObjectInfo, now_ns: int, dry_run: bool) -> Judgement:
        if paths.is_pack(info.key):
            return await self._pack(info, now_ns, dry_run)
        try:
            sha256 = paths.sha256_of_blob(info.key)
        except Invalid:
            return Judgement("keep", "not a blob's key")
        evidence = await self._evidence(sha256, info, now_ns)
        judgement = judge(evidence, self._undecided)
        if dry_run or judgement.verdict == "keep":
            return judgement
        if judgement.verdict == "finish":
            return await self._finish(FramePlace(info.key, 0, info.size), sha256)
        await self._store.delete(info.key)
        await self._store.delete(paths.blob_by_time_key(sha256, evidence.modified_ns))
        log.info("deleted a raw blob", key=info.key, reason=judgement.reason)
        return judgement

    async def _pack(self, info: ObjectInfo, now_ns: int, dry_run: bool) -> Judgement:
        """A pack is deleted when each of its frames could be deleted as a blob of its own; one that is undecided is
        finished, and keeps the pack."""
        found = Evidence("", info.modified_ms * 1_000_000, now_ns, self._horizon_ns)
        if now_ns < found.modified_ns + self._horizon_ns:
            return judge(found, self._undecided)
        try:
            table = await read_table(self._store, info.key)
        except (Corrupt, NotFound) as error:
            return Judgement("keep", f"its table cannot be read, so its identities are unknown: {error.message}")
        made = [judge(await self._gathered(found, each.place(info.key), each), self._undecided) for each in table]
        open_frames = [each for each, judgement in zip(table, made, strict=True) if judgement.verdict == "finish"]
        if open_frames and not dry_run:
            for each in open_frames:
                await self._finish(each.place(info.key), each.sha256)
            return Judgement("finish", f"acceptance of {len(open_frames)} of {len(table)} packed frames was completed")
        for verdict in ("finish", "keep"):
            if some := [each for each in made if each.verdict == verdict]:
                return Judgement(some[0].verdict, f"{len(some)} of {len(table)} packed frames: {some[0].reason}")
        if not dry_run:
            await self._store.delete(info.key)
            log.info("deleted a pack of frames", key=info.key, frames=len(table))
        return Judgement("delete", f"no batch needs any of its {len(table)} frames")

    async def _evidence(self, sha256: str, info: ObjectInfo, now_ns: int) -> Evidence:
        modified_ns = info.modified_ms * 1_000_000
        found = Evidence(sha256, modified_ns, now_ns, self._horizon_ns)
        if now_ns < modified_ns + self._horizon_ns:
            return found  # too young: no further requests to the store
        try:
            head = await self._store.get_range(info.key, 0, min(info.size, IDENTITY_BYTES_MAX))
            identity = identity_of_head(head)
        except (Corrupt, Invalid, NotFound) as error:
            return msgspec.structs.replace(found, problem=error.message)
        place = FramePlace(info.key, 0, info.size)
        return await self._gathered(found, place, PackedFrame(identity, sha256, 0, info.size))

    async def _gathered(self, found: Evidence, place: FramePlace, frame: PackedFrame) -> Evidence:
        """The evidence of a frame at this place, whose head or table names this identity."""
        identity, sha256 = frame.identity, frame.sha256
        try:
            accepted = await self._accepted(frame)
        except Corrupt as error:
            return msgspec.structs.replace(found, malformed=error.message)
        existing = accepted.frame_sha256 if accepted is not None else ""
        elsewhere = accepted is not None and accepted.place[:2] != place[:2]
        found = msgspec.structs.replace(found, sha256=sha256, existing_sha256=existing, elsewhere=elsewhere)
        if accepted is not None and not elsewhere:
            return found
        return msgspec.structs.replace(
            found,
            problem=await self._problem(place, sha256, identity),
            # The frame of a conflict is a blob of its own: no quarantine manifest refers to a pack.
            quarantined=not place.offset
            and (
                await exists(self._store, paths.quarantine_key(identity, sha256))
                or await self._any(paths.quarantine_by_blob(sha256))
            ),
            boot_held=await exists(self._store, paths.held_boot_key(identity.agent_id, identity.boot_id)),
            settled=not existing and await self._settled.find(identity) is not None,
        )

    async def _accepted(self, frame: PackedFrame) -> AcceptedBatch | None:
        return await accepted_at(self._store, frame)

    async def _problem(self, place: FramePlace, sha256: str, identity: BatchIdentity) -> str:
        """Why the blob is not the frame that its head claims: only a verified identity decides."""
        try:
            batch = verified(await read_frame(self._store, place), sha256)
        except (Corrupt, NotFound) as error:
            return error.message
        return "" if batch.identity == identity else "its head names another batch than its frame"

    async def _finish(self, place: FramePlace, sha256: str) -> Judgement:
        """Creates the manifest that a collector began with: the agent's retry, should it come, is a duplicate."""
        batch = verified(await read_frame(self._store, place), sha256)
        identity = batch.identity
        accepted = acceptance.manifest_of(
            identity,
            sha256,
            place,
            at_ns=self._clock.now_ns(),
            collector_id=self._name,
            attempt_id=self._ids.token(),
        )
        try:
            await self._store.create(paths.accepted_key(identity), write_record(accepted))
        except AlreadyExists:
            return Judgement("keep", "another process decided it in the meantime")
        await write_rows(self._store, [acceptance.entry_of(accepted, acceptance.span_of(batch))], writer=self._name)
        return Judgement("finish", "acceptance of a raw blob was completed")

    async def _by_time(self, now_ns: int, dry_run: bool) -> AsyncIterator[ObjectInfo]:
        """Blobs past the horizon that the index records as undecided: cheap, and blind to what was not indexed."""
        packs: set[str] = set()  # one for each frame of it that was not needed
        async for orphan in AcceptedIndex(self._store).orphans(now_ns - self._horizon_ns):
            if orphan.pack in packs:
                continue
            packs.update([orphan.pack] if orphan.pack else [])
            try:
                yield await self._store.head(orphan.key)
            except NotFound:
                continue  # swept already
        for day in await self._store.children(paths.RAW_BLOBS_BY_TIME):
            try:
                if paths.day_ns(day) > now_ns - self._horizon_ns:
                    continue
            except Invalid:
                continue  # not ours
            async for entry in self._store.list(f"{paths.RAW_BLOBS_BY_TIME}{day}/"):
                try:
                    yield await self._store.head(await self._seen(entry.key))
                except NotFound:
                    if not dry_run:
                        await self._store.delete(entry.key)  # the blob is gone: the entry is obsolete

    async def _seen(self, key: str) -> str:
        """The blob of an entry of raw-blobs-by-time/: by its name, and where that is in a pack, by its content."""
        blob = paths.blob_key(key.rsplit("sha256=", 1)[-1].removesuffix(".json"))
        if await exists(self._store, blob):
            return blob
        try:
            return read_record(await self._store.get(key), BlobSeen).raw_blob_key
        except Corrupt:
            return blob

    async def _candidates(self) -> AsyncIterator[ObjectInfo]:
        """What the last audit found that nothing refers to."""
        audit = await self._findings.work()
        if audit is None:
            return
        async for key in self._findings.keys(audit, "judge"):
            try:
                yield await self._store.head(key)
            except NotFound:
                continue  # swept already

    async def _any(self, prefix: str) -> bool:
        async for _ in self._store.list(prefix):
            return True
        return False

    async def _keep(self, report: GcReport) -> None:
        if report.dry_run:
            return
        await self._store.create(
            f"{paths.GC_REPORTS}{report.at_unix_ns:020d}-{self._ids.token()}.json", write_record(report)
        )

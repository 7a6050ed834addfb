"""Conflicts for operators: list them, inspect one, decide. A decision is stored with its reason and never changes."""

from __future__ import annotations

import msgspec

from lakebed.batches import paths
from lakebed.batches.model import (
    BatchIdentity,
    BootHeld,
    ConflictRecord,
    ConflictResolution,
    HeldBoot,
    ResolutionAction,
    check_identity,
    write_record,
)
from lakebed.core.errors import AlreadyExists, Conflict, Invalid, LakebedError, NotFound
from lakebed.core.logs import logger
from lakebed.store.model import read_record
from lakebed.store.runtime import StoreRuntime

LIST_MAX = 1000
REASON_CHARS_MAX = 2000
HELD_MAX = 10_000  # boots held at once; more would be an outage, not an investigation
HELD_REFRESH_S = 10.0

log = logger("batches")


class ConflictView(msgspec.Struct, frozen=True):
    """A conflict as it is shown: the record, its id, and the decision."""

    conflict_id: str
    first_seen_unix_ns: int
    record: ConflictRecord
    resolution: ConflictResolution | None = None


class ConflictReview:
    def __init__(self, runtime: StoreRuntime) -> None:
        store, clock = runtime.store, runtime.clock
        self._store, self._clock = store, clock

    async def list(self, *, limit: int = 100, after: str = "", open_only: bool = False) -> list[ConflictView]:
        """Conflicts in the order of their identities, behind the conflict id `after`."""
        if not 1 <= limit <= LIST_MAX:
            raise Invalid(f"limit {limit} is not between 1 and {LIST_MAX}")
        found: list[ConflictView] = []
        start = paths.quarantine_key(*parse_id(after)) if after else ""
        # Two listings instead of two reads of each conflict that was ever decided.
        decided = {info.key async for info in self._store.list(paths.RESOLUTIONS)} if open_only else set()
        async for info in self._store.list(paths.QUARANTINE, after=start):
            if paths.RESOLUTIONS + info.key.removeprefix(paths.QUARANTINE) in decided:
                continue
            view = await self._view(info.key)
            if view is not None and not (open_only and view.resolution):
                found.append(view)
            if len(found) == limit:
                break
        return found

    async def show(self, conflict_id: str) -> ConflictView:
        """One conflict. Raises NotFound."""
        view = await self._view(paths.quarantine_key(*parse_id(conflict_id)))
        if view is None:
            raise NotFound(f"there is no conflict {conflict_id}", hint="lakebed batches conflicts lists them")
        return view

    async def resolve(self, conflict_id: str, action: ResolutionAction, reason: str, by: str) -> ConflictView:
        """Records the decision; repeating the same one is harmless. Raises Conflict when another was recorded before.

        accept_existing: the accepted batch is kept, and the agent's owner may drop the parked one.
        quarantine_boot: from now on no batch of this boot is accepted.
        """
        if not reason.strip() or len(reason) > REASON_CHARS_MAX:
            raise Invalid(f"a reason of 1 to {REASON_CHARS_MAX} characters is needed", hint="state why")
        view = await self.show(conflict_id)
        if view.resolution is not None:
            return self._same(view, view.resolution, action)
        now_ns = self._clock.now_ns()
        if action == "quarantine_boot":
            await self._hold(view.record, reason, by, now_ns)
        made = ConflictResolution("lightmetrics.conflict_resolution.v1", conflict_id, action, reason, by, now_ns)
        try:
            await self._store.create(paths.resolution_key(*parse_id(conflict_id)), write_record(made))
        except AlreadyExists as error:
            return self._same(view, read_record(error.current, ConflictResolution), action)
        return msgspec.structs.replace(view, resolution=made)

    async def held(self, agent_id: str, boot_id: str) -> HeldBoot:
        """The record of a quarantined boot. Raises NotFound."""
        try:
            return read_record(await self._store.get(paths.held_boot_key(agent_id, boot_id)), HeldBoot)
        except NotFound as error:
            raise NotFound(f"boot {boot_id} of agent {agent_id} is not quarantined") from error

    async def release(self, agent_id: str, boot_id: str) -> HeldBoot:
        """Ends the quarantine of a boot, and returns its record. Decisions about its conflicts stay as they are.

        Collectors accept its batches again within a few seconds. Raises NotFound.
        """
        record = await self.held(agent_id, boot_id)
        await self._store.delete(paths.held_boot_key(agent_id, boot_id))
        return record

    def _same(self, view: ConflictView, existing: ConflictResolution, action: ResolutionAction) -> ConflictView:
        if existing.action != action:
            raise Conflict(
                f"{view.conflict_id} was already resolved as {existing.action} by {existing.resolved_by}",
                resolution=msgspec.to_builtins(existing),
            )
        return msgspec.structs.replace(view, resolution=existing)

    async def _hold(self, record: ConflictRecord, reason: str, by: str, now_ns: int) -> None:
        held = HeldBoot("lightmetrics.held_boot.v1", record.agent_id, record.boot_id, reason, by, now_ns)
        try:
            await self._store.create(paths.held_boot_key(record.agent_id, record.boot_id), write_record(held))
        except AlreadyExists:
            return  # held already, for another of its conflicts

    async def _view(self, key: str) -> ConflictView | None:
        try:
            record = read_record(await self._store.get(key), ConflictRecord)
        except NotFound:
            return None
        sha256 = record.submitted_frame_sha256
        try:
            stored = await self._store.get(paths.resolution_key(record.identity, sha256))
            resolution: ConflictResolution | None = read_record(stored, ConflictResolution)
        except NotFound:
            resolution = None
        return ConflictView(conflict_id(record.identity, sha256), record.observed_at_unix_ns, record, resolution)


class HeldBoots:
    """The boots nothing is accepted from, known without a request per upload: refreshed every few seconds."""

    def __init__(self, runtime: StoreRuntime) -> None:
        store, clock = runtime.store, runtime.clock
        self._store, self._clock = store, clock
        self._held: frozenset[tuple[str, str]] = frozenset()

    def check(self, identity: BatchIdentity) -> None:
        """Raises BootHeld."""
        if (identity.agent_id, identity.boot_id) in self._held:
            raise BootHeld(
                "an operator quarantined this boot of the agent",
                hint="keep the batch; the operator who resolved the conflict decides",
                agent_id=identity.agent_id,
                boot_id=identity.boot_id,
            )

    async def refresh(self) -> None:
        """Takes the boots that are held now. Their keys name them, so a damaged record releases no boot."""
        found = set()
        async for info in self._store.list(paths.HELD_BOOTS):
            try:
                found.add(paths.boot_of_held(info.key))
            except Invalid:
                continue  # not ours
            if len(found) >= HELD_MAX:
                log.error("too many held boots: the rest is ignored", limit=HELD_MAX)
                break
        self._held = frozenset(found)

    async def try_refresh(self) -> None:
        """Refreshes; while the store does not answer, what was held before stays held."""
        try:
            await self.refresh()
        except LakebedError as error:
            log.warning("held boots could not be read", error=error.message)

    async def run(self) -> None:
        while True:
            await self._clock.sleep(HELD_REFRESH_S)
            await self.try_refresh()


def conflict_id(identity: BatchIdentity, sha256: str) -> str:
    agent, boot = identity.agent_id.encode().hex(), identity.boot_id.encode().hex()
    return f"{agent}.{boot}.{identity.seq_start}-{identity.seq_end}.{sha256}"


def parse_id(text: str) -> tuple[BatchIdentity, str]:
    """The identity and the submitted hash that a conflict id names. Raises Invalid."""
    try:
        agent, boot, seqs, sha256 = text.split(".")
        start, end = seqs.split("-")
        identity = BatchIdentity(bytes.fromhex(agent).decode(), bytes.fromhex(boot).decode(), int(start), int(end))
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise ValueError(sha256)
    except ValueError as error:
        raise Invalid(f"{text[:200]!r} is not a conflict id", hint="lakebed batches conflicts lists them") from error
    return check_identity(identity), sha256

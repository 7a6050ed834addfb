"""Conflicts for people: list them, look at one, decide. A decision is recorded with its reason and never changed."""

from __future__ import annotations

import msgspec

from lakebed.batches import paths
from lakebed.batches.model import (
    Action,
    BootHeld,
    ConflictRecord,
    HeldBoot,
    Resolution,
    read_record,
    write_record,
)
from lakebed.clock import Clock
from lakebed.errors import AlreadyExists, Conflict, Invalid, LakebedError, NotFound
from lakebed.frame.model import Identity, check_identity
from lakebed.logs import logger
from lakebed.store.protocol import Store

LIST_MAX = 1000
REASON_CHARS_MAX = 2000
HELD_MAX = 10_000  # boots held at once; more would be an outage, not an investigation
HELD_REFRESH_S = 10.0

log = logger("batches")


class ConflictView(msgspec.Struct, frozen=True):
    """A conflict as it is shown: the record, its id, and what was decided."""

    conflict_id: str
    first_seen_unix_ns: int
    record: ConflictRecord
    resolution: Resolution | None = None


class ConflictDesk:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock

    async def list(self, *, limit: int = 100, after: str = "", open_only: bool = False) -> list[ConflictView]:
        """Conflicts in the order of their identities, behind the conflict id `after`."""
        if not 1 <= limit <= LIST_MAX:
            raise Invalid(f"limit {limit} is not between 1 and {LIST_MAX}")
        found: list[ConflictView] = []
        start = paths.quarantine_key(*parse_id(after)) if after else ""
        async for info in self._store.list(paths.QUARANTINE, after=start):
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

    async def resolve(self, conflict_id: str, action: Action, reason: str, by: str) -> ConflictView:
        """Records the decision; repeating the same one is harmless. Raises Conflict when another was recorded before.

        accept_existing: the accepted manifest is the truth, and the agent's owner may drop the parked batch.
        quarantine_boot: from now on nothing of this agent's boot is accepted.
        """
        if not reason.strip() or len(reason) > REASON_CHARS_MAX:
            raise Invalid(f"a reason of 1 to {REASON_CHARS_MAX} characters is needed", hint="say why, for whoever asks")
        view = await self.show(conflict_id)
        if view.resolution is not None:
            return self._same(view, view.resolution, action)
        now_ns = self._clock.now_ns()
        if action == "quarantine_boot":
            await self._hold(view.record, reason, by, now_ns)
        made = Resolution("lightmetrics.conflict_resolution.v1", conflict_id, action, reason, by, now_ns)
        try:
            await self._store.create(paths.resolution_key(*parse_id(conflict_id)), write_record(made))
        except AlreadyExists as error:
            return self._same(view, read_record(error.current, Resolution), action)
        return msgspec.structs.replace(view, resolution=made)

    def _same(self, view: ConflictView, standing: Resolution, action: Action) -> ConflictView:
        if standing.action != action:
            raise Conflict(
                f"{view.conflict_id} was already resolved as {standing.action} by {standing.resolved_by}",
                resolution=msgspec.to_builtins(standing),
            )
        return msgspec.structs.replace(view, resolution=standing)

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
            resolution: Resolution | None = read_record(stored, Resolution)
        except NotFound:
            resolution = None
        return ConflictView(conflict_id(record.identity, sha256), record.observed_at_unix_ns, record, resolution)


class HeldBoots:
    """The boots nothing is accepted from, known without a request per upload: refreshed every few seconds."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._held: frozenset[tuple[str, str]] = frozenset()

    def check(self, identity: Identity) -> None:
        """Raises BootHeld."""
        if (identity.agent_id, identity.boot_id) in self._held:
            raise BootHeld(
                "an operator set this boot of the agent aside for investigation",
                hint="keep the batch; ask who resolved the conflict",
                agent_id=identity.agent_id,
                boot_id=identity.boot_id,
            )

    async def refresh(self) -> None:
        """Takes the boots that are held now. Their keys name them, so a damaged record frees nobody."""
        found = set()
        async for info in self._store.list(paths.HELD_BOOTS):
            try:
                found.add(paths.boot_of_held(info.key))
            except Invalid:
                continue  # not ours
            if len(found) >= HELD_MAX:
                log.error("more boots are held than are looked at", limit=HELD_MAX)
                break
        self._held = frozenset(found)

    async def try_refresh(self) -> None:
        """Refreshes; while the store does not answer, what was held before stays held."""
        try:
            await self.refresh()
        except LakebedError as error:
            log.warning("held boots could not be read", cause=error.message)

    async def run(self) -> None:
        while True:
            await self._clock.sleep(HELD_REFRESH_S)
            await self.try_refresh()


def conflict_id(identity: Identity, sha256: str) -> str:
    agent, boot = identity.agent_id.encode().hex(), identity.boot_id.encode().hex()
    return f"{agent}.{boot}.{identity.seq_start}-{identity.seq_end}.{sha256}"


def parse_id(text: str) -> tuple[Identity, str]:
    """The identity and the submitted hash that a conflict id names. Raises Invalid."""
    try:
        agent, boot, seqs, sha256 = text.split(".")
        start, end = seqs.split("-")
        identity = Identity(bytes.fromhex(agent).decode(), bytes.fromhex(boot).decode(), int(start), int(end))
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise ValueError(sha256)
    except ValueError as error:
        raise Invalid(f"{text[:200]!r} is not a conflict id", hint="lakebed batches conflicts lists them") from error
    return check_identity(identity), sha256

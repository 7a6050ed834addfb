"""What may be appended to the producer manifest, and what may leave it. Pure: manifest in, manifest and result out.

Four rules make an append happen once, and only while its data exists:

- An ingestor numbers its batches. The manifest remembers the last number of each ingestor, so an append that is retried
  after a lost response is recognised, even when its batch has long been collected and removed.
- Batches are stored in a folder named by the manifest's generation. A batch of an older generation than the last two is
  refused (`GenerationExpired`): the sweep may have removed it, and the ingestor stores it again under a fresh name.
- An ingestor's number is forgotten only together with its generation, so a forgotten number always meets that refusal.
- Entries with an idempotency key are appended only when no call with that key was, for as long as keys are kept.

No clock decides the first three: generations are raised at a pace, but compared by number.

The manifest stays short. `seal` moves its oldest batches into a segment, an object that is stored before and never
changes; clean-up removes sequences, not rows, so that it needs no segment.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from lakebed.core.errors import Overloaded
from lakebed.queue.model import (
    SEALED_VERSION,
    Append,
    Durable,
    EnqueuedKey,
    GenerationExpired,
    IngestorSession,
    KeysEnqueued,
    KeysUnread,
    PendingBatch,
    ProducerManifest,
)

GENERATIONS_KEPT = 2  # the current one and the one before it: a stalled ingestor has at least one whole horizon
SESSIONS_MAX = 10_000  # ingestors seen within two generations; a gateway counts as one
REPLAY = "replay-"  # begins the ingestor of a replayed dead letter


class KeyIndex:
    """Which idempotency keys are in segments: those up to the segment `upto`, exclusive, and after `since_ms`."""

    def __init__(self) -> None:
        self.sequences: dict[str, EnqueuedKey] = {}
        self.upto = 0


def complete(manifest: ProducerManifest) -> ProducerManifest:
    """The manifest with a sequence for every location, and with a floor; one in the seed's plain form gets them.

    Deterministic, so that all readers agree on them before they are written.
    """
    bare = [location for location in manifest.pending if location not in manifest.entries]
    if bare:
        entries = dict(manifest.entries)
        for sequence, location in enumerate(bare, manifest.next_sequence):
            entries[location] = PendingBatch(sequence)
        manifest = replace(manifest, entries=entries, next_sequence=manifest.next_sequence + len(bare))
    if manifest.floor:
        return manifest
    there = sorted(entry.sequence for entry in manifest.entries.values())
    gaps = [(one + 1, other - 1) for one, other in pairwise(there) if other > one + 1]
    if there and there[-1] + 1 < manifest.next_sequence:
        gaps.append((there[-1] + 1, manifest.next_sequence - 1))
    return replace(manifest, floor=there[0] if there else manifest.next_sequence, removed=tuple(gaps))


def append(
    manifest: ProducerManifest,
    batches: Sequence[Append],
    *,
    now_ms: int,
    pending_max: int,
    index: KeyIndex | None = None,
) -> tuple[ProducerManifest, list[Durable]]:
    """Appends the batches of one ingestor, in order; those it appended before get their first result again.

    Raises GenerationExpired when a batch's generation is over, Overloaded when the queue is full, KeysEnqueued when a
    key was enqueued before, KeysUnread when `index` is older than the manifest. Then nothing is appended.
    """
    manifest = complete(manifest)
    ingestor = batches[0].ingestor
    session = manifest.sessions.get(ingestor)
    if ingestor.startswith(REPLAY) and (letter := ingestor.removeprefix(REPLAY)) in manifest.replays:
        return manifest, [Durable(batch.location, manifest.replays[letter]) for batch in batches]
    last = session.counter if session else 0
    fresh = [batch for batch in batches if batch.counter > last]
    if fresh:
        _demand_new_keys(manifest, fresh, index)
        _admit(manifest, fresh, known=session is not None, pending_max=pending_max)
    first = manifest.next_sequence
    results = [_repeated(batch, session) for batch in batches if session and batch.counter <= last]
    results += [Durable(batch.location, first + position) for position, batch in enumerate(fresh)]
    if not fresh:
        return manifest, results
    generation = max(session.generation if session else 0, *[batch.generation for batch in fresh])
    newest = IngestorSession(fresh[-1].counter, generation, first + len(fresh) - 1)
    after = _enqueued(manifest, fresh, now_ms)
    after = replace(after, sessions=manifest.sessions | {ingestor: newest})
    if ingestor.startswith(REPLAY):
        after = replace(after, replays=after.replays | {ingestor.removeprefix(REPLAY): first})
    return after, results


def remove(manifest: ProducerManifest, finished: Mapping[str, tuple[int, int]]) -> tuple[ProducerManifest, int]:
    """Removes finished batches (location → sequence and bytes). Returns the clean-up's number, for the consumer."""
    manifest = complete(manifest)
    after = manifest
    gone = {
        sequence: size for sequence, size in finished.values() if sequence and not manifest.is_removed(sequence)
    } | {manifest.entries[one].sequence: 0 for one in finished if one in manifest.entries}
    if gone:
        after = replace(_without(manifest, gone), cleanups=manifest.cleanups + 1)
    return after, after.cleanups


def split(
    manifest: ProducerManifest, sequence: int, size_bytes: int, pieces: Sequence[Append], *, now_ms: int
) -> tuple[ProducerManifest, bool]:
    """Puts the pieces of a pending batch at the end of the queue and takes the batch out, in one step.

    Idempotent: a batch that is no longer pending was split before, and nothing is appended and it returns False.
    Raises GenerationExpired when a piece's generation is over. A full queue accepts them: their entries were in it
    already.
    """
    manifest = complete(manifest)
    if manifest.is_removed(sequence):
        return manifest, False
    _demand_generation(manifest, pieces)
    after = _enqueued(_without(manifest, {sequence: size_bytes}), pieces, now_ms)
    return replace(after, cleanups=manifest.cleanups + 1), True


def age(
    manifest: ProducerManifest, *, now_ms: int, horizon_ms: int, keys_first: int = 0, keys_since_ms: int = 0
) -> tuple[ProducerManifest, ProducerManifest]:
    """Raises the generation when the current one is a horizon old, forgetting the ingestors of those that are over,
    and forgets key segments before `keys_first` and keys in the manifest from before `keys_since_ms`.
    """
    if keys_first > manifest.keys_first:
        manifest = replace(manifest, keys_first=min(keys_first, manifest.keys_next))
    if any(one.at_ms < keys_since_ms for one in manifest.keys):
        manifest = replace(manifest, keys=tuple(one for one in manifest.keys if one.at_ms >= keys_since_ms))
    if now_ms - manifest.generation_at_ms < horizon_ms:
        return manifest, manifest
    generation = manifest.generation + 1
    after = replace(
        manifest,
        generation=generation,
        generation_at_ms=now_ms,
        sessions={
            ingestor: session
            for ingestor, session in manifest.sessions.items()
            if not is_over(session.generation, generation)
        },
    )
    return after, after


def forget_replay(manifest: ProducerManifest, letter_id: str) -> tuple[ProducerManifest, None]:
    """Forgets the replay of a dead letter that is closed."""
    if letter_id not in manifest.replays:
        return manifest, None
    return replace(manifest, replays={one: at for one, at in manifest.replays.items() if one != letter_id}), None


def seal(
    manifest: ProducerManifest, folder: str, block: int, until: int, sealed: Container[str]
) -> tuple[ProducerManifest, bool]:
    """Lets segments in `folder` stand for the batches below `until`; False when they do not hold all of those."""
    manifest = complete(manifest)
    moved = {place: entry for place, entry in manifest.entries.items() if entry.sequence < until}
    same = (manifest.segments or folder) == folder and manifest.sealed < until <= manifest.next_sequence
    same = same and (manifest.block or block) == block
    if not same or not all(place in sealed for place in moved):
        return manifest, False
    after = replace(
        manifest,
        version=SEALED_VERSION,
        pending=tuple(place for place in manifest.pending if place not in moved),
        entries={place: entry for place, entry in manifest.entries.items() if place not in moved},
        sealed=until,
        segments=folder,
        block=block,
        sealed_bytes=manifest.sealed_bytes + sum(entry.size_bytes for entry in moved.values()),
    )
    return after, True


def seal_keys(
    manifest: ProducerManifest, folder: str, number: int, keys: Sequence[EnqueuedKey]
) -> tuple[ProducerManifest, bool]:
    """Lets the key segment of this number stand for the keys in it; False when another was written since.

    Some of them may have left the manifest before, in the seed's format.
    """
    if (manifest.segments or folder) != folder or manifest.keys_next != number:
        return manifest, False
    held = set(keys)
    kept = tuple(one for one in manifest.keys if one not in held)
    after = replace(manifest, version=SEALED_VERSION, segments=folder, keys=kept, keys_next=number + 1)
    return after, True


def is_over(generation: int, current: int) -> bool:
    """Whether batches of this generation are refused, and so whether unreferenced ones may be swept."""
    return generation <= current - GENERATIONS_KEPT


def _enqueued(manifest: ProducerManifest, batches: Sequence[Append], now_ms: int) -> ProducerManifest:
    first = manifest.next_sequence
    rows = {
        batch.location: PendingBatch(first + position, batch.size_bytes, batch.count, now_ms)
        for position, batch in enumerate(batches)
    }
    keys = [EnqueuedKey(key, first + position, now_ms) for position, batch in enumerate(batches) for key in batch.keys]
    return replace(
        manifest,
        pending=(*manifest.pending, *rows),
        entries=manifest.entries | rows,
        next_sequence=first + len(rows),
        keys=(*manifest.keys, *keys) if keys else manifest.keys,
    )


def _without(manifest: ProducerManifest, gone: Mapping[int, int]) -> ProducerManifest:
    """The manifest without these sequences (→ bytes), which are in it."""
    ranges = _merged([*manifest.removed, *[(sequence, sequence) for sequence in gone]])
    floor = manifest.floor
    if ranges and ranges[0][0] <= floor:
        floor = max(floor, ranges[0][1] + 1)
        ranges = ranges[1:]
    kept = {place: entry for place, entry in manifest.entries.items() if entry.sequence not in gone}
    sealed = sum(size for sequence, size in gone.items() if sequence < manifest.sealed)
    return replace(
        manifest,
        pending=tuple(place for place in manifest.pending if place in kept),
        entries=kept,
        floor=floor,
        removed=tuple(ranges),
        sealed_bytes=max(0, manifest.sealed_bytes - sealed),
    )


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _demand_generation(manifest: ProducerManifest, fresh: Sequence[Append]) -> None:
    for batch in fresh:
        if is_over(batch.generation, manifest.generation):
            raise GenerationExpired(
                f"{batch.location!r} is of generation {batch.generation}; the current one is {manifest.generation}",
                hint="store the batch again under a fresh name",
                generation=manifest.generation,
            )


def _demand_new_keys(manifest: ProducerManifest, fresh: Sequence[Append], index: KeyIndex | None) -> None:
    asked = {key for batch in fresh for key in batch.keys}
    if not asked:
        return
    if (index.upto if index else 0) < manifest.keys_next:
        raise KeysUnread(f"key segments up to {manifest.keys_next} exist")
    known = index.sequences if index else {}
    found = {key: known[key].sequence for key in asked if key in known}
    found |= {one.key: one.sequence for one in manifest.keys if one.key in asked}
    if found:
        raise KeysEnqueued(found)


def _admit(manifest: ProducerManifest, fresh: Sequence[Append], *, known: bool, pending_max: int) -> None:
    _demand_generation(manifest, fresh)
    if manifest.waiting + len(fresh) > pending_max:
        raise Overloaded(
            f"{manifest.waiting} batches wait in the queue, the limit is {pending_max}",
            retry_after_s=5.0,
            hint="start a collector, or raise queue.pending_max",
        )
    if not known and len(manifest.sessions) >= SESSIONS_MAX:
        raise Overloaded(
            f"{SESSIONS_MAX} ingestors appended within two generations",
            retry_after_s=60.0,
            hint="send through a gateway: its producers share one ingestor",
        )


def _repeated(batch: Append, session: IngestorSession) -> Durable:
    """The result of an append that was made before. The batches of one call have consecutive sequences."""
    return Durable(batch.location, session.sequence - (session.counter - batch.counter))

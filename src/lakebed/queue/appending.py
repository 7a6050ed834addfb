"""What may be appended to the producer manifest, and what may leave it. Pure: manifest in, manifest and result out.

Three rules make an append happen once, and only while its data exists:

- An ingestor numbers its batches. The manifest remembers the last number of each ingestor, so an append that is retried
  after a lost response is recognised, even when its batch has long been collected and removed.
- Batches are stored in a folder named by the manifest's generation. A batch of an older generation than the last two is
  refused (`GenerationExpired`): the sweep may have removed it, and the ingestor stores it again under a fresh name.
- An ingestor's number is forgotten only together with its generation, so a forgotten number always meets that refusal.

No clock decides any of this: generations are raised at a pace, but compared by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from lakebed.core.errors import Overloaded
from lakebed.queue.model import Append, Durable, GenerationExpired, IngestorSession, PendingBatch, ProducerManifest

GENERATIONS_KEPT = 2  # the current one and the one before it: a stalled ingestor has at least one whole horizon
SESSIONS_MAX = 10_000  # ingestors seen within two generations; a gateway counts as one


def complete(manifest: ProducerManifest) -> ProducerManifest:
    """The manifest with a sequence for every location; one in the seed's plain form gets them in order.

    Deterministic, so that all readers agree on them before they are written.
    """
    bare = [location for location in manifest.pending if location not in manifest.entries]
    if not bare:
        return manifest
    entries = dict(manifest.entries)
    for sequence, location in enumerate(bare, manifest.next_sequence):
        entries[location] = PendingBatch(sequence)
    return replace(manifest, entries=entries, next_sequence=manifest.next_sequence + len(bare))


def append(
    manifest: ProducerManifest, batches: Sequence[Append], *, now_ms: int, pending_max: int
) -> tuple[ProducerManifest, list[Durable]]:
    """Appends the batches of one ingestor, in order; those it appended before get their first result again.

    Raises GenerationExpired when a batch's generation is over, Overloaded when the queue is full. Then nothing is
    appended.
    """
    manifest = complete(manifest)
    ingestor = batches[0].ingestor
    session = manifest.sessions.get(ingestor)
    last = session.counter if session else 0
    fresh = [batch for batch in batches if batch.counter > last]
    if fresh:
        _admit(manifest, fresh, known=session is not None, pending_max=pending_max)
    first = manifest.next_sequence
    results = [_repeated(batch, session) for batch in batches if session and batch.counter <= last]
    results += [Durable(batch.location, first + index) for index, batch in enumerate(fresh)]
    if not fresh:
        return manifest, results
    pending = {
        batch.location: PendingBatch(first + index, batch.size_bytes, batch.count, now_ms)
        for index, batch in enumerate(fresh)
    }
    generation = max(session.generation if session else 0, *[batch.generation for batch in fresh])
    newest = IngestorSession(fresh[-1].counter, generation, first + len(fresh) - 1)
    after = replace(
        manifest,
        pending=(*manifest.pending, *pending),
        entries=manifest.entries | pending,
        next_sequence=first + len(fresh),
        sessions=manifest.sessions | {ingestor: newest},
    )
    return after, results


def remove(manifest: ProducerManifest, locations: Iterable[str]) -> tuple[ProducerManifest, int]:
    """Takes finished locations out of `pending`. Returns the clean-up's number, for the consumer manifest."""
    manifest = complete(manifest)
    gone = set(locations).intersection(manifest.pending)
    if not gone:
        return manifest, manifest.cleanups
    after = replace(
        manifest,
        pending=tuple(location for location in manifest.pending if location not in gone),
        entries={location: entry for location, entry in manifest.entries.items() if location not in gone},
        cleanups=manifest.cleanups + 1,
    )
    return after, after.cleanups


def split(
    manifest: ProducerManifest, location: str, pieces: Sequence[Append], *, now_ms: int
) -> tuple[ProducerManifest, bool]:
    """Puts the pieces of a pending batch at the end of the queue and takes the batch out, in one step.

    Idempotent: a batch that is no longer pending was split before, and nothing is appended and it returns False.
    Raises GenerationExpired when a piece's generation is over. A full queue accepts them: their entries were in it
    already.
    """
    manifest = complete(manifest)
    if location not in manifest.pending:
        return manifest, False
    _demand_generation(manifest, pieces)
    first = manifest.next_sequence
    fresh = {
        piece.location: PendingBatch(first + index, piece.size_bytes, piece.count, now_ms)
        for index, piece in enumerate(pieces)
    }
    after = replace(
        manifest,
        pending=(*[each for each in manifest.pending if each != location], *fresh),
        entries={each: entry for each, entry in manifest.entries.items() if each != location} | fresh,
        next_sequence=first + len(fresh),
        cleanups=manifest.cleanups + 1,
    )
    return after, True


def age(manifest: ProducerManifest, *, now_ms: int, horizon_ms: int) -> tuple[ProducerManifest, ProducerManifest]:
    """Raises the generation when the current one is a horizon old, forgetting the ingestors of those that are over."""
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


def is_over(generation: int, current: int) -> bool:
    """Whether batches of this generation are refused, and so whether unreferenced ones may be swept."""
    return generation <= current - GENERATIONS_KEPT


def _demand_generation(manifest: ProducerManifest, fresh: Sequence[Append]) -> None:
    for batch in fresh:
        if is_over(batch.generation, manifest.generation):
            raise GenerationExpired(
                f"{batch.location!r} is of generation {batch.generation}; the current one is {manifest.generation}",
                hint="store the batch again under a fresh name",
                generation=manifest.generation,
            )


def _admit(manifest: ProducerManifest, fresh: Sequence[Append], *, known: bool, pending_max: int) -> None:
    _demand_generation(manifest, fresh)
    if len(manifest.pending) + len(fresh) > pending_max:
        raise Overloaded(
            f"{len(manifest.pending)} batches wait in the queue, the limit is {pending_max}",
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

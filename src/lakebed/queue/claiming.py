"""Which collector has claimed which batch, and what may happen to it next. Pure: manifest in, manifest and result out.

    pending ──claim──▶ claimed ──ack──▶ done ──clean-up──▶ gone
       ▲                │  ▲  └─bury──▶ done (dead) ──────▶ dead letter
       │                └──┘ takeover of a stale claim (a new epoch)
       └─── release; rejection, after a delay that grows with each

A claim has its own epoch. An ack, a heartbeat or a rejection under an old epoch is Fenced, so a collector that paused
for longer than its timeout cannot finish a batch that another collector has claimed since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from lakebed.core.errors import Fenced
from lakebed.queue.model import (
    BatchClaim,
    BatchTrouble,
    Claimed,
    ConsumerManifest,
    DoneBatch,
    PendingView,
    ProducerManifest,
)

SETTLED_MAX = 1000  # epochs of acks kept after clean-up, to recognise an ack whose first response was lost
REASON_CHARS_MAX = 500
DOUBLINGS_MAX = 30  # of the delay: more would be no number of milliseconds


class ClaimRules(msgspec.Struct, frozen=True):
    """How claims are made: by which collector, for how long, how many, and whether several collectors work at once."""

    collector: str
    timeout_ms: int
    batches_max: int
    bytes_max: int
    parallel: bool
    silences_max: int


class RejectionRules(msgspec.Struct, frozen=True):
    """When a rejected batch is delivered again, and when it becomes a dead letter. `also`: location → epoch."""

    rejections_max: int
    delay_ms: int
    delay_max_ms: int
    also: dict[str, int] = {}


class StaleManifest(msgspec.Struct, frozen=True):
    """The producer manifest was read before a clean-up that the consumer manifest already records: read it again."""


def claim(
    consumer: ConsumerManifest, producer: PendingView, rules: ClaimRules, *, held: Collection[str], now_ms: int
) -> tuple[ConsumerManifest, list[Claimed] | StaleManifest]:
    """Claims the next batches in order: unclaimed ones, stale ones, and own ones not in `held` (a lost response).

    Unless `parallel`, a batch with a fresh claim of another collector, or one that was rejected and is delayed, blocks
    everything behind it, and taking over one claim of a stale collector voids all of its claims: that keeps ingest
    order, also through a failover.
    """
    if producer.cleanups < consumer.cleanups:
        return consumer, StaleManifest()
    taken: list[Claimed] = []
    size_bytes = 0
    not_ours = {*consumer.done, *held}
    for location in producer.pending:
        if location in not_ours:
            continue
        heartbeat_ms = consumer.claimed.get(location)
        holder = consumer.claims.get(location, _SEED_CLAIM)
        another = heartbeat_ms is not None and holder.collector != rules.collector
        busy = another and now_ms - (heartbeat_ms or 0) <= rules.timeout_ms
        if busy or _is_delayed(consumer, location, now_ms):
            if rules.parallel:
                continue
            break
        known = producer.entries[location]
        size_bytes += known.size_bytes
        if taken and (len(taken) >= rules.batches_max or size_bytes > rules.bytes_max):
            break
        taken.append(
            Claimed(
                location,
                known.sequence,
                consumer.next_epoch + len(taken),
                known.size_bytes,
                known.enqueued_ms,
                takeover=another,
                trouble=consumer.troubles.get(location),
            )
        )
    if not taken:
        return consumer, []
    if taken[0].takeover:
        taken[0] = replace(taken[0], trouble=_blamed(taken[0].trouble, rules.silences_max, now_ms))
    # This write also refreshes our other claims: they go stale together or not at all.
    ours = [location for location, claim in consumer.claims.items() if claim.collector == rules.collector]
    if not rules.parallel:
        late = {consumer.claims.get(one.location, _SEED_CLAIM).collector for one in taken if one.takeover}
        consumer = _give_back(consumer, {place for place, claim in consumer.claims.items() if claim.collector in late})
    after = replace(
        consumer,
        claimed=consumer.claimed | dict.fromkeys([*ours, *[one.location for one in taken]], now_ms),
        claims=consumer.claims | {one.location: _claim_of(rules.collector, one, now_ms) for one in taken},
        troubles=consumer.troubles | {one.location: one.trouble for one in taken if one.trouble},
        next_epoch=consumer.next_epoch + len(taken),
    )
    return after, taken


def heartbeat(
    consumer: ConsumerManifest, held: Mapping[str, int], *, now_ms: int
) -> tuple[ConsumerManifest, frozenset[str]]:
    """Refreshes the claims in `held` (location → epoch). Returns those that are no longer ours."""
    ours = _ours(consumer, held)
    lost = frozenset(
        location
        for location, epoch in held.items()
        if location not in ours and not _is_finished(consumer, location, epoch)
    )
    if not ours:
        return consumer, lost
    return replace(consumer, claimed=consumer.claimed | dict.fromkeys(ours, now_ms)), lost


def ack(consumer: ConsumerManifest, claimed: Claimed, *, now_ms: int) -> tuple[ConsumerManifest, int]:
    """Marks a claimed batch as done. Idempotent; raises Fenced when another collector has the claim.

    Returns how many done batches now wait for a clean-up.
    """
    if not _is_finished(consumer, claimed.location, claimed.epoch):
        _demand(consumer, claimed)
        consumer = _finish(consumer, claimed.location, _done(consumer, claimed.location, now_ms))
    return consumer, len(consumer.done)


def bury(consumer: ConsumerManifest, claimed: Claimed, *, now_ms: int) -> tuple[ConsumerManifest, None]:
    """Marks a claimed batch as done and dead, after its dead letter was written. Idempotent; raises Fenced."""
    if _is_finished(consumer, claimed.location, claimed.epoch):
        return consumer, None
    _demand(consumer, claimed)
    return _finish(consumer, claimed.location, replace(_done(consumer, claimed.location, now_ms), dead=True)), None


def reject(
    consumer: ConsumerManifest, claimed: Claimed, reason: str, *, now_ms: int, rules: RejectionRules
) -> tuple[ConsumerManifest, BatchTrouble]:
    """Counts a rejection and gives the batch back, to be delivered again after a delay that doubles with each one.

    After the last one the claim stays, and the batch becomes a dead letter. Unless `parallel`, the later claims of the
    same collector that are named in `rules` are given back too: the rejected batch comes before them.
    """
    _demand(consumer, claimed)
    before = consumer.troubles.get(claimed.location)
    count = (before.count if before else 0) + 1
    silences = before.silences if before else 0
    bury = count >= rules.rejections_max
    delay_ms = 0 if bury else min(rules.delay_ms << min(count - 1, DOUBLINGS_MAX), rules.delay_max_ms)
    trouble = BatchTrouble(count, reason[:REASON_CHARS_MAX], now_ms, bury, silences, now_ms + delay_ms)
    after = replace(consumer, troubles=consumer.troubles | {claimed.location: trouble})
    if bury:
        return after, trouble
    return _give_back(after, {claimed.location, *_ours(consumer, rules.also)}), trouble


def abandoned(consumer: ConsumerManifest, producer: ProducerManifest) -> list[str]:
    """Claims of batches that were split and are no longer pending, whose collector died before it marked them."""
    return [
        location
        for location, trouble in consumer.troubles.items()
        if trouble.bury
        and location in consumer.claimed
        and location in consumer.claims
        and producer.is_removed(consumer.claims[location].sequence)
    ]


def close_abandoned(
    consumer: ConsumerManifest, locations: Iterable[str], *, now_ms: int
) -> tuple[ConsumerManifest, None]:
    """Marks those batches as done, whichever collector had claimed them; the next clean-up removes them."""
    for location in locations:
        claim = consumer.claims.get(location)
        if claim is not None and location in consumer.claimed:
            consumer = _finish(consumer, location, _done(consumer, location, now_ms))
    return consumer, None


def release(consumer: ConsumerManifest, held: Mapping[str, int]) -> tuple[ConsumerManifest, None]:
    """Releases claims, so that others need not wait for them to go stale. Claims of others stay."""
    ours = _ours(consumer, held)
    if not ours:
        return consumer, None
    return _give_back(consumer, ours), None


def trim(consumer: ConsumerManifest, locations: Iterable[str], cleanups: int) -> tuple[ConsumerManifest, None]:
    """Forgets done batches that have left the producer manifest in the clean-up of that number."""
    gone = set(locations).intersection(consumer.done)
    if not gone and cleanups <= consumer.cleanups:
        return consumer, None
    epochs = [done.epoch for location, done in consumer.finished.items() if location in gone]
    after = replace(
        consumer,
        done=tuple(location for location in consumer.done if location not in gone),
        finished={location: done for location, done in consumer.finished.items() if location not in gone},
        troubles={location: trouble for location, trouble in consumer.troubles.items() if location not in gone},
        cleanups=max(cleanups, consumer.cleanups),
        settled=(*consumer.settled, *epochs)[-SETTLED_MAX:],
    )
    return after, None


_SEED_CLAIM = BatchClaim()  # a claim in the seed's plain form has a time and no collector


def _blamed(before: BatchTrouble | None, silences_max: int, now_ms: int) -> BatchTrouble:
    """The first batch of a silent collector may have caused its crash; after enough of them it is buried."""
    trouble = before or BatchTrouble(0, "", now_ms)
    silences = trouble.silences + 1
    if trouble.bury or silences < silences_max:
        return replace(trouble, silences=silences)
    return replace(
        trouble, silences=silences, bury=True, reason=f"{silences} collectors stopped while they processed it"
    )


def is_settled(consumer: ConsumerManifest, epoch: int) -> bool:
    """Whether the claim of this epoch was finished and cleaned up."""
    return epoch in consumer.settled


def _claim_of(collector: str, claimed: Claimed, now_ms: int) -> BatchClaim:
    return BatchClaim(collector, claimed.epoch, claimed.sequence, now_ms, claimed.size_bytes, claimed.enqueued_ms)


def _done(consumer: ConsumerManifest, location: str, now_ms: int) -> DoneBatch:
    """What is known of the claim in the manifest, whatever its caller says."""
    claim = consumer.claims[location]
    return DoneBatch(claim.epoch, now_ms, sequence=claim.sequence, size_bytes=claim.size_bytes)


def _ours(consumer: ConsumerManifest, held: Mapping[str, int]) -> set[str]:
    return {location for location, epoch in held.items() if _epoch(consumer, location) == epoch}


def _is_delayed(consumer: ConsumerManifest, location: str, now_ms: int) -> bool:
    trouble = consumer.troubles.get(location)
    return trouble is not None and location not in consumer.claimed and now_ms < trouble.until_ms


def _epoch(consumer: ConsumerManifest, location: str) -> int | None:
    claim = consumer.claims.get(location)
    return claim.epoch if claim and location in consumer.claimed else None


def _is_finished(consumer: ConsumerManifest, location: str, epoch: int) -> bool:
    """Whether this very claim was acked or buried, even when its clean-up has happened since."""
    done = consumer.finished.get(location)
    return (done is not None and done.epoch == epoch) or epoch in consumer.settled


def _demand(consumer: ConsumerManifest, claimed: Claimed) -> None:
    if _epoch(consumer, claimed.location) != claimed.epoch:
        holder = consumer.claims.get(claimed.location)
        raise Fenced(
            f"{claimed.location!r} is no longer claimed under epoch {claimed.epoch}",
            hint="another collector has claimed it, or it is done: drop this batch",
            holder=holder.collector if holder else "",
            epoch=holder.epoch if holder else 0,
        )


def _finish(consumer: ConsumerManifest, location: str, done: DoneBatch) -> ConsumerManifest:
    after = _unclaim(consumer, {location})
    return replace(after, done=(*after.done, location), finished=after.finished | {location: done})


def _give_back(consumer: ConsumerManifest, locations: Collection[str]) -> ConsumerManifest:
    """Lets others claim these at once. A batch that is being buried keeps its claim, a stale one: it may have been
    split and no longer be pending, and then only its claim shows the sweeper that it is to be closed."""
    buried = {location for location in locations if (one := consumer.troubles.get(location)) is not None and one.bury}
    after = _unclaim(consumer, set(locations) - buried)
    return replace(after, claimed=after.claimed | dict.fromkeys(buried & after.claimed.keys(), 0)) if buried else after


def _unclaim(consumer: ConsumerManifest, locations: Collection[str]) -> ConsumerManifest:
    return replace(
        consumer,
        claimed={location: at for location, at in consumer.claimed.items() if location not in locations},
        claims={location: claim for location, claim in consumer.claims.items() if location not in locations},
    )

"""Tests, by racing clients, that a store honours conditional writes: all guarantees depend on that.

K clients race creates and replaces on a scratch prefix, over several rounds: each race must have exactly one winner,
and reads and listings must then return the winner's object. A store that ignores the condition has several winners and
is refused. A store that does not respond is not refused: run the test again. The report is stored in the bucket beside
the authority.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import Conflict, Invalid, NotFound, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.runtime import Runtime
from lakebed.store.model import Version
from lakebed.store.protocol import Store

REPORTS = "lakebed/proofs/"
SCRATCH = "lakebed/scratch/"
ANSWERS = "answers"


class StoreFinding(msgspec.Struct, frozen=True):
    """One property, whether it held, and what was observed."""

    name: str
    held: bool
    seen: str


class StoreProof(msgspec.Struct, frozen=True):
    schema: str
    proved_at_ms: int
    clients: int
    rounds: int
    findings: tuple[StoreFinding, ...]

    @property
    def held(self) -> bool:
        return all(finding.held for finding in self.findings)


async def prove(stores: Sequence[Store], runtime: Runtime, *, rounds: int, keep_report: bool = True) -> StoreProof:
    """Races the given clients (each on its own connections) and stores the report; a bad store is a finding.

    So is one that does not answer. Raises what else the store raises, such as Denied.
    """
    ids = runtime.ids
    scratch = f"{SCRATCH}{ids.token()}/"
    created: list[int] = []
    replaced: list[int] = []
    truthful = True
    listed = True
    failures: list[str] = []
    for number in range(rounds):
        key = f"{scratch}race-{number:04d}"
        try:
            winners = await _race_creates(stores, key, ids)
            created.append(len(winners))
            listed = listed and any([info.key == key async for info in stores[0].list(scratch)])
            seen = await stores[-1].get(key)
            truthful = truthful and seen.data in winners
            winners = await _race_replaces(stores, key, seen.etag, ids)
            replaced.append(len(winners))
            truthful = truthful and (await stores[-1].get(key)).data in winners
        except NotFound:
            truthful = False
        except Unavailable as error:
            failures.append(error.message)
    swept = await _sweep(stores[0], scratch, failures)
    rivals = len(stores)
    findings = (
        StoreFinding("create_has_one_winner", _all_one(created), _winners(created, rivals)),
        StoreFinding("replace_has_one_winner", _all_one(replaced), _winners(replaced, rivals)),
        StoreFinding(
            "reads_see_the_winner", truthful, "every read returned the winner's bytes" if truthful else "other bytes"
        ),
        StoreFinding(
            "lists_see_the_write", listed, "listed at once" if listed else "a key was missing from its listing"
        ),
        StoreFinding("deletes_work", swept, "scratch objects are gone" if swept else "scratch objects remain"),
        StoreFinding(ANSWERS, not failures, "; ".join(failures[:3])[:500] or "every request got a response"),
    )
    proof = StoreProof("lakebed.proof.v1", now_ms(runtime.clock), rivals, rounds, findings)
    if keep_report and not failures:
        await stores[0].create(f"{REPORTS}{proof.proved_at_ms:013d}-{ids.token()}.json", msgspec.json.encode(proof))
    return proof


def demand(proof: StoreProof) -> None:
    """Raises Invalid, naming what failed and what to do, unless every property held.

    Raises Unavailable when the only failure is that the store did not respond: test it again.
    """
    failed = [finding for finding in proof.findings if not finding.held]
    broken = [f"{finding.name} ({finding.seen})" for finding in failed]
    if failed and all(finding.name == ANSWERS for finding in failed):
        raise Unavailable(f"the store did not respond during the test of conditional writes: {failed[0].seen}")
    if broken:
        raise Invalid(
            f"this store does not support concurrent writers: {', '.join(broken)}",
            hint="use a store with conditional PUT (AWS S3, SeaweedFS, MinIO, GCS, Azure), "
            "or remove the proxy that drops If-Match and If-None-Match",
        )


async def _race_creates(stores: Sequence[Store], key: str, ids: Ids) -> set[bytes]:
    async def attempt(store: Store) -> bytes | None:
        mine = ids.token().encode()
        try:
            await store.create(key, mine)
        except Conflict:
            return None
        return mine

    return {won for won in await asyncio.gather(*map(attempt, stores)) if won is not None}


async def _race_replaces(stores: Sequence[Store], key: str, etag: Version, ids: Ids) -> set[bytes]:
    async def attempt(store: Store) -> bytes | None:
        mine = ids.token().encode()
        try:
            await store.replace(key, mine, etag)
        except Conflict:
            return None
        return mine

    return {won for won in await asyncio.gather(*map(attempt, stores)) if won is not None}


async def _sweep(store: Store, scratch: str, failures: list[str]) -> bool:
    try:
        for info in [info async for info in store.list(scratch)]:
            await store.delete(info.key)
        return not [info async for info in store.list(scratch)]
    except Unavailable as error:
        failures.append(error.message)
        return True  # no evidence of a failure


def _all_one(winners: list[int]) -> bool:
    """Of the races that were run; those that were not are missing answers."""
    return all(count == 1 for count in winners)


def _winners(counts: list[int], rivals: int) -> str:
    if not counts:
        return "no race could be run"
    spread = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{spread} of {rivals} clients won, in each of {len(counts)} races"

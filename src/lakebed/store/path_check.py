"""Checks that conditional requests work on this path: this client, this endpoint, and every proxy between.

The prover races many clients once per bucket. Its stored report does not cover a process that reaches the same bucket
through a proxy that drops If-Match or If-None-Match. This check is cheap, so every process that writes runs it: one
stale replace and one second create, both of which the store must refuse.

It uses a small and a large body, because a store may write them through different clients.
Only a write that succeeds is evidence against a store. No response is Unavailable: check again.
"""

from __future__ import annotations

from contextlib import suppress

from lakebed.core.clock import Clock, now_ms
from lakebed.core.errors import AlreadyExists, LakebedError, Stale
from lakebed.core.ids import Ids
from lakebed.core.runtime import Runtime
from lakebed.store.fast.puts import FAST_BYTES_MAX
from lakebed.store.model import Version
from lakebed.store.protocol import Store
from lakebed.store.prover import SCRATCH, StoreFinding, StoreProof

BODIES = {"small": 64, "large": FAST_BYTES_MAX + 1}  # bytes; one size for each of the two write paths
LEFT_AFTER_MS = 24 * 3600 * 1000  # scratch objects this old were left by a process that died; no clock is so wrong
LEFT_MAX = 1000  # of them looked at by one check


async def check_path(store: Store, runtime: Runtime) -> StoreProof:
    """One check of the store; ignored conditions are a finding, not an error.

    Raises what the store raises when it does not respond or denies access: no result then. Deletes what it wrote.
    """
    clock, ids, findings = runtime.clock, runtime.ids, list[StoreFinding]()
    for size, length in BODIES.items():
        findings += await _check(store, f"{SCRATCH}{ids.token()}/path-{size}", length, ids)
        if not all(finding.held for finding in findings):
            break  # enough evidence: an error of the rest must not hide it
    await _remove_left(store, clock)
    return StoreProof("lakebed.proof.v1", now_ms(clock), clients=1, rounds=1, findings=tuple(findings))


async def _check(store: Store, key: str, length: int, ids: Ids) -> list[StoreFinding]:
    first, second, stale, other = (ids.token().encode().ljust(length, b".") for _ in range(4))
    try:
        created = await store.create(key, first)
        await store.replace(key, second, created.etag)
        found = [await _stale_replace(store, key, stale, created.etag)]
        try:
            found.append(await _second_create(store, key, other))
        except LakebedError:
            if found[0].held:
                raise
        return found
    except Stale:
        seen = f"a replace of {length} bytes with the current ETag was refused"
        return [StoreFinding("replace_takes_the_current_etag", held=False, seen=seen)]
    finally:
        with suppress(LakebedError):  # swept by a later check
            await store.delete(key)


async def _stale_replace(store: Store, key: str, data: bytes, etag: Version) -> StoreFinding:
    name = "stale_replace_is_refused"
    try:
        await store.replace(key, data, etag)
    except Stale:
        return StoreFinding(name, held=True, seen=f"with {len(data)} bytes")
    return StoreFinding(
        name, held=False, seen=f"a replace of {len(data)} bytes with an old ETag was answered with success"
    )


async def _second_create(store: Store, key: str, data: bytes) -> StoreFinding:
    name = "second_create_is_refused"
    try:
        await store.create(key, data)
    except AlreadyExists:
        return StoreFinding(name, held=True, seen=f"with {len(data)} bytes")
    return StoreFinding(name, held=False, seen=f"a create of {len(data)} bytes overwrote an object that existed")


async def _remove_left(store: Store, clock: Clock) -> None:
    """Removes what processes left that died during a check or a proof. A failure is left to the next check."""
    before_ms, looked_at = now_ms(clock) - LEFT_AFTER_MS, 0
    with suppress(LakebedError):
        async for info in store.list(SCRATCH):
            if info.modified_ms < before_ms:
                await store.delete(info.key)
            looked_at += 1
            if looked_at >= LEFT_MAX:
                return

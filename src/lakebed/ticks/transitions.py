"""The state transitions of a tick. Pure: state in, state and result out.

uploading → finalizing → committed
    ↑           ↓
    └──────── failed      (a part that is added or deleted reopens it)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from lakebed.core.errors import Conflict, TooEarly, Unprocessable
from lakebed.ticks.model import (
    LOG_CHARS,
    LOG_LINES,
    BadManifest,
    FinalizeResult,
    PartDiffers,
    StoredPart,
    TickFailure,
    TickId,
    TickState,
)

EXPIRED = "expired"


def receive(
    now: TickState, tick: TickId, seq: int, part: StoredPart, *, now_ms: int, parts_max: int
) -> tuple[TickState, bool]:
    """Adds a part; False when the same one is there already. Raises PartDiffers, Conflict, TooEarly, Unprocessable."""
    held = now.parts.get(str(seq))
    if held is not None:
        same_or_raise(held, seq, part.sha256)
        return now, False
    _open(now, f"part {seq} was not added")
    if len(now.parts) >= parts_max:
        raise Unprocessable(f"a tick has at most {parts_max} parts", hint="send larger parts, or another tick")
    parts = {**now.parts, str(seq): part}
    return _reopened(now, tick, parts, now_ms), True


def same_or_raise(held: StoredPart, seq: int, sha256: str) -> None:
    if held.sha256 != sha256:
        raise PartDiffers(
            f"part {seq} exists with another hash", hint="DELETE it first, then PUT it again", held_sha256=held.sha256
        )


def drop(now: TickState, tick: TickId, seq: int, *, now_ms: int) -> tuple[TickState, StoredPart | None]:
    """Removes a part; None when it does not exist. Raises Conflict or TooEarly once a finalize has begun."""
    held = now.parts.get(str(seq))
    if held is None:
        return now, None
    _open(now, f"part {seq} was not deleted")
    parts = {name: part for name, part in now.parts.items() if name != str(seq)}
    return _reopened(now, tick, parts, now_ms), held


def begin(now: TickState, seen: TickState, manifest: Any, *, epoch: int, now_ms: int) -> tuple[TickState, None]:
    """Pins the manifest that was checked against `seen`. Raises TooEarly when the tick has changed since.

    From here on bronze may hold the tick's rows, so another manifest is refused until bronze itself refuses this one.
    """
    if now.state == "committed" or now.parts != seen.parts:
        raise TooEarly("the tick changed while it was checked", hint="finalize again")
    if now.manifest is not None and now.manifest != manifest:
        raise other_manifest()
    after = msgspec.structs.replace(
        now, state="finalizing", manifest=manifest, finalizing_epoch=epoch, failure=None, updated_at_ms=now_ms
    )
    return after, None


def repeated_or_raise(now: TickState, manifest: Any) -> None:
    """Raises BadManifest when a committed tick is finalized with another manifest: its rows are not in bronze."""
    if now.manifest is not None and now.manifest != manifest:
        raise other_manifest()


def other_manifest() -> BadManifest:
    message = "this tick was finalized with another manifest"
    return BadManifest("other_manifest", message, hint="finalize with that one, or start another tick")


def finish(
    now: TickState, tick: TickId, result: FinalizeResult, *, manifest: Any, now_ms: int, log: Iterable[str] = ()
) -> tuple[TickState, FinalizeResult]:
    """Caches the result, with the end of the log. The first one stays, and so does a pinned manifest: a state that was
    swept gets it again.
    """
    if now.result is not None:
        return now, now.result
    after = msgspec.structs.replace(
        now,
        org_id=tick.org_id,
        project_id=tick.project_id,
        tick_id=tick.tick_id,
        state="committed",
        manifest=now.manifest if now.manifest is not None else manifest,
        result=result,
        failure=None,
        updated_at_ms=now_ms,
        committed_at_ms=now_ms,
        log=tuple(line[:LOG_CHARS] for line in tuple(log)[-LOG_LINES:]),
    )
    return after, result


def fail(now: TickState, failure: TickFailure, *, by_bronze: bool, now_ms: int) -> tuple[TickState, None]:
    """Marks the tick failed. A pinned manifest stays, unless bronze itself refused it and so holds nothing."""
    if now.state == "committed" or not now.exists or (now.manifest is not None and not by_bronze):
        return now, None
    after = msgspec.structs.replace(now, state="failed", failure=failure, manifest=None, updated_at_ms=now_ms)
    return after, None


def forget(now: TickState, seq: int, part: StoredPart, *, now_ms: int) -> tuple[TickState, None]:
    """Removes a part whose bytes are gone, so that it can be uploaded again."""
    if now.parts.get(str(seq)) != part or now.state == "committed":
        return now, None
    parts = {name: each for name, each in now.parts.items() if name != str(seq)}
    return msgspec.structs.replace(now, parts=parts, state="uploading", updated_at_ms=now_ms), None


def expire(now: TickState, *, before_ms: int, now_ms: int) -> tuple[TickState, bool]:
    """Fails an upload that nothing changed since `before_ms`; its parts may be swept then."""
    if now.state not in ("uploading", "failed") or now.updated_at_ms >= before_ms or not now.parts:
        return now, False
    failure = TickFailure(EXPIRED, "the upload expired: nothing was uploaded for too long")
    return msgspec.structs.replace(now, state="failed", failure=failure, parts={}, updated_at_ms=now_ms), True


def committed(what: str) -> Conflict:
    return Conflict(f"the tick is committed: {what}", hint="start another tick, or lakebed bronze replay")


def _open(now: TickState, what: str) -> None:
    if now.state == "committed":
        raise committed(what)
    if now.state == "finalizing":
        raise TooEarly(f"the tick is being finalized: {what}", hint="finalize again", retry_after_s=2.0)


def _reopened(now: TickState, tick: TickId, parts: dict[str, StoredPart], now_ms: int) -> TickState:
    return msgspec.structs.replace(
        now,
        org_id=tick.org_id,
        project_id=tick.project_id,
        tick_id=tick.tick_id,
        state="uploading",
        parts=parts,
        failure=None,
        created_at_ms=now.created_at_ms or now_ms,
        updated_at_ms=now_ms,
    )

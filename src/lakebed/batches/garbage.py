"""What may be deleted from raw-blobs/v1/: a pure judgement, and why it can never hit an accepted batch.

A frame carries its identity, so exactly one key could ever refer to a blob: the accepted manifest of that identity. It
is created if absent and never changes. A blob is deleted only when that manifest stands **for other bytes**: no writer,
however long it stalled between blob and manifest, can then make it accepted, and a delete that is itself delayed cannot
hurt. A blob whose identity is undecided is never deleted, because a stalled writer may still decide for it; past the
horizon its acceptance is finished instead (or it is kept). The four conditions are demanded on top.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["delete", "finish", "keep"]


class Evidence(msgspec.Struct, frozen=True):
    """What was found out about one blob."""

    sha256: str
    modified_ns: int
    now_ns: int
    horizon_ns: int
    audited_through_ns: int
    accepted_references: int
    quarantine_references: int
    problem: str = ""  # why its frame cannot be read
    standing_sha256: str = ""  # hash in the manifest at its identity; empty: undecided
    boot_held: bool = False


class Judgement(msgspec.Struct, frozen=True):
    verdict: Verdict
    reason: str


def judge(found: Evidence, undecided: Literal["finish", "keep"]) -> Judgement:
    """The four conditions in their order, then the one that makes them safe."""
    ripe_ns = found.modified_ns + found.horizon_ns
    if found.now_ns < ripe_ns:
        left_s = (ripe_ns - found.now_ns) // 1_000_000_000
        return Judgement("keep", f"younger than the retry horizon, for another {left_s} s")
    if found.accepted_references:
        return Judgement("keep", "an accepted manifest refers to it")
    if found.quarantine_references:
        return Judgement("keep", "a quarantine manifest refers to it")
    if found.audited_through_ns < ripe_ns:
        return Judgement("keep", "no audit of accepted and quarantine has begun since it passed the horizon")
    if found.problem:
        return Judgement("keep", f"its frame cannot be read, so its identity is unknown: {found.problem}")
    if found.standing_sha256 == found.sha256:
        return Judgement("keep", "its manifest is accepted; the reverse reference is missing")
    if found.standing_sha256:
        return Judgement("delete", f"its identity was accepted with other bytes, {found.standing_sha256}")
    if found.boot_held:
        return Judgement("keep", "its boot is held for investigation")
    if undecided == "finish":
        return Judgement("finish", "nobody accepted or refused it within the horizon: its acceptance is finished")
    return Judgement("keep", "undecided: a writer could still accept it")

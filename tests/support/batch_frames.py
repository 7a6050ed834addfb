"""Frames by number, for every lane."""

from __future__ import annotations

from lakebed.batches import acceptance
from lakebed.batches.acceptance import Submission
from lakebed.batches.codec.frame import columns_of, decode, encode
from lakebed.batches.model import BatchIdentity, Kind, Sample

START_NS = 1_760_000_000_000_000_000


def frame_of(
    start: int = 0, end: int = 9, *, agent: str = "agent-a", boot: str = "boot-1", value: float = 1.0, at_ns: int = 0
) -> bytes:
    samples = [
        Sample("cpu", (at_ns or START_NS) + seq % 10**9 * 1_000_000, value + seq, Kind.GAUGE, {"host": f"h{seq % 2}"})
        for seq in range(start, end + 1)
    ]
    return encode(BatchIdentity(agent, boot, start, end), columns_of(samples))


def submit(frame: bytes) -> Submission:
    return acceptance.submission(frame, decode(frame))

"""What a frame holds: an identity and samples, as frozen values, and the limits a reader sets before it reads.

Every sample has a sequence number of its agent's boot: a frame carries exactly those from `seq_start` to `seq_end`, in
order, so (agent_id, boot_id, seq) names one sample for ever and (agent_id, boot_id, seq_start, seq_end) one batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec

from lakebed.errors import Invalid

WIRE_VERSION = 1  # how a frame is sent
FRAME_VERSION = 1  # how its header and body are laid out
SEQ_MAX = 2**63 - 1  # fits a signed 64-bit column in every reader
ID_BYTES_MAX = 120  # as hex behind "agent=" it fits one path segment: SeaweedFS takes 255 bytes


class Kind(IntEnum):
    """What a value means. A counter only grows within a boot; a delta is what was added since the sample before."""

    UNTYPED = 0
    GAUGE = 1
    COUNTER = 2
    DELTA = 3


class Compression(IntEnum):
    NONE = 0
    ZSTD = 1


class Identity(msgspec.Struct, frozen=True, order=True):
    """Which batch this is: the dedupe key of the whole system. `seq_end` is inclusive."""

    agent_id: str
    boot_id: str
    seq_start: int
    seq_end: int

    @property
    def samples(self) -> int:
        return self.seq_end - self.seq_start + 1


class Sample(msgspec.Struct, frozen=True):
    """One measurement. `labels` must not name a label twice."""

    metric: str
    time_ns: int
    value: float
    kind: Kind = Kind.GAUGE
    labels: Mapping[str, str] = {}


class Limits(msgspec.Struct, frozen=True):
    """What a reader accepts. A frame outside them is Invalid before it costs memory."""

    frame_bytes: int = 4 * 1024 * 1024
    body_bytes: int = 16 * 1024 * 1024  # after decompression
    samples: int = 250_000
    series: int = 50_000
    labels_per_series: int = 64
    strings: int = 100_000
    name_bytes: int = 255  # a metric's or a label's name
    label_value_bytes: int = 1024


LIMITS = Limits()


class Columns(msgspec.Struct, frozen=True, eq=False):
    """Samples as columns. One row a sample; series, labels and strings are dictionaries.

    times_ns int64, values float64, kinds uint8, series uint32 (an index of the series table): one entry a sample.
    series_metric uint32 (an index of `strings`), label_offsets uint32 (one more than there are series): the table.
    label_names, label_values uint32 (indexes of `strings`): labels of all series, end to end.
    strings: every name and value once, in ascending order of their UTF-8 bytes.
    """

    times_ns: Any
    values: Any
    kinds: Any
    series: Any
    series_metric: Any
    label_offsets: Any
    label_names: Any
    label_values: Any
    strings: tuple[str, ...]

    @property
    def samples(self) -> int:
        return len(self.times_ns)

    def metric(self, series: int) -> str:
        return self.strings[int(self.series_metric[series])]

    def labels(self, series: int) -> dict[str, str]:
        start, end = int(self.label_offsets[series]), int(self.label_offsets[series + 1])
        return {
            self.strings[name]: self.strings[value]
            for name, value in zip(
                self.label_names[start:end].tolist(), self.label_values[start:end].tolist(), strict=True
            )
        }

    def rows(self) -> list[Sample]:
        """Every sample as a value: for people and tests, not for the hot path."""
        table = [(self.metric(i), self.labels(i)) for i in range(len(self.series_metric))]
        return [
            Sample(metric=table[s][0], time_ns=t, value=v, kind=Kind(k), labels=table[s][1])
            for s, t, v, k in zip(
                self.series.tolist(), self.times_ns.tolist(), self.values.tolist(), self.kinds.tolist(), strict=True
            )
        ]


class Batch(msgspec.Struct, frozen=True, eq=False):
    """A decoded, validated frame."""

    identity: Identity
    columns: Columns
    compression: Compression
    wire_version: int = WIRE_VERSION
    frame_version: int = FRAME_VERSION


def check_identity(identity: Identity) -> Identity:
    """Returns the identity, or raises Invalid for one that cannot be a key."""
    check_id("agent_id", identity.agent_id)
    check_id("boot_id", identity.boot_id)
    if not 0 <= identity.seq_start <= identity.seq_end <= SEQ_MAX:
        raise Invalid(f"sequence range {identity.seq_start}-{identity.seq_end} is not a range of 0 to {SEQ_MAX}")
    return identity


def check_id(name: str, value: str) -> str:
    if not value or len(value.encode()) > ID_BYTES_MAX or not value.isprintable():
        raise Invalid(f"{name} {value[:80]!r} must be 1 to {ID_BYTES_MAX} printable bytes")
    return value

"""JSON lines: one sample a line.

    {"metric": "temperature", "value": 21.5, "labels": {"room": "a"}, "kind": "gauge", "time_ms": 1760000000000}

`labels`, `kind` (gauge, counter, delta, untyped) and the time are optional; the time may be `time_ns` instead, and is
now when absent. Pure: a line in, a sample out, or Invalid.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from lakebed.agent.intake import checked
from lakebed.errors import Invalid
from lakebed.frame.model import Kind, Sample


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metric: str
    value: float
    labels: dict[str, str] = {}
    kind: Literal["gauge", "counter", "delta", "untyped"] = "gauge"
    time_ms: int | None = None
    time_ns: int | None = None


_DECODER = msgspec.json.Decoder(Line)
_KINDS = {"gauge": Kind.GAUGE, "counter": Kind.COUNTER, "delta": Kind.DELTA, "untyped": Kind.UNTYPED}


def sample_of(line: bytes, *, now_ns: int) -> Sample:
    try:
        said = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(str(error)) from error
    if said.time_ms is not None and said.time_ns is not None:
        raise Invalid("time_ms and time_ns are both given")
    time_ns = said.time_ns if said.time_ns is not None else now_ns if said.time_ms is None else said.time_ms * 1_000_000
    return checked(said.metric, time_ns, said.value, _KINDS[said.kind], said.labels)

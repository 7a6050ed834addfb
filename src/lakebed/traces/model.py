"""A span, and the W3C header that carries its place from one process to the next. Pure."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

HEADER = "traceparent"
FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 1

Kind = Literal["internal", "server", "client"]
Value = str | int | float | bool


class Place(msgspec.Struct, frozen=True):
    """Where in which trace, and whether it is recorded."""

    trace_id: str
    span_id: str
    sampled: bool = True


class Span(msgspec.Struct):
    """One piece of work. Changed by whoever does it until it ends, then handed to the exporter."""

    place: Place
    name: str
    start_ns: int
    parent_id: str = ""
    kind: Kind = "internal"
    end_ns: int = 0
    error: str = ""
    attributes: dict[str, Value] = {}

    def set(self, **attributes: Value) -> None:
        """A . in an attribute's name is written __."""
        self.attributes.update({name.replace("__", "."): value for name, value in attributes.items()})


def parse(header: str) -> Place | None:
    """The caller's place; None when the header is not one. A later version is read by its first four fields."""
    match = FORM.fullmatch(header.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    if match[2] == "0" * 32 or match[3] == "0" * 16:
        return None
    return Place(match[2], match[3], bool(int(match[4], 16) & SAMPLED))


def render(place: Place) -> str:
    return f"00-{place.trace_id}-{place.span_id}-{SAMPLED if place.sampled else 0:02x}"

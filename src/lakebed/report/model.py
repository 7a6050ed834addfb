"""What a report is made of: frozen values that say what is drawn, not how."""

from __future__ import annotations

import msgspec


class Line(msgspec.Struct, frozen=True):
    """A named series of (x, y). Points that are not finite are left out and the line is interrupted there."""

    name: str
    points: tuple[tuple[float, float], ...]


class Verdict(msgspec.Struct, frozen=True):
    """Something that was claimed, whether it held, and what was seen."""

    name: str
    held: bool
    seen: str
    group: str = ""

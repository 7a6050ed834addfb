"""How numbers, times and sizes are written for people. Pure; used by every template."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
NONE = "–"


def number(value: Any) -> str:
    """1,234; fractions with one digit."""
    if value is None:
        return NONE
    return f"{value:,.1f}" if isinstance(value, float) and not value.is_integer() else f"{int(value):,}"


def short(value: Any) -> str:
    """1.2k, 3.4M: for places where digits would jump."""
    if value is None:
        return NONE
    size = abs(float(value))
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.1f}{unit}"
    return number(round(float(value), 1))


def size(value: Any) -> str:
    if value is None:
        return NONE
    left = float(value)
    for unit in SIZES:
        if left < 1024 or unit == SIZES[-1]:
            return f"{left:.0f} {unit}" if unit == "B" else f"{left:.1f} {unit}"
        left /= 1024
    raise AssertionError("the last unit takes everything")


def age(seconds: Any) -> str:
    """3.2 s, 5 min, 2 h, 4 d."""
    if seconds is None:
        return NONE
    left = max(0.0, float(seconds))
    if left < 1:
        return f"{left * 1000:.0f} ms"
    if left < 10:
        return f"{left:.1f} s"
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if left < limit:
            return f"{left / unit_s:.0f} {unit}"
    return f"{left / 86_400:.0f} d"


def time_ms(at_ms: Any) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S") if at_ms else NONE


def clock_ms(at_ms: Any) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%H:%M:%S") if at_ms else NONE


def time_ns(at_ns: Any) -> str:
    return time_ms(at_ns / 1e6) if at_ns else NONE


def dollars(value: Any) -> str:
    if value is None:
        return NONE
    return f"${value:,.2f}" if value >= 0.01 or not value else f"${value:.6f}"


def brief(text: Any, length: int = 24) -> str:
    """The ends of a long name."""
    text = str(text)
    keep = (length - 1) // 2
    return text if len(text) <= length else f"{text[:keep]}…{text[-keep:]}"


def as_json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode()


FILTERS = {
    "number": number,
    "short": short,
    "size": size,
    "age": age,
    "time_ms": time_ms,
    "clock_ms": clock_ms,
    "time_ns": time_ns,
    "dollars": dollars,
    "brief": brief,
    "as_json": as_json,
}

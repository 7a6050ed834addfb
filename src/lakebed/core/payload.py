"""Payloads of clients as text that can be shown. They are untrusted: bounded in size, never interpreted."""

from __future__ import annotations

from typing import Literal

import msgspec

CHARS_MAX = 4096  # of one payload
JSON_BYTES_MAX = 64 * 1024  # larger ones are not indented
HEX_BYTES = 128
ONE_LINE_BYTES = 100  # shorter JSON is not indented


class Payload(msgspec.Struct, frozen=True):
    """`cut`: the payload is longer than `text`."""

    kind: Literal["json", "text", "binary"]
    size: int
    text: str
    cut: bool = False


def payload(data: bytes) -> Payload:
    """JSON indented unless it is short, other UTF-8 as it is, anything else as hex."""
    try:
        text = data[: CHARS_MAX * 4 + 4].decode() if len(data) <= CHARS_MAX * 4 else _decoded_start(data)
    except UnicodeDecodeError:
        return Payload("binary", len(data), data[:HEX_BYTES].hex(" "), len(data) > HEX_BYTES)
    kind: Literal["json", "text"] = "text"
    if data[:1] in (b"{", b"[") and len(data) <= JSON_BYTES_MAX:
        try:
            indented = msgspec.json.format(data, indent=2).decode()
            text, kind = text if len(data) <= ONE_LINE_BYTES else indented, "json"
        except (msgspec.DecodeError, RecursionError):
            kind = "text"
    shown = text[:CHARS_MAX]
    return Payload(kind, len(data), shown, len(shown) < len(text) or len(data) > CHARS_MAX * 4)


def _decoded_start(data: bytes) -> str:
    """The start of long text; a character may be cut in the middle."""
    start = data[: CHARS_MAX * 4]
    try:
        return start.decode()
    except UnicodeDecodeError as error:
        if error.start < len(start) - 4:
            raise
        return start[: error.start].decode()

"""Stored objects of a queue, told in plain JSON: for `dump`, `peek` and people."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from lakebed.errors import Corrupt
from lakebed.queue import codec
from lakebed.queue.model import KeyValueEntry


def dump(key: str, data: bytes) -> dict[str, Any]:
    """A batch as its entries, a manifest or a dead letter as it is. Raises Corrupt with the first bytes otherwise."""
    if data[:1] == b"{":
        try:
            return {"key": key, "kind": "json", "bytes": len(data), "object": msgspec.json.decode(data)}
        except msgspec.DecodeError as error:
            raise Corrupt(f"{key!r} is not JSON: {error}; it begins {data[:32]!r}") from error
    try:
        entries = codec.decode(data)
    except Corrupt as error:
        raise Corrupt(f"{key!r}: {error.message}; it begins {data[:32]!r}", hint=error.hint) from error
    form = "json batch" if data[:1] == b"[" else "binary batch"
    return {
        "key": key,
        "kind": form,
        "bytes": len(data),
        "count": len(entries),
        "entries": [shown(entry) for entry in entries],
    }


def shown(entry: KeyValueEntry) -> dict[str, str]:
    """An entry as text where it is text; other bytes as base64 under another name."""
    return _side("key", entry.key) | _side("value", entry.value)


def _side(name: str, data: bytes) -> dict[str, str]:
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}

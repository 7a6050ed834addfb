"""How a manifest compares with the address it was sent to and with what was uploaded. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lakebed.errors import Invalid
from lakebed.tick_manifest import SHA256, BadManifest, Manifest, read_manifest
from lakebed.ticks.errors import PartsDiffer
from lakebed.ticks.model import Part, TickId


def decode(body: bytes, tick: TickId) -> Manifest:
    """The manifest of this tick, checked in itself. Raises BadManifest, whose `error_class` names what is wrong."""
    found = read_manifest(body)
    for name in ("tick_id", "project_id"):
        if getattr(found, name) not in ("", getattr(tick, name)):
            raise BadManifest("wrong_tick", f"the manifest has another {name} than the address")
    return found


def said(body: bytes) -> Any:
    """The manifest as it was said, to compare with another time; None for what is no JSON."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None


def lists(manifest: Manifest, parts: Mapping[str, str]) -> bool:
    """Whether the manifest has exactly these parts, each with its hash."""
    return parts == {str(part.file_seq): part.sha256 for part in manifest.parts}


def compare(manifest: Manifest, parts: Mapping[str, Part]) -> None:
    """Raises PartsDiffer unless exactly the listed parts were uploaded, each with its hash."""
    wanted = {part.file_seq: part.sha256 for part in manifest.parts}
    have = {int(seq): part.sha256 for seq, part in parts.items()}
    missing = [seq for seq in wanted if seq not in have]
    mismatched = [seq for seq, sha256 in wanted.items() if seq in have and have[seq] != sha256]
    unlisted = [seq for seq in have if seq not in wanted]
    if missing or mismatched or unlisted:
        raise PartsDiffer(missing, mismatched, unlisted)


def check_sha(text: str | None) -> str:
    """The header X-Sha256, in lower case. Raises Invalid."""
    if text is None or not SHA256.fullmatch(text.lower()):
        raise Invalid("X-Sha256 is missing or not 64 hex digits", hint="send the SHA-256 of the part's bytes")
    return text.lower()

"""Canonical hashes: of a rule, and of the part of an entry that rules look at.

Every field is written with its length in front, so no value can be mistaken for the border between two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from lakebed.lifecycle.model import Rule

VERSION = b"lakebed.lifecycle.rule.v1"


def rule_hash(rule: Rule) -> str:
    """16 hex digits over filter and actions. The id, the status and the order of tags or elements do not count."""
    fields: list[bytes] = [VERSION, rule.prefix.encode()]
    fields += [_number(len(rule.tags))]
    for key, value in sorted(rule.tags):
        fields += [key.encode(), value.encode()]
    for number in (
        rule.size_greater_than,
        rule.size_less_than,
        rule.expiration_days,
        rule.expiration_date_ns,
        int(rule.expired_delete_marker),
        rule.noncurrent_days,
        rule.newer_noncurrent,
        rule.abort_days,
    ):
        fields.append(_number(number))
    return _digest(fields)


def extended_hash(extended: Mapping[str, bytes]) -> str:
    """16 hex digits over an entry's extended attributes, in any order."""
    return _digest(part for key in sorted(extended) for part in (key.encode(), extended[key]))


def _number(number: int | None) -> bytes:
    return b"" if number is None else str(number).encode()


def _digest(fields: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for field in fields:
        whole.update(len(field).to_bytes(8, "big"))
        whole.update(field)
    return whole.hexdigest()[:16]

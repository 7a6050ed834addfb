"""The policy as the AWS CLI's JSON (`get-bucket-lifecycle-configuration`): the same strict model as the XML."""

from __future__ import annotations

from typing import Any

import msgspec

from lakebed.errors import TooLarge
from lakebed.lifecycle.model import Rule
from lakebed.lifecycle.rules import MalformedPolicy, policy_of
from lakebed.lifecycle.xml import BYTES_MAX, date_text


def parse(data: bytes, *, unique_ids: bool = True) -> tuple[Rule, ...]:
    """The checked rules of a JSON policy. Raises MalformedPolicy, InvalidPolicy or TooLarge."""
    if len(data) > BYTES_MAX:
        raise TooLarge(f"the policy has {len(data)} bytes, more than {BYTES_MAX}")
    try:
        tree = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedPolicy(f"not JSON: {error}") from None
    return policy_of(tree, strict=True, unique_ids=unique_ids)


def render(rules: tuple[Rule, ...]) -> bytes:
    """A policy as JSON that the AWS CLI takes and that parses back to the same rules."""
    return msgspec.json.format(msgspec.json.encode({"Rules": [_rule(rule) for rule in rules]}), indent=2)


def _rule(rule: Rule) -> dict[str, Any]:
    out: dict[str, Any] = {"ID": rule.rule_id} if rule.rule_id else {}
    out |= {"Status": "Enabled" if rule.enabled else "Disabled", "Filter": _filter(rule)}
    if rule.expiration_days:
        out["Expiration"] = {"Days": rule.expiration_days}
    elif rule.expiration_date_ns is not None:
        out["Expiration"] = {"Date": date_text(rule.expiration_date_ns)}
    elif rule.expired_delete_marker:
        out["Expiration"] = {"ExpiredObjectDeleteMarker": True}
    noncurrent = {"NoncurrentDays": rule.noncurrent_days, "NewerNoncurrentVersions": rule.newer_noncurrent}
    if given := {name: value for name, value in noncurrent.items() if value}:
        out["NoncurrentVersionExpiration"] = given
    if rule.abort_days:
        out["AbortIncompleteMultipartUpload"] = {"DaysAfterInitiation": rule.abort_days}
    return out


def _filter(rule: Rule) -> dict[str, Any]:
    sizes = {"ObjectSizeGreaterThan": rule.size_greater_than, "ObjectSizeLessThan": rule.size_less_than}
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    if rule.prefix:
        given["Prefix"] = rule.prefix
    tags = [{"Key": key, "Value": value} for key, value in rule.tags]
    if len(given) + len(tags) > 1:
        return {"And": given | ({"Tags": tags} if tags else {})}
    if tags:
        return {"Tag": tags[0]}
    return given or {"Prefix": ""}

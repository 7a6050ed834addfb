"""A policy's text and its rules: XML or the AWS CLI's JSON, by its first character; the model is in `rules.py`.

XML is read strictly and safely: no document type, no entities, nothing beyond elements and text, a limit on bytes. A
stored policy is never rewritten: bytes that were put are what is read back.
"""

from __future__ import annotations

from typing import Any
from xml.etree.ElementTree import Element, ParseError, SubElement, indent, tostring

import msgspec
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from lakebed.core.errors import TooLarge
from lakebed.lifecycle.model import SECOND_NS, Rule
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.rules import MalformedPolicy, policy_of

BYTES_MAX = 1 << 20  # a thousand rules of AWS's longest fit
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
ROOTS = ("LifecycleConfiguration", "BucketLifecycleConfiguration")
# The elements with children: what each may hold more than once, under which name of the model.
_REPEATED: dict[str, dict[str, str]] = {
    "LifecycleConfiguration": {"Rule": "Rules"},
    "Rule": {"Transition": "Transitions", "NoncurrentVersionTransition": "NoncurrentVersionTransitions"},
    "And": {"Tag": "Tags"},
}
_CONTAINERS = frozenset(
    [
        "LifecycleConfiguration",
        "Rule",
        "Filter",
        "And",
        "Tag",
        "Expiration",
        "NoncurrentVersionExpiration",
        "AbortIncompleteMultipartUpload",
        "Transition",
        "NoncurrentVersionTransition",
    ]
)
_BOOLEANS = frozenset({"ExpiredObjectDeleteMarker"})
DEPTH_MAX = 8  # LifecycleConfiguration, Rule, Filter, And, Tag and Key are six


def rules_of(text: bytes, *, unique_ids: bool = False) -> tuple[Rule, ...]:
    """The checked rules of a policy about to be put, or shown; none for an empty text. `stored_policy` reads one that
    is in force. Raises Invalid.
    """
    body = text.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not body:
        return ()
    if body[:1] not in (b"{", b"["):
        return parse_xml(body, unique_ids=unique_ids)
    try:
        return parse_json(body, unique_ids=unique_ids)
    except MalformedPolicy as error:
        raise MalformedPolicy(error.why, form="JSON") from None


def as_xml(text: bytes, *, bucket: str, reserved: ReservedKeys) -> bytes:
    """What an S3 store keeps: XML verbatim, JSON rendered.

    Raises Invalid for what AWS would refuse, ReachesReserved for a rule that could delete Lakebed's own keys.
    """
    rules = rules_of(text, unique_ids=True)
    reserved.check(bucket, rules)
    return text if text.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<" else render_xml(rules)


# XML.


def parse_xml(data: bytes, *, unique_ids: bool = True) -> tuple[Rule, ...]:
    """The checked rules of an XML policy. Raises MalformedPolicy, InvalidPolicy or TooLarge; never expands anything."""
    root = _root(data)
    return policy_of(_children(root, "LifecycleConfiguration"), strict=False, unique_ids=unique_ids)


def xml_rules(data: bytes) -> list[Any]:
    """The rules of an XML policy as trees, each on its own: one that is malformed is its error. Raises like
    `parse_xml` when there is no list of rules.
    """
    found: list[Any] = []
    for child in _root(data):
        try:
            if _element_name(child) == "Rule":
                found.append(_children(child, "Rule"))
        except MalformedPolicy as error:
            found.append(error)
    if not found:
        raise MalformedPolicy("there is no Rule")
    return found


def _root(data: bytes) -> Element:
    if len(data) > BYTES_MAX:
        raise TooLarge(f"the policy has {len(data)} bytes, more than {BYTES_MAX}")
    try:
        root: Element = fromstring(data, forbid_dtd=True, forbid_entities=True, forbid_external=True)
    except DefusedXmlException as error:
        raise MalformedPolicy(f"document types and entities are not read ({type(error).__name__})") from None
    except (ParseError, ValueError, LookupError) as error:
        raise MalformedPolicy(f"not XML: {error}") from None
    name = _element_name(root)
    if name not in ROOTS:
        raise MalformedPolicy(f"the root is {name!r}, not LifecycleConfiguration")
    return root


def _children(element: Element, name: str, depth: int = 1) -> dict[str, Any]:
    if depth > DEPTH_MAX:
        raise MalformedPolicy(f"elements are nested more than {DEPTH_MAX} deep")
    if element.attrib:
        raise MalformedPolicy(f"{name} has attributes")
    if (element.text or "").strip() or any((child.tail or "").strip() for child in element):
        raise MalformedPolicy(f"{name} has text between its elements")
    repeated = _REPEATED.get(name, {})
    tree: dict[str, Any] = {held: [] for tag, held in repeated.items() if name != "Rule"}
    for child in element:
        tag = _element_name(child)
        value: Any = _children(child, tag, depth + 1) if tag in _CONTAINERS else _element_text(child, tag)
        if tag in repeated:
            tree.setdefault(repeated[tag], []).append(value)
        elif tag in tree or tag in repeated.values():
            raise MalformedPolicy(f"{name} has {tag!r} more than once, or misspelt")
        else:
            tree[tag] = value
    return tree


def _element_text(element: Element, name: str) -> Any:
    if len(element) or element.attrib:
        raise MalformedPolicy(f"{name} has elements or attributes inside")
    text = element.text or ""
    if name in _BOOLEANS:
        if text.strip() not in ("true", "false"):
            raise MalformedPolicy(f"{name} is {text!r}, not true or false")
        return text.strip() == "true"
    return text if name in ("Prefix", "Key", "Value", "ID") else text.strip()


def _element_name(element: Element) -> str:
    tag = str(element.tag)
    if tag.startswith("{"):
        space, _, tag = tag[1:].partition("}")
        if space.rstrip("/") != NAMESPACE.rstrip("/"):
            raise MalformedPolicy(f"unknown namespace {space!r}")
    return tag


def render_xml(rules: tuple[Rule, ...]) -> bytes:
    """A policy as XML that parses back to the same rules: how JSON becomes what an S3 store keeps."""
    root = Element("LifecycleConfiguration", {"xmlns": NAMESPACE})
    for rule in rules:
        node = SubElement(root, "Rule")
        if rule.rule_id:
            SubElement(node, "ID").text = rule.rule_id
        SubElement(node, "Status").text = "Enabled" if rule.enabled else "Disabled"
        _render_filter(SubElement(node, "Filter"), rule)
        _render_actions(node, rule)
    indent(root)
    body: bytes = tostring(root, encoding="utf-8")
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + body + b"\n"


def _render_filter(node: Element, rule: Rule) -> None:
    conditions: list[tuple[str, str | tuple[str, str]]] = [("Prefix", rule.prefix)] if rule.prefix else []
    conditions += [("Tag", tag) for tag in rule.tags]
    if rule.size_greater_than is not None:
        conditions.append(("ObjectSizeGreaterThan", str(rule.size_greater_than)))
    if rule.size_less_than is not None:
        conditions.append(("ObjectSizeLessThan", str(rule.size_less_than)))
    if len(conditions) > 1:
        node = SubElement(node, "And")
    if not conditions:
        SubElement(node, "Prefix").text = ""
    for name, value in conditions:
        child = SubElement(node, name)
        if isinstance(value, tuple):
            SubElement(child, "Key").text, SubElement(child, "Value").text = value
        else:
            child.text = value


def _render_actions(node: Element, rule: Rule) -> None:
    if rule.expiration_days or rule.expiration_date_ns is not None or rule.expired_delete_marker:
        expiration = SubElement(node, "Expiration")
        if rule.expiration_days:
            SubElement(expiration, "Days").text = str(rule.expiration_days)
        elif rule.expiration_date_ns is not None:
            SubElement(expiration, "Date").text = date_text(rule.expiration_date_ns)
        else:
            SubElement(expiration, "ExpiredObjectDeleteMarker").text = "true"
    if rule.noncurrent_days or rule.newer_noncurrent:
        noncurrent = SubElement(node, "NoncurrentVersionExpiration")
        if rule.noncurrent_days:
            SubElement(noncurrent, "NoncurrentDays").text = str(rule.noncurrent_days)
        if rule.newer_noncurrent:
            SubElement(noncurrent, "NewerNoncurrentVersions").text = str(rule.newer_noncurrent)
    if rule.abort_days:
        abort = SubElement(node, "AbortIncompleteMultipartUpload")
        SubElement(abort, "DaysAfterInitiation").text = str(rule.abort_days)


def date_text(at_ns: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at_ns // SECOND_NS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# JSON.


def parse_json(data: bytes, *, unique_ids: bool = True) -> tuple[Rule, ...]:
    """The checked rules of a JSON policy. Raises MalformedPolicy, InvalidPolicy or TooLarge."""
    return policy_of(_json(data), strict=True, unique_ids=unique_ids)


def json_rules(data: bytes) -> list[Any]:
    """The rules of a JSON policy as trees. Raises MalformedPolicy when there is no list of them, or TooLarge."""
    tree = _json(data)
    found = tree.get("Rules") if isinstance(tree, dict) else None
    if not isinstance(found, list) or not found:
        raise MalformedPolicy("there is no Rule")
    return found


def _json(data: bytes) -> Any:
    if len(data) > BYTES_MAX:
        raise TooLarge(f"the policy has {len(data)} bytes, more than {BYTES_MAX}")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedPolicy(f"not JSON: {error}") from None


def render_json(rules: tuple[Rule, ...]) -> bytes:
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

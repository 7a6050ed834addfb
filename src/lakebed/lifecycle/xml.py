"""The policy as XML: read safely and strictly, written canonically.

No document type, no entities, no processing beyond elements and text; a limit on bytes and depth. Bytes that were put
are what is read back: this module is never asked to rewrite a stored policy.
"""

from __future__ import annotations

from typing import Any
from xml.etree.ElementTree import Element, ParseError, SubElement, indent, tostring

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from lakebed.errors import TooLarge
from lakebed.lifecycle.model import SECOND_NS, Rule
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


def parse(data: bytes, *, unique_ids: bool = True) -> tuple[Rule, ...]:
    """The checked rules of an XML policy. Raises MalformedPolicy, InvalidPolicy or TooLarge; never expands anything."""
    if len(data) > BYTES_MAX:
        raise TooLarge(f"the policy has {len(data)} bytes, more than {BYTES_MAX}")
    try:
        root = fromstring(data, forbid_dtd=True, forbid_entities=True, forbid_external=True)
    except DefusedXmlException as error:
        raise MalformedPolicy(f"document types and entities are not read ({type(error).__name__})") from None
    except (ParseError, ValueError, LookupError) as error:
        raise MalformedPolicy(f"not XML: {error}") from None
    name = _name(root)
    if name not in ROOTS:
        raise MalformedPolicy(f"the root is {name!r}, not LifecycleConfiguration")
    return policy_of(_children(root, "LifecycleConfiguration"), strict=False, unique_ids=unique_ids)


def _children(element: Element, name: str) -> dict[str, Any]:
    if element.attrib:
        raise MalformedPolicy(f"{name} has attributes")
    if (element.text or "").strip() or any((child.tail or "").strip() for child in element):
        raise MalformedPolicy(f"{name} has text between its elements")
    repeated = _REPEATED.get(name, {})
    tree: dict[str, Any] = {held: [] for tag, held in repeated.items() if name != "Rule"}
    for child in element:
        tag = _name(child)
        value: Any = _children(child, tag) if tag in _CONTAINERS else _text(child, tag)
        if tag in repeated:
            tree.setdefault(repeated[tag], []).append(value)
        elif tag in tree or tag in repeated.values():
            raise MalformedPolicy(f"{name} has {tag!r} more than once, or misspelt")
        else:
            tree[tag] = value
    return tree


def _text(element: Element, name: str) -> Any:
    if len(element) or element.attrib:
        raise MalformedPolicy(f"{name} has elements or attributes inside")
    text = element.text or ""
    if name in _BOOLEANS:
        if text.strip() not in ("true", "false"):
            raise MalformedPolicy(f"{name} is {text!r}, not true or false")
        return text.strip() == "true"
    return text if name in ("Prefix", "Key", "Value", "ID") else text.strip()


def _name(element: Element) -> str:
    tag = str(element.tag)
    if tag.startswith("{"):
        space, _, tag = tag[1:].partition("}")
        if space.rstrip("/") != NAMESPACE.rstrip("/"):
            raise MalformedPolicy(f"unknown namespace {space!r}")
    return tag


def render(rules: tuple[Rule, ...]) -> bytes:
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

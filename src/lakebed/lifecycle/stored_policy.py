"""A policy in force, read as SeaweedFS and Ceph read it: a rule that cannot be read takes out itself only.

What another writer's S3 accepted is not refused as a whole. A rule without Filter and Prefix matches the whole bucket,
conditions of a Filter without And all hold, the rule's own Prefix counts where the Filter has none, and a transition
beside an expiration is left out. Every rule that does not run is named in `problems`, with the reason.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from lakebed.core.errors import Invalid
from lakebed.lifecycle.model import Rule
from lakebed.lifecycle.policy import json_rules, xml_rules
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.rules import RULES_MAX, MalformedPolicy, rule_of

_TRANSITIONS = ("Transitions", "NoncurrentVersionTransitions", "Transition", "NoncurrentVersionTransition")
POLICIES_CACHED = 2048  # every round reads all policies, and few change
_CONDITIONS = ("Prefix", "Tag", "ObjectSizeGreaterThan", "ObjectSizeLessThan")


class StoredPolicy(msgspec.Struct, frozen=True):
    rules: tuple[Rule, ...] = ()
    problems: tuple[str, ...] = ()


class _ReadRule(msgspec.Struct, frozen=True):
    """A rule of a text, or the problem with it. `shown` is its id or its number."""

    shown: str
    rule: Rule | None = None
    problem: str = ""
    transitions: bool = False


def stored_policy(text: bytes, bucket: str = "", reserved: ReservedKeys | None = None) -> StoredPolicy:
    """The rules that can be run, and why the others cannot. Never raises: an unreadable text has one problem.

    With `reserved`, a rule that could delete Lakebed's own keys is a problem too.
    """
    read, whole = _read(text)
    rules: list[Rule] = []
    problems = list(whole)
    for one in read:
        problem = one.problem
        if one.rule is not None and reserved is not None:
            try:
                reserved.check(bucket, (one.rule,))
            except Invalid as error:
                if not one.rule.enabled:
                    continue
                problem = error.message
        if problem:
            problems.append(f"rule {one.shown}: {problem}")
        elif one.rule is not None:
            rules.append(one.rule)
            if one.transitions:
                problems.append(f"rule {one.shown}: its transitions are not run, its expirations are")
    return StoredPolicy(tuple(rules), tuple(problems))


@lru_cache(maxsize=POLICIES_CACHED)
def _read(text: bytes) -> tuple[tuple[_ReadRule, ...], tuple[str, ...]]:
    """The rules of a text, and the problems of the text as a whole."""
    body = text.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not body:
        return (), ()
    strict = body[:1] in (b"{", b"[")
    try:
        trees = json_rules(body) if strict else xml_rules(body)
    except Invalid as error:
        return (), (error.message,)
    found: list[_ReadRule] = []
    for number, tree in enumerate(trees[:RULES_MAX], 1):
        try:
            if isinstance(tree, Invalid):
                raise tree
            rule = rule_of(_as_accepted(tree), strict=strict)
        except Invalid as error:
            if not _disabled(tree):
                found.append(_ReadRule(str(_name(tree) or number), problem=error.message))
            continue
        transitions = rule.enabled and any(name in tree for name in _TRANSITIONS)
        found.append(_ReadRule(str(_name(tree) or number), rule, transitions=transitions))
    return tuple(found), (f"only the first {RULES_MAX} rules are run",) if len(trees) > RULES_MAX else ()


def _disabled(tree: Any) -> bool:
    return isinstance(tree, dict) and tree.get("Status") == "Disabled"


def _name(tree: Any) -> str:
    found = tree.get("ID") if isinstance(tree, dict) else None
    return repr(found[:40]) if isinstance(found, str) and found else ""


def _as_accepted(tree: Any) -> dict[str, Any]:
    """The rule in the form that AWS would have accepted, with the same meaning."""
    if not isinstance(tree, dict):
        raise MalformedPolicy("a Rule is not an element")
    rule = {name: value for name, value in tree.items() if name not in _TRANSITIONS}
    conditions = _conditions(rule.pop("Filter", None), rule.pop("Prefix", None))
    tags = conditions.pop("Tags", [])
    if len(conditions) + len(tags) > 1:
        rule["Filter"] = {"And": {**conditions, "Tags": tags}}
    elif tags:
        rule["Filter"] = {"Tag": tags[0]}
    else:
        rule["Filter"] = conditions or {"Prefix": ""}
    expiration = rule.get("Expiration")
    if isinstance(expiration, dict) and expiration.get("ExpiredObjectDeleteMarker") in (False, "false"):
        rest = {name: value for name, value in expiration.items() if name != "ExpiredObjectDeleteMarker"}
        rule = {**rule, "Expiration": rest} if rest else {n: v for n, v in rule.items() if n != "Expiration"}
    return rule


def _conditions(given: Any, prefix: Any) -> dict[str, Any]:
    """All conditions of a rule, which all hold: those of And, those beside it, and the rule's own prefix."""
    given = given if given is not None and given != "" else {}
    both = given.get("And") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(both, (dict, type(None))):
        raise MalformedPolicy("Filter is not an element")
    if unknown := set(given) - {*_CONDITIONS, "And"}:
        raise MalformedPolicy(f"Filter has {sorted(unknown)[0]!r}")
    found = {**{name: value for name, value in given.items() if name in _CONDITIONS}, **(both or {})}
    tags = found.pop("Tags", [])
    if not isinstance(tags, list):
        raise MalformedPolicy("Tags is not a list")
    tags = [*tags, *([found.pop("Tag")] if "Tag" in found else [])]
    if not found.get("Prefix") and prefix:
        found["Prefix"] = prefix
    if found.get("Prefix") == "":
        del found["Prefix"]
    return {**found, "Tags": tags} if tags else found

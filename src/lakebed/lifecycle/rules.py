"""The one strict model of an AWS lifecycle policy, whichever form it came in, and the checks AWS makes.

An unknown or misspelt element is an error, never silence. What AWS refuses is refused in AWS's own words, with its own
code in `detail["aws_code"]`. Transitions are refused clearly: there is no colder class to move to.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from lakebed.core.errors import Invalid
from lakebed.lifecycle.model import DAY_S, SECOND_NS, Rule

RULES_MAX = 1000  # AWS's own limit
ID_LENGTH_MAX = 255
PREFIX_LENGTH_MAX = 1024
TAG_KEY_MAX, TAG_VALUE_MAX = 128, 256
TAGS_MAX = 50  # an object has at most ten; more in one filter can never match
NEWER_NONCURRENT_MAX = 100
DAYS_MAX = 2_147_483_647
NOT_WELL_FORMED = "The XML you provided was not well-formed or did not validate against our published schema"


class MalformedPolicy(Invalid):
    """Not the shape of a lifecycle policy."""

    code = "malformed_policy"

    def __init__(self, why: str, *, form: str = "XML") -> None:
        self.why = why
        said = NOT_WELL_FORMED if form == "XML" else f"The {form} is not a lifecycle policy"
        super().__init__(f"{said}: {why}", aws_code="MalformedXML", aws_message=NOT_WELL_FORMED)


class InvalidPolicy(Invalid):
    """The shape is right, the values are not allowed. `aws_message` is AWS's sentence."""

    code = "invalid_policy"

    def __init__(self, message: str, *, aws_code: str = "InvalidArgument", rule: str = "", hint: str = "") -> None:
        where = f" (rule {rule!r})" if rule else ""
        super().__init__(f"{message}{where}", hint=hint, aws_code=aws_code, aws_message=message, rule=rule)


class _Element(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="pascal", omit_defaults=True):
    """An element with exactly these children."""


class TagElement(_Element, frozen=True):
    key: str
    value: str


class AndElement(_Element, frozen=True):
    prefix: str | None = None
    tags: tuple[TagElement, ...] = ()
    object_size_greater_than: int | None = None
    object_size_less_than: int | None = None


class FilterElement(_Element, frozen=True):
    prefix: str | None = None
    tag: TagElement | None = None
    object_size_greater_than: int | None = None
    object_size_less_than: int | None = None
    and_: AndElement | None = msgspec.field(name="And", default=None)


class ExpirationElement(_Element, frozen=True):
    days: int | None = None
    date: str | None = None
    expired_object_delete_marker: bool | None = None


class NoncurrentElement(_Element, frozen=True):
    noncurrent_days: int | None = None
    newer_noncurrent_versions: int | None = None


class AbortElement(_Element, frozen=True):
    days_after_initiation: int | None = None


class RuleElement(_Element, frozen=True):
    status: str
    id: str | None = msgspec.field(name="ID", default=None)
    prefix: str | None = None
    filter: FilterElement | None = None
    expiration: ExpirationElement | None = None
    noncurrent_version_expiration: NoncurrentElement | None = None
    abort_incomplete_multipart_upload: AbortElement | None = None
    transitions: Any = None
    noncurrent_version_transitions: Any = None


class PolicyElement(_Element, frozen=True):
    rules: tuple[RuleElement, ...]
    transition_default_minimum_object_size: str | None = None


def policy_of(tree: Any, *, strict: bool, unique_ids: bool = True) -> tuple[Rule, ...]:
    """Checked rules from a tree of plain values. Raises MalformedPolicy or InvalidPolicy.

    XML knows only text, so it converts (`strict=False`); JSON must bring the right types. A policy that is already in
    force may have repeated ids (another writer's), so a reader passes `unique_ids=False`.
    """
    try:
        policy = msgspec.convert(tree, PolicyElement, strict=strict)
    except msgspec.ValidationError as error:
        raise MalformedPolicy(str(error)) from None
    if not policy.rules:
        raise MalformedPolicy("there is no Rule")
    if len(policy.rules) > RULES_MAX:
        raise InvalidPolicy(
            f"Your request contains more than {RULES_MAX} rules. The limit is {RULES_MAX} rules per bucket.",
            aws_code="InvalidRequest",
        )
    if unique_ids:
        _check_ids(policy.rules)
    return tuple(_rule(element) for element in policy.rules)


def rule_of(tree: Any, *, strict: bool) -> Rule:
    """One checked rule from a tree of plain values. Raises MalformedPolicy or InvalidPolicy."""
    try:
        return _rule(msgspec.convert(tree, RuleElement, strict=strict))
    except msgspec.ValidationError as error:
        raise MalformedPolicy(str(error)) from None


def _check_ids(rules: Iterable[RuleElement]) -> None:
    seen: set[str] = set()
    for rule in rules:
        if rule.id and rule.id in seen:
            raise InvalidPolicy("Rule ID must be unique. Found same ID for more than one rule", rule=rule.id)
        seen.add(rule.id or "")


def _rule(element: RuleElement) -> Rule:
    name = element.id or ""
    if len(name) > ID_LENGTH_MAX:
        raise InvalidPolicy(f"ID length should not exceed allowed limit of {ID_LENGTH_MAX}", rule=name[:40])
    if element.status not in ("Enabled", "Disabled"):
        raise MalformedPolicy(f"Status is {element.status!r}, not Enabled or Disabled")
    if element.transitions is not None or element.noncurrent_version_transitions is not None:
        raise InvalidPolicy(
            "Transition and NoncurrentVersionTransition are not supported: there is no other storage class",
            aws_code="NotImplemented",
            rule=name,
            hint="take the transitions out of the rule; expirations work without them",
        )
    prefix, tags, greater, less = _filter(element, name)
    days, date_ns, marker = _expiration(element.expiration, name)
    noncurrent_days, newer = _noncurrent(element.noncurrent_version_expiration, name)
    abort_days = _abort(element.abort_incomplete_multipart_upload, name)
    if not (days or date_ns is not None or marker or noncurrent_days or newer or abort_days):
        raise InvalidPolicy("At least one action needs to be specified in a rule", aws_code="InvalidRequest", rule=name)
    for narrowed, by in ((tags, "Tags"), (greater is not None or less is not None, "Object Size")):
        if narrowed and abort_days:
            raise InvalidPolicy(
                f"AbortIncompleteMultipartUpload cannot be specified with {by}.", aws_code="InvalidRequest", rule=name
            )
        if narrowed and marker:
            raise InvalidPolicy(
                f"ExpiredObjectDeleteMarker cannot be specified with {by}.", aws_code="InvalidRequest", rule=name
            )
    return Rule(
        rule_id=name,
        enabled=element.status == "Enabled",
        prefix=prefix,
        tags=tags,
        size_greater_than=greater,
        size_less_than=less,
        expiration_days=days,
        expiration_date_ns=date_ns,
        expired_delete_marker=marker,
        noncurrent_days=noncurrent_days,
        newer_noncurrent=newer,
        abort_days=abort_days,
    )


def _filter(element: RuleElement, name: str) -> tuple[str, tuple[tuple[str, str], ...], int | None, int | None]:
    if element.filter is not None and element.prefix is not None:
        raise MalformedPolicy("a rule has either Filter or Prefix, not both")
    if element.filter is None:
        if element.prefix is None:
            raise MalformedPolicy("a rule needs a Filter (an empty one matches every object)")
        return _prefix(element.prefix, name), (), None, None
    given = element.filter
    singles = [given.prefix, given.tag, given.object_size_greater_than, given.object_size_less_than, given.and_]
    if sum(single is not None for single in singles) > 1:
        raise MalformedPolicy("a Filter has one condition; join several with And")
    both = given.and_ or AndElement(
        prefix=given.prefix,
        tags=(given.tag,) if given.tag is not None else (),
        object_size_greater_than=given.object_size_greater_than,
        object_size_less_than=given.object_size_less_than,
    )
    if given.and_ is not None:
        parts = (both.prefix is not None) + len(both.tags)
        parts += (both.object_size_greater_than is not None) + (both.object_size_less_than is not None)
        if parts < 2:
            raise MalformedPolicy("And joins at least two conditions")
    greater, less = both.object_size_greater_than, both.object_size_less_than
    _check_sizes(greater, less, name)
    return _prefix(both.prefix or "", name), _tags(both.tags, name), greater, less


def _prefix(prefix: str, name: str) -> str:
    if len(prefix) > PREFIX_LENGTH_MAX:
        raise InvalidPolicy(f"The maximum size of a prefix is {PREFIX_LENGTH_MAX}", rule=name)
    return prefix


def _tags(tags: tuple[TagElement, ...], name: str) -> tuple[tuple[str, str], ...]:
    if len({tag.key for tag in tags}) < len(tags):
        raise InvalidPolicy("Duplicate Tag Keys are not allowed.", aws_code="InvalidRequest", rule=name)
    if len(tags) > TAGS_MAX:
        raise InvalidPolicy(f"A filter has at most {TAGS_MAX} tags", aws_code="InvalidRequest", rule=name)
    for tag in tags:
        if not 0 < len(tag.key) <= TAG_KEY_MAX:
            raise InvalidPolicy("The TagKey you have provided is invalid", aws_code="InvalidTag", rule=name)
        if len(tag.value) > TAG_VALUE_MAX:
            raise InvalidPolicy("The TagValue you have provided is invalid", aws_code="InvalidTag", rule=name)
    return tuple(sorted((tag.key, tag.value) for tag in tags))


def _check_sizes(greater: int | None, less: int | None, name: str) -> None:
    for size, field in ((greater, "ObjectSizeGreaterThan"), (less, "ObjectSizeLessThan")):
        if size is not None and size < (0 if field == "ObjectSizeGreaterThan" else 1):
            raise InvalidPolicy(f"'{field}' has to be a positive value", aws_code="InvalidRequest", rule=name)
    if greater is not None and less is not None and greater + 1 >= less:
        raise InvalidPolicy(
            "'ObjectSizeLessThan' has to be a value greater than 'ObjectSizeGreaterThan' by more than one byte",
            aws_code="InvalidRequest",
            rule=name,
        )


def _expiration(element: ExpirationElement | None, name: str) -> tuple[int | None, int | None, bool]:
    if element is None:
        return None, None, False
    given = [element.days, element.date, element.expired_object_delete_marker]
    if sum(one is not None for one in given) != 1:
        raise MalformedPolicy("Expiration has exactly one of Days, Date and ExpiredObjectDeleteMarker")
    days = _positive(element.days, "Days", "Expiration", name)
    date_ns = _midnight(element.date, name) if element.date is not None else None
    return days, date_ns, bool(element.expired_object_delete_marker)


def _noncurrent(element: NoncurrentElement | None, name: str) -> tuple[int | None, int | None]:
    if element is None:
        return None, None
    action = "NoncurrentVersionExpiration"
    days = _positive(element.noncurrent_days, "NoncurrentDays", action, name)
    newer = _positive(element.newer_noncurrent_versions, "NewerNoncurrentVersions", action, name)
    if newer is not None and newer > NEWER_NONCURRENT_MAX:
        raise InvalidPolicy(f"'NewerNoncurrentVersions' must be at most {NEWER_NONCURRENT_MAX}", rule=name)
    if days is None and newer is None:
        raise MalformedPolicy(f"{action} is empty")
    return days, newer


def _abort(element: AbortElement | None, name: str) -> int | None:
    if element is None:
        return None
    if element.days_after_initiation is None:
        raise MalformedPolicy("AbortIncompleteMultipartUpload has no DaysAfterInitiation")
    return _positive(element.days_after_initiation, "DaysAfterInitiation", "AbortIncompleteMultipartUpload", name)


def _positive(days: int | None, field: str, action: str, name: str) -> int | None:
    if days is not None and not 0 < days <= DAYS_MAX:
        raise InvalidPolicy(f"'{field}' for {action} action must be a positive integer", rule=name)
    return days


def _midnight(text: str, name: str) -> int:
    try:
        date = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        raise MalformedPolicy(f"Date {text[:40]!r} is not ISO 8601") from None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    seconds, rest = divmod((date - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds(), 1)
    if rest or int(seconds) % DAY_S:
        raise InvalidPolicy("'Date' must be at midnight GMT", rule=name)
    return int(seconds) * SECOND_NS

"""The policy as XML and as the AWS CLI's JSON: one strict model, AWS's words, no hostile input."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakebed.core.errors import Invalid, TooLarge
from lakebed.lifecycle.model import DAY_S, SECOND_NS, Rule
from lakebed.lifecycle.policy import BYTES_MAX, parse_json, parse_xml, render_json, render_xml
from lakebed.lifecycle.rules import InvalidPolicy, MalformedPolicy

DAY = DAY_S * SECOND_NS
NAMESPACE = b'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def policy(inside: str, *, status: str = "Enabled", where: str = "<Filter><Prefix>a/</Prefix></Filter>") -> bytes:
    rule = f"<Rule><ID>r</ID><Status>{status}</Status>{where}{inside}</Rule>"
    return f"<LifecycleConfiguration>{rule}</LifecycleConfiguration>".encode()


def one(data: bytes) -> Rule:
    (rule,) = parse_xml(data)
    return rule


DAYS = "<Expiration><Days>1</Days></Expiration>"


def test_a_whole_rule_is_read() -> None:
    """Every condition and every action of a rule arrives in the model."""
    found = one(
        b"<?xml version='1.0'?><LifecycleConfiguration " + NAMESPACE + b"><Rule><ID>all</ID><Status>Disabled</Status>"
        b"<Filter><And><Prefix>x/</Prefix><Tag><Key>b</Key><Value>2</Value></Tag><Tag><Key>a</Key><Value> 1 </Value>"
        b"</Tag><ObjectSizeGreaterThan>5</ObjectSizeGreaterThan><ObjectSizeLessThan>9</ObjectSizeLessThan></And>"
        b"</Filter><Expiration><Days>3</Days></Expiration><NoncurrentVersionExpiration><NoncurrentDays>4"
        b"</NoncurrentDays><NewerNoncurrentVersions>5</NewerNoncurrentVersions></NoncurrentVersionExpiration>"
        b"</Rule></LifecycleConfiguration>"
    )

    assert found == Rule(
        "all", False, "x/", (("a", " 1 "), ("b", "2")), 5, 9, expiration_days=3, noncurrent_days=4, newer_noncurrent=5
    )


@pytest.mark.parametrize(
    ("where", "prefix"),
    [
        ("<Filter/>", ""),
        ("<Filter></Filter>", ""),
        ("<Filter><Prefix/></Filter>", ""),
        ("<Prefix></Prefix>", ""),
        ("<Prefix>old/</Prefix>", "old/"),
    ],
)
def test_an_empty_filter_and_the_old_prefix_are_both_read(where: str, prefix: str) -> None:
    """All of AWS's ways to say a prefix, or none, are one."""
    assert prefix == one(policy(DAYS, where=where)).prefix


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ("<Expiration><Days>0</Days></Expiration>", "'Days' for Expiration action must be a positive integer"),
        ("<Expiration><Days>-1</Days></Expiration>", "'Days' for Expiration action must be a positive integer"),
        ("<Expiration><Date>2026-01-01T05:00:00Z</Date></Expiration>", "'Date' must be at midnight GMT"),
        (
            "<NoncurrentVersionExpiration><NoncurrentDays>0</NoncurrentDays></NoncurrentVersionExpiration>",
            "'NoncurrentDays' for NoncurrentVersionExpiration action must be a positive integer",
        ),
        (
            "<AbortIncompleteMultipartUpload><DaysAfterInitiation>0</DaysAfterInitiation>"
            "</AbortIncompleteMultipartUpload>",
            "'DaysAfterInitiation' for AbortIncompleteMultipartUpload action must be a positive integer",
        ),
        ("", "At least one action needs to be specified in a rule"),
        (
            "<Expiration><ExpiredObjectDeleteMarker>false</ExpiredObjectDeleteMarker></Expiration>",
            "At least one action needs to be specified in a rule",
        ),
        (
            DAYS + "<Transition><Days>1</Days><StorageClass>GLACIER</StorageClass></Transition>",
            "Transition and NoncurrentVersionTransition are not supported: there is no other storage class",
        ),
        (
            DAYS + "<NoncurrentVersionTransition><NoncurrentDays>1</NoncurrentDays></NoncurrentVersionTransition>",
            "Transition and NoncurrentVersionTransition are not supported: there is no other storage class",
        ),
    ],
)
def test_what_aws_refuses_is_refused_in_its_words(inside: str, words: str) -> None:
    """The sentence is AWS's own, and the rule is named."""
    with pytest.raises(InvalidPolicy) as caught:
        parse_xml(policy(inside))

    assert words == caught.value.detail["aws_message"]
    assert "r" == caught.value.detail["rule"]


TAG = "<Filter><Tag><Key>k</Key><Value>v</Value></Tag></Filter>"
ABORT = "<AbortIncompleteMultipartUpload><DaysAfterInitiation>1</DaysAfterInitiation></AbortIncompleteMultipartUpload>"
EODM = "<Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>"
SIZE = "<Filter><ObjectSizeLessThan>5</ObjectSizeLessThan></Filter>"


@pytest.mark.parametrize(
    ("inside", "where", "words"),
    [
        (ABORT, TAG, "AbortIncompleteMultipartUpload cannot be specified with Tags."),
        (EODM, TAG, "ExpiredObjectDeleteMarker cannot be specified with Tags."),
        (ABORT, SIZE, "AbortIncompleteMultipartUpload cannot be specified with Object Size."),
        (
            DAYS,
            "<Filter><And><Tag><Key>k</Key><Value>v</Value></Tag><Tag><Key>k</Key><Value>w</Value></Tag></And></Filter>",
            "Duplicate Tag Keys are not allowed.",
        ),
        (
            DAYS,
            "<Filter><And><ObjectSizeGreaterThan>5</ObjectSizeGreaterThan><ObjectSizeLessThan>5</ObjectSizeLessThan>"
            "</And></Filter>",
            "'ObjectSizeLessThan' has to be a value greater than 'ObjectSizeGreaterThan' by more than one byte",
        ),
        (DAYS, f"<Filter><Prefix>{'p' * 1025}</Prefix></Filter>", "The maximum size of a prefix is 1024"),
        (
            DAYS,
            f"<Filter><Tag><Key>{'k' * 129}</Key><Value/></Tag></Filter>",
            "The TagKey you have provided is invalid",
        ),
    ],
)
def test_filters_that_aws_refuses_are_refused(inside: str, where: str, words: str) -> None:
    """Combinations that could never mean anything are errors, not silence."""
    with pytest.raises(InvalidPolicy) as caught:
        parse_xml(policy(inside, where=where))

    assert words == caught.value.detail["aws_message"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<",
        b"{}",
        b"\xff\xfe\x00",
        b"<Other/>",
        b"<LifecycleConfiguration/>",
        b'<LifecycleConfiguration xmlns="urn:else"/>',
        policy(DAYS, status="enabled"),
        policy(DAYS, where=""),
        policy(DAYS, where="<Prefix>a</Prefix><Filter/>"),
        policy(DAYS, where="<Filter><Prefix>a</Prefix>" + TAG[8:]),
        policy(DAYS, where="<Filter><And><Prefix>a</Prefix></And></Filter>"),
        policy("<Expiration><Dayz>1</Dayz></Expiration>"),
        policy("<Expiraton><Days>1</Days></Expiraton>"),
        policy("<Expiration><Days>1</Days><Days>2</Days></Expiration>"),
        policy("<Expiration><Days>1</Days><Date>2026-01-01T00:00:00Z</Date></Expiration>"),
        policy("<Expiration><Days>one</Days></Expiration>"),
        policy("<Expiration><Days>1.5</Days></Expiration>"),
        policy("<Expiration><Days/></Expiration>"),
        policy("<Expiration><Days><One/></Days></Expiration>"),
        policy("<Expiration/>"),
        policy("<Expiration>soon</Expiration>"),
        policy("<Expiration><Date>tomorrow</Date></Expiration>"),
        policy("<Expiration><ExpiredObjectDeleteMarker>yes</ExpiredObjectDeleteMarker></Expiration>"),
        policy("<NoncurrentVersionExpiration/>"),
        policy("<AbortIncompleteMultipartUpload/>"),
        policy(DAYS + DAYS),
        policy(DAYS + "<Rules/>"),
        policy("<Expiration when='now'><Days>1</Days></Expiration>"),
        b"<!DOCTYPE a [<!ENTITY x 'y'>]>" + policy(DAYS),
        b"<!DOCTYPE a SYSTEM 'file:///etc/passwd'>" + policy(DAYS),
        b"<!DOCTYPE a [<!ENTITY a 'aa'><!ENTITY b '&a;&a;'>]><LifecycleConfiguration>&b;</LifecycleConfiguration>",
    ],
)
def test_what_is_not_a_policy_is_malformed(data: bytes) -> None:
    """Misspelt, repeated, mistyped or hostile: a typed error with AWS's code, never a guess."""
    with pytest.raises(MalformedPolicy) as caught:
        parse_xml(data)

    assert "MalformedXML" == caught.value.detail["aws_code"]


def test_too_much_is_refused_before_it_is_read() -> None:
    """A policy has a limit in bytes, and a limit in rules."""
    with pytest.raises(TooLarge):
        parse_xml(b" " * (BYTES_MAX + 1))
    rule = b"<Rule><Status>Enabled</Status><Filter/><Expiration><Days>1</Days></Expiration></Rule>"
    with pytest.raises(InvalidPolicy, match="more than 1000 rules"):
        parse_xml(b"<LifecycleConfiguration>" + rule * 1001 + b"</LifecycleConfiguration>")
    assert 1000 == len(parse_xml(b"<LifecycleConfiguration>" + rule * 1000 + b"</LifecycleConfiguration>"))


def test_ids_may_be_missing_but_not_repeated() -> None:
    """Empty ids are fine, any number of them; a repeated one is refused when put, and borne when it already stands."""
    rule = "<Rule><ID>{}</ID><Status>Enabled</Status><Filter/>" + DAYS + "</Rule>"
    empty = f"<LifecycleConfiguration>{rule.format('') * 2}</LifecycleConfiguration>".encode()
    twice = f"<LifecycleConfiguration>{rule.format('x') * 2}</LifecycleConfiguration>".encode()

    assert ["", ""] == [found.rule_id for found in parse_xml(empty)]
    with pytest.raises(InvalidPolicy, match="Rule ID must be unique"):
        parse_xml(twice)
    assert 2 == len(parse_xml(twice, unique_ids=False))
    with pytest.raises(InvalidPolicy, match="ID length should not exceed allowed limit of 255"):
        parse_xml(twice.replace(b"<ID>x</ID>", b"<ID>" + b"y" * 256 + b"</ID>", 1))


@pytest.mark.parametrize(
    "date", ["2020-01-01T00:00:00Z", "2020-01-01T00:00:00.000Z", "2020-01-01", "2019-12-31T22:00:00-02:00"]
)
def test_a_date_is_midnight_utc_past_or_future(date: str) -> None:
    """The same instant in any form of ISO 8601."""
    assert 18262 * DAY == one(policy(f"<Expiration><Date>{date}</Date></Expiration>")).expiration_date_ns


def test_the_cli_json_is_the_same_model() -> None:
    """What `aws s3api get-bucket-lifecycle-configuration` prints is read, and a misspelt key is an error."""
    text = b"""{"TransitionDefaultMinimumObjectSize": "all_storage_classes_128K",
        "Rules": [{"ID": "r", "Status": "Enabled",
        "Filter": {"And": {"Prefix": "p", "Tags": [{"Key": "k", "Value": "v"}]}},
        "Expiration": {"Date": "2020-01-01T00:00:00+00:00"}}]}"""
    (found,) = parse_json(text)

    assert Rule("r", True, "p", (("k", "v"),), expiration_date_ns=18262 * DAY) == found
    for wrong in (
        b'{"Rules": [{"Status": "Enabled", "Filter": {}, "Expiration": {"Dais": 1}}]}',
        b'{"Rules": [{"Status": "Enabled", "Filter": {}, "Expiration": {"Days": "1"}}]}',
        b'{"Rules": []}',
        b"[]",
        b"nonsense",
        b"[" * 5000,
    ):
        with pytest.raises(MalformedPolicy):
            parse_json(wrong)


TEXT = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=("Cc", "Cs")), min_size=1, max_size=8
)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    greater = draw(st.none() | st.integers(0, 100))
    less = draw(st.none() | st.integers((greater or 0) + 2, 300))
    tags = tuple(sorted(draw(st.dictionaries(TEXT, TEXT, max_size=3)).items()))
    expiration = draw(st.sampled_from([{}, {"expiration_days": 3}, {"expiration_date_ns": 20000 * DAY}]))
    noncurrent = draw(st.sampled_from([{}, {"noncurrent_days": 2}, {"newer_noncurrent": 2}]))
    plain = not tags and greater is None and less is None
    abort = {"abort_days": 5} if plain and draw(st.booleans()) else {}
    if not (expiration or noncurrent or abort):
        expiration = {"expiration_days": 1}
    return Rule(
        draw(st.just("") | TEXT), draw(st.booleans()), draw(st.just("") | TEXT), tags, greater, less,
        **expiration, **noncurrent, **abort,
    )  # fmt: skip


@given(rules())
@settings(max_examples=100)
def test_a_policy_written_in_either_form_reads_back_the_same(rule: Rule) -> None:
    """Rendering and parsing are inverse, in XML and in JSON."""
    assert (rule,) == parse_xml(render_xml((rule,)))
    assert (rule,) == parse_json(render_json((rule,)))


@given(st.integers(0, 400), st.integers(0, 7))
@settings(max_examples=200)
def test_damaged_bytes_are_a_typed_error_or_a_policy(position: int, bit: int) -> None:
    """A flipped bit anywhere gives rules or Invalid, nothing else."""
    data = bytearray(policy(DAYS + ABORT))
    data[position % len(data)] ^= 1 << bit
    with contextlib.suppress(Invalid):
        parse_xml(bytes(data))


def test_sizes_leave_room_for_at_least_one_size_between_them() -> None:
    """5 and 6 leave none, 5 and 7 leave one; 0 is a lower bound and no upper one."""

    def sizes(greater: int, less: int) -> bytes:
        inside = (
            f"<ObjectSizeGreaterThan>{greater}</ObjectSizeGreaterThan><ObjectSizeLessThan>{less}</ObjectSizeLessThan>"
        )
        return policy(DAYS, where=f"<Filter><And>{inside}</And></Filter>")

    with pytest.raises(InvalidPolicy):
        parse_xml(sizes(5, 6))
    with pytest.raises(InvalidPolicy):
        parse_xml(policy(DAYS, where="<Filter><ObjectSizeLessThan>0</ObjectSizeLessThan></Filter>"))
    (found,) = parse_xml(sizes(0, 2))
    assert (0, 2) == (found.size_greater_than, found.size_less_than)

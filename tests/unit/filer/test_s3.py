"""Where S3 state lies in the filer's entries."""

from __future__ import annotations

import pytest

from lakebed.core.errors import Corrupt
from lakebed.filer import s3
from lakebed.filer.model import FilerEntry

NOW_NS = 1_794_780_597_123_456_789
CHANCE = "00112233aabbccdd"


def test_a_path_under_buckets_is_a_bucket_and_a_key() -> None:
    """What lies elsewhere belongs to no bucket."""
    assert ("b", "a/k") == s3.bucket_of(s3.object_path("b", "a/k"))
    assert ("", "") == s3.bucket_of("/topics/.system/log")
    assert ("/buckets/b/a", "k") == s3.split(s3.object_path("b", "a/k"))
    assert "/buckets/b/a/k.versions" == s3.versions_path("b", "a/k")


def test_a_version_id_tells_its_time_in_both_ways_of_writing() -> None:
    """New ids count down, old ones up; both give the same instant, and siblings are written alike."""
    new = s3.new_version_id(NOW_NS, CHANCE)
    old = s3.new_version_id(NOW_NS, CHANCE, like=f"{NOW_NS - 5:016x}{CHANCE}")

    assert new != old
    assert NOW_NS == s3.version_time_ns(new) == s3.version_time_ns(old)
    assert s3.new_version_id(NOW_NS + 1, CHANCE, like=new) < new
    assert s3.new_version_id(NOW_NS + 1, CHANCE, like=old) > old


@pytest.mark.parametrize("bad", ["", "null", "z" * 32, "6717a897", "v_" + "0" * 32])
def test_what_is_no_version_id_is_corrupt(bad: str) -> None:
    """A damaged id is not a time."""
    with pytest.raises(Corrupt):
        s3.version_time_ns(bad)


def test_versions_and_markers_are_told_by_their_attributes() -> None:
    """The id is the attribute's, else the file name's; an object at its key has none."""
    assert "ab" == s3.version_id(FilerEntry("v_ab"))
    assert "cd" == s3.version_id(FilerEntry("v_ab", extended={s3.VERSION_ID: b"cd"}))
    assert "" == s3.version_id(FilerEntry("k"))
    assert "null" == s3.version_id(FilerEntry("k", extended={s3.VERSION_ID: b"null"}))
    assert s3.is_marker(FilerEntry("v_ab", extended={s3.DELETE_MARKER: b"true"}))
    assert not s3.is_marker(FilerEntry("v_ab"))
    assert 5 == s3.noncurrent_since_ns(FilerEntry("v_ab", extended={s3.NONCURRENT_SINCE: b"5"}))
    with pytest.raises(Corrupt):
        s3.noncurrent_since_ns(FilerEntry("v_ab", extended={s3.NONCURRENT_SINCE: b"yesterday"}))


@pytest.mark.parametrize(
    ("extended", "locked"),
    [
        ({}, False),
        ({s3.LEGAL_HOLD: b"ON"}, True),
        ({s3.LEGAL_HOLD: b"OFF"}, False),
        ({s3.LOCK_MODE: b"GOVERNANCE", s3.RETAIN_UNTIL: b"1794780598"}, True),
        ({s3.LOCK_MODE: b"COMPLIANCE", s3.RETAIN_UNTIL: b"1794780597"}, False),
        ({s3.LOCK_MODE: b"COMPLIANCE", s3.RETAIN_UNTIL: b"tomorrow"}, True),
        ({s3.LOCK_MODE: b"COMPLIANCE"}, True),
        ({s3.RETAIN_UNTIL: b"1794780598"}, True),
        ({s3.RETAIN_UNTIL: b"1794780597"}, False),
    ],
)
def test_object_lock_is_read_on_the_safe_side(extended: dict[str, bytes], locked: bool) -> None:
    """A hold or a time to come locks; what cannot be read locks too."""
    assert locked is s3.is_locked(FilerEntry("k", extended=extended), NOW_NS)


def test_tags_are_sorted_pairs() -> None:
    """Only what was put as a tag is one."""
    entry = FilerEntry("k", extended={f"{s3.TAG}b": b"2", f"{s3.TAG}a": b"1", s3.VERSION_ID: b"x"})

    assert (("a", "1"), ("b", "2")) == s3.tags_of(entry)


def test_a_bucket_says_its_policy_and_its_versioning() -> None:
    """A bucket with object lock keeps versions even where it does not say so."""
    assert b"<x/>" == s3.lifecycle_of(FilerEntry("b", extended={s3.LIFECYCLE: b"<x/>"}))
    assert b"" == s3.lifecycle_of(FilerEntry("b"))
    assert "Suspended" == s3.versioning_of(FilerEntry("b", extended={s3.VERSIONING: b"Suspended"}))
    assert "Enabled" == s3.versioning_of(FilerEntry("b", extended={s3.LOCK_ENABLED: b"Enabled"}))
    assert "" == s3.versioning_of(FilerEntry("b"))


def test_an_upload_without_a_key_is_corrupt() -> None:
    """An upload that nobody can place is not guessed at."""
    assert "m/p" == s3.upload_key(FilerEntry("u", is_directory=True, extended={s3.UPLOAD_KEY: b"m/p"}))
    with pytest.raises(Corrupt):
        s3.upload_key(FilerEntry("u", is_directory=True))

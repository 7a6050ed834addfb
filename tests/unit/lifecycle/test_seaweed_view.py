"""What SeaweedFS's entries and changes are to lifecycle."""

from __future__ import annotations

import pytest

from lakebed.filer import s3
from lakebed.filer.model import Attributes, FileChunk, FilerEntry, FilerEvent
from lakebed.lifecycle.delete_decision import EventMeaning, meaning
from lakebed.lifecycle.seaweed import entries as view

T_NS = 1_794_780_000_000_000_000
SECOND_NS = 1_000_000_000


def file(name: str, at_ns: int = T_NS, fid: str = "1,01", **extended: str) -> FilerEntry:
    known = {"marker": s3.DELETE_MARKER, "since": s3.NONCURRENT_SINCE, "tag": f"{s3.TAG}k", "upload": s3.UPLOAD_KEY}
    return FilerEntry(
        name,
        attributes=Attributes(file_size=3, mtime_ns=at_ns),
        chunks=(FileChunk(fid),),
        extended={known[key]: value.encode() for key, value in extended.items()},
    )


def folder(name: str, **extended: str) -> FilerEntry:
    keys = {"latest": s3.LATEST_FILE, "upload": s3.UPLOAD_KEY}
    return FilerEntry(name, is_directory=True, extended={keys[key]: value.encode() for key, value in extended.items()})


def version(seconds: int, **extended: str) -> FilerEntry:
    at_ns = T_NS + seconds * SECOND_NS
    return file(f"v_{s3.new_version_id(at_ns, '0' * 16)}", at_ns, **extended)


def test_versions_come_current_first_and_say_when_they_aged() -> None:
    """The pointer says which is current; a noted time counts before the successor's."""
    oldest, middle, newest = version(1), version(2, since=str(T_NS + 9)), version(3)

    found = view.versions_of("b", "k", None, folder("k.versions", latest=newest.name), [newest, middle, oldest], T_NS)

    assert [s3.version_id(one) for one in (newest, middle, oldest)] == [one.version_id for one in found]
    assert [True, False, False] == [one.latest for one in found]
    assert [None, T_NS + 9, T_NS + 2 * SECOND_NS] == [one.noncurrent_since_ns for one in found]
    assert [True, True, False] == [one.since_noted for one in found]
    assert [0, 0, 1] == [one.newer_noncurrent for one in found]
    assert not any(one.alone for one in found)


def test_the_object_at_the_key_is_current_where_nothing_points_elsewhere() -> None:
    """Before versions were kept and while they are suspended it is; afterwards it is one of the older."""
    bare, kept = file("k"), version(5)

    alone = view.versions_of("b", "k", bare, None, [], T_NS)
    suspended = view.versions_of("b", "k", bare, folder("k.versions"), [kept], T_NS)
    enabled = view.versions_of("b", "k", bare, folder("k.versions", latest=kept.name), [kept], T_NS)

    assert [("null", True, True)] == [(one.version_id, one.latest, one.alone) for one in alone]
    assert ["null", s3.version_id(kept)] == [one.version_id for one in suspended]
    assert [s3.version_id(kept), "null"] == [one.version_id for one in enabled]
    assert T_NS + 5 * SECOND_NS == enabled[1].noncurrent_since_ns


def test_a_marker_without_an_id_is_a_version_like_others() -> None:
    """Where versions are suspended a delete leaves it in the folder, under the name of the null version."""
    marker = file("v_null", marker="true")

    (found,) = view.versions_of("b", "k", None, folder("k.versions", latest="v_null"), [marker], T_NS)

    assert ("null", True, True, True) == (found.version_id, found.marker, found.latest, found.alone)


def test_a_file_that_is_no_version_is_none_of_the_keys_versions() -> None:
    """A key may be named like a folder of versions: what is put below it belongs to that key."""
    assert () == view.versions_of("b", "k", None, folder("k.versions"), [file("v_nonsense"), file("z")], T_NS)


@pytest.mark.parametrize(
    ("directory", "entry", "place"),
    [
        ("/buckets/b", file("k"), view.ObjectAddress("b", "k")),
        ("/buckets/b/a", file("k"), view.ObjectAddress("b", "a/k")),
        ("/buckets/b/a/k.versions", file("v_" + "a" * 32), view.ObjectAddress("b", "a/k", "a" * 32)),
        ("/buckets/b/a/k.versions", file("v_ab"), view.ObjectAddress("b", "a/k.versions/v_ab")),
        ("/buckets/b/a/k.versions", file("z"), view.ObjectAddress("b", "a/k.versions/z")),
        ("/buckets/b/.uploads", folder("u", upload="a/k"), view.ObjectAddress("b", "a/k", upload_id="u")),
        ("/buckets/b/.uploads", folder("u"), None),
        ("/buckets/b/.uploads/u", file("0001.part"), None),
        ("/buckets/b", folder("a"), None),
        ("/buckets/b/a", folder("k.versions", latest="v_ab"), None),
        ("/buckets/.system", file("k"), None),
        ("/topics/.system/log", file("k"), None),
    ],
)
def test_a_path_is_an_object_a_version_an_upload_or_nothing(
    directory: str, entry: FilerEntry, place: view.ObjectAddress | None
) -> None:
    """Folders, parts, pointers and the store's own files are nobody's."""
    assert place == view.place_of(directory, entry)


def test_changes_have_the_meaning_that_lifecycle_gives_them() -> None:
    """New bytes are a new age, new tags a change of predicates, the rest is nothing."""
    plain, tagged, rewritten = file("k"), file("k", tag="v"), file("k", fid="2,02")
    seen = {
        EventMeaning.AGE_ORIGIN: [(None, plain), (plain, rewritten)],
        EventMeaning.PREDICATE_CHANGE: [(plain, tagged)],
        EventMeaning.NOTHING: [(plain, plain), (plain, None)],
    }

    for meant, pairs in seen.items():
        for old, new in pairs:
            (event,) = view.events_of(FilerEvent("/buckets/b", 7, old, new, new_parent="/buckets/b"))
            assert meant is meaning(event)
    (gone,) = view.events_of(FilerEvent("/buckets/b/k.versions", 7, version(1), None))
    assert EventMeaning.REMOVAL is meaning(gone)


def test_a_move_is_an_end_and_a_beginning() -> None:
    """At its new place the object is new; moved out of all buckets it is only gone."""
    moved = list(view.events_of(FilerEvent("/buckets/b", 7, file("k"), file("l"), new_parent="/buckets/c")))
    left = list(view.events_of(FilerEvent("/buckets/b", 7, file("k"), file("k"), new_parent="/elsewhere")))

    assert [("b", "k", True), ("c", "l", False)] == [(one.bucket, one.key, one.new is None) for one in moved]
    assert [("b", "k")] == [(one.bucket, one.key) for one in left]


def test_a_change_of_a_bucket_is_a_change_of_policy() -> None:
    """Whatever changed on it: the policy is read again."""
    (event,) = view.events_of(FilerEvent("/buckets", 7, folder("b"), folder("b"), new_parent="/buckets"))

    assert ("b", True) == (event.bucket, event.policy)


def test_an_unreadable_change_names_its_bucket_and_its_reason() -> None:
    """It blocks the streams of that bucket, not those of others; a heartbeat is nothing."""
    (event,) = view.events_of(FilerEvent("/buckets/b/a", 7, unreadable="no UTF-8"))

    assert ("b", "no UTF-8") == (event.bucket, event.unreadable)
    assert [] == list(view.events_of(FilerEvent("", 7)))


def test_a_log_file_says_its_minute() -> None:
    """And what is named otherwise is no file of the log."""
    assert 1_794_780_540 * SECOND_NS == view.log_file_ns("2026-11-15", "22-09.4728a8bc")
    assert view.log_file_ns("2026-11-15", "latest") is None

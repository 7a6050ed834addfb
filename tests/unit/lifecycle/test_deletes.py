"""Deletes on SeaweedFS: what changed, holds others, is locked or became current again stays, and no delete goes on."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.core.errors import Denied, NotFound, Stale
from lakebed.filer import s3
from lakebed.filer.model import ConditionKind, MutationKind, Transaction
from lakebed.lifecycle.model import ObjectEntry, Verb
from lakebed.lifecycle.seams import Removal
from lakebed.lifecycle.seaweed import deletes
from lakebed.lifecycle.seaweed.deletes import ATTEMPTS
from lakebed.lifecycle.seaweed.entries import object_of, upload_of
from support.lifecycle_filer import Place

LOCKED = {s3.LOCK_MODE: b"COMPLIANCE", s3.RETAIN_UNTIL: b"99999999999"}
VERSION = "a" * 32


def version(place: Place, *, current: str, **said: object) -> ObjectEntry:
    """A version of `k`, in a folder of versions that points at `current`."""
    place.put(f"k{s3.VERSIONS}/{s3.VERSION_FILE}{VERSION}", **said)  # type: ignore[arg-type]
    live = place.filer.entries[f"/buckets/b/k{s3.VERSIONS}/{s3.VERSION_FILE}{VERSION}"]
    place.filer.put(f"/buckets/b/k{s3.VERSIONS}", is_directory=True, extended={s3.LATEST_FILE: current.encode()})
    return msgspec.structs.replace(object_of("b", "k", live, 0), version_id=VERSION, latest=False)


async def test_a_condition_that_keeps_failing_is_given_up() -> None:
    """The filer refuses although nothing changed that we can see: a few tries, then the entry stays."""
    place = Place()
    judged = place.put()
    tried: list[Transaction] = []

    async def refuse(transaction: Transaction) -> None:
        tried.append(transaction)
        raise Stale("refused")

    place.filer.transact = refuse  # type: ignore[method-assign]
    with pytest.raises(Stale):
        await place.delete(judged)

    assert ATTEMPTS == len(tried)


async def test_a_folder_object_that_holds_others_stays() -> None:
    """It is an object of its own only while it is empty."""
    place = Place()
    place.filer.put("/buckets/b/f", is_directory=True)
    judged = msgspec.structs.replace(object_of("b", "f", place.filer.entries["/buckets/b/f"], 0), key="f/")
    place.put("f/inside")

    with pytest.raises(NotFound, match="holds other objects"):
        await place.delete(judged)
    assert [] == place.filer.done

    del place.filer.entries["/buckets/b/f/inside"]
    await place.delete(judged)
    assert [True] == place.deleted_data()


@pytest.mark.parametrize("versioning", ["", "Suspended"])
async def test_what_is_under_object_lock_stays(versioning: str) -> None:
    """Its bytes would go: at once, or replaced by the null marker."""
    place = Place()

    with pytest.raises(Denied):
        await place.delete(place.put(extended=LOCKED), Verb.CURRENT, versioning)
    assert [] == place.filer.done


async def test_a_locked_current_version_gets_its_marker() -> None:
    """As on AWS: a marker above it removes none of its bytes."""
    place = Place()
    judged = msgspec.structs.replace(
        version(place, current=f"{s3.VERSION_FILE}{VERSION}", extended=LOCKED), latest=True
    )

    await place.delete(judged, Verb.CURRENT, "Enabled")

    (done,) = place.filer.done
    assert [] == [change for change in done.mutations if change.kind is MutationKind.DELETE]


async def test_a_version_that_became_current_again_stays_and_so_does_a_locked_one() -> None:
    """The pointer is read just before: bytes that readers see now are not removed as an old version."""
    place = Place()
    judged = version(place, current=f"{s3.VERSION_FILE}{VERSION}")
    with pytest.raises(Stale, match="became the current one"):
        await place.delete(judged, Verb.VERSION, "Enabled")

    with pytest.raises(Denied):
        await place.delete(version(place, current="v_other", extended=LOCKED), Verb.VERSION, "Enabled")
    assert [] == place.filer.done

    await place.delete(version(place, current="v_other"), Verb.VERSION, "Enabled")
    assert 1 == len(place.filer.done)


async def test_a_marker_goes_only_while_it_is_all_that_is_left() -> None:
    """Another version, or an object at the key, keeps it; the condition is the pointer that was read."""
    place = Place()
    marker = msgspec.structs.replace(version(place, current=f"{s3.VERSION_FILE}{VERSION}"), marker=True, latest=True)

    place.put(f"k{s3.VERSIONS}/v_other")
    with pytest.raises(Stale, match="other versions"):
        await place.delete(marker, Verb.DELETE_MARKER, "Enabled")
    del place.filer.entries[f"/buckets/b/k{s3.VERSIONS}/v_other"]

    place.put("k")
    with pytest.raises(Stale, match="beside its marker"):
        await place.delete(marker, Verb.DELETE_MARKER, "Enabled")
    del place.filer.entries["/buckets/b/k"]
    assert [] == place.filer.done

    await place.delete(marker, Verb.DELETE_MARKER, "Enabled")
    (done,) = place.filer.done
    assert (f"/buckets/b/k{s3.VERSIONS}", [ConditionKind.ENTRY_EQUAL]) == (
        done.condition_path,
        [clause.kind for clause in done.clauses],
    )


async def test_of_remembered_entries_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was judged last is deleted without a look; what was forgotten is looked up again, and goes all the same."""
    monkeypatch.setattr(deletes, "SEEN_MAX", 2)
    place = Place()
    judged = {name: place.put(name, ttl_s=0) for name in ("a", "b", "c")}
    for name in judged:
        place.deleter.remember("b", name, place.filer.entries[f"/buckets/b/{name}"])
    for name in ("c", "b", "a"):
        await place.delete(judged[name])

    assert ["/buckets/b/a"] == place.filer.looks
    assert 3 == len(place.filer.done)


# Uploads.


def upload(place: Place, name: str = "u1") -> ObjectEntry:
    path = f"{s3.uploads_path('b')}/{name}"
    return upload_of("b", place.filer.put(path, is_directory=True, extended={s3.UPLOAD_KEY: b"k"}))


async def test_an_open_upload_goes_with_its_bytes() -> None:
    """Nothing was completed from it: an object of another upload at its key does not count."""
    place = Place()
    place.put("k", extended={s3.UPLOAD_ID: b"u0"})

    assert Removal.WHOLE is await place.delete(upload(place), Verb.ABORT_MPU)
    assert [True] == place.deleted_data()


@pytest.mark.parametrize("name", ["k", f"k{s3.VERSIONS}/{s3.VERSION_FILE}{VERSION}"])
async def test_an_upload_whose_object_was_completed_loses_its_metadata_only(name: str) -> None:
    """The object at the key, or any of its versions, uses the chunks of the parts."""
    place = Place()
    place.filer.put(f"/buckets/b/k{s3.VERSIONS}", is_directory=True)
    place.put(name, extended={s3.UPLOAD_ID: b"u1"})

    assert Removal.COMPLETED is await place.delete(upload(place), Verb.ABORT_MPU)
    assert [False] == place.deleted_data()


async def test_an_upload_whose_object_is_a_version_beside_a_null_version_keeps_its_bytes() -> None:
    """The object at the key is older than versioning and of another upload: the versions are looked at all the same."""
    place = Place()
    place.filer.put(f"/buckets/b/k{s3.VERSIONS}", is_directory=True)
    place.put("k", extended={s3.UPLOAD_ID: b"u0"})
    place.put(f"k{s3.VERSIONS}/{s3.VERSION_FILE}{VERSION}", extended={s3.UPLOAD_ID: b"u1"})

    assert Removal.COMPLETED is await place.delete(upload(place), Verb.ABORT_MPU, "Enabled")
    assert [False] == place.deleted_data()


async def test_an_upload_whose_object_is_one_of_many_versions_keeps_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page of the versions is looked through, not the first alone."""
    monkeypatch.setattr(deletes, "PAGE", 2)
    place = Place()
    place.filer.put(f"/buckets/b/k{s3.VERSIONS}", is_directory=True)
    for number in range(5):
        upload_id = b"u1" if number == 4 else b"u0"
        place.put(f"k{s3.VERSIONS}/{s3.VERSION_FILE}{number:032d}", extended={s3.UPLOAD_ID: upload_id})

    assert Removal.COMPLETED is await place.delete(upload(place), Verb.ABORT_MPU, "Enabled")
    assert [False] == place.deleted_data()


@pytest.mark.parametrize("versioning", ["", "Enabled", "Suspended"])
async def test_an_upload_that_is_completed_while_it_is_aborted_keeps_its_bytes(versioning: str) -> None:
    """The condition is what completing writes, so the abort is refused, read again, and leaves the bytes."""
    place = Place()
    judged = upload(place)
    transact = place.filer.transact

    async def late(transaction: Transaction) -> None:
        if versioning == "Enabled":
            place.filer.put(f"/buckets/b/k{s3.VERSIONS}", is_directory=True, extended={s3.LATEST_ID: VERSION.encode()})
            place.put(f"k{s3.VERSIONS}/{s3.VERSION_FILE}{VERSION}", extended={s3.UPLOAD_ID: b"u1"})
        else:
            place.put("k", extended={s3.UPLOAD_ID: b"u1"})
        place.filer.transact = transact  # type: ignore[method-assign]
        await transact(transaction)

    place.filer.transact = late  # type: ignore[method-assign]

    assert Removal.COMPLETED is await place.delete(judged, Verb.ABORT_MPU, versioning)
    assert [False] == place.deleted_data()

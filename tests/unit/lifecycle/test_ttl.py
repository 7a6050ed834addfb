"""Bytes on volumes that live for a time only are left to them; all others are deleted with their entry."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.core.errors import Corrupt, Stale
from lakebed.filer import s3
from lakebed.filer.model import ConditionKind
from lakebed.lifecycle.memory import MemoryLake
from lakebed.lifecycle.model import ObjectEntry as Judged
from lakebed.lifecycle.model import Verb
from lakebed.lifecycle.seams import Removal
from lakebed.lifecycle.seaweed.deletes import ROUTES_FRESH_S, is_routed, read_routes
from lakebed.lifecycle.seaweed.entries import object_of
from support.lifecycle_filer import CONF, ROUTED, Place
from support.lifecycle_harness import Harness
from support.lifecycle_makers import rule


async def test_the_entry_alone_goes_in_the_same_conditional_step() -> None:
    """One transaction, whose condition is the whole entry, its time included, and whose delete leaves the bytes."""
    place = Place()

    assert Removal.METADATA_ONLY is await place.delete(place.put())

    (done,) = place.filer.done
    assert [ConditionKind.ENTRY_EQUAL] == [clause.kind for clause in done.clauses]
    assert [False] == place.deleted_data()


@pytest.mark.parametrize(
    ("conf", "ttl_s", "chunks"),
    [
        (ROUTED, 0, 1),
        (ROUTED, 60, 0),
        (ROUTED.replace(b"/b/", b"/c/"), 60, 1),
        (ROUTED.replace(b"60d", b""), 60, 1),
        (ROUTED.replace(b"60d", b"0d"), 60, 1),
        (b"", 60, 1),
        (b"{", 60, 1),
        (b'{"locations": [{"ttl": 7}]}', 60, 1),
    ],
)
async def test_in_doubt_the_bytes_are_deleted(conf: bytes, ttl_s: int, chunks: int) -> None:
    """No time on the entry, no bytes, no route, a route without a time, or routes that cannot be understood."""
    place = Place(conf)

    assert Removal.WHOLE is await place.delete(place.put(ttl_s=ttl_s, chunks=chunks))
    assert [True] == place.deleted_data()


async def test_an_entry_that_was_stamped_later_goes_with_its_bytes() -> None:
    """They are on an ordinary volume, which nobody drops: left there, they would stay for good."""
    place = Place()

    assert Removal.WHOLE is await place.delete(place.put(extended={s3.BACK_STAMPED: b"true"}))
    assert [True] == place.deleted_data()


async def test_an_entry_that_lost_its_time_meanwhile_goes_with_its_bytes() -> None:
    """The condition holds the time too: it fails, the entry is looked at anew, and no byte is left behind for good."""
    place = Place()
    judged = place.put()
    place.deleter.remember("b", "k", place.filer.entries["/buckets/b/k"])
    place.put(ttl_s=0)

    assert Removal.WHOLE is await place.delete(judged)
    assert [True] == place.deleted_data()


async def test_an_object_that_was_overwritten_since_it_was_judged_stays() -> None:
    """Judged, overwritten and looked at again, for another action: the delete of the first one must not take it."""
    place = Place()
    judged = place.put()
    place.deleter.remember("b", "k", place.filer.entries["/buckets/b/k"])
    newer = place.put(chunks=2)
    place.deleter.remember("b", "k", place.filer.entries["/buckets/b/k"])

    with pytest.raises(Stale):
        await place.delete(judged)
    assert [] == place.filer.done

    place.deleter.remember("b", "k", place.filer.entries["/buckets/b/k"])
    assert Removal.METADATA_ONLY is await place.delete(newer)


async def test_a_noncurrent_version_and_a_suspended_null_version_are_left_to_their_volume_too() -> None:
    """Wherever bytes would be deleted; a marker deletes none."""
    place = Place()
    file = f"{s3.VERSION_FILE}{'a' * 32}"
    place.put(f"k{s3.VERSIONS}/{file}")
    live = place.filer.entries[f"/buckets/b/k{s3.VERSIONS}/{file}"]
    place.filer.put(f"/buckets/b/k{s3.VERSIONS}", is_directory=True, extended={s3.LATEST_FILE: b"v_other"})
    version = msgspec.structs.replace(object_of("b", "k", live, 0), version_id="a" * 32, latest=False)

    assert Removal.METADATA_ONLY is await place.delete(version, Verb.VERSION, "Enabled")
    assert Removal.METADATA_ONLY is await place.delete(place.put("null"), Verb.CURRENT, "Suspended")
    assert Removal.WHOLE is await place.delete(place.put("marked"), Verb.CURRENT, "Enabled")
    assert [False, False] == place.deleted_data()


async def test_routes_are_read_once_in_a_while_and_only_for_entries_with_a_time() -> None:
    """A bucket without TTLs pays nothing; another one look in some seconds."""
    place = Place()
    for number in range(5):
        await place.delete(place.put(f"plain{number}", ttl_s=0))
    before = place.filer.looks.count(CONF)
    for number in range(5):
        await place.delete(place.put(f"timed{number}"))
    during = place.filer.looks.count(CONF)
    del place.filer.entries[CONF]
    await place.clock.advance(ROUTES_FRESH_S)

    assert Removal.WHOLE is await place.delete(place.put("late"))
    assert (0, 1, 2) == (before, during, place.filer.looks.count(CONF))


def test_of_the_routes_that_match_the_longest_with_a_time_counts() -> None:
    """As the filer itself merges them; both spellings of a prefix are read."""
    routes = read_routes(
        b'{"locations": [{"location_prefix": "/buckets/b/keep/", "ttl": "0"},'
        b'{"locationPrefix": "/buckets/", "ttl": "7"},'
        b'{"locationPrefix": "/buckets/b/keep/not/", "collection": "x"}]}'
    )

    assert is_routed(routes, "/buckets/b/k")
    assert not is_routed(routes, "/buckets/b/keep/not/k")
    assert not is_routed(routes, "/elsewhere/k")
    with pytest.raises(Corrupt):
        read_routes(b"\xff")


async def test_what_was_left_to_its_volume_is_counted_and_told_in_the_ledger() -> None:
    """An outcome like any other delete, with the reason beside it and a counter of its own."""
    world = Harness()

    class Timed(MemoryLake):
        async def delete(self, entry: Judged, verb: Verb) -> Removal:
            await super().delete(entry, verb)
            return Removal.METADATA_ONLY if entry.key == "timed" else Removal.WHOLE

    world.lake = Timed(world.clock)
    world.worker = world.new_worker(world.lake)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    for key in ("timed", "plain"):
        world.lake.write("b", key)
    await world.run_round(1.01)

    told = {row.key: (row.outcome, row.reason) for row in await world.ledger() if row.outcome}
    assert "DELETED" == told["timed"][0] and told["timed"][1].startswith("metadata only")
    assert ("DELETED", "") == told["plain"]
    (name,) = (await world.state()).actions
    assert 1.0 == world.metrics.value("lakebed_lifecycle_metadata_only_total", bucket="b", action=name)
    assert 2.0 == world.metrics.value("lakebed_lifecycle_expired_total", bucket="b", action=name)

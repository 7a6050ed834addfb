"""A store below a prefix: no key with the prefix in it ever comes out, and nothing beside it is seen."""

from __future__ import annotations

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import AlreadyExists, Stale
from lakebed.store.connect import PrefixedStore
from lakebed.store.memory import MemoryStore


async def test_every_answer_names_the_key_that_was_asked_for(manual_clock: ManualClock) -> None:
    """Also what a conflict carries: its reader looks the object up again by that key."""
    whole = MemoryStore(clock=manual_clock)
    store = PrefixedStore(whole, "a/b")
    made = await store.create("x/1", b"one")

    with pytest.raises(AlreadyExists) as exists:
        await store.create("x/1", b"two")
    with pytest.raises(Stale) as stale:
        await store.replace("x/1", b"two", "another etag")
    with pytest.raises(Stale) as gone:
        await store.replace("x/2", b"two", made.etag)

    assert ("x/1", "x/1", None) == (exists.value.current.key, stale.value.current.key, gone.value.current)
    assert {"x/1"} == {made.key, (await store.get("x/1")).key, (await store.head("x/1")).key}
    assert b"one" == (await whole.get("a/b/x/1")).data


async def test_a_listing_resumes_behind_a_key_that_it_gave(manual_clock: ManualClock) -> None:
    """Nothing comes twice, and nothing of another prefix."""
    whole = MemoryStore(clock=manual_clock)
    store, other = PrefixedStore(whole, "m"), PrefixedStore(whole, "n")
    for name in ("x/1", "x/2", "x/3"):
        await store.create(name, b".")
        await other.create(name, b".")

    every = [info.key async for info in store.list("x/")]
    rest = [info.key async for info in store.list("x/", after="x/2")]
    await store.delete("x/1")

    assert (["x/1", "x/2", "x/3"], ["x/3"]) == (every, rest)
    assert ["x"] == await store.children("")
    assert 3 == len([info async for info in other.list("x/")])

"""The pure core of the bucket backend against a plain dictionary, and its limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakebed.core.errors import Corrupt, Invalid, OutcomeUnknown
from lakebed.meta.bucket import bins, decisions
from lakebed.meta.bucket.bins import BinPut
from lakebed.meta.bucket.decisions import HeadChange, HeadFull, HeadWriter, LoadedState, NotLoaded, Replan, SpillPlan
from lakebed.meta.bucket.model import (
    HOT_BYTES_HARD_MAX,
    WRITERS_MAX,
    Head,
    Leaf,
    LeafRef,
    LeafRow,
    decode_head,
    decode_leaf,
    encode_leaf,
    group_name,
)

KEYS = st.integers(0, 40).map(lambda at: f"k/{at:03d}")
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, KEYS),
        st.tuples(st.just("delete"), KEYS, KEYS),
        st.tuples(st.just("delete_range"), KEYS, KEYS),
        st.tuples(st.sampled_from(["spill", "plan", "apply"]), KEYS, KEYS),
    ),
    max_size=60,
)


@pytest.fixture(autouse=True, scope="module")
def small_heads() -> object:
    """Spills after a handful of entries, merges after a handful of leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions, "HOT_BYTES_MAX", 200)
        patch.setattr(decisions, "HOT_BYTES_KEPT", 60)
        patch.setattr(decisions, "LEAF_BYTES", 250)
        patch.setattr(decisions, "LEAF_MERGED_BYTES_MAX", 1500)
        patch.setattr(decisions, "REFS_MAX", 17)
        yield


class Shard:
    """A head with all its leaves available."""

    def __init__(self) -> None:
        self.head = Head()
        self.leaves: dict[str, Leaf] = {}
        self.ids = itertools.count()

    @property
    def known(self) -> LoadedState:
        return LoadedState(self.leaves, {})

    def spill(self) -> SpillPlan | None:
        plan = self.plan()
        if plan is not None:
            self.head = decisions.apply_spill(self.head, plan)
        return plan

    def plan(self) -> SpillPlan | None:
        """A spill whose leaves are stored, and that is not carried out yet."""
        plan = decisions.plan_spill(self.head, self.known, (), lambda: f"leaf-{next(self.ids)}")
        if plan is not None:
            self.leaves |= {id: decode_leaf(encode_leaf(leaf.rows), id) for id, leaf in plan.leaves.items()}
        return plan

    def put(self, key: str, value: bytes) -> None:
        self.head, _ = bins.put_all(self.head, [BinPut(key, value)], self.known)

    def filled(self, count: int) -> Shard:
        for at in range(count):
            self.put(f"k/{at:03d}", b"%d" % at)
            if decisions.spill_due(self.head):
                self.spill()
        return self


@settings(max_examples=120, deadline=None)
@given(OPS, KEYS, KEYS, st.integers(1, 50))
def test_a_group_answers_as_a_sorted_dictionary_would(
    ops: list[tuple[str, str, str]], start: str, end: str, limit: int
) -> None:
    """Whatever is put, deleted and spilled in whatever order, every read agrees with a model.

    Spills of several processes overlap: each plans on a head that others change before it is carried out.
    """
    shard, model, planned = Shard(), dict[str, bytes](), list[SpillPlan]()

    for at, (verb, one, other) in enumerate(ops):
        if verb == "put":
            shard.put(one, b"%d" % at)
            model[one] = b"%d" % at
        elif verb == "delete":
            shard.head, _ = decisions.delete(shard.head, one, None, shard.known)
            model.pop(one, None)
        elif verb == "delete_range":
            shard.head, _ = decisions.delete_range(shard.head, one, other, shard.known)
            model = {key: value for key, value in model.items() if not one <= key < other}
        elif verb == "plan":
            planned += [plan] if (plan := shard.plan()) is not None else []
        elif verb == "apply" and planned:
            with suppress(Replan):
                shard.head = decisions.apply_spill(shard.head, planned.pop(0))
        else:
            shard.spill()

    inside = sorted(key for key in model if start <= key < end)[:limit]
    found = decisions.scan(shard.head, shard.known, start=start, end=end, limit=limit)
    assert [(key, model[key]) for key in inside] == [(entry.key, entry.value) for entry in found]
    for key in (start, end):
        entry = decisions.find(shard.head, key, shard.known)
        assert model.get(key) == (entry.value if entry else None)
    shown = [row.key for ref in shard.head.refs for row in shard.leaves[ref.id].visible(ref)]
    assert sorted(model) == sorted([*shown, *shard.head.hot])
    assert shown == sorted(shown)


def test_a_ceiling_needs_one_leaf() -> None:
    """However many leaves there are, the lowest entry at or above a key is in the head or in one of them."""
    shard = Shard().filled(200)

    with pytest.raises(NotLoaded) as need:
        decisions.scan(shard.head, LoadedState({}, {}), start="k/011", end="k0", limit=1)

    assert len(shard.head.refs) > 3
    assert len(need.value.leaves) == 1


def test_deleting_what_leaves_hold_needs_only_the_leaves_at_the_edges() -> None:
    """Compaction drops whole leaves unread."""
    shard = Shard().filled(200)

    with pytest.raises(NotLoaded) as need:
        decisions.delete_range(shard.head, "k/011", "k/150", LoadedState({}, {}))

    assert len(need.value.leaves) <= 2


def test_entries_that_change_all_the_time_stay_in_the_head() -> None:
    """A spill takes what has not changed for longest."""
    shard = Shard()
    for at in range(100):
        shard.put(f"index/{at:03d}", b"x")
        shard.put("meta/control", b"%d" % at)
        if decisions.spill_due(shard.head):
            shard.spill()

    assert "meta/control" in shard.head.hot
    assert shard.head.refs


def test_a_spill_keeps_what_changed_since_it_was_planned() -> None:
    """An entry overwritten or deleted between plan and apply is not brought back by the leaf that holds it."""
    shard = Shard()
    for at in range(8):
        shard.put(f"k/{at}", b"old")
    plan = decisions.plan_spill(shard.head, shard.known, (), lambda: f"leaf-{next(shard.ids)}")
    assert plan is not None
    shard.leaves |= plan.leaves
    overwritten, deleted, *_ = sorted(plan.moved)

    shard.put(overwritten, b"new")
    shard.head, _ = decisions.delete(shard.head, deleted, None, shard.known)
    shard.head = decisions.apply_spill(shard.head, plan)

    found = decisions.find(shard.head, overwritten, shard.known)
    assert found is not None
    assert found.value == b"new"
    assert decisions.find(shard.head, deleted, shard.known) is None
    assert len(decisions.scan(shard.head, shard.known, start="k/", end="k0", limit=100)) == 7


def test_a_leaf_that_would_lie_across_another_is_not_referred_to() -> None:
    """Another process has spilled a key from between those of the plan: the plan is made again."""
    shard = Shard()
    for at in range(8):
        shard.put(f"k/{at}", b"old")
    plan = shard.plan()
    assert plan is not None and {"k/0", "k/1"} <= plan.moved.keys()
    shard.leaves["other"] = other = Leaf([LeafRow("k/0+", b"x", 99)])
    beside = Head(version=99, hot=shard.head.hot, refs=(other.whole("other"),))

    with pytest.raises(Replan):
        decisions.apply_spill(beside, plan)


def test_a_spill_planned_before_a_sweep_is_refused() -> None:
    """A leaf that a sweep found unreferenced can never be referenced later."""
    shard = Shard()
    for at in range(8):
        shard.put(f"k/{at}", b"old")
    plan = decisions.plan_spill(shard.head, shard.known, (), lambda: "leaf")
    assert plan is not None

    fenced = Head(version=shard.head.version, fence=1, hot=shard.head.hot)

    with pytest.raises(Replan):
        decisions.apply_spill(fenced, plan)


def test_a_full_head_takes_no_more_before_it_is_spilled() -> None:
    """The hard limit of the head is kept by refusing, not by growing."""
    head, value = Head(), bytes(512 * 1024)

    with pytest.raises(HeadFull):
        for at in range(10):
            head, _ = bins.put_all(head, [BinPut(f"k/{at}", value)], LoadedState({}, {}))

    assert sum(len(hot.value) for hot in head.hot.values()) < HOT_BYTES_HARD_MAX


def test_a_change_that_was_done_and_overwritten_is_not_done_again() -> None:
    """A conflict answered to a write that is in the head gives that write's own answer."""
    change = HeadChange(HeadWriter("me")).deciding(lambda head: (Head(version=head.version + 1), head.version))
    done, first = change(Head())
    overwritten, _ = HeadChange(HeadWriter("you")).deciding(lambda head: (Head(version=head.version + 1), None))(done)

    again, second = change(overwritten)

    assert again is overwritten
    assert first == second


def test_changes_of_one_lost_write_are_all_decided_anew() -> None:
    """Two changes shared a write that lost its race. The second is not in the head because the first is again."""
    writer, nothing = HeadWriter("me"), LoadedState({}, {})

    def change(key: str) -> Callable[[Head], tuple[Head, Any]]:
        return HeadChange(writer).deciding(lambda head: bins.put_all(head, [BinPut(key, b"v")], nothing))

    first, second = change("k/1"), change("k/2")
    second(first(Head())[0])
    others = HeadChange(HeadWriter("other")).deciding(lambda head: bins.put_all(head, [BinPut("k/0", b"v")], nothing))
    stored, _ = others(Head())

    again, _ = second(first(stored)[0])

    assert {"k/0", "k/1", "k/2"} == set(again.hot)
    stored = msgspec.structs.replace(again)
    assert second(first(stored)[0])[0] is stored  # once they are stored, neither is made again


def test_a_change_that_was_not_done_is_decided_anew() -> None:
    """A conflict that others caused leads to a new decision on what is now."""
    change = HeadChange(HeadWriter("me")).deciding(lambda head: (Head(version=head.version + 1), head.version))
    change(Head())
    theirs, _ = HeadChange(HeadWriter("you")).deciding(lambda head: (Head(version=9), None))(Head())

    after, (_, result) = change(theirs)

    assert after.version == 10
    assert result == 9


def test_a_forgotten_writer_in_doubt_is_told_so() -> None:
    """When the head remembers only others, nobody can report whether the write was done."""
    change = HeadChange(HeadWriter("me")).deciding(lambda head: (Head(version=head.version + 1), None))
    change(Head())
    crowd = Head(writers={f"w{at}": 1 for at in range(WRITERS_MAX)})

    with pytest.raises(OutcomeUnknown):
        change(crowd)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema":"lakebed.meta.leaf.v2","entries":[["a","",1]]}',
        b'{"schema":"lakebed.meta.leaf.v1","entries":[]}',
        b'{"schema":"lakebed.meta.leaf.v1","entries":[["b","",1],["a","",2]]}',
        b'{"schema":"lakebed.meta.leaf.v1","entries":[["a","",1],["a","",2]]}',
        b'{"schema":"lakebed.meta.leaf.v1","entries":[["a","not base64",1]]}',
    ],
)
def test_a_leaf_that_is_not_one_is_corrupt(data: bytes) -> None:
    """Damaged leaves are named, never half read."""
    with pytest.raises(Corrupt):
        decode_leaf(data, "some/leaf.json")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 300), st.integers(0, 255))
def test_a_leaf_with_a_damaged_byte_is_read_as_a_leaf_or_refused(at: int, byte: int) -> None:
    """No damage raises anything but Corrupt."""
    data = bytearray(encode_leaf([LeafRow(f"k/{n}", b"v" * n, n) for n in range(9)]))
    data[at % len(data)] = byte

    try:
        leaf = decode_leaf(bytes(data), "some/leaf.json")
    except Corrupt:
        return

    assert leaf.keys == sorted(leaf.keys)


@pytest.mark.parametrize("data", [b"", b"{}x", b'{"schema":"lakebed.meta.head.v9"}', b'{"refs":[["a"]]}', b"null"])
def test_a_head_that_is_not_one_is_corrupt(data: bytes) -> None:
    """A head of another schema is refused, not guessed at."""
    with pytest.raises(Corrupt):
        decode_head(data, "some/head.json")


def test_groups_have_names_of_their_own() -> None:
    """Different partition keys never share a folder, whatever they are made of."""
    keys = ["", "=", "a:0", "a=3A0", "a/0", "a.0", "é:0", "A:0", ".", "..", "x" * 200, "x" * 201, "x" * 80]

    names = [group_name(key) for key in keys]

    assert len(keys) == len(set(names))
    assert all(name and "/" not in name and "." not in name and len(name) <= 200 for name in names)
    with pytest.raises(Invalid):
        group_name("x" * 513)


def test_a_reference_is_trimmed_on_both_sides_and_split_in_the_middle() -> None:
    """What is cut away is exactly the range, and counts and sizes stay right."""
    leaf = Leaf([LeafRow(f"k/{at}", b"v", at) for at in range(6)])
    ref = leaf.whole("L")

    assert (ref,) == leaf.without(ref, "k/9", "k/99")
    assert leaf.without(ref, "k/", "k0") == ()
    assert [part.first for part in leaf.without(ref, "", "k/2")] == ["k/2"]
    assert [(part.first, part.last, part.count) for part in leaf.without(ref, "k/2", "k/4")] == [
        ("k/0", "k/1", 2),
        ("k/4", "k/5", 2),
    ]
    assert ref.size_bytes == 6 * leaf.part("L", 0, 1)[0].size_bytes
    assert LeafRef("L", "k/0", "k/5", 6, ref.size_bytes) == ref

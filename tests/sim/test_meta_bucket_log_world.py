"""The log's own world, in which everything dies, with its coordination on the bucket instead of the memory twin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lakebed.log.simulation
from lakebed.meta.bucket import bins, decisions, model
from lakebed.meta.bucket.backend import BucketMeta, Layout
from lakebed.meta.bucket.decisions import LoadedState
from lakebed.meta.bucket.model import BinPaths, BucketPaths, Head, Leaf, decode_head, decode_leaf, entry_of, plain
from lakebed.meta.bucket.tree import ROOT
from lakebed.meta.model import MetaEntry
from lakebed.sim.commands import play
from lakebed.sim.world import Process
from lakebed.store.model import StoredObject
from support.seeds import seeds

SEEDS = range(12)


class StateInTheBucket:
    """What the world's watch queries the memory twin, read from the heads and leaves in the store."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.paths = layout, BucketPaths("meta") if layout == "groups" else BinPaths("meta")
        self.objects: dict[str, StoredObject] = {}
        self.leaves_read = self.splits = self.members = 0
        self._etags: dict[str, str] = {}
        self._entries: dict[str, MetaEntry] = {}
        self._changes = 0

    @property
    def entries(self) -> dict[str, MetaEntry]:
        objects = self.objects
        heads = {key: stored for key, stored in objects.items() if key.startswith(self.paths.heads)}
        etags = {key: stored.etag for key, stored in heads.items()}
        if etags != self._etags:
            self._etags, self._entries = etags, {}
            self._changes += 1
            for name, head in self._heads():
                self._entries |= {plain(each): entry_of(each, hot) for each, hot in head.hot.items()}
                for ref in head.refs:
                    rows = self._leaf(name, ref.id).visible(ref)
                    self._entries |= {plain(row.key): entry_of(row.key, row) for row in rows}
        return self._entries

    def _leaf(self, name: str, id: str) -> Leaf:
        self.leaves_read += 1
        key = self.paths.leaf(name, id)
        return decode_leaf(self.objects[key].data, key)

    def _heads(self) -> Iterator[tuple[str, Head]]:
        """All heads with entries: of groups, or of bins, also of those that were never written since their split."""
        if self.layout == "groups":
            for key, stored in self.objects.items():
                if key.startswith(self.paths.heads):
                    yield self.paths.group(key), decode_head(stored.data, key)
            return
        bins_left = [(ROOT, Head())]
        while bins_left:
            name, head = bins_left.pop()
            stored_bin = self.objects.get(self.paths.head(name))
            head = decode_head(stored_bin.data, name) if stored_bin is not None else head
            self.members = max(self.members, len(head.members))
            if head.split is None:
                yield name, head
                continue
            self.splits += 1
            known = LoadedState({ref.id: self._leaf(name, ref.id) for ref in head.refs}, {})
            bins_left.append((head.split.left, bins.half(head, known, left=True)))
            bins_left.append((head.split.right, bins.half(head, known, left=False)))

    @property
    def version(self) -> int:
        assert self.entries is not None
        return self._changes

    @property
    def keys(self) -> list[str]:
        return sorted(self.entries)

    def between(self, start: str, end: str) -> list[str]:
        return [key for key in self.keys if start <= key < end]


@pytest.mark.parametrize("layout", ["groups", "bins"])
@pytest.mark.parametrize("seed", seeds(SEEDS, quick=range(3)))
def test_the_log_keeps_its_promises_on_the_bucket_backend(
    seed: int, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost answers, late writes and deaths below the meta seam instead of above it: the log's invariants all hold."""
    states: list[StateInTheBucket] = []

    def state() -> StateInTheBucket:
        states.append(StateInTheBucket(layout))
        return states[-1]

    def connect(process: Process, state: StateInTheBucket) -> BucketMeta:
        state.objects = process.world.bucket.objects
        return BucketMeta(process.context(), "meta", layout=layout, horizon_s=5.0)

    monkeypatch.setattr(lakebed.log.simulation, "MemoryState", state)
    monkeypatch.setattr(lakebed.log.simulation, "FaultyMeta", connect)
    monkeypatch.setattr(decisions, "HOT_BYTES_MAX", 2000)
    monkeypatch.setattr(decisions, "HOT_BYTES_KEPT", 800)
    monkeypatch.setattr(model, "BIN_SCALE", 1)
    monkeypatch.setattr(bins, "MEMBERS_MAX", 1)

    play("log", seed)

    assert states
    assert states[0].version > 10
    assert seed or states[0].leaves_read
    assert states[0].splits or states[0].members < 2

"""The log's own world, in which everything dies, with its coordination on the bucket instead of the memory twin."""

from __future__ import annotations

import pytest

import lakebed.log.simulation
from lakebed.meta.bucket import decisions
from lakebed.meta.bucket.backend import BucketMeta
from lakebed.meta.bucket.model import BucketPaths, decode_head, decode_leaf, entry_of
from lakebed.meta.model import MetaEntry
from lakebed.sim.commands import play
from lakebed.sim.world import Process
from lakebed.store.model import StoredObject

SEEDS = range(12)
PATHS = BucketPaths("meta")


class StateInTheBucket:
    """What the world's watch queries the memory twin, read from the heads and leaves in the store."""

    def __init__(self) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.leaves_read = 0
        self._etags: dict[str, str] = {}
        self._entries: dict[str, MetaEntry] = {}
        self._changes = 0

    @property
    def entries(self) -> dict[str, MetaEntry]:
        objects = self.objects
        heads = {key: stored for key, stored in objects.items() if key.startswith(PATHS.heads)}
        etags = {key: stored.etag for key, stored in heads.items()}
        if etags != self._etags:
            self._etags, self._entries = etags, {}
            self._changes += 1
            for key, stored in heads.items():
                head = decode_head(stored.data, key)
                self._entries |= {name: entry_of(name, hot) for name, hot in head.hot.items()}
                for ref in head.refs:
                    self.leaves_read += 1
                    leaf = PATHS.leaf(PATHS.group(key), ref.id)
                    rows = decode_leaf(objects[leaf].data, leaf).visible(ref)
                    self._entries |= {row.key: entry_of(row.key, row) for row in rows}
        return self._entries

    @property
    def version(self) -> int:
        assert self.entries is not None
        return self._changes

    @property
    def keys(self) -> list[str]:
        return sorted(self.entries)

    def between(self, start: str, end: str) -> list[str]:
        return [key for key in self.keys if start <= key < end]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_log_keeps_its_promises_on_the_bucket_backend(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost answers, late writes and deaths below the meta seam instead of above it: the log's invariants all hold."""
    states: list[StateInTheBucket] = []

    def state() -> StateInTheBucket:
        states.append(StateInTheBucket())
        return states[-1]

    def connect(process: Process, state: StateInTheBucket) -> BucketMeta:
        state.objects = process.world.bucket.objects
        return BucketMeta(process.context(), "meta", horizon_s=5.0)

    monkeypatch.setattr(lakebed.log.simulation, "MemoryState", state)
    monkeypatch.setattr(lakebed.log.simulation, "FaultyMeta", connect)
    monkeypatch.setattr(decisions, "HOT_BYTES_MAX", 2000)
    monkeypatch.setattr(decisions, "HOT_BYTES_KEPT", 800)

    play("log", seed)

    assert states
    assert states[0].version > 10
    assert seed or states[0].leaves_read

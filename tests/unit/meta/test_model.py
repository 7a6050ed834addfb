"""Every embedded backend against a plain dictionary: two clients, conditions, ranges, and sessions that end.

The steps come from a seed. Sessions send no heartbeats by themselves, so they end when time passes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import AlreadyExists, Fenced, LakebedError, NotFound, Stale
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.meta.bucket import decisions
from lakebed.meta.bucket.backend import BucketMeta
from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.meta.model import ABSENT, MetaEntry
from lakebed.meta.protocol import Meta
from lakebed.meta.sqlite.backend import SqliteMeta
from lakebed.store.memory import MemoryStore
from lakebed.store.runtime import StoreRuntime

GROUP = "orders:0"
SESSION_S = 10.0
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 60))]


class Held(NamedTuple):
    value: bytes
    version: str
    session: str = ""


class Model:
    """What a meta store holds, as its protocol says."""

    def __init__(self) -> None:
        self.entries: dict[str, Held] = {}
        self.alive: set[str] = set()
        self.given: set[tuple[str, str]] = set()

    def end(self, session: str) -> None:
        self.alive.discard(session)
        self.entries = {key: held for key, held in self.entries.items() if held.session != session}

    def refusal(self, key: str, expected: str | None, session: str = "") -> type[LakebedError] | None:
        if session and session not in self.alive:
            return Fenced
        if expected == ABSENT:
            return AlreadyExists if key in self.entries else None
        if expected is not None and (key not in self.entries or self.entries[key].version != expected):
            return Stale
        return None

    def put(self, made: MetaEntry, session: str) -> None:
        assert (made.key, made.version) not in self.given, "a version was given out twice"
        self.given.add((made.key, made.version))
        self.entries[made.key] = Held(made.value, made.version, session)

    def between(self, start: str, end: str) -> list[tuple[str, bytes, str]]:
        return [(key, held.value, held.version) for key, held in sorted(self.entries.items()) if start <= key < end]


def clients(backend: str, folder: Path, clock: ManualClock) -> list[Meta]:
    if backend == "memory":
        state = MemoryState()
        return [MemoryMeta(Runtime(clock, Ids.seeded(n), Metrics()), state) for n in range(2)]
    if backend == "sqlite":
        return [
            SqliteMeta(Runtime(clock, Ids.seeded(n), Metrics()), folder / "meta.sqlite", sync="normal")
            for n in range(2)
        ]
    store = MemoryStore(clock=clock)
    return [BucketMeta(StoreRuntime(clock, Ids.seeded(n), Metrics(), store), "meta") for n in range(2)]


class Steps:
    def __init__(self, metas: list[Meta], clock: ManualClock, seed: int) -> None:
        self.metas, self.clock, self.model = metas, clock, Model()
        self.sessions: list[Any] = []
        self._draw = Ids.seeded(f"steps-{seed}")

    def one_of(self, *choices: Any) -> Any:
        return choices[int(self._draw.uniform(0, len(choices)))]

    def key(self) -> str:
        return f"k/{int(self._draw.uniform(0, 30)):02d}"

    async def step(self) -> None:
        steps: list[Callable[[], Awaitable[None]]] = [self.put] * 8 + [self.put_under_a_session] * 2
        steps += [self.delete] * 2 + [self.delete_range, self.open, self.close, self.pass_time, self.read] * 1
        await self.one_of(*steps)()

    def expected(self, key: str) -> str | None:
        """The version that is there, one that was, one of another key, none, or any."""
        held = [held.version for held in self.model.entries.values()]
        was = [version for of, version in self.model.given if of == key]
        now = self.model.entries.get(key)
        return self.one_of(None, ABSENT, now.version if now else ABSENT, *held[:1], *was[:1])

    async def refused_or(self, refusal: type[LakebedError] | None, call: Awaitable[Any]) -> Any:
        if refusal is None:
            return await call
        with pytest.raises(refusal) as caught:
            await call
        return caught.value

    async def put(self, session: Any = None) -> None:
        key, value = self.key(), b"%d" % len(self.model.given) * self.one_of(1, 20)
        expected, id = self.expected(key), session.id if session is not None else ""
        refusal = self.model.refusal(key, expected, id)
        made = await self.refused_or(
            refusal,
            self.one_of(*self.metas).put(key, value, expected=expected, session=session, partition_key=GROUP),
        )
        if refusal is None:
            self.model.put(made, id)
            assert (key, value) == (made.key, made.value)
        elif refusal is not Fenced:
            there = self.model.entries.get(key)
            assert (there.value, there.version) == (made.current.value, made.current.version) if there else True

    async def put_under_a_session(self) -> None:
        if self.sessions:
            await self.put(self.one_of(*self.sessions))

    async def delete(self) -> None:
        key = self.key()
        expected = self.expected(key) or None  # a delete has no use for ABSENT
        refusal = self.model.refusal(key, expected)
        await self.refused_or(refusal, self.one_of(*self.metas).delete(key, expected=expected, partition_key=GROUP))
        if refusal is None:
            self.model.entries.pop(key, None)

    async def delete_range(self) -> None:
        start, end = sorted((self.key(), self.key()))
        await self.one_of(*self.metas).delete_range(start, end, partition_key=GROUP)
        for key, _, _ in self.model.between(start, end):
            del self.model.entries[key]

    async def open(self) -> None:
        session = await self.one_of(*self.metas).open_session(timeout_s=SESSION_S)
        session._beating.cancel()
        self.sessions.append(session)
        self.model.alive.add(session.id)

    async def close(self) -> None:
        if self.sessions:
            session = self.sessions.pop(0)
            await session.close()
            self.model.end(session.id)

    async def pass_time(self) -> None:
        """Long enough for every session to end by the clock of any process, or too short for any."""
        if self.one_of(True, False):
            await self.clock.advance(2 * SESSION_S)
            for session in list(self.model.alive):
                self.model.end(session)

    async def read(self) -> None:
        start, end, limit = self.key(), self.key(), self.one_of(1, 2, 7, 100)
        everywhere = self.one_of({}, {"partition_key": GROUP})
        for meta in self.metas:
            found = await meta.range(start, end, limit=limit, **everywhere)
            assert self.model.between(start, end)[:limit] == [(each.key, each.value, each.version) for each in found]
            above = await meta.ceiling(start, prefix="k/", partition_key=GROUP)
            assert self.model.between(start, "k0")[:1] == ([tuple(_plain(above))] if above is not None else [])
            held = self.model.entries.get(start)
            got = await self.refused_or(None if held else NotFound, meta.get(start, partition_key=GROUP))
            assert held is None or held[:2] == (got.value, got.version)


def _plain(entry: MetaEntry) -> tuple[str, bytes, str]:
    return entry.key, entry.value, entry.version


@pytest.mark.parametrize("backend", ["memory", "sqlite", "bucket"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_backend_answers_as_a_dictionary_would(
    backend: str, seed: int, tmp_path: Path, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call sees what every client did before it, no version is given out twice, and a session's entries end with
    it."""
    for name, size in (("HOT_BYTES_MAX", 400), ("HOT_BYTES_KEPT", 150), ("LEAF_BYTES", 300)):
        monkeypatch.setattr(decisions, name, size)
    steps = Steps(clients(backend, tmp_path, manual_clock), manual_clock, seed)

    for _ in range(120):
        await steps.step()
    for _ in range(8):
        await steps.read()

    for meta in steps.metas:
        await meta.close()

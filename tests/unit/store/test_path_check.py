"""The path check: what uses against a path, what does not, and what a guarded store does about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Invalid, OutcomeUnknown, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.store.fast.puts import FAST_BYTES_MAX
from lakebed.store.guarded import ConditionsIgnored, GuardedStore, unguarded
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from lakebed.store.path_check import check_path
from lakebed.store.prover import SCRATCH, StoreProof
from support.runtimes import runtime_of


class Path(MemoryStore):
    """A bucket behind something that may drop a condition, or lose answers, for bodies of some sizes."""

    drops: frozenset[str] = frozenset()
    least_bytes = 0
    most_bytes = 1 << 30
    silent_from = 1 << 30  # bodies of this size and larger get no answer
    lost = 0
    creates = 0

    def _dropped(self, header: str, data: bytes) -> bool:
        return header in self.drops and self.least_bytes <= len(data) <= self.most_bytes

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        self.creates += 1
        if self.lost or len(data) >= self.silent_from:
            self.lost = max(0, self.lost - 1)
            raise OutcomeUnknown("no answer")
        if self._dropped("if-none-match", data):
            return self.bucket.overwrite(key, data)
        return await super().create(key, data)

    async def replace(self, key: str, data: bytes, etag: str) -> ObjectInfo:
        if self._dropped("if-match", data):
            return self.bucket.overwrite(key, data)
        return await super().replace(key, data, etag)


@pytest.fixture
def path(manual_clock: ManualClock) -> Path:
    return Path(clock=manual_clock)


@pytest.fixture
def guarded(path: Path, manual_clock: ManualClock, metrics: Metrics) -> GuardedStore:
    return GuardedStore(path, runtime_of(manual_clock, Ids.seeded(1), metrics))


async def checked(path: Path, clock: ManualClock) -> StoreProof:
    return await check_path(path, runtime_of(clock, Ids.seeded(1)))


def broken(proof: StoreProof) -> list[str]:
    return [f"{finding.name}: {finding.seen}" for finding in proof.findings if not finding.held]


async def test_a_good_path_holds_and_nothing_is_left(path: Path, manual_clock: ManualClock) -> None:
    """Both conditions are seen to be refused, with small and with large bodies; the scratch objects are gone."""
    proof = await checked(path, manual_clock)

    assert proof.held
    assert [finding.name for finding in proof.findings] == ["stale_replace_is_refused", "second_create_is_refused"] * 2
    assert [info.key async for info in path.list("")] == []


@pytest.mark.parametrize(
    ("header", "found"), [("if-none-match", "second_create_is_refused"), ("if-match", "stale_replace_is_refused")]
)
@pytest.mark.parametrize("large", [False, True])
async def test_one_dropped_condition_on_one_way_to_write_is_found(
    path: Path, manual_clock: ManualClock, header: str, found: str, large: bool
) -> None:
    """A path that drops one header, of bodies of one size only, is found out; nothing is left behind."""
    path.drops = frozenset({header})
    path.least_bytes, path.most_bytes = (FAST_BYTES_MAX + 1, 1 << 30) if large else (0, FAST_BYTES_MAX)

    (output,) = broken(await checked(path, manual_clock))

    assert output.startswith(found)
    assert str(FAST_BYTES_MAX + 1 if large else 64) in output
    assert [info.key async for info in path.list("")] == []


async def test_no_answer_is_no_evidence(path: Path, guarded: GuardedStore) -> None:
    """A lost answer refuses nobody: the write fails as unavailable, and the next one checks again."""
    path.lost = 1

    with pytest.raises(Unavailable):
        await guarded.create("a", b"1")

    assert guarded.refusal == ""
    await guarded.create("a", b"1")
    assert (await guarded.get("a")).data == b"1"


async def test_what_was_seen_stands_although_the_rest_of_the_check_gets_no_answer(
    path: Path, guarded: GuardedStore
) -> None:
    """A path that ignores a condition for small bodies is refused, also while large ones time out."""
    path.drops, path.silent_from = frozenset({"if-none-match"}), FAST_BYTES_MAX

    with pytest.raises(Invalid, match="second_create_is_refused"):
        await guarded.create("a", b"1")
    with pytest.raises(ConditionsIgnored):
        await guarded.create("a", b"1")


async def test_what_a_dead_process_left_is_removed_after_a_day(path: Path, manual_clock: ManualClock) -> None:
    """Scratch objects do not gather; those of a check under way stay."""
    await path.create(f"{SCRATCH}old/path-small", b"1")
    await manual_clock.advance(3600)
    await path.create(f"{SCRATCH}new/path-small", b"1")
    await manual_clock.advance(23 * 3600 + 1)

    await checked(path, manual_clock)

    assert [info.key async for info in path.list(SCRATCH)] == [f"{SCRATCH}new/path-small"]


async def test_the_first_write_checks_the_path_once(path: Path, guarded: GuardedStore) -> None:
    """Anyone who writes first waits for one check; those beside it share it; later writes do not pay for it."""
    await asyncio.gather(*[guarded.create(f"key-{number}", b"1") for number in range(10)])
    after_first = path.creates

    await guarded.create("later", b"1")

    assert after_first == 10 + 4  # two creates for each size of body
    assert path.creates == after_first + 1


async def test_on_a_good_path_every_write_is_made(path: Path, guarded: GuardedStore) -> None:
    """The guard looks at each kind of write and changes none."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b"1"
        yield b"2"

    made = await guarded.create("a", b"1")
    await guarded.replace("a", b"2", made.etag)
    uploaded = await guarded.upload("b", chunks())
    await guarded.create("c", b"3")
    await guarded.delete("c")

    assert {"a": b"2", "b": b"12"} == {key: (await path.get(key)).data for key in ("a", "b")}
    assert (2, ["a", "b"]) == (uploaded.size, [info.key async for info in path.list("")])


async def test_a_stale_replace_that_succeeded_stands_although_the_create_gets_no_answer(
    path: Path, manual_clock: ManualClock
) -> None:
    """What was seen is enough to refuse the path; without it, the missing answer is raised."""
    create = path.create

    async def first_only(key: str, data: bytes) -> ObjectInfo:
        if path.creates % 2:
            path.creates += 1
            raise OutcomeUnknown("no answer")
        return await create(key, data)

    path.create = first_only  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown):
        await checked(path, manual_clock)
    path.drops, path.creates = frozenset({"if-match"}), 0

    (output,) = broken(await checked(path, manual_clock))

    assert output.startswith("stale_replace_is_refused")


async def test_a_read_checks_nothing(path: Path, guarded: GuardedStore) -> None:
    """A process that only reads writes no scratch objects, and reads also while writes are refused."""
    await path.create("a", b"1")
    path.creates = 0
    assert (await guarded.get("a")).data == b"1"
    assert path.creates == 0
    path.drops = frozenset({"if-match"})
    await guarded.check()

    assert (await guarded.head("a")).size == 1
    assert await guarded.get_range("a", 0, 1) == b"1"
    assert [info.key async for info in guarded.list("")] == ["a"]
    assert list(await guarded.children("")) == []


async def test_a_command_on_a_bad_path_writes_nothing(path: Path, guarded: GuardedStore) -> None:
    """The first write is refused as a wrong setting, in words a person can act on."""
    path.drops = frozenset({"if-none-match", "if-match"})

    with pytest.raises(Invalid, match="does not support concurrent writers") as caught:
        await guarded.create("a", b"1")

    assert "If-Match" in caught.value.hint
    assert [info.key async for info in path.list("")] == []


async def test_a_path_that_fails_later_refuses_every_write_until_it_holds(
    path: Path, guarded: GuardedStore, metrics: Metrics
) -> None:
    """Nothing is acknowledged on a path that is known to ignore conditions, and nothing is deleted."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b"1"

    info = await guarded.create("a", b"1")
    path.drops = frozenset({"if-match"})
    assert not (await guarded.check()).held

    for write in (
        guarded.create("b", b"1"),
        guarded.replace("a", b"2", info.etag),
        guarded.upload("c", chunks()),
        guarded.delete("a"),
    ):
        with pytest.raises(ConditionsIgnored, match="stale_replace_is_refused"):
            await write
    assert metrics.value("lakebed_store_conditions_ignored") == 1
    assert [info.key async for info in path.list("")] == ["a"]

    path.drops = frozenset()
    assert (await guarded.check()).held
    await guarded.replace("a", b"2", info.etag)
    assert metrics.value("lakebed_store_conditions_ignored") == 0


async def test_a_caller_that_leaves_does_not_end_the_check_that_others_wait_for(
    path: Path, guarded: GuardedStore
) -> None:
    """A client hangs up during the first write of a process: the writes beside it are not cancelled with it."""
    create, go = path.create, asyncio.Event()

    async def slow(key: str, data: bytes) -> ObjectInfo:
        await go.wait()
        return await create(key, data)

    path.create = slow  # type: ignore[method-assign]
    leaving, staying = (asyncio.ensure_future(guarded.create(f"key-{number}", b"1")) for number in range(2))
    await settle()

    leaving.cancel()
    await settle()
    go.set()
    await staying

    assert leaving.cancelled()
    assert ["key-1"] == [info.key async for info in path.list("")]


async def test_a_check_that_is_not_answered_keeps_what_was_known(path: Path, guarded: GuardedStore) -> None:
    """A store that is away neither closes a good path nor opens a bad one."""
    await guarded.check()
    path.lost = 1
    with pytest.raises(Unavailable):
        await guarded.check()
    await guarded.create("a", b"1")
    path.drops = frozenset({"if-match"})
    await guarded.check()
    path.lost = 1

    with pytest.raises(Unavailable):
        await guarded.check()

    with pytest.raises(ConditionsIgnored):
        await guarded.create("b", b"1")


async def test_whoever_examines_the_path_gets_it_without_the_guard(path: Path, guarded: GuardedStore) -> None:
    """Doctor must be able to write where others are refused."""
    assert unguarded(guarded) is path
    assert unguarded(path) is path

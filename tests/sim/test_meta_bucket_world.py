"""Processes that share a group of the bucket backend, with faults, crashes and sweeps that wait for nobody."""

from __future__ import annotations

import asyncio

import pytest

from lakebed.core.errors import AlreadyExists, LakebedError, NotFound, OutcomeUnknown
from lakebed.meta.bucket import decisions
from lakebed.meta.bucket.backend import BucketMeta
from lakebed.meta.bucket.model import BucketPaths, decode_head, decode_leaf, group_name
from lakebed.meta.model import ABSENT, prefix_end
from lakebed.sim.faults import CALM, NONE, Faults
from lakebed.sim.world import Process, World
from support.seeds import seeds

GROUP = "orders:0"
ROOT = "llog/orders/partitions/0/"
VALUE = b"." * 150
ROUNDS = 30
SEEDS = 5
AWAITS_MAX = 200
PATHS = BucketPaths("m")


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spills after a handful of entries, into leaves of a handful, merged when there are more than a few."""
    monkeypatch.setattr(decisions, "HOT_BYTES_MAX", 1500)
    monkeypatch.setattr(decisions, "HOT_BYTES_KEPT", 500)
    monkeypatch.setattr(decisions, "LEAF_BYTES", 1200)
    monkeypatch.setattr(decisions, "LEAF_MERGED_BYTES_MAX", 8000)
    monkeypatch.setattr(decisions, "REFS_MAX", 17)


class Ledger:
    """What callers were answered: keys that must be there, keys that must not, and increments."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.gone: set[str] = set()
        self.counted = self.asked = 0


def connect(process: Process) -> BucketMeta:
    return BucketMeta(process.context(), "m", horizon_s=-10.0)


def whole(world: World) -> str | None:
    """Every head refers to leaves that exist, in order and apart from each other; no key is in two places."""
    stored = world.peek(PATHS.head(group_name(GROUP)))
    if stored is None:
        return None
    head = decode_head(stored.data, stored.key)
    seen = set(head.hot)
    last = ""
    for ref in head.refs:
        leaf = world.peek(PATHS.leaf(group_name(GROUP), ref.id))
        if leaf is None:
            return f"leaf {ref.id} is referred to and gone"
        rows = decode_leaf(leaf.data, leaf.key).visible(ref)
        keys = {row.key for row in rows}
        if not ref.first > last or ref.count != len(rows) or rows[0].key != ref.first or rows[-1].key != ref.last:
            return f"reference {ref} does not fit its leaf or its neighbours"
        if keys & seen:
            return f"{sorted(keys & seen)[0]} is in two places"
        seen |= keys
        last = ref.last
    return None


async def work(process: Process, ledger: Ledger) -> None:
    """Appends keys of its own, counts, deletes what it appended long ago, and sweeps."""
    meta = connect(process)
    for at in range(ROUNDS):
        await append(meta, ledger, f"{ROOT}index/{process.node}-{at:06d}")
        await count(meta, ledger)
        if at % 7 == 6:
            await trim(meta, ledger, process.node, at - 4)
        if at % 11 == 10:
            try:
                await meta.sweep()
            except LakebedError:
                continue


async def append(meta: BucketMeta, ledger: Ledger, key: str) -> None:
    try:
        await meta.put(key, key.encode() + VALUE, expected=ABSENT, partition_key=GROUP)
    except OutcomeUnknown:
        return
    except AlreadyExists as error:
        raise AssertionError(f"{key} was refused, and nobody else puts it") from error
    except LakebedError:
        ledger.gone.add(key)
        return
    ledger.there.add(key)


async def count(meta: BucketMeta, ledger: Ledger) -> None:
    try:
        found = await meta.get(ROOT + "meta/control", partition_key=GROUP)
        value, expected = int(found.value), found.version
    except NotFound:
        value, expected = 0, ABSENT
    except LakebedError:
        return
    ledger.asked += 1
    try:
        await meta.put(ROOT + "meta/control", b"%d" % (value + 1), expected=expected, partition_key=GROUP)
    except OutcomeUnknown:
        return
    except LakebedError:
        ledger.asked -= 1
        return
    ledger.counted += 1


async def trim(meta: BucketMeta, ledger: Ledger, node: str, below: int) -> None:
    doomed = {f"{ROOT}index/{node}-{at:06d}" for at in range(below)}
    maybe = ledger.there & doomed
    ledger.there -= doomed
    try:
        await meta.delete_range(f"{ROOT}index/{node}-", f"{ROOT}index/{node}-{below:06d}", partition_key=GROUP)
    except OutcomeUnknown:
        return
    except LakebedError:
        ledger.there |= maybe
        return
    ledger.gone |= doomed


async def verdict(world: World, ledger: Ledger) -> None:
    """A newcomer finds what was acknowledged and nothing that was refused; after a sweep nothing is about."""
    world.heal(NONE)
    await asyncio.sleep(10.0)
    meta = connect(world.process("judge"))
    found = await meta.range(ROOT, prefix_end(ROOT), limit=10_000, partition_key=GROUP)
    keys = {entry.key for entry in found}
    world.check(ledger.there <= keys, f"lost: {sorted(ledger.there - keys)[:3]}")
    world.check(not ledger.gone & keys, f"came back: {sorted(ledger.gone & keys)[:3]}")
    world.check(all(e.value.startswith(e.key.encode()) for e in found if "/index/" in e.key), "a value is another's")
    total = int((await meta.get(ROOT + "meta/control", partition_key=GROUP)).value)
    world.check(ledger.counted <= total <= ledger.asked, f"{total} stored, {ledger.counted} to {ledger.asked} told")
    for key in sorted(keys)[::9]:
        lowest = await meta.ceiling(key, prefix=ROOT + key[len(ROOT) :].split("/")[0] + "/", partition_key=GROUP)
        world.check(lowest is not None and lowest.key == key, f"the ceiling of {key} is {lowest}")
    while await meta.sweep():
        continue
    head = decode_head(world.peek(PATHS.head(group_name(GROUP))).data, "")  # type: ignore[union-attr]
    leaves = {info.key for info in world.keys(PATHS.leaves(group_name(GROUP)))}
    referenced = {PATHS.leaf(group_name(GROUP), ref.id) for ref in head.refs}
    world.check(leaves == referenced, f"orphan leaves are left: {sorted(leaves - referenced)[:3]}")


@pytest.mark.parametrize("seed", seeds(range(SEEDS), quick=[0, 1]))
def test_nothing_acknowledged_is_lost_whatever_goes_wrong(seed: int) -> None:
    """Three processes with lost answers, late writes, crashes and merciless sweeps: every promise holds, each step."""
    world, ledger, spilled = World(seed, name="meta-bucket", faults=Faults(crash=0.002)), Ledger(), []

    async def script(world: World) -> None:
        world.invariant("whole", lambda: whole(world))
        done = [world.keep(f"p{at}", lambda process: work(process, ledger)) for at in range(3)]
        await asyncio.gather(*done)
        await verdict(world, ledger)
        spilled.extend(p.metrics.value("lakebed_meta_spills_total") for p in world.processes)

    world.run(script)

    assert not world.cut
    assert ledger.there
    assert sum(spilled) >= 2


def test_a_death_at_any_await_leaves_a_group_that_others_go_on_with() -> None:
    """For every k: a process that dies at its k-th await, in a put, a spill or a sweep, harms nobody."""
    for await_number in range(1, AWAITS_MAX + 1):
        world, ledger = World(7, name="meta-bucket", faults=CALM), Ledger()

        async def script(world: World, await_number: int = await_number, ledger: Ledger = ledger) -> None:
            world.invariant("whole", lambda: whole(world))
            victim = world.process("victim", crash_at_await=await_number)
            await victim.spawn(life(victim, ledger))
            survivor = world.process("survivor")
            assert await survivor.spawn(life(survivor, ledger))
            await verdict(world, ledger)

        world.run(script)

        if not any(verb == "crash" for _, _, _, verb, _, _ in world.trace):
            break
    assert 60 < await_number < AWAITS_MAX


async def life(process: Process, ledger: Ledger) -> None:
    meta = connect(process)
    for at in range(10):
        await append(meta, ledger, f"{ROOT}index/{process.node}-{at:06d}")
    await count(meta, ledger)
    await trim(meta, ledger, process.node, 6)
    for at in range(10, 15):
        await append(meta, ledger, f"{ROOT}index/{process.node}-{at:06d}")
    await meta.sweep()

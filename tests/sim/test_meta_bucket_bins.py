"""Processes that share bins of the bucket backend, with faults, crashes, spills, sweeps and splits."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from lakebed.core.errors import LakebedError, NotFound, OutcomeUnknown
from lakebed.meta.bucket import bins, decisions, model
from lakebed.meta.bucket.backend import BucketMeta
from lakebed.meta.bucket.model import BinPaths, Head, decode_head, decode_leaf
from lakebed.meta.bucket.tree import ROOT
from lakebed.meta.model import ABSENT, MetaEntry, Put, prefix_end
from lakebed.sim.faults import CALM, NONE, Faults
from lakebed.sim.world import Process, World
from support.seeds import seeds

GROUPS = [f"orders:{number}" for number in range(7)]
VALUE = b"." * 120
ROUNDS = 25
SEEDS = 6
AWAITS_MAX = 250
PATHS = BinPaths("m")


@pytest.fixture(autouse=True)
def small_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spills after a handful of entries, splits after a handful of groups."""
    for module, limits in (
        (decisions, {"HOT_BYTES_MAX": 1500, "HOT_BYTES_KEPT": 500, "LEAF_BYTES": 1200, "LEAF_MERGED_BYTES_MAX": 8000}),
        (decisions, {"REFS_MAX": 17}),
        (model, {"BIN_SCALE": 1}),
        (bins, {"MEMBERS_MAX": 3, "SPILLED_BYTES_MAX": 12_000}),
    ):
        for name, value in limits.items():
            monkeypatch.setattr(module, name, value)


class Ledger:
    """What callers were answered: how often each group's number was raised, and how often it may have been."""

    def __init__(self) -> None:
        self.raised: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.trimmed: Counter[str] = Counter()


def connect(process: Process) -> BucketMeta:
    return BucketMeta(process.context(), "m", layout="bins", horizon_s=-10.0)


def folder(group: str) -> str:
    return f"llog/{group.replace(':', '/partitions/')}/"


def index(group: str, number: int) -> str:
    return f"{folder(group)}index/{number:06d}"


async def raise_some(meta: BucketMeta, ledger: Ledger, groups: list[str]) -> None:
    """Raises the numbers of these groups in one call. Each raise brings an entry for the number before it."""
    known: list[tuple[str, int, str]] = []
    for group in groups:
        try:
            found = await meta.get(folder(group) + "meta/control", partition_key=group)
            known.append((group, int(found.value), found.version))
        except NotFound:
            known.append((group, 0, ABSENT))
        except LakebedError:
            continue
    puts = [
        Put(folder(group) + "meta/control", b"%d" % (now + 1), version, group, first=(index(group, now), VALUE))
        for group, now, version in known
    ]
    ledger.asked.update(group for group, _, _ in known)
    for (group, _, _), made in zip(known, await meta.put_all(puts), strict=True):
        if isinstance(made, MetaEntry):
            ledger.raised[group] += 1
        elif not isinstance(made, OutcomeUnknown):
            ledger.asked[group] -= 1


async def trim(meta: BucketMeta, ledger: Ledger, group: str) -> None:
    try:
        below = int((await meta.get(folder(group) + "meta/control", partition_key=group)).value) // 2
        ledger.trimmed[group] = max(ledger.trimmed[group], below)
        await meta.delete_range(index(group, 0), index(group, below), partition_key=group)
    except LakebedError:
        return


async def work(process: Process, ledger: Ledger, rounds: int = ROUNDS) -> None:
    meta, rng = connect(process), process.world.rng
    for at in range(rounds):
        # Two at a time, so that several changes share a write.
        some = [rng.sample(GROUPS, rng.randint(1, len(GROUPS))) for _ in range(2)]
        await asyncio.gather(*(raise_some(meta, ledger, groups) for groups in some))
        if at % 6 == 5:
            await trim(meta, ledger, rng.choice(GROUPS))
        if at % 9 == 8:
            try:
                await meta.sweep()
            except LakebedError:
                continue


def live_bins(world: World) -> list[tuple[str, Head]]:
    """The bins that are stored and not split, found as a newcomer finds them."""
    found, names = [], [ROOT]
    while names:
        name = names.pop()
        stored = world.peek(PATHS.head(name))
        if stored is None:
            continue
        head = decode_head(stored.data, stored.key)
        if head.split is not None:
            names += [head.split.right, head.split.left]
        else:
            found.append((name, head))
    return found


def whole(world: World) -> str | None:
    """Every bin refers to leaves that exist, in order and apart from each other; no key is in two places."""
    seen: set[str] = set()
    for name, head in live_bins(world):
        keys, last = set(head.hot), ""
        for ref in head.refs:
            leaf = world.peek(PATHS.leaf(name, ref.id))
            if leaf is None:
                return f"leaf {ref.id} is referred to and gone"
            rows = decode_leaf(leaf.data, leaf.key).visible(ref)
            if not ref.first > last or ref.count != len(rows) or rows[0].key != ref.first or rows[-1].key != ref.last:
                return f"reference {ref} does not fit its leaf or its neighbours"
            if keys & {row.key for row in rows}:
                return f"a key of {name} is in two places"
            keys |= {row.key for row in rows}
            last = ref.last
        if strangers := {bins.member_of(key) for key in keys} - set(head.members):
            return f"{name} has keys of {strangers}, which are not its members"
        if seen & keys:
            return f"{name} has keys of another bin"
        seen |= keys
    return None


async def verdict(world: World, ledger: Ledger) -> None:
    """A newcomer finds every number as it was acknowledged, with all the entries that must be there before it."""
    world.heal(NONE)
    await asyncio.sleep(10.0)
    meta = connect(world.process("judge"))
    written = [group for group in GROUPS if ledger.raised[group]]
    world.check(set(written) <= set(await meta.groups()), "a group is not listed")
    everything = {entry.key for entry in await meta.range("llog/", "llog0", limit=10_000)}
    for group in written:
        now = int((await meta.get(folder(group) + "meta/control", partition_key=group)).value)
        low, high = ledger.raised[group], ledger.asked[group]
        world.check(low <= now <= high, f"{group}: {now} stored, {low} to {high} told")
        found = {entry.key for entry in await meta.range(folder(group), prefix_end(folder(group)), limit=10_000)}
        wanted = {index(group, number) for number in range(ledger.trimmed[group], now)}
        world.check(wanted <= found, f"{group} is at {now} without {sorted(wanted - found)[:3]}")
        world.check(found <= everything, f"a range over all groups lacks {sorted(found - everything)[:3]}")
        lowest = await meta.ceiling(index(group, now - 1), prefix=f"{folder(group)}index/", partition_key=group)
        world.check(lowest is not None and lowest.key == index(group, now - 1), f"the ceiling in {group} is {lowest}")
    while await meta.sweep():
        continue
    heads = [await meta.head(group) for group in GROUPS]  # the half of a split that nobody has written is among them
    referenced = {PATHS.leaf("", ref.id) for head in heads for ref in head.refs}
    leaves = {info.key for info in world.keys(PATHS.leaves(""))}
    world.check(leaves <= referenced or not referenced, f"orphan leaves are left: {sorted(leaves - referenced)[:3]}")


@pytest.mark.parametrize("seed", seeds(range(SEEDS), quick=[0, 1]))
def test_nothing_acknowledged_is_lost_while_bins_split(seed: int) -> None:
    """Three processes with lost answers, late writes, crashes and merciless sweeps: every promise holds, each step."""
    world, ledger, counted = World(seed, name="meta-bins", faults=Faults(crash=0.002)), Ledger(), []

    async def script(world: World) -> None:
        world.invariant("whole", lambda: whole(world))
        await asyncio.gather(*(world.keep(f"p{at}", lambda process: work(process, ledger)) for at in range(3)))
        await verdict(world, ledger)
        counted.append(sum(p.metrics.value("lakebed_meta_spills_total") for p in world.processes))

    world.run(script)

    assert not world.cut
    assert len(live_bins(world)) >= 3
    assert counted[0] >= 2


def test_a_death_at_any_await_leaves_bins_that_others_go_on_with() -> None:
    """For every k: a process that dies at its k-th await, in a put, a spill, a split or a sweep, harms nobody."""
    for await_number in range(1, AWAITS_MAX + 1):
        world, ledger = World(7, name="meta-bins", faults=CALM), Ledger()

        async def script(world: World, await_number: int = await_number, ledger: Ledger = ledger) -> None:
            world.invariant("whole", lambda: whole(world))
            victim = world.process("victim", crash_at_await=await_number)
            await victim.spawn(work(victim, ledger, 3))
            survivor = world.process("survivor")
            await survivor.spawn(work(survivor, ledger, 2))
            await verdict(world, ledger)

        world.run(script)

        assert ledger.raised
        root = world.peek(PATHS.head(ROOT))
        assert root is not None and decode_head(root.data, ROOT).split is not None
        if not any(verb == "crash" for _, _, _, verb, _, _ in world.trace):
            break
    assert 25 < await_number < AWAITS_MAX

"""The register: one object, changed by compare-and-swap, exactly once for each change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Corrupt, Fenced, Invalid, OutcomeUnknown, Overloaded, Stale, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.store import register as register_module
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject
from lakebed.store.protocol import Store
from lakebed.store.register import ATTEMPTS_MAX, Register, RegisterState
from lakebed.store.runtime import StoreRuntime
from support.references import is_freed_after

KEY = "folder/register.json"


class Names(msgspec.Struct, frozen=True):
    names: tuple[str, ...] = ()


class Hurried(ManualClock):
    """Sleeps no time at all."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Gated(MemoryStore):
    """Counts requests, holds writes until `gate` opens, and fails those it was told to, before or after the deed."""

    def __init__(self) -> None:
        super().__init__(clock=ManualClock())
        self.gate = asyncio.Event()
        self.gate.set()
        self.puts = self.gets = 0
        self.instead: list[Callable[[], Exception]] = []  # raised instead of writing, one for each write
        self.afterwards: list[Callable[[], Awaitable[Exception]]] = []  # raised after writing, one for each write

    async def get(self, key: str) -> StoredObject:
        self.gets += 1
        await asyncio.sleep(0)
        return await super().get(key)

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        await self._enter()
        return await self._leave(await super().create(key, data))

    async def replace(self, key: str, data: bytes, etag: str) -> ObjectInfo:
        await self._enter()
        return await self._leave(await super().replace(key, data, etag))

    async def _enter(self) -> None:
        self.puts += 1
        await self.gate.wait()
        if self.instead:
            raise self.instead.pop(0)()

    async def _leave(self, info: ObjectInfo) -> ObjectInfo:
        if self.afterwards:
            raise await self.afterwards.pop(0)()
        return info


@pytest.fixture
def store() -> Gated:
    return Gated()


@pytest.fixture
def names(store: Gated) -> Register[Names]:
    return open_register(store)


def open_register(store: Store) -> Register[Names]:
    return Register(
        StoreRuntime(clock=Hurried(), ids=Ids(), metrics=Metrics(), store=store), KEY, Names, Names(), name="names"
    )


def add(name: str) -> Callable[[Names], tuple[Names, int]]:
    return lambda value: (Names((*value.names, name)), len(value.names))


def keep(value: Names) -> tuple[Names, tuple[str, ...]]:
    return value, value.names


async def stored(store: Gated) -> tuple[str, ...]:
    return (await open_register(store).read()).value.names


async def test_an_absent_register_is_its_initial_value(names: Register[Names]) -> None:
    """Reading what was never written gives the initial value at epoch 0."""
    assert RegisterState(Names(), 0, "") == await names.read()


async def test_an_uncontended_change_is_one_request(names: Register[Names], store: Gated) -> None:
    """After the first, each change costs one PUT and no read."""
    await names.change(add("a"))
    gets, puts = store.gets, store.puts

    assert await names.change(add("b")) == 1

    assert (gets, puts + 1) == (store.gets, store.puts)


async def test_changes_asked_for_during_a_write_share_the_next_one(names: Register[Names], store: Gated) -> None:
    """A hundred callers cost two PUTs, and each gets its own result."""
    store.gate.clear()
    first = asyncio.create_task(names.change(add("first")))
    await settle()
    others = [asyncio.create_task(names.change(add(f"n{number}"))) for number in range(100)]
    await settle()

    store.gate.set()
    results = [await first, *(await asyncio.gather(*others))]

    assert list(range(101)) == results
    assert store.puts == 2


async def test_what_a_decision_raises_reaches_its_caller_alone(names: Register[Names]) -> None:
    """One bad decision in a group spoils nothing for the others."""

    def refuse(value: Names) -> tuple[Names, int]:
        raise Invalid("not today")

    results = await asyncio.gather(
        names.change(add("a")), names.change(refuse), names.change(add("b")), return_exceptions=True
    )

    assert [results[0], results[2]] == [0, 1]
    assert isinstance(results[1], Invalid)


async def test_a_refusal_is_only_believed_on_a_fresh_read(names: Register[Names], store: Gated) -> None:
    """What this process remembers is never a reason to report no, nor to report that nothing changes."""
    await names.change(add("a"))
    await open_register(store).change(lambda value: (Names(), None))

    def only_when_empty(value: Names) -> tuple[Names, str]:
        if value.names:
            raise Invalid("not empty")
        return Names(("b",)), "done"

    assert await names.change(only_when_empty) == "done"
    await open_register(store).change(add("c"))
    assert await names.change(keep) == ("b", "c")


async def test_an_older_owner_is_fenced_and_a_newer_one_raises_the_epoch(names: Register[Names]) -> None:
    """Once a newer epoch has written, an older one can neither write nor read."""
    await names.change(add("two"), epoch=2)
    await names.change(add("nobody's"))

    with pytest.raises(Fenced):
        await names.change(add("one"), epoch=1)
    await names.change(add("three"), epoch=3)

    assert ((await names.read()).value.names, (await names.read()).epoch) == (("two", "nobody's", "three"), 3)


async def test_owners_of_different_epochs_in_one_group_are_fenced_in_order(
    names: Register[Names], store: Gated
) -> None:
    """Inside one PUT the same rule holds as between PUTs: after a newer epoch, no older one."""
    store.gate.clear()
    first = asyncio.create_task(names.change(add("first")))
    await settle()
    group = asyncio.gather(
        names.change(add("four"), epoch=4),
        names.change(keep, epoch=9),
        names.change(add("six"), epoch=6),
        names.change(add("five"), epoch=5),
        names.change(add("any")),
        return_exceptions=True,
    )
    await settle()
    store.gate.set()
    await first
    results = await group

    assert [results[0], results[1], results[2], results[4]] == [1, ("first", "four"), 2, 3]
    assert isinstance(results[3], Fenced)
    assert ((await names.read()).value.names, (await names.read()).epoch) == (("first", "four", "six", "any"), 6)


async def test_a_caller_cancelled_before_its_write_began_gives_its_change_up(
    names: Register[Names], store: Gated
) -> None:
    """The others of its group are written; what it wanted is not."""
    store.gate.clear()
    first = asyncio.create_task(names.change(add("first")))
    await settle()
    gone, stays = asyncio.create_task(names.change(add("gone"))), asyncio.create_task(names.change(add("stays")))
    await settle()
    gone.cancel()
    await settle()

    store.gate.set()
    await asyncio.gather(first, stays)

    assert await stored(store) == ("first", "stays")


async def test_a_caller_cancelled_during_its_write_does_not_disturb_the_group(
    names: Register[Names], store: Gated
) -> None:
    """A write on its way continues; the first caller, who started the writer, can leave too."""
    store.gate.clear()
    both = [asyncio.create_task(names.change(add(name))) for name in "ab"]
    await settle()
    both[0].cancel()
    await settle()

    store.gate.set()

    assert await both[1] == 1
    assert await stored(store) == ("a", "b")


async def test_a_cancelled_writer_tells_everybody_who_waits(names: Register[Names], store: Gated) -> None:
    """Nobody is left waiting: for the write under way the outcome is unknown, the next one has not begun."""
    store.gate.clear()
    first = asyncio.create_task(names.change(add("first")))
    await settle()
    second = asyncio.create_task(names.change(add("second")))
    await settle()
    assert names._writer is not None
    names._writer.cancel()

    results = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), timeout=100)

    assert [type(result) for result in results] == [OutcomeUnknown, Unavailable]
    store.gate.set()
    assert await names.change(add("third")) == 0


async def test_a_lost_answer_behind_anothers_write_is_not_done_twice(names: Register[Names], store: Gated) -> None:
    """Our write was done, another built upon it, and we get Stale: the change is there once."""
    await names.change(add("a"))
    other = open_register(store)

    async def overtaken() -> Exception:
        await other.change(add("theirs"))
        return Stale("changed", current=await store.get(KEY))

    store.afterwards = [overtaken]

    assert await names.change(add("mine")) == 1

    assert await stored(store) == ("a", "mine", "theirs")
    assert await names.change(add("z")) == 3


async def test_behind_too_many_writers_a_lost_answer_is_unknown(
    names: Register[Names], store: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the object no longer remembers our last write, we neither claim it nor make it again."""
    monkeypatch.setattr(register_module, "WRITERS_MAX", 2)
    await names.change(add("a"))

    async def overtaken() -> Exception:
        await open_register(store).change(add("b"))
        await open_register(store).change(add("c"))
        return Stale("changed", current=await store.get(KEY))

    store.afterwards = [overtaken]

    with pytest.raises(OutcomeUnknown):
        await names.change(add("mine"))

    assert await stored(store) == ("a", "mine", "b", "c")


async def test_more_writers_than_the_object_records_get_plain_conflicts(store: Gated) -> None:
    """On a healthy store nobody is in doubt: a writer that was away while 40 others wrote has lost a race."""
    crowd = [open_register(store) for _ in range(40)]
    for number, each in enumerate(crowd):
        await each.change(add(f"first-{number}"))

    places = [await each.change(add(f"second-{number}")) for number, each in enumerate(crowd)]

    assert list(range(40, 80)) == places
    assert 80 == len(set(await stored(store)))


async def test_a_race_lost_soon_after_a_read_is_decided_without_the_stores_word(store: Gated) -> None:
    """A few writes since the version we built on cannot have pushed our attempt out, whoever repeated what."""
    for number in range(40):
        await open_register(store).change(add(f"n{number}"))
    late = open_register(store)
    await late.read()
    for number in range(3):
        await open_register(store).change(add(f"m{number}"))
    store.instead = [lambda: _repeated(store)]

    assert await late.change(add("late")) == 43


def _repeated(store: Gated) -> Stale:
    return Stale("changed", current=store.bucket.objects[KEY])


async def test_each_write_has_the_next_number(names: Register[Names], store: Gated) -> None:
    """Whoever made the one before: by the number it is known how many wrote since."""
    other, numbers = open_register(store), list[int]()
    for each in (names, names, other, names, other):
        await each.change(add("x"))
        numbers.append((await open_register(store).read()).revision)

    assert [1, 2, 3, 4, 5] == numbers


async def test_while_others_write_the_register_is_read_first(names: Register[Names], store: Gated) -> None:
    """A refused PUT costs more than a read; when the others are quiet again, a change is one request again."""
    other = open_register(store)
    await names.change(add("a"))
    await other.change(add("b"))
    await names.change(add("c"))  # learns that it is not alone
    shared = list[tuple[int, int]]()
    for name in "de":  # each time they do, not only the first
        await other.change(add(name))
        shared.append(await requests_of(names, store))
    await names.change(add("f"))
    alone = await requests_of(names, store)

    assert ([(1, 1), (1, 1)], (0, 1)) == (shared, alone)


async def requests_of(names: Register[Names], store: Gated) -> tuple[int, int]:
    gets, puts = store.gets, store.puts
    await names.change(add("one more"))
    return store.gets - gets, store.puts - puts


async def test_an_unknown_outcome_is_passed_on_and_what_was_known_is_forgotten(
    names: Register[Names], store: Gated
) -> None:
    """The next change starts from a read, so it builds on whichever came true."""
    await names.change(add("a"))

    async def lost() -> Exception:
        return OutcomeUnknown("lost")

    store.afterwards = [lost]
    with pytest.raises(OutcomeUnknown):
        await names.change(add("b"))

    store.instead = [lambda: Unavailable("busy")]
    with pytest.raises(Unavailable):
        await names.change(add("c"))

    assert await names.change(add("d")) == 2
    assert await stored(store) == ("a", "b", "d")


async def test_a_deleted_register_starts_again_from_its_initial_value(names: Register[Names], store: Gated) -> None:
    """Stale without a current object means that the key is gone, not that reading failed."""
    await names.change(add("a"), epoch=5)
    await store.delete(KEY)

    assert await names.change(add("b"), epoch=5) == 0

    assert await stored(store) == ("b",)


async def test_two_registers_on_one_key_in_one_process_lose_nothing(store: Gated) -> None:
    """Each has its own memory and its own writer, and both meet at the store as two processes do."""
    one, other = open_register(store), open_register(store)

    await asyncio.gather(*(each.change(add(f"n{number}")) for number in range(20) for each in (one, other)))

    assert sorted(2 * [f"n{number}" for number in range(20)]) == sorted(await stored(store))


async def test_an_object_that_does_not_decode_is_corrupt_for_all_and_left_alone(
    names: Register[Names], store: Gated
) -> None:
    """Every caller is informed, nothing is overwritten, and once the object is repaired the register continues."""
    await store.create(KEY, b"not json")

    results = await asyncio.gather(names.change(add("a")), names.change(add("b")), return_exceptions=True)

    assert [Corrupt, Corrupt] == [type(result) for result in results]
    assert (await store.get(KEY)).data == b"not json"
    await store.delete(KEY)
    assert await names.change(add("c")) == 0


async def test_callers_of_a_failed_group_each_get_an_error_of_their_own(names: Register[Names], store: Gated) -> None:
    """The same kind, message, hint and detail; but what one caller does with it does not reach the others."""
    store.instead = [lambda: Unavailable("busy", hint="wait", retry_after_s=7.0, key=KEY)]

    results = await asyncio.gather(*(names.change(add(name)) for name in "abc"), return_exceptions=True)

    assert len({id(result) for result in results}) == 3
    for result in results:
        assert isinstance(result, Unavailable)
        reported = (result.message, result.hint, result.retry_after_s, result.detail)
        assert reported == ("busy", "wait", 7.0, {"key": KEY})


async def test_a_failed_group_does_not_fail_the_next(names: Register[Names], store: Gated) -> None:
    """The writer continues with those who came later."""
    store.gate.clear()
    store.instead = [lambda: Unavailable("busy")]
    first = asyncio.create_task(names.change(add("first")))
    await settle()
    second = asyncio.create_task(names.change(add("second")))
    await settle()

    store.gate.set()
    results = await asyncio.gather(first, second, return_exceptions=True)

    assert isinstance(results[0], Unavailable)
    assert results[1] == 0


async def test_a_race_that_is_always_lost_ends_as_overloaded(names: Register[Names], store: Gated) -> None:
    """Retries are bounded, and nothing of the change was stored."""
    await names.change(add("a"))
    elsewhere = await store.get(KEY)
    store.instead = [lambda: Stale("changed", current=elsewhere)] * (ATTEMPTS_MAX + 1)

    with pytest.raises(Overloaded):
        await names.change(add("b"))

    assert store.puts - 1 == ATTEMPTS_MAX
    assert await stored(store) == ("a",)


async def test_more_waiting_changes_than_the_limit_are_refused(
    names: Register[Names], store: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is stalled fills a bounded list, not memory."""
    monkeypatch.setattr(register_module, "GROUP_MAX", 3)
    store.gate.clear()
    tasks = [asyncio.create_task(names.change(add("first")))]
    await settle()
    tasks += [asyncio.create_task(names.change(add(f"n{number}"))) for number in range(3)]
    await settle()

    with pytest.raises(Overloaded):
        await names.change(add("too many"))

    store.gate.set()
    assert await asyncio.gather(*tasks) == [0, 1, 2, 3]


def test_a_value_cannot_have_the_registers_own_fields(store: Gated) -> None:
    """A field that would be overwritten on every write is refused when the register is made."""

    class Clash(msgspec.Struct):
        epoch: int = 0

    with pytest.raises(Invalid, match="epoch"):
        Register(
            StoreRuntime(clock=Hurried(), ids=Ids(), metrics=Metrics(), store=store), KEY, Clash, Clash(), name="clash"
        )


async def test_the_same_value_is_never_stored_as_the_same_bytes(names: Register[Names], store: Gated) -> None:
    """A → B → A gives three etags, so a late writer of the first A cannot take the second for it."""
    etags = set()
    for value in (Names(("a",)), Names(("b",)), Names(("a",))):
        await names.change(lambda _, value=value: (value, None))
        etags.add((await names.read()).etag)

    assert len(etags) == 3


@pytest.mark.parametrize("cause", [None, ConnectionResetError()])
async def test_a_change_that_failed_does_not_keep_its_caller(
    names: Register[Names], store: Gated, cause: Exception | None
) -> None:
    """A collector that is dropped after a failed heartbeat would go on sending them."""

    def failing() -> Exception:
        error = OutcomeUnknown("no answer")
        error.__cause__ = cause
        return error

    store.instead = [failing]

    assert await is_freed_after(lambda: names.change(add("a")), OutcomeUnknown)

"""Acceptance on this disk: durable before the answer, deduplicated, served, landed, and recovered from any end."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.index import AcceptedIndex
from lakebed.batches.landed import LandedBatches
from lakebed.batches.model import AcceptedBatch, IdentityConflict, SettledBoot, write_record
from lakebed.batches.segments import HEAD, SpoolSegments, pack, records
from lakebed.batches.settled import settled_register
from lakebed.batches.spool import Spool
from lakebed.core import private
from lakebed.core.clock import SystemClock, settle
from lakebed.core.errors import Conflict, Overloaded, Unavailable
from lakebed.store.authority import claim
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, read_record
from support.batch_frames import START_NS, frame_of, submit
from support.batches_gateway import collector
from support.references import frames_left_after
from support.runtimes import runtime_on

WINDOW = f"metric=cpu&from={START_NS}&to={START_NS + 10**9}"


class Switched(MemoryStore):
    """A bucket that can be out of reach."""

    down = True

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        if self.down:
            raise Unavailable("down")
        return await super().create(key, data)


@pytest.fixture
def store() -> Switched:
    return Switched(clock=SystemClock())


def spooling(folder: Path) -> dict[str, object]:
    return {"acceptance": "local_spool", "spool_dir": folder, "object_landing_interval_ms": 3_600_000}


async def test_batches_are_accepted_and_served_while_the_bucket_is_down(store: Switched, tmp_path: Path) -> None:
    """The spool is the acceptance point: answers, duplicates, conflicts and private queries need no bucket."""
    async with collector(store, **spooling(tmp_path), live_bytes_max=0) as (client, _):
        new = await client.post("/v1/batches", content=frame_of())
        again = await client.post("/v1/batches", content=frame_of())
        other = await client.post("/v1/batches", content=frame_of(value=2.0))
        found = (await client.get(f"/v1/query/range?{WINDOW}")).json()

    assert [(a.status_code, a.json()["duplicate"]) for a in (new, again)] == [(200, False), (200, True)]
    assert (other.status_code, other.json()["quarantined"]) == (409, False)
    assert found["sources"] == {"live": 0, "spool": 1, "raw": 0}
    assert sum(len(series["points"]) for series in found["series"]) == 10


async def test_spooled_batches_land_when_the_bucket_is_back_and_the_disk_is_freed(
    store: Switched, tmp_path: Path
) -> None:
    """Landing creates the blob and the manifest the spool promised, then removes its segment."""
    async with collector(store, **spooling(tmp_path)) as (client, part):
        answers = [(await client.post("/v1/batches", content=frame_of(n, n + 9))).json() for n in (0, 10, 20)]
        assert part._lander is not None
        with pytest.raises(Unavailable):
            await part._lander.land()
        store.down = False
        landed = await part._lander.land()
        duplicate = (await client.post("/v1/batches", content=frame_of())).json()["duplicate"]

    assert landed == 3
    assert list(tmp_path.glob("*.spool")) == []
    assert duplicate
    manifests = [read_record(await store.get(i.key), AcceptedBatch) async for i in store.list(paths.ACCEPTED)]
    assert {a["accepted_at_unix_ns"] for a in answers} == {m.accepted_at_unix_ns for m in manifests}
    for manifest in manifests:
        assert (await store.get(manifest.raw_blob_key)).data


async def test_what_was_acknowledged_is_there_after_a_crash_and_lands_once(store: Switched, tmp_path: Path) -> None:
    """A collector that ends without a word leaves its spool; the next one serves, deduplicates and lands it."""
    async with collector(store, **spooling(tmp_path / "a")) as (client, _):
        for start in (0, 10):
            await client.post("/v1/batches", content=frame_of(start, start + 9))
        copy = tmp_path / "b"
        copy.mkdir()
        for path in (tmp_path / "a").glob("*.spool"):
            (copy / path.name).write_bytes(path.read_bytes() + pack(frame_of(20, 29), 1, "torn")[:-3])

    store.down = False
    async with collector(store, **spooling(copy)) as (client, part):
        duplicate = (await client.post("/v1/batches", content=frame_of())).json()["duplicate"]
        found = (await client.get(f"/v1/query/range?{WINDOW}")).json()
        assert part._lander is not None
        landed = await part._lander.land()
        second = await part._lander.land()

    assert duplicate
    assert sum(len(series["points"]) for series in found["series"]) == 20
    assert (landed, second) == (2, 0)
    assert len([info async for info in store.list(paths.ACCEPTED)]) == 2


async def test_a_batch_that_meets_another_in_the_bucket_is_quarantined_when_it_lands(
    store: Switched, tmp_path: Path
) -> None:
    """The bucket has the last word; the spooled bytes are kept under quarantine, not lost."""
    store.down = False
    async with collector(store) as (client, _):
        await client.post("/v1/batches", content=frame_of())
    mine = submit(frame_of(value=2.0))
    async with collector(store, **spooling(tmp_path)) as (client, part):
        await client.post("/v1/batches", content=mine.frame)
        assert part._lander is not None
        await part._lander.land()

    assert (await store.get(mine.blob_key)).data == mine.frame
    assert len([info async for info in store.list(paths.QUARANTINE)]) == 1


async def test_a_batch_that_another_collector_has_accepted_meanwhile_is_in_the_index_once(
    store: Switched, tmp_path: Path
) -> None:
    """The index says what the manifest in the bucket says: under a second time the batch would count twice."""
    async with collector(store, **spooling(tmp_path)) as (client, part):
        await client.post("/v1/batches", content=frame_of())
        store.down = False
        async with collector(store, node="collector-2") as (other, _):
            accepted = (await other.post("/v1/batches", content=frame_of())).json()
        assert part._lander is not None
        await part._lander.land()

    found = [each async for each in AcceptedIndex(store).entries(0, 2**62)]
    assert not accepted["duplicate"]
    assert [accepted["accepted_at_unix_ns"]] == [each.at_ns for each in found]


async def test_a_full_spool_refuses_with_a_wait(store: Switched, tmp_path: Path) -> None:
    """The disk has a limit with a name; over it agents wait."""
    async with collector(store, **spooling(tmp_path), spool_bytes_max=600) as (client, _):
        answers = [await client.post("/v1/batches", content=frame_of(n, n + 9)) for n in (0, 10, 20)]

    assert sorted({answer.status_code for answer in answers}) == [200, 503]
    assert "retry-after" in answers[-1].headers


async def test_uploads_that_are_being_written_count_for_the_limit(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the disk is, what is accepted at once is no more than the limit."""
    disk = StalledDisk(monkeypatch)
    limit = len(frame_of()) + HEAD.size
    async with collector(store, **spooling(tmp_path), spool_bytes_max=limit) as (_, part):
        uploads = [asyncio.create_task(part.acceptor.accept(submit(frame_of(n, n + 9)))) for n in (0, 10)]
        await asyncio.to_thread(disk.reached.wait, 60)
        await settle()
        disk.go.set()
        answers = await asyncio.gather(*uploads, return_exceptions=True)

        assert [frame_of()] == stored_frames(tmp_path)
    assert isinstance(answers[1], Overloaded)


async def test_many_uploads_share_an_fsync(store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty uploads at once are durable after far fewer syncs than uploads."""
    syncs = 0
    real = os.fsync

    def counted(handle: int) -> None:
        nonlocal syncs
        syncs += 1
        real(handle)

    monkeypatch.setattr(os, "fsync", counted)
    async with collector(store, **spooling(tmp_path)) as (_, part):
        await asyncio.gather(*(part.acceptor.accept(submit(frame_of(n * 10, n * 10 + 9))) for n in range(50)))

    assert syncs < 10


async def test_an_answer_comes_after_its_record_is_on_the_disk(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When `accept` returns, the segment file was fsynced with the record in it, and its folder after it was made."""
    synced: dict[str, bytes] = {}
    real = os.fsync

    def noted(handle: int) -> None:
        real(handle)
        path = Path(f"/proc/self/fd/{handle}").readlink()
        synced[path.name] = path.read_bytes() if path.is_file() else b"".join(sorted(map(bytes, path.iterdir())))

    monkeypatch.setattr(os, "fsync", noted)
    async with collector(store, **spooling(tmp_path)) as (_, part):
        for start in (0, 10):
            await part.acceptor.accept(submit(frame_of(start, start + 9)))
            (segment,) = tmp_path.glob("*.spool")
            assert frame_of(start, start + 9) in synced[segment.name]
            assert bytes(segment) in synced[tmp_path.name]


class StalledDisk:
    """Holds the first write to a new segment back, after its file was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        real = private.sync_folder

        def stalled(folder: Path) -> None:
            self.reached.set()
            assert self.go.wait(60)
            real(folder)

        monkeypatch.setattr(private, "sync_folder", stalled)


async def test_a_sweep_leaves_the_segment_that_is_being_written(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write to a new segment stalls, a sweep comes: what is acknowledged then is still on the disk."""
    disk = StalledDisk(monkeypatch)
    async with collector(store, **spooling(tmp_path)) as (_, part):
        assert isinstance(part.acceptor, Spool)
        upload = asyncio.create_task(part.acceptor.accept(submit(frame_of())))
        await asyncio.to_thread(disk.reached.wait, 60)
        await part.acceptor.sweep()
        disk.go.set()
        await upload

        assert [frame_of()] == stored_frames(tmp_path)


async def test_an_upload_given_up_while_it_is_written_takes_no_later_one_with_it(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client goes away during the write, a sweep comes: the segment stays, since the next upload goes into it."""
    disk = StalledDisk(monkeypatch)
    async with collector(store, **spooling(tmp_path)) as (_, part):
        assert isinstance(part.acceptor, Spool)
        upload = asyncio.create_task(part.acceptor.accept(submit(frame_of())))
        await asyncio.to_thread(disk.reached.wait, 60)
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)
        part.acceptor.waiting()
        await part.acceptor.sweep()
        disk.go.set()
        await part.acceptor.accept(submit(frame_of(10, 19)))

        assert frame_of(10, 19) in stored_frames(tmp_path)


def stored_frames(folder: Path) -> list[bytes]:
    """What a collector would find on this disk after a crash now."""
    found = []
    for path in sorted(folder.glob("*.spool")):
        data = path.read_bytes()
        for record in records(data):
            start = record.offset + HEAD.size
            found.append(data[start : start + record.frame_bytes])
    return found


async def test_a_batch_that_was_written_twice_counts_once_after_a_restart(store: Switched, tmp_path: Path) -> None:
    """An upload that was given up and sent again left two records: the room they take is free when it has landed."""
    (tmp_path / f"{1:020d}.spool").write_bytes(pack(frame_of(), 1, "a") + pack(frame_of(), 2, "b"))
    store.down = False
    async with collector(store, **spooling(tmp_path)) as (_, part):
        assert isinstance(part.acceptor, Spool) and part._lander is not None
        held_bytes = part.acceptor._bytes
        await part._lander.land()

        assert len(pack(frame_of(), 1, "a")) == held_bytes
        assert 0 == part.acceptor._bytes


def test_a_segment_whose_folder_could_not_be_synced_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name may be lost with the power: the next append makes a new segment and syncs the folder again."""
    segments = SpoolSegments(tmp_path)
    real, calls = private.sync_folder, 0

    def failing(folder: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("the folder cannot be synced")
        real(folder)

    monkeypatch.setattr(private, "sync_folder", failing)
    with pytest.raises(OSError, match="synced"):
        segments.append([pack(frame_of(), 1, "a")])
    number, start = segments.append([pack(frame_of(), 1, "a")])

    assert (2, 2, 0) == (calls, number, start)
    segments.close()


async def test_a_sync_that_fails_accepts_nothing_and_the_next_upload_goes_on(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered 503 is not on the disk after a crash; uploads that were waiting behind it are written."""
    monkeypatch.setattr("lakebed.batches.spool.GROUP_MAX", 1)
    real, broken = os.fsync, True

    def failing(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if broken and path.suffix == ".spool" and path.stat().st_size:
            raise OSError("the disk cannot be synced")
        real(handle)

    async with collector(store, **spooling(tmp_path)) as (_, part):
        await part.acceptor.accept(submit(frame_of()))
        monkeypatch.setattr(os, "fsync", failing)
        broken = True
        refused = await asyncio.gather(
            *(part.acceptor.accept(submit(frame_of(n, n + 9))) for n in (10, 20)), return_exceptions=True
        )
        broken = False
        await part.acceptor.accept(submit(frame_of(30, 39)))

        assert [Unavailable, Unavailable] == [type(each) for each in refused]
        assert [frame_of(), frame_of(30, 39)] == stored_frames(tmp_path)


async def test_an_upload_that_the_disk_refused_is_not_kept_in_memory(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk refuses for hours: each upload would wait for the garbage collector with all of its bytes."""

    def failing(handle: int) -> None:
        raise OSError("the disk cannot be synced")

    async with collector(store, **spooling(tmp_path)) as (_, part):
        await part.acceptor.accept(submit(frame_of()))
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", failing)
            left = await frames_left_after(lambda: part.acceptor.accept(submit(frame_of(10, 19))), Unavailable)

    assert not left & {"_append", "_write"}


class Short(io.FileIO):
    """A file that takes at most 100 bytes of each write, and none once it has `room` bytes."""

    room = 2**62

    def write(self, data: Any, /) -> int:
        taken = bytes(data)[: min(100, self.room - self.tell())]
        if not taken:
            raise OSError(28, "No space left on device")
        return super().write(taken)

    @classmethod
    def opened(cls, path: Path, mode: str, *, buffering: int = -1, opener: Any = None) -> Any:
        return cls(path, mode, opener=opener) if buffering == 0 else open(path, mode, opener=opener)


async def test_an_upload_is_accepted_only_with_all_of_its_bytes(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may take a part of a write without an error, as one that is almost full does: the rest is written too."""
    monkeypatch.setattr("lakebed.batches.segments.open", Short.opened, raising=False)

    async with collector(store, **spooling(tmp_path)) as (_, part):
        await asyncio.gather(*(part.acceptor.accept(submit(frame_of(n, n + 9))) for n in (0, 10)))

        assert [frame_of(), frame_of(10, 19)] == stored_frames(tmp_path)


async def test_an_upload_that_a_full_disk_takes_a_part_of_is_not_accepted(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent gets 503 and keeps it; what was accepted before and what comes after are whole on the disk."""
    record_bytes = HEAD.size + len(frame_of())
    monkeypatch.setattr("lakebed.batches.segments.open", Short.opened, raising=False)
    monkeypatch.setattr(Short, "room", record_bytes + 150)

    async with collector(store, **spooling(tmp_path)) as (_, part):
        await part.acceptor.accept(submit(frame_of()))
        with pytest.raises(Unavailable, match="cannot be written"):
            await part.acceptor.accept(submit(frame_of(10, 19)))
        await part.acceptor.accept(submit(frame_of(20, 29)))

        assert [frame_of(), frame_of(20, 29)] == stored_frames(tmp_path)


async def test_a_spool_counts_uploads_samples_and_times_as_the_bucket_does(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The charts and the alert on failed uploads read the same numbers, whichever way a collector accepts."""

    def failing(handle: int) -> None:
        raise OSError("the disk cannot be synced")

    async with collector(store, **spooling(tmp_path)) as (_, part):
        metrics = part._context.metrics
        for _ in range(2):
            await part.acceptor.accept(submit(frame_of()))
        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(Unavailable):
            await part.acceptor.accept(submit(frame_of(10, 19)))
        monkeypatch.undo()

    uploads = [
        metrics.value("lakebed_batches_uploads_total", outcome=each) for each in ("accepted", "duplicate", "failed")
    ]
    assert [1, 1, 1] == uploads
    assert 10 == metrics.value("lakebed_batches_samples_total")
    assert 2 == metrics.value("lakebed_batches_accept_seconds_count")


async def test_one_damaged_record_does_not_hold_the_others_back(store: Switched, tmp_path: Path) -> None:
    """What can be landed is landed and the damage is reported; a query reports that something is missing."""
    store.down = False
    async with collector(store, **spooling(tmp_path), live_bytes_max=0) as (client, part):
        for n in range(20):
            assert 200 == (await client.post("/v1/batches", content=frame_of(n * 10, n * 10 + 9))).status_code
        (segment,) = tmp_path.glob("*.spool")
        data = bytearray(segment.read_bytes())
        data[HEAD.size + 60] ^= 0xFF
        segment.write_bytes(bytes(data))
        answer = (await client.get(f"/v1/query/range?{WINDOW}")).json()
        assert part._lander is not None
        with pytest.raises(Unavailable, match="cannot be read back"):
            await part._lander.land()

    assert (19, True) == (answer["sources"]["spool"], answer["partial"])
    assert "1 accepted batches cannot be read: see repairs/v1/" in answer["why_partial"]
    assert 19 == len([info async for info in store.list(paths.ACCEPTED)])
    assert [segment] == list(tmp_path.glob("*.spool"))


@pytest.mark.parametrize("record", [0, 1], ids=["between others", "the last one"])
async def test_damage_is_reported_by_queries_after_a_restart_too(store: Switched, tmp_path: Path, record: int) -> None:
    """An accepted batch cannot be read back: answers are partial until a person has removed the file."""
    async with collector(store, **spooling(tmp_path), live_bytes_max=0) as (client, _):
        for start in (0, 10):
            await client.post("/v1/batches", content=frame_of(start, start + 9))
        (segment,) = tmp_path.glob("*.spool")
        data = bytearray(segment.read_bytes())
        data[[found.offset for found in records(bytes(data))][record] + HEAD.size + 60] ^= 0xFF
        segment.write_bytes(bytes(data))
    store.down = False

    answers = []
    for _ in range(2):  # it is landed in the first, and the file is set aside
        async with collector(store, **spooling(tmp_path), live_bytes_max=0) as (client, part):
            await part.follower.poll()
            answers.append((await client.get(f"/v1/query/range?{WINDOW}")).json())
    (kept,) = tmp_path.glob("*.damaged")
    kept.unlink()
    async with collector(store, **spooling(tmp_path), live_bytes_max=0) as (client, part):
        await part.follower.poll()
        cleared = (await client.get(f"/v1/query/range?{WINDOW}")).json()

    assert [True, True] == ["damaged" in " ".join(answer["why_partial"]) for answer in answers]
    assert (False, 1) == (cleared["partial"], sum(cleared["sources"].values()))


async def test_what_retention_has_removed_is_a_duplicate_for_a_spool_too(store: Switched, tmp_path: Path) -> None:
    """After a restart that has forgotten it: it is not accepted anew, and not served as new."""
    store.down = False
    async with collector(store, **spooling(tmp_path)) as (client, part):
        await client.post("/v1/batches", content=frame_of(0, 9))
        assert part._lander is not None
        await part._lander.land()
        runtime = runtime_on(store, SystemClock())
        await settled_register(runtime, "agent-a", "boot-1").change(lambda _: (SettledBoot(((0, 9),), 1), None))
        for key in [info.key async for info in store.list(paths.ACCEPTED)]:
            await store.delete(key)
    (tmp_path / "landed.jsonl").unlink()

    async with collector(store, **spooling(tmp_path)) as (client, part):
        old = (await client.post("/v1/batches", content=frame_of(0, 9))).json()
        new = (await client.post("/v1/batches", content=frame_of(10, 19))).json()
        waiting = len(part.spool._held)

    assert (True, False, 1) == (old["duplicate"], new["duplicate"], waiting)


async def test_a_spooled_batch_that_retention_has_removed_does_not_land_again(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken while the bucket was away: the record is read before its manifest would be created anew."""

    def away(*_: object, **__: object) -> None:
        raise Unavailable("away")

    store.down = False
    runtime = runtime_on(store, SystemClock())
    await settled_register(runtime, "agent-a", "boot-1").change(lambda _: (SettledBoot(((0, 9),), 1), None))
    async with collector(store, **spooling(tmp_path)) as (_, part):
        assert isinstance(part.acceptor, Spool) and part._lander is not None
        with monkeypatch.context() as patch:
            patch.setattr(store, "list", away)
            await part.acceptor.accept(submit(frame_of(0, 9)))
        await part._lander.land()
        metrics = part._context.metrics

        assert [] == [info async for info in store.list(paths.ACCEPTED)] + list(part.acceptor._held)
    assert 1 == metrics.value("lakebed_batches_landed_total", outcome="duplicate")


async def test_more_batches_than_land_at_once_land_once_each(store: Switched, tmp_path: Path) -> None:
    """Counted once, indexed once."""
    store.down = False
    async with collector(store, **spooling(tmp_path)) as (_, part):
        assert part._lander is not None
        for n in range(20):
            await part.acceptor.accept(submit(frame_of(n * 10, n * 10 + 9)))
        landed = await part._lander.land()
        await part.derived_writes.drain()
        metrics = part._context.metrics

    assert 20 == landed == metrics.value("lakebed_batches_landed_total", outcome="accepted")
    assert 20 == metrics.value("lakebed_batches_aftermath_total", outcome="written")


async def test_one_upload_of_an_identity_is_written_at_a_time(store: Switched, tmp_path: Path) -> None:
    """The same bytes sent twice at once are one record; other bytes are a conflict, not a second acceptance."""
    frames = [frame_of(), frame_of(), frame_of(value=2.0)]
    async with collector(store, **spooling(tmp_path)) as (_, part):
        answers = await asyncio.gather(
            *(part.acceptor.accept(submit(frame)) for frame in frames), return_exceptions=True
        )

        assert [frame_of()] == stored_frames(tmp_path)
    assert [False, True] == [getattr(each, "duplicate", None) for each in answers[:2]]
    assert isinstance(answers[2], IdentityConflict)


async def test_uploads_of_an_identity_that_look_in_the_bucket_at_once_are_one_acceptance(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch of a boot is looked up: what comes during the look is compared with what that one accepts."""
    frames = [frame_of(), frame_of(), frame_of(value=2.0)]
    read, looking, answered = store.get, asyncio.Event(), asyncio.Event()

    async def slow(key: str) -> Any:
        if key.startswith(paths.ACCEPTED):
            looking.set()
            await answered.wait()
        return await read(key)

    async with collector(store, **spooling(tmp_path)) as (_, part):
        monkeypatch.setattr(store, "get", slow)
        uploads = [asyncio.ensure_future(part.acceptor.accept(submit(frame))) for frame in frames]
        await looking.wait()
        await settle()
        answered.set()
        answers = await asyncio.gather(*uploads, return_exceptions=True)

        assert [frame_of()] == stored_frames(tmp_path)
    assert [False, True] == [getattr(each, "duplicate", None) for each in answers[:2]]
    assert isinstance(answers[2], IdentityConflict)


async def test_a_bucket_that_hangs_does_not_hold_a_spool_up(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the look for an old manifest nor the record of a conflict is waited for without end; a number that
    follows what has landed needs no look."""
    looks = 0

    async def hanging(*_: object) -> None:
        nonlocal looks
        looks += 1
        await asyncio.Event().wait()

    monkeypatch.setattr("lakebed.batches.spool.LOOK_TIMEOUT_S", 0.01)
    monkeypatch.setattr("lakebed.batches.spool.QUARANTINE_TIMEOUT_S", 0.01)
    store.down = False
    async with collector(store, **spooling(tmp_path)) as (_, part):
        assert part._lander is not None
        await part.acceptor.accept(submit(frame_of(10, 19)))
        await part._lander.land()
        with monkeypatch.context() as away:
            away.setattr(store, "get", hanging)
            away.setattr(store, "create", hanging)
            async with asyncio.timeout(30):
                await part.acceptor.accept(submit(frame_of(20, 29)))
                looks_for_new = looks
                await part.acceptor.accept(submit(frame_of(0, 9)))
                with pytest.raises(IdentityConflict) as refused:
                    await part.acceptor.accept(submit(frame_of(0, 9, value=2.0)))

    assert (0, False) == (looks_for_new, refused.value.detail["quarantined"])


async def test_a_segment_that_is_full_is_followed_by_another(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long outage of the bucket is many files, not one; all of it lands, and the disk is freed."""
    monkeypatch.setattr("lakebed.batches.spool.SEGMENT_BYTES_MAX", 1)
    async with collector(store, **spooling(tmp_path)) as (_, part):
        assert part._lander is not None
        for n in range(3):
            await part.acceptor.accept(submit(frame_of(n * 10, n * 10 + 9)))
        files = len(list(tmp_path.glob("*.spool")))
        store.down = False
        landed = await part._lander.land()

        assert (3, 3, []) == (files, landed, list(tmp_path.glob("*.spool")))


async def test_a_record_that_is_no_frame_is_kept_for_a_person_and_an_empty_segment_is_not(
    store: Switched, tmp_path: Path
) -> None:
    """The batches beside it are taken up."""
    (tmp_path / f"{1:020d}.spool").write_bytes(pack(frame_of(), 1, "a") + pack(b"no frame", 2, "b"))
    (tmp_path / f"{2:020d}.spool").write_bytes(b"")
    store.down = False
    async with collector(store, **spooling(tmp_path)) as (_, part):
        assert isinstance(part.acceptor, Spool) and part._lander is not None
        found = [path.name for path in tmp_path.glob("*.spool")]
        landed = await part._lander.land()

        assert ([f"{1:020d}.spool"], 1) == (found, landed)
        assert (1, [f"{1:020d}.damaged"]) == (
            part.acceptor.damaged_files(),
            [path.name for path in tmp_path.glob("*.damaged")],
        )


def test_a_spool_has_one_owner(tmp_path: Path) -> None:
    """A second collector on the same folder is refused."""
    first = SpoolSegments(tmp_path)

    with pytest.raises(Conflict):
        SpoolSegments(tmp_path)

    first.close()
    SpoolSegments(tmp_path).close()


def test_damage_inside_a_segment_costs_only_what_it_hit(tmp_path: Path) -> None:
    """Records behind a damaged one are recovered, and the damaged file is kept for a person."""
    segments = SpoolSegments(tmp_path)
    records = [pack(frame_of(n, n + 9), n, f"a{n}") for n in (0, 10, 20)]
    number, start = segments.append(records)
    segments.close()
    path = segments.path(number)
    data = bytearray(path.read_bytes())
    data[start + len(records[0]) + 60] ^= 0xFF
    path.write_bytes(bytes(data))

    again = SpoolSegments(tmp_path)
    found = [record.at_ns for record, _ in again.recover(number)]
    again.remove(number)

    assert found == [0, 20]
    assert [path.with_suffix(".damaged").name] == [p.name for p in tmp_path.glob("*.damaged")]
    again.close()


def test_no_segment_takes_the_name_of_one_that_is_kept_for_a_person(tmp_path: Path) -> None:
    """Damage is kept aside, also when it strikes again after a restart."""
    kept = []
    for restart in range(2):
        segments = SpoolSegments(tmp_path)
        segments.append([pack(b"%d" % restart, 1, "x")])
        kept.append(segments.path(segments.active_number).read_bytes())
        segments.damaged.add(segments.active_number)
        segments.remove(segments.active_number)
        segments.close()

    assert sorted(kept) == sorted(path.read_bytes() for path in tmp_path.glob("*.damaged"))


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_a_tail_torn_anywhere_is_cut_off(tmp_path: Path, cut: int) -> None:
    """Whatever of the last record reached the disk, the ones before it are whole."""
    whole, torn = pack(frame_of(), 1, "a"), pack(frame_of(10, 19), 2, "b")
    (tmp_path / f"{1:020d}.spool").write_bytes(whole + torn[:cut])

    segments = SpoolSegments(tmp_path)
    found = [frame for _, frame in segments.recover(1)]

    assert [frame_of()] == found
    assert len(whole) == segments.path(1).stat().st_size
    segments.close()


@pytest.mark.parametrize("known_max", [100, 1], ids=["remembered", "evicted"])
async def test_what_has_landed_is_known_after_a_restart(store: Switched, tmp_path: Path, known_max: int) -> None:
    """The same bytes are a duplicate and other bytes a conflict, also when the collector has forgotten the batch."""
    store.down = False
    for number in range(3):
        async with collector(store, **spooling(tmp_path), known_max=known_max) as (client, part):
            await client.post("/v1/batches", content=frame_of(number * 10, number * 10 + 9))
            assert part._lander is not None
            await part._lander.land()

    async with collector(store, **spooling(tmp_path), known_max=known_max) as (client, _):
        again = await client.post("/v1/batches", content=frame_of(0, 9))
        other = await client.post("/v1/batches", content=frame_of(0, 9, value=7.0))
        fresh = await client.post("/v1/batches", content=frame_of(30, 39))

    assert (True, 409, False) == (again.json()["duplicate"], other.status_code, fresh.json()["duplicate"])


async def test_what_has_landed_is_known_after_a_restart_without_the_bucket(store: Switched, tmp_path: Path) -> None:
    """From the file beside the segments, whose last line may be torn."""
    store.down = False
    async with collector(store, **spooling(tmp_path)) as (client, part):
        await client.post("/v1/batches", content=frame_of(0, 9))
        assert part._lander is not None
        await part._lander.land()
    with (tmp_path / "landed.jsonl").open("ab") as file:
        file.write(b'{"schema": "lightm')
    store.down = True

    async with collector(store, **spooling(tmp_path)) as (client, part):
        again = await client.post("/v1/batches", content=frame_of(0, 9))
        other = await client.post("/v1/batches", content=frame_of(0, 9, value=7.0))
        used = part._context.metrics.value("lakebed_batches_spool_disk_bytes")

    assert (True, 409) == (again.json()["duplicate"], other.status_code)
    assert used >= (tmp_path / "landed.jsonl").stat().st_size > 0


async def test_a_spool_lands_only_in_the_bucket_it_has_landed_in_before(store: Switched, tmp_path: Path) -> None:
    """A collector may start without its bucket, so the bucket is compared before the first landing of each process."""
    store.down = False
    async with collector(store, **spooling(tmp_path)) as (client, part):
        await client.post("/v1/batches", content=frame_of())
        assert part._lander is not None
        await part._lander.land()
    other = MemoryStore(clock=SystemClock())

    async with collector(other, **spooling(tmp_path)) as (client, part):
        spooled = await client.post("/v1/batches", content=frame_of(10, 19))
        assert part._lander is not None
        await claim(runtime_on(other), expected="", location="")  # another bucket, with an authority of its own
        with pytest.raises(Conflict, match="authority"):
            await part._lander.land()

    assert 200 == spooled.status_code
    assert [] == [info.key async for info in other.list(paths.ACCEPTED)]
    async with collector(store, **spooling(tmp_path)) as (_, part):
        assert part._lander is not None
        assert 1 == await part._lander.land()


@pytest.mark.parametrize("where", ["_sync", "_sweep", "_seal"])
async def test_landing_goes_on_after_an_error_of_the_disk(
    store: Switched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A full disk, a file that cannot be removed: the round fails, and the next one lands what waits."""
    store.down = False
    spool = spooling(tmp_path) | {"object_landing_interval_ms": 1}
    failing = {"_sync": (LandedBatches, "sync"), "_sweep": (SpoolSegments, "remove"), "_seal": (SpoolSegments, "seal")}
    at, name = failing[where]
    failed = threading.Event()

    def fails(*_: object) -> None:
        failed.set()
        raise OSError(28, "No space left on device")

    async with collector(store, **spool) as (client, part):
        assert part._lander is not None
        with monkeypatch.context() as patch:
            await client.post("/v1/batches", content=frame_of())
            patch.setattr(at, name, fails)
            assert await asyncio.to_thread(failed.wait, 60)
            with pytest.raises(Unavailable):  # as at the end of the process
                await part._lander.land()
        await client.post("/v1/batches", content=frame_of(10, 19))
        async with asyncio.timeout(60):
            while len([info async for info in store.list(paths.ACCEPTED)]) < 2:
                await asyncio.sleep(0)


@pytest.mark.parametrize("known_max", [1, 100])
def test_landed_batches_whose_sync_failed_are_written_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_max: int
) -> None:
    """A full disk for a while: nothing that landed meanwhile is forgotten by a restart."""
    accepted = [
        acceptance.manifest(submit(frame_of(n, n + 9)), at_ns=1, collector_id="c", attempt_id="a") for n in (0, 10, 20)
    ]
    known = LandedBatches(tmp_path, known_max=known_max)
    for each in accepted:
        known.add(each)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError):
            known.sync()
    (tmp_path / "landed.jsonl").unlink(missing_ok=True)  # what was not synced may be gone after a crash
    known.sync()
    again = LandedBatches(tmp_path, known_max=known_max)
    again.load()

    assert accepted[-1] == again.get(accepted[-1].identity)


def test_a_torn_line_of_the_landed_batches_takes_no_other_with_it(tmp_path: Path) -> None:
    """The end of a write that a crash or a full disk cut off: what lands after it is known after the next restart."""
    accepted = [
        acceptance.manifest(submit(frame_of(n, n + 9)), at_ns=1, collector_id="c", attempt_id="a") for n in (0, 10, 20)
    ]
    for number, each in enumerate(accepted):
        known = LandedBatches(tmp_path, known_max=100)
        known.load()
        known.add(each)
        known.sync()
        if number == 0:
            with (tmp_path / "landed.jsonl").open("ab") as file:
                file.write(write_record(each)[:50])
    again = LandedBatches(tmp_path, known_max=100)
    again.load()

    assert accepted == [again.get(each.identity) for each in accepted]
    assert not again.is_new(accepted[-1].identity)


def test_a_number_is_new_only_behind_the_highest_that_has_landed(tmp_path: Path) -> None:
    """Batches land in any order: of one below the highest the bucket is asked, after a restart too."""
    accepted = [
        acceptance.manifest(submit(frame_of(n, n + 9)), at_ns=1, collector_id="c", attempt_id="a") for n in (20, 10)
    ]
    known = LandedBatches(tmp_path, known_max=1)
    for each in accepted:
        known.add(each)
        known.sync()
    again = LandedBatches(tmp_path, known_max=1)
    again.load()

    for one in (known, again):
        assert [False, False, True] == [one.is_new(submit(frame_of(n, n + 9)).batch.identity) for n in (10, 20, 30)]


async def test_what_another_collector_has_landed_is_known_to_one_that_never_saw_its_boot(
    store: Switched, tmp_path: Path
) -> None:
    """An agent that fails over sends again what it has no answer for: the bucket is asked, as nothing here knows it."""
    store.down = False
    async with collector(store, **spooling(tmp_path / "a")) as (client, part):
        await client.post("/v1/batches", content=frame_of(0, 9))
        assert part._lander is not None
        await part._lander.land()

    async with collector(store, **spooling(tmp_path / "b")) as (client, _):
        again = await client.post("/v1/batches", content=frame_of(0, 9))
        other = await client.post("/v1/batches", content=frame_of(0, 9, value=7.0))
        fresh = await client.post("/v1/batches", content=frame_of(10, 19))

    assert (True, 409, False) == (again.json()["duplicate"], other.status_code, fresh.json()["duplicate"])

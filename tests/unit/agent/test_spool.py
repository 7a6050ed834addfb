from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakebed.agent import paths
from lakebed.agent.disk_queue import DiskQueue, QueueLimits
from lakebed.agent.files import BLOCK_BYTES, Files
from lakebed.agent.model import DiskTrouble, Frame, ParkedBatch, QueuedBatch, QueueFull, QueueInUse
from lakebed.core.errors import Corrupt, Invalid, NotFound
from support.agent_fakes import AGENT, FailingPower, PowerLoss, frame, open_spool


def parked_for(entry: QueuedBatch) -> ParkedBatch:
    return ParkedBatch(
        agent_id=AGENT,
        boot_id=entry.boot_id,
        seq_start=entry.seq_start,
        seq_end=entry.seq_end,
        reason="identity_conflict",
        submitted_frame_sha256=entry.sha256,
        accepted_frame_sha256="ab" * 32,
        parked_at_ms=7,
        size_bytes=entry.size_bytes,
    )


def waiting(disk_queue: DiskQueue) -> list[tuple[str, int, int]]:
    found = []
    while entry := disk_queue.claim():
        found.append((entry.boot_id, entry.seq_start, entry.seq_end))
    return found


def test_batches_come_back_oldest_boot_first_after_a_restart(tmp_path: Path) -> None:
    """Batches of earlier boots are kept and sent before those of this one."""
    for boot in ("boot-z", "boot-a"):
        disk_queue = open_spool(tmp_path, boot)
        disk_queue.append([frame(boot, 0, 4), frame(boot, 5, 9)])
        disk_queue.close()

    disk_queue = open_spool(tmp_path, "boot-m")
    disk_queue.append([frame("boot-m", 0, 0)])

    assert waiting(disk_queue) == [
        ("boot-z", 0, 4),
        ("boot-z", 5, 9),
        ("boot-a", 0, 4),
        ("boot-a", 5, 9),
        ("boot-m", 0, 0),
    ]


@pytest.mark.parametrize("seed", range(3))
def test_batches_of_a_boot_come_back_in_order_whatever_order_the_folder_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A folder lists its files in no order: after a restart twelve batches are sent as they were numbered."""
    disk_queue = open_spool(tmp_path)
    disk_queue.append([frame("boot-1", n, n) for n in range(12)])
    disk_queue.close()
    real = os.scandir

    def shuffled(folder: Path) -> list[os.DirEntry[str]]:
        found = list(real(folder))
        random.Random(seed).shuffle(found)
        return found

    monkeypatch.setattr(os, "scandir", shuffled)

    assert [("boot-1", n, n) for n in range(12)] == waiting(open_spool(tmp_path, "boot-2"))


def test_what_is_read_is_exactly_what_was_stored(tmp_path: Path) -> None:
    """The file holds the frame's bytes and nothing else."""
    disk_queue = open_spool(tmp_path)
    sent = frame("boot-1", 0, 9, size=10_000)

    [entry] = disk_queue.append([sent]).stored

    assert sent.data == disk_queue.read(entry)


def test_one_batch_costs_two_fsyncs_and_four_together_cost_five(tmp_path: Path) -> None:
    """The stated cost: each file once, their folder once for all of them."""
    disk_queue = open_spool(tmp_path)
    disk_queue.append([frame("boot-1", 0, 0)])  # makes the boot's folder
    start = disk_queue.files.fsyncs

    disk_queue.append([frame("boot-1", 1, 1)])
    one = disk_queue.files.fsyncs - start
    disk_queue.append([frame("boot-1", n, n) for n in range(2, 6)])

    assert (one, disk_queue.files.fsyncs - start - one) == (2, 5)


def test_a_second_agent_is_refused_the_same_folder(tmp_path: Path) -> None:
    """Two agents never share a queue."""
    first = open_spool(tmp_path)

    with pytest.raises(QueueInUse):
        open_spool(tmp_path, "boot-2")

    first.close()
    open_spool(tmp_path, "boot-2").close()


def test_a_queue_of_another_agent_id_is_refused(tmp_path: Path) -> None:
    """A queue belongs to one agent_id for ever: its frames carry it."""
    open_spool(tmp_path).close()

    with pytest.raises(Invalid, match="agent-b"):
        DiskQueue.open(
            tmp_path, agent_id="agent-b", boot_id="b", limits=QueueLimits(1 << 20, 10, "block"), now_ms=lambda: 0
        )


def test_a_full_queue_that_blocks_stores_nothing_and_drops_nothing(tmp_path: Path) -> None:
    """Under `block` the caller keeps the batch and nothing already queued is touched."""
    disk_queue = open_spool(tmp_path, bytes_max=2 * BLOCK_BYTES)
    disk_queue.append([frame("boot-1", 0, 0), frame("boot-1", 1, 1)])

    with pytest.raises(QueueFull):
        disk_queue.append([frame("boot-1", 2, 2)])

    assert waiting(disk_queue) == [("boot-1", 0, 0), ("boot-1", 1, 1)]


def test_a_full_queue_that_drops_gives_up_the_oldest_that_nobody_is_sending(tmp_path: Path) -> None:
    """Under `drop_oldest` the count reports exactly what was given up, and what is being sent stays."""
    disk_queue = open_spool(tmp_path, batches_max=3, when_full="drop_oldest")
    disk_queue.append([frame("boot-1", 0, 9), frame("boot-1", 10, 14), frame("boot-1", 15, 19)])
    disk_queue.claim()

    stored = disk_queue.append([frame("boot-1", 20, 29)])

    assert (stored.dropped_batches, stored.dropped_samples) == (1, 5)
    assert waiting(disk_queue) == [("boot-1", 15, 19), ("boot-1", 20, 29)]
    assert "dropped_when_full" in (tmp_path / "ledger.jsonl").read_text()


def test_parked_batches_are_never_given_up_for_room(tmp_path: Path) -> None:
    """When parked batches fill the disk, new ones are given up, counted, and the parked ones stay."""
    disk_queue = open_spool(tmp_path, bytes_max=2 * BLOCK_BYTES, when_full="drop_oldest")
    for entry in disk_queue.append([frame("boot-1", 0, 0), frame("boot-1", 1, 1)]).stored:
        disk_queue.park(entry, parked_for(entry))

    stored = disk_queue.append([frame("boot-1", 2, 9)])

    assert (len(stored.stored), stored.dropped_batches, stored.dropped_samples) == (0, 1, 8)
    assert disk_queue.parked_batches == 2


def test_waiting_batches_are_not_given_up_when_that_makes_no_room(tmp_path: Path) -> None:
    """Parked batches leave too little: the new batch is given up, and not every waiting one in vain before it."""
    disk_queue = open_spool(tmp_path, bytes_max=4 * BLOCK_BYTES, when_full="drop_oldest")
    for entry in disk_queue.append([frame("boot-1", n, n) for n in range(3)]).stored:
        disk_queue.park(entry, parked_for(entry))
    disk_queue.append([frame("boot-1", 3, 3)])

    stored = disk_queue.append([frame("boot-1", 4, 9, size=2 * BLOCK_BYTES)])

    assert (0, 1, 6) == (len(stored.stored), stored.dropped_batches, stored.dropped_samples)
    assert [("boot-1", 3, 3)] == waiting(disk_queue)


def test_damaged_bytes_are_refused_and_a_missing_file_is_said_to_be_gone(tmp_path: Path) -> None:
    """Bytes that are not those that were stored are never sent."""
    disk_queue = open_spool(tmp_path)
    entries = disk_queue.append([frame("boot-1", 0, 0), frame("boot-1", 1, 1)]).stored
    files = sorted((tmp_path / "boots").rglob("*.lmbatch"))
    files[0].write_bytes(b"other")
    files[1].unlink()

    with pytest.raises(Corrupt):
        disk_queue.read(entries[0])
    with pytest.raises(NotFound):
        disk_queue.read(entries[1])


def test_a_refusing_disk_promises_nothing_and_the_same_frames_can_be_offered_again(tmp_path: Path) -> None:
    """After DiskTrouble the same frames land on the same names: one copy of each."""

    class Refusing(Files):
        left = 1

        def sync_folder(self, path: Path) -> None:
            if path.parent.name == "boots" and self.left:
                self.left -= 1
                raise OSError(28, "no space left")
            super().sync_folder(path)

    disk_queue = open_spool(tmp_path, files=Refusing())
    frames = [frame("boot-1", 0, 4), frame("boot-1", 5, 9)]

    with pytest.raises(DiskTrouble):
        disk_queue.append(frames)
    disk_queue.append(frames)

    assert waiting(disk_queue) == [("boot-1", 0, 4), ("boot-1", 5, 9)]
    assert len(list(tmp_path.rglob("*.lmbatch"))) == 2


def test_a_batch_that_the_disk_takes_in_parts_is_stored_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may take a part of a write without an error: a batch counts only with all of its bytes."""
    disk_queue, one = open_spool(tmp_path), frame("boot-1", 0, 4)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:10]))

    (stored,) = disk_queue.append([one]).stored

    assert one.data == disk_queue.read(stored)


def test_a_boot_folder_whose_name_could_not_be_synced_is_synced_at_the_next_try(tmp_path: Path) -> None:
    """A folder that exists is not yet one that lasts: the retry syncs its parent before anything is promised."""

    class Refusing(Files):
        refused = False
        synced: list[str] = []

        def sync_folder(self, path: Path) -> None:
            if path.name == "boots" and not self.refused:
                self.refused = True
                raise OSError(5, "I/O error")
            self.synced.append(path.name)
            super().sync_folder(path)

    files = Refusing()
    disk_queue = open_spool(tmp_path, files=files)
    with pytest.raises(DiskTrouble):
        disk_queue.append([frame("boot-1", 0, 0)])
    files.synced.clear()

    disk_queue.append([frame("boot-1", 0, 0)])

    assert "boots" in files.synced


def test_emptied_folders_of_earlier_boots_are_removed(tmp_path: Path) -> None:
    """A folder per boot does not become a folder per restart for ever."""
    disk_queue = open_spool(tmp_path, "boot-1")
    disk_queue.append([frame("boot-1", 0, 0)])
    disk_queue.close()
    disk_queue = open_spool(tmp_path, "boot-2")

    entry = disk_queue.claim()
    assert entry is not None
    disk_queue.complete(entry)

    assert list((tmp_path / "boots").iterdir()) == []
    assert (disk_queue.batches, disk_queue.pending_bytes) == (0, 0)


class Story:
    """What a world promised, followed step by step: `held` must survive any crash, `offered` is all that may exist."""

    def __init__(self, folder: Path, files: Files) -> None:
        self.folder, self.files = folder, files
        self.offered: dict[str, Frame] = {}
        self.held: set[str] = set()
        self.leaving: set[str] = set()  # completes that were begun: either answer is right

    def play(self, boot: str, moves: str) -> None:
        disk_queue = open_spool(self.folder, boot, files=self.files)
        try:
            seq = 0
            for move in moves:
                if move in "ab":
                    frames = [frame(boot, seq + 2 * i, seq + 2 * i + 1) for i in range(1 if move == "a" else 2)]
                    seq += 2 * len(frames)
                    self.offered |= {one.sha256: one for one in frames}
                    disk_queue.append(frames)
                    self.held |= {one.sha256 for one in frames}
                elif entry := disk_queue.claim():
                    if move == "c":
                        self.held.discard(entry.sha256)
                        self.leaving.add(entry.sha256)
                        disk_queue.complete(entry)
                    else:
                        disk_queue.park(entry, parked_for(entry))
        finally:
            disk_queue.close()

    def check(self) -> None:
        """Reopens on a whole disk: nothing promised is lost, nothing is there that was not offered."""
        disk_queue = open_spool(self.folder, "boot-after")
        found: dict[str, bytes] = {}
        while entry := disk_queue.claim():
            found[entry.sha256] = disk_queue.read(entry)
        queued = set(found)
        for path in (self.folder / "parked").glob("*.lmbatch"):
            found[path.name.split(".")[2]] = path.read_bytes()
            assert path.with_name(path.name + ".json").exists(), "parked without its reason"
        disk_queue.close()
        assert self.held <= set(found), "lost a batch that was promised"
        assert found == {sha: self.offered[sha].data for sha in found}, "something exists that nobody offered"
        spans = [self.offered[sha].identity for sha in found]
        samples = [(span.boot_id, seq) for span in spans for seq in range(span.seq_start, span.seq_end + 1)]
        assert len(samples) == len(set(samples)), "one sample under two identities"
        assert not list(self.folder.rglob("*.tmp"))
        assert queued <= set(self.offered)


MOVES = ("aa", "bca", "apb", "bpcac")


def crash(folder: Path, fail_at: int, *, cut: int, keep: Callable[[], bool]) -> bool:
    """One crash at one step of the whole story; False when the story ended before that step."""
    files = FailingPower(fail_at, cut=cut)
    scenario = Story(folder, files)
    try:
        for number, moves in enumerate(MOVES):
            scenario.play(f"boot-{number}", moves)
    except PowerLoss:
        files.forget(keep)
        scenario.check()
        return True
    scenario.check()
    return False


@pytest.mark.parametrize("kept", [False, True], ids=["unsynced names lost", "unsynced names kept"])
def test_a_crash_at_any_step_loses_nothing_that_was_promised(tmp_path: Path, kept: bool) -> None:
    """Power fails before each single disk operation of four boots; what append returned is always there after."""
    step = 1

    while crash(tmp_path / str(step), step, cut=5, keep=lambda: kept):
        step += 1

    assert step > 60


def test_a_write_torn_at_any_byte_is_cut_and_nothing_else_is_harmed(tmp_path: Path) -> None:
    """The unfinished file of a crash is cut at every byte boundary; fsynced batches before it survive each time."""
    probe = FailingPower(0)
    Story(tmp_path / "probe", probe).play("boot-0", "aa")
    step = max(step for step, name in probe.written if name.endswith(".lmbatch.tmp"))

    for cut in range(len(frame("boot-0", 2, 3).data) + 1):
        files = FailingPower(step, cut=cut)
        scenario = Story(tmp_path / f"cut-{cut}", files)
        with pytest.raises(PowerLoss):
            scenario.play("boot-0", "aa")
        assert [cut] == [path.stat().st_size for path in (tmp_path / f"cut-{cut}").rglob("*.lmbatch.tmp")]
        scenario.check()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    boots=st.lists(st.text("abcp", max_size=8), min_size=1, max_size=4),
    fail_at=st.integers(1, 150),
    cut=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_random_stories_with_random_crashes_keep_every_promise(
    tmp_path_factory: pytest.TempPathFactory, boots: list[str], fail_at: int, cut: int, seed: int
) -> None:
    """Any order of appends, completes and parks over several boots, any crash, any subset of unsynced names lost."""
    chance = random.Random(seed)
    files = FailingPower(fail_at, cut=cut)
    scenario = Story(tmp_path_factory.mktemp("story"), files)

    try:
        for number, moves in enumerate(boots):
            scenario.play(f"boot-{number}", moves)
    except PowerLoss:
        files.forget(lambda: chance.random() < 0.5)

    scenario.check()


def test_the_reason_of_a_parked_batch_is_on_the_disk_before_the_batch_is_there(tmp_path: Path) -> None:
    """A power loss in between leaves a reason without a batch, which is still queued; never a batch without one."""
    steps: list[str] = []

    class Steps(Files):
        def rename(self, source: Path, target: Path) -> None:
            steps.append(target.suffix)
            super().rename(source, target)

        def sync_folder(self, path: Path) -> None:
            steps.append(f"sync {path.name}")
            super().sync_folder(path)

    disk_queue = open_spool(tmp_path, files=Steps())
    disk_queue.append([frame("boot-1", 0, 4)])
    entry = disk_queue.claim()
    assert entry is not None
    steps.clear()
    disk_queue.park(entry, parked_for(entry))

    assert [".json", "sync parked", ".lmbatch", "sync parked", f"sync {paths.boot_folder(1, 'boot-1')}"] == steps


def test_a_parked_batch_whose_reason_is_lost_is_sent_again_after_a_restart(tmp_path: Path) -> None:
    """Nobody could settle it; a collector that refuses it again gives the reason again. Its place stays its own."""
    disk_queue = open_spool(tmp_path)
    disk_queue.append([frame("boot-1", 0, 4), frame("boot-1", 5, 9)])
    for _ in range(2):
        entry = disk_queue.claim()
        assert entry is not None
        disk_queue.park(entry, parked_for(entry))
    reasons = sorted((tmp_path / paths.PARKED).glob(f"*{paths.REASON}"))
    disk_queue.close()
    reasons[0].unlink()

    again = open_spool(tmp_path, "boot-2")

    assert [("boot-1", 0, 4)] == waiting(again)
    assert 1 == again.parked_batches

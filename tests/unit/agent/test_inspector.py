"""The owner's view of a queue folder, the ledger, the names in the folder, and what a restart puts in order."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakebed.agent import files as ledgers
from lakebed.agent import paths
from lakebed.agent.codec import Account, accounts
from lakebed.agent.disk_queue import DiskQueue
from lakebed.agent.files import BLOCK_BYTES, Files, QueueLedger, disk_bytes
from lakebed.agent.inspector import QueueInspector
from lakebed.agent.model import ParkedBatch, ParkedFor, QueuedBatch
from lakebed.core.errors import Corrupt, Invalid
from support.agent_fakes import AGENT, frame, open_spool


def park(disk_queue: DiskQueue, entry: QueuedBatch, *, at_ms: int = 7, reason: ParkedFor = "rejected") -> None:
    parked = ParkedBatch(
        AGENT, entry.boot_id, entry.seq_start, entry.seq_end, reason, entry.sha256, at_ms, entry.size_bytes
    )
    disk_queue.park(entry, parked)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The batches 0 to 3 of one boot; 2 and 3 are parked, 3 for longer."""
    disk_queue = open_spool(tmp_path / "queue")
    stored = disk_queue.append([frame("boot-1", n, n, size=100 + n) for n in range(4)]).stored
    park(disk_queue, stored[2], at_ms=20, reason="identity_conflict")
    park(disk_queue, stored[3], at_ms=10)
    disk_queue.close()
    return tmp_path / "queue"


def keeper_of(folder: Path, files: Files | None = None) -> QueueInspector:
    return QueueInspector(folder, lambda: 99, files)


def sha(number: int) -> str:
    return frame("boot-1", number, number, size=100 + number).sha256


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()]


def test_a_chosen_batch_says_where_it_is_and_why(folder: Path) -> None:
    """Queued and parked ones alike, with size and numbers; a parked one has its reason."""
    queued, parked = keeper_of(folder).select([sha(1), sha(2)[:6]])

    assert ("queued", "boot-1", 1, 1, sha(1), 101, "") == (
        queued.state, queued.boot_id, queued.seq_start, queued.seq_end, queued.sha256, queued.size_bytes, queued.reason,
    )  # fmt: skip
    assert ("parked", "boot-1", 2, 2, sha(2), 102, "identity_conflict") == (
        parked.state, parked.boot_id, parked.seq_start, parked.seq_end, parked.sha256, parked.size_bytes, parked.reason,
    )  # fmt: skip
    assert queued.path.is_file() and parked.path.is_file()


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        ([], {}, []),
        ([], {"all_parked": True}, [2, 3]),
        ([2], {"all_parked": True}, [2, 3]),
        ([0], {"all_parked": True}, [0, 2, 3]),
        ([2, 2], {}, [2]),
        ([2], {"parked_only": True}, [2]),
    ],
)
def test_batches_are_chosen_once_each(
    folder: Path, names: list[int], options: dict[str, bool], expected: list[int]
) -> None:
    """By name, or everything parked; naming one twice chooses it once."""
    chosen = keeper_of(folder).select([sha(number) for number in names], **options)

    assert expected == sorted(choice.seq_start for choice in chosen)


@pytest.mark.parametrize(
    ("name", "options"), [(sha(0)[:5], {}), ("f" * 64, {}), (sha(0), {"parked_only": True}), ("", {})]
)
def test_a_name_that_fits_not_exactly_one_batch_is_refused(folder: Path, name: str, options: dict[str, bool]) -> None:
    """Too short, unknown, or not parked where only parked ones count."""
    with pytest.raises(Invalid, match="names"):
        keeper_of(folder).select([name], **options)


def test_a_prefix_of_two_batches_is_refused_and_nothing_is_chosen(tmp_path: Path) -> None:
    """The same bytes queued under two boots have one hash."""
    for boot in ("boot-1", "boot-2"):
        disk_queue = open_spool(tmp_path / "queue", boot)
        made = frame("x", 0, 0)
        disk_queue.append([msgspec.structs.replace(made, identity=frame(boot, 0, 0).identity)])
        disk_queue.close()

    with pytest.raises(Invalid, match="names 2 batches"):
        keeper_of(tmp_path / "queue").select([frame("x", 0, 0).sha256])


class Steps(Files):
    """Writes down what is done to the folder."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, str]] = []

    def append(self, path: Path, data: bytes) -> None:
        self.steps.append(("append", path.name))
        super().append(path, data)

    def unlink(self, path: Path) -> None:
        self.steps.append(("unlink", path.suffix))
        super().unlink(path)

    def rename(self, source: Path, target: Path) -> None:
        self.steps.append(("rename", target.parent.name))
        super().rename(source, target)

    def sync_folder(self, path: Path) -> None:
        self.steps.append(("sync", path.name))
        super().sync_folder(path)


def test_a_drop_is_in_the_ledger_first_and_leaves_no_file(folder: Path) -> None:
    """A parked batch goes with its reason's file; the folder is synced after."""
    files = Steps()
    inspector_ = keeper_of(folder, files)
    inspector_.drop(inspector_.select([sha(2), sha(0)]), reason="why")

    assert [
        ("append", "ledger.jsonl"), ("unlink", ".lmbatch"), ("unlink", ".json"), ("sync", "parked"),
        ("append", "ledger.jsonl"), ("unlink", ".lmbatch"),
    ] == files.steps[:6]  # fmt: skip
    assert "sync" == files.steps[6][0] and 7 == len(files.steps)
    assert [3] == [each.seq_start for each in inspector_.parked()]
    assert [1] == [each.seq_start for each in inspector_.queued(10)]
    reported = [line for line in lines(folder) if line["what"] == "dropped_by_owner"]
    assert [(99, "why", 2, "identity_conflict", 102), (99, "why", 0, "", 100)] == [
        (line["at_ms"], line["reason"], line["seq_start"], line["parked_for"], line["size_bytes"]) for line in reported
    ]


def test_a_return_moves_the_batch_before_its_reason_goes(folder: Path) -> None:
    """A crash between leaves the batch in one place; the ledger reports who returned what."""
    files = Steps()
    inspector_ = keeper_of(folder, files)
    inspector_.requeue(inspector_.select([sha(3)]), reason="fixed")

    assert [
        ("append", "ledger.jsonl"), ("rename", "returned"), ("sync", "returned"), ("unlink", ".json"),
        ("sync", "parked"),
    ] == files.steps  # fmt: skip
    assert ("returned", "fixed", 3) == tuple(lines(folder)[-1][name] for name in ("what", "reason", "seq_start"))
    with pytest.raises(Invalid, match="is not parked"):
        inspector_.requeue(inspector_.select([sha(0)]), reason="fixed")


def test_boots_are_summed_up(folder: Path) -> None:
    """Batches, samples, bytes, numbers, and the age of the first batch."""
    for path in (folder / "boots").rglob("*.lmbatch"):
        os.utime(path, (1000 + int(path.name.split("-")[0]),) * 2)

    (row,) = keeper_of(folder).boots()

    assert ("boot-1", 2, 2, 201, 0, 1, 1_000_000) == (
        row.boot_id, row.batches, row.samples, row.size_bytes, row.seq_start, row.seq_end, row.oldest_at_ms,
    )  # fmt: skip


def test_a_boot_whose_batches_are_all_gone_is_no_row(folder: Path) -> None:
    """Its folder may stand a moment longer, or a running agent may remove it while it is listed."""
    for path in (folder / "boots").rglob("*.lmbatch"):
        path.unlink()

    assert [] == keeper_of(folder).boots()


def test_files_that_are_no_batches_are_not_shown(folder: Path) -> None:
    """Unfinished ones, strangers, parked batches without a reason, folders that are no boots."""
    (boot,) = (folder / "boots").iterdir()
    (boot / "x.tmp").write_bytes(b"")
    (folder / "boots" / "stranger").mkdir()
    (folder / "parked" / "stranger").write_bytes(b"")
    next((folder / "parked").glob(f"*{sha(2)}*.json")).unlink()

    inspector_ = keeper_of(folder)

    assert [0, 1] == [each.seq_start for each in inspector_.queued(10)]
    assert [3] == [each.seq_start for each in inspector_.parked()]
    assert 1 == len(inspector_.boots())


def test_the_ledger_begins_anew_at_its_limit_and_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files at most, each within the limit."""
    path = tmp_path / "ledger.jsonl"
    book = QueueLedger(path, Files(), lambda: 5)
    book.note("torn", name="a")
    size = path.stat().st_size
    monkeypatch.setattr(ledgers, "LEDGER_BYTES_MAX", 2 * size)
    book.note("torn", name="b")
    both = path.read_bytes().count(b"\n")
    book.note("torn", name="c")

    assert 2 == both
    assert [["a", "b"], ["c"]] == [
        [json.loads(line)["name"] for line in each.read_bytes().splitlines()]
        for each in (tmp_path / "ledger.1.jsonl", path)
    ]
    assert {"at_ms": 5, "what": "torn", "name": "c"} == json.loads(path.read_bytes())


def test_a_torn_line_of_the_ledger_takes_no_other_with_it(tmp_path: Path) -> None:
    """A crash or a full disk cut it off: the drop that is noted next is still known."""
    path = tmp_path / "ledger.jsonl"
    book = QueueLedger(path, Files(), lambda: 5)
    book.note("torn", name="a")
    path.write_bytes(path.read_bytes() + b'{"at_ms": 5, "wh')

    book.note("torn", name="b")
    book.note("torn", name="c")

    first, _, *rest = path.read_bytes().splitlines()
    assert ["a", "b", "c"] == [json.loads(line)["name"] for line in (first, *rest)]


def test_a_ledger_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    """The line is lost, the agent continues."""
    QueueLedger(tmp_path / "none" / "ledger.jsonl", Files(), lambda: 5).note("torn", name="a")

    assert [] == list(tmp_path.iterdir())


def test_accounts_read_both_ledgers_and_parked_batches(folder: Path) -> None:
    """Drops within one boot name their numbers; those over several boots, and cut lines, name none."""
    notes: list[dict[str, Any]] = [
        {"what": "dropped_when_full", "first": ["boot-1", 50], "last": ["boot-1", 59]},
        {"what": "dropped_when_full", "first": ["boot-1", 60], "last": ["boot-2", 9]},
        {"what": "dropped_when_full", "batches": 1, "samples": 3, "newest": True},
        {"what": "returned", "boot_id": "boot-1", "seq_start": 70, "seq_end": 79},
    ]
    (folder / "ledger.1.jsonl").write_bytes(b"".join(msgspec.json.encode(note) + b"\n" for note in notes))
    old = {"what": "dropped_by_owner", "boot_id": "boot-0", "seq_start": 1, "seq_end": 2}
    with (folder / "ledger.jsonl").open("ab") as out:
        out.write(msgspec.json.encode(old) + b"\n[1]\n" + b'{"what": "dropped_by')

    found = accounts(folder)

    assert {
        Account(AGENT, "boot-1", 0, 0, "queued"),
        Account(AGENT, "boot-1", 1, 1, "queued"),
        Account(AGENT, "boot-1", 2, 2, "parked"),
        Account(AGENT, "boot-1", 3, 3, "parked"),
        Account(AGENT, "boot-0", 1, 2, "dropped"),
        Account(AGENT, "boot-1", 50, 59, "dropped"),
    } == set(found)
    assert 6 == len(found)


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}"])
def test_a_damaged_queue_file_is_corrupt(folder: Path, data: bytes) -> None:
    """An audit must not take it for an agent that lost nothing."""
    (folder / "queue.json").write_bytes(data)

    with pytest.raises(Corrupt, match=r"queue\.json"):
        accounts(folder)


@pytest.mark.parametrize(
    ("size", "taken"), [(0, 1), (1, 1), (BLOCK_BYTES, 1), (BLOCK_BYTES + 1, 2), (3 * BLOCK_BYTES, 3)]
)
def test_a_file_takes_whole_blocks(size: int, taken: int) -> None:
    """At least one, as file systems count."""
    assert taken * BLOCK_BYTES == disk_bytes(size)


def test_names_lead_back_to_what_they_name() -> None:
    """Boots, batches and parked batches, whatever the boot's id contains."""
    boot_id, hashed = "bøot/../1", "ab" * 32
    parked = paths.parked_file(boot_id, 3, 9, hashed)

    assert (12, boot_id) == paths.parse_boot(paths.boot_folder(12, boot_id))
    assert (3, 9, hashed) == paths.parse_batch(paths.batch_file(3, 9, hashed))
    assert (boot_id, paths.batch_file(3, 9, hashed)) == paths.parse_parked(parked)
    assert "/" not in parked
    assert paths.batch_file(9, 9, hashed) < paths.batch_file(10, 10, hashed)
    for name in ("", "1.61", "00000001.6", "00000001.zz", parked + ".json", parked + ".tmp"):
        assert (None, None, None) == (paths.parse_boot(name), paths.parse_batch(name), paths.parse_parked(name))


def test_a_restart_puts_parked_batches_in_order(tmp_path: Path) -> None:
    """A reason without its batch goes, a batch without its reason is sent again, unfinished files go."""
    disk_queue = open_spool(tmp_path)
    stored = disk_queue.append([frame("boot-1", n, n) for n in range(3)]).stored
    for entry in stored:
        park(disk_queue, entry)
    disk_queue.close()
    names = sorted(path.name for path in (tmp_path / "parked").glob("*.lmbatch"))
    (tmp_path / "parked" / names[0]).unlink()
    (tmp_path / "parked" / (names[1] + ".json")).unlink()
    (tmp_path / "parked" / "half.tmp").write_bytes(b"")

    again = open_spool(tmp_path, "boot-2")

    assert [names[2], names[2] + ".json"] == sorted(path.name for path in (tmp_path / "parked").iterdir())
    assert (1, 1) == (again.parked_batches, again.batches)
    entry = again.claim()
    assert entry is not None and ("boot-1", 1) == (entry.boot_id, entry.seq_start)
    again.close()


def test_torn_files_are_counted_and_noted(tmp_path: Path) -> None:
    """Each unfinished file of each boot, in the ledger and on the spool; a boot left empty goes."""
    disk_queue = open_spool(tmp_path)
    disk_queue.append([frame("boot-1", 0, 0)])
    disk_queue.close()
    (boot,) = (tmp_path / "boots").iterdir()
    (boot / "a.tmp").write_bytes(b"x")
    other = tmp_path / "boots" / paths.boot_folder(7, "boot-7")
    other.mkdir()
    (other / "b.tmp").write_bytes(b"x")

    again = open_spool(tmp_path, "boot-8")
    whole = open_spool(tmp_path / "fresh")
    again.append([frame("boot-8", 0, 0)])

    assert (2, 0, False) == (again.torn, whole.torn, other.exists())
    assert {"a.tmp", "b.tmp"} == {line["name"] for line in lines(tmp_path) if line["what"] == "torn"}
    assert paths.boot_folder(8, "boot-8") in {path.name for path in (tmp_path / "boots").iterdir()}


def test_returned_batches_are_taken_under_their_boot_before_newer_ones(tmp_path: Path) -> None:
    """Strangers in the folder stay; the count is of what was taken."""
    disk_queue = open_spool(tmp_path)
    first, second = disk_queue.append([frame("boot-1", 0, 4), frame("boot-1", 5, 9)]).stored
    park(disk_queue, first)
    disk_queue.close()
    disk_queue = open_spool(tmp_path, "boot-2")
    inspector_ = keeper_of(tmp_path)
    inspector_.requeue(inspector_.select([], all_parked=True), reason="r")
    (tmp_path / "returned" / "stranger").write_bytes(b"")

    taken = (disk_queue.take_returned(), disk_queue.take_returned())

    assert (1, 0) == taken
    assert (2, (tmp_path / "returned" / "stranger").exists()) == (disk_queue.batches, True)
    assert frame("boot-1", 0, 4).data == disk_queue.read(first)
    assert {(1, "boot-1")} == {(entry.boot, entry.boot_id) for entry in disk_queue._pending.values()}
    assert disk_queue.pending_bytes == 2 * BLOCK_BYTES and second.seq_start == 5
    disk_queue.close()


def test_a_full_queue_says_how_full_it_is_and_notes_what_it_gave_up(tmp_path: Path) -> None:
    """The ledger has batches, samples and the numbers of the first and last one given up."""
    disk_queue = open_spool(tmp_path, batches_max=3, when_full="drop_oldest")
    disk_queue.append([frame("boot-1", 0, 9), frame("boot-1", 10, 14), frame("boot-1", 15, 19)])

    disk_queue.append([frame("boot-1", 20, 29), frame("boot-1", 30, 39)])

    (line,) = lines(tmp_path)
    assert ("dropped_when_full", 2, 15, ["boot-1", 0], ["boot-1", 14]) == tuple(
        line[name] for name in ("what", "batches", "samples", "first", "last")
    )
    assert (3, 3) == (disk_queue.batches, len(list((tmp_path / "boots").rglob("*.lmbatch"))))


def test_a_file_that_is_written_again_holds_only_its_new_bytes(tmp_path: Path) -> None:
    """Also when it is shorter than what a crash left; an append adds to the end."""
    files, path = Files(), tmp_path / "x"
    files.write(path, b"a long line")
    files.write(path, b"short")
    files.append(path, b"er")

    assert (b"shorter", 3) == (path.read_bytes(), files.fsyncs)
    assert 0o600 == path.stat().st_mode & 0o777


def test_batches_of_a_boot_are_sent_in_order_after_a_restart_whatever_the_folders_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory lists its files in any order."""
    disk_queue = open_spool(tmp_path)
    disk_queue.append([frame("boot-1", n, n) for n in range(6)])
    disk_queue.close()
    scandir = os.scandir
    monkeypatch.setattr("os.scandir", lambda path: sorted(scandir(path), key=lambda file: file.name, reverse=True))

    again = open_spool(tmp_path, "boot-2")

    assert list(range(6)) == [entry.seq_start for entry in again._pending.values()]
    again.close()

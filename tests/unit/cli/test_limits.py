"""Commands over many things have a limit whatever was asked for, and those that delete need a reason with words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lakebed.agent.batcher import make_frame
from lakebed.agent.disk_queue import DiskQueue, QueueLimits
from lakebed.batches.model import BatchIdentity, Sample
from lakebed.cli import exits
from lakebed.core.errors import Invalid
from support.shell import Shell


@pytest.fixture
def three(shell: Shell) -> Shell:
    """A queue with three batches."""
    for value in ("a", "b", "c"):
        shell("queue", "put", "--value", value)
    return shell


@pytest.mark.parametrize("verb", ["waiting", "peek"])
def test_a_view_of_a_queue_shows_at_most_so_many_batches(
    three: Shell, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A count above the limit is the limit; one below it is itself."""
    monkeypatch.setattr("lakebed.queue.commands.BATCHES_MAX", 2)

    assert [2, 1] == [len(three.data("queue", verb, "--count", count)) for count in ("1000000", "1")]


def test_a_drain_takes_at_most_so_many_batches_at_once(three: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run says the number that the real one takes; the rest stays for the next."""
    monkeypatch.setattr("lakebed.queue.commands.BATCHES_MAX", 2)

    _, _, would = three("queue", "drain", "--count", "1000000", "--dry-run")
    taken = [three("queue", "drain", "--count", "1000000")[1] for _ in range(2)]

    assert "2 batches would be taken" == would.strip()
    assert [["a", "b"], ["c"]] == [[json.loads(line)["value"] for line in out.splitlines()] for out in taken]


def test_an_agents_queue_lists_at_most_so_many_batches(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest ones; the row of the boot counts all of them."""
    monkeypatch.setattr("lakebed.agent.commands.LISTED_MAX", 2)
    limits = QueueLimits(bytes_max=10**6, batches_max=100)
    disk_queue = DiskQueue.open(tmp_path / "q", agent_id="a", boot_id="boot", limits=limits, now_ms=lambda: 0)
    disk_queue.append([make_frame(BatchIdentity("a", "boot", n, n), [Sample("m", 1, float(n))]) for n in range(3)])
    disk_queue.close()

    listed = shell.data("agent", "queue", "--batches", "--queue-dir", str(tmp_path / "q"))
    (boot,) = shell.data("agent", "queue", "--queue-dir", str(tmp_path / "q"))

    assert ([0, 1], 3) == ([row["seq_start"] for row in listed], boot["batches"])


@pytest.mark.parametrize("blank", ["", " ", "\t"])
@pytest.mark.parametrize(
    "words",
    [
        ("queue", "dlq", "discard", "letter"),
        ("queue", "dlq", "replay", "letter"),
        ("batches", "sweep"),
        ("silver", "audit", "--resend"),
    ],
)
def test_a_blank_reason_is_none(shell: Shell, words: tuple[str, ...], blank: str) -> None:
    """Refused before anything is done, and nothing is on the trail."""
    code, out, err = shell(*words, "--reason", blank)

    assert (exits.code_for(Invalid("")), "") == (code, out)
    assert "reason" in err
    assert [] == shell.deeds()

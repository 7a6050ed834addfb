"""The names in a queue folder, and back. See docs/formats/agent.md.

lock                                            held by the running agent
queue.json                                      format and agent_id
boots/<ordinal>.<boot-hex>/<seq>-<seq>.<sha256>.lmbatch    waiting to be sent
parked/<boot-hex>.<seq>-<seq>.<sha256>.lmbatch and .json    out of the retry order, with the reason
returned/                                       parked batches their owner sent back to the queue
alerts/<kind>.json                              what is wrong now
ledger.jsonl                                    what left the queue unsent, and why
"""

from __future__ import annotations

import re

from lakebed.agent.model import ParkedBatch, QueuedBatch

BATCH, UNFINISHED, REASON = ".lmbatch", ".tmp", ".json"
LOCK, ABOUT, LEDGER = "lock", "queue.json", "ledger.jsonl"
BOOTS, PARKED, RETURNED, ALERTS = "boots", "parked", "returned", "alerts"

_BOOT = re.compile(r"(\d{8,})\.((?:[0-9a-f]{2})+)")
_FILE = re.compile(r"(\d{20})-(\d{20})\.([0-9a-f]{64})\.lmbatch")
_PARKED = re.compile(r"((?:[0-9a-f]{2})+)\.(\d{20}-\d{20}\.[0-9a-f]{64}\.lmbatch)")


def boot_folder(ordinal: int, boot_id: str) -> str:
    return f"{ordinal:08d}.{boot_id.encode().hex()}"


def parse_boot(name: str) -> tuple[int, str] | None:
    found = _BOOT.fullmatch(name)
    return (int(found[1]), bytes.fromhex(found[2]).decode(errors="replace")) if found else None


def batch_file(seq_start: int, seq_end: int, sha256: str) -> str:
    return f"{seq_start:020d}-{seq_end:020d}.{sha256}{BATCH}"


def parse_batch(name: str) -> tuple[int, int, str] | None:
    found = _FILE.fullmatch(name)
    return (int(found[1]), int(found[2]), found[3]) if found else None


def parked_file(boot_id: str, seq_start: int, seq_end: int, sha256: str) -> str:
    return f"{boot_id.encode().hex()}.{batch_file(seq_start, seq_end, sha256)}"


def parse_parked(name: str) -> tuple[str, str] | None:
    """The boot_id and the batch's file name inside its boot's folder."""
    found = _PARKED.fullmatch(name)
    return (bytes.fromhex(found[1]).decode(errors="replace"), found[2]) if found else None


def queued_path(entry: QueuedBatch) -> tuple[str, str]:
    return boot_folder(entry.boot, entry.boot_id), batch_file(entry.seq_start, entry.seq_end, entry.sha256)


def parked_path(parked: ParkedBatch) -> str:
    return parked_file(parked.boot_id, parked.seq_start, parked.seq_end, parked.submitted_frame_sha256)

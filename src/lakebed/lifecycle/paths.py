"""Where lifecycle keeps its state, all of it under `lifecycle/v1/` of Lakebed's own bucket."""

from __future__ import annotations

import re

from lakebed.core.errors import Invalid
from lakebed.lifecycle.engine import ActionRef

ROOT = "lifecycle/v1/"
LOG_STATE = ROOT + "log.json"
LOG_DAYS = ROOT + "log/"
WORKER_SHARDS = ROOT + "shards.json"
PENDING = ROOT + "pending.json"
RATE = ROOT + "rate.json"
BLOCKERS = ROOT + "blockers.json"
WAKE = ROOT + "wake.json"
LAST_ROUND = ROOT + "tick.json"
BUCKETS = ROOT + "buckets/"
LEDGER = ROOT + "ledger/"
FOLD = ROOT + "ledger-fold.json"
FOLD_LEASE = ROOT + "leases/fold.json"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")  # as S3 once allowed: buckets of before keep their names


def checked_bucket(name: str) -> str:
    """The name, as it is. Raises Invalid for one that no bucket has: it would become another path of the store."""
    if not _BUCKET.fullmatch(name):
        raise Invalid(
            f"{name[:64]!r} is not the name of a bucket" if name else "the name of the bucket is empty",
            hint="letters, digits, dots, hyphens and underscores, as `lakebed lifecycle rules list` shows it",
        )
    return name


def reader(shard: int) -> str:
    return f"{ROOT}reader/{shard:02d}.json"


def log_day(day: str) -> str:
    return f"{LOG_DAYS}{day}.json"


def bucket_state(bucket: str) -> str:
    return f"{BUCKETS}{bucket}/state.json"


def pending_folder(ref: ActionRef) -> str:
    return f"{BUCKETS}{ref.bucket}/pending/{ref.key.rule_hash}/{ref.key.kind.value}/"


def pending_segment(ref: ActionRef, number: int, writer: str) -> str:
    return f"{pending_folder(ref)}{number:012d}-{writer}.json"


def ledger_folder(bucket: str) -> str:
    return f"{LEDGER}{bucket}/"


def ledger_segment(bucket: str, at_ns: int, name: str) -> str:
    """Segments of a bucket sort by time."""
    return f"{ledger_folder(bucket)}{at_ns:020d}-{name}.jsonl"


def scan_lease(bucket: str, part: int) -> str:
    return f"{ROOT}leases/walk/{bucket}/{part:04d}.json"


def drain_lease(ref: ActionRef) -> str:
    return f"{ROOT}leases/drain/{ref.bucket}/{ref.key.rule_hash}-{ref.key.kind.value}.json"


def bucket_counts(bucket: str) -> str:
    return f"{BUCKETS}{bucket}/counts.json"

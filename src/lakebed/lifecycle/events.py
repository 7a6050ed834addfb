"""Expiration events in CloudEvents form (1.0, JSON): one for each deletion of the ledger. Pure.

They are published when the ledger's segments are moved into its table, before the move is committed: at least once, in
order of time within a bucket. `id` is the same whenever a deletion is published again, so consumers can drop repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec

from lakebed.lifecycle.model import DeleteOutcome, Verb
from lakebed.lifecycle.state import LedgerRow

TYPE = "io.lakebed.lifecycle.expiration"
_KINDS = {
    Verb.CURRENT.value: ("deleted", "s3:LifecycleExpiration:Delete"),
    Verb.VERSION.value: ("deleted", "s3:LifecycleExpiration:Delete"),
    Verb.DELETE_MARKER.value: ("deleted", "s3:LifecycleExpiration:Delete"),
    Verb.ABORT_MPU.value: ("upload_aborted", ""),  # S3 has no event for it
}
_MARKED = ("delete_marker_created", "s3:LifecycleExpiration:DeleteMarkerCreated")


def expiration_events(segment: str, rows: Sequence[LedgerRow]) -> list[bytes]:
    """One event for each deletion among these rows. `segment` is the name of their object."""
    return [
        msgspec.json.encode(_event(f"{segment}#{place}", row))
        for place, row in enumerate(rows)
        if row.outcome == DeleteOutcome.DELETED.value
    ]


def _event(ident: str, row: LedgerRow) -> dict[str, Any]:
    # The current version of a key with versions is not removed: a delete marker is put above it.
    marked = row.verb == Verb.CURRENT.value and row.version_id
    kind, event_name = _MARKED if marked else _KINDS[row.verb]
    return {
        "specversion": "1.0",
        "id": ident,
        "source": f"/lakebed/lifecycle/{quote(row.bucket)}",
        "type": f"{TYPE}.{kind}",
        "subject": row.key,
        "time": datetime.fromtimestamp(row.at_ns / 1e9, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "datacontenttype": "application/json",
        "data": {
            "event_name": event_name,
            "bucket": row.bucket,
            "key": row.key,
            "version_id": row.version_id,
            "upload_id": row.upload_id,
            "size": row.identity.size,
            "mtime_ns": row.identity.mtime_ns,
            "rule_id": row.rule_id,
            "rule_hash": row.rule_hash,
            "action": row.kind.value,
            "due_at_ns": row.due_at_ns,
        },
    }

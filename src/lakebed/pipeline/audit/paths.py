"""The keys of audits. See docs/formats/audit.md."""

from __future__ import annotations

from lakebed.batches.paths import AUDITS

FINDINGS_TABLE = "audit/findings"
CONSERVATION_TABLE = "audit/conservation"


def work_folder(audit_id: str) -> str:
    return f"{AUDITS}{audit_id}/tasks/"


def audit_id(began_ns: int, token: str) -> str:
    return f"{began_ns:020d}-{token}"

"""The keys of audits. See docs/formats/audit.md."""

from __future__ import annotations

ROOT = "audit/v1/"
LAST = f"{ROOT}last.json"  # a register: which audit was completed last
FINDINGS_TABLE = "audit/findings"
CONSERVATION_TABLE = "audit/conservation"


def folder(audit_id: str) -> str:
    return f"{ROOT}{audit_id}/"


def record_key(audit_id: str) -> str:
    """The audit's record: it is created last, and everything it names was written before."""
    return f"{folder(audit_id)}audit.json"


def work_folder(audit_id: str) -> str:
    return f"{folder(audit_id)}tasks/"


def audit_id(began_ns: int, token: str) -> str:
    return f"{began_ns:020d}-{token}"

"""The record of an audit, as it is stored and served: docs/formats/audit.md.

A finding is one object that is missing, corrupt, orphaned, unindexed or foreign. A total is how many of one sort there
are, and how many bytes they hold. Work is what the reconciler or the sweeper does about it
(`mend`, `mend_quarantine`, `judge`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from lakebed.batches.model import AuditWorkFile, GarbageProof

AUDIT_SCHEMA: Literal["lakebed.audit.v1"] = "lakebed.audit.v1"
LOSSES_SHOWN = 1000  # rows of conservation that are wrong and are listed in the record; all are in the table
FINDINGS_SHOWN = 1000  # likewise of findings


class AuditFinding(msgspec.Struct, frozen=True):
    """`key` is the object that is missing or wrong, `referrer` the manifest that refers to it."""

    finding: str
    kind: str
    key: str
    referrer: str = ""
    size_bytes: int | None = None
    modified_ns: int | None = None
    reason: str = ""


class FindingTotal(msgspec.Struct, frozen=True):
    """`size_bytes` adds up what is known of their sizes. `wrong`: these make the audit fail."""

    finding: str
    kind: str
    objects: int
    size_bytes: int
    wrong: bool


class ConservationRow(msgspec.Struct, frozen=True):
    """One agent and hour: how many samples each stage has, and what was lost, doubled or changed on the way to it."""

    agent_id: str
    hour: str
    sent: int = 0
    accepted: int = 0
    bronze: int | None = None
    rollup: int | None = None
    lost: dict[str, int] = {}
    doubled: dict[str, int] = {}
    changed: dict[str, int] = {}
    waiting: int = 0  # accepted, and not loaded into bronze yet
    expired: int = 0  # accepted, and older than bronze keeps
    explained: int = 0  # an agent reports them as given up
    checksum: str = ""  # of the accepted samples, order-independent: two sums in hex

    @property
    def wrong(self) -> bool:
        return any(sum(named.values()) for named in (self.lost, self.doubled, self.changed))


class TableFlow(msgspec.Struct, frozen=True):
    """One silver table and its source: how many rows each has, and what is in neither silver nor the quarantine.

    `source` is the contract's word for it. `behind` is how many versions of bronze silver has not read yet.
    """

    org_id: str
    project_id: str
    table: str
    source: str
    bronze: int
    silver: int
    quarantined: int
    lost: int
    behind: int


class Conservation(msgspec.Struct, frozen=True):
    """Samples of all agents and hours by stage, and every (agent, hour) in which they do not agree.

    `flows` are the silver tables of every source, `gold` the rows of the gold tables.
    """

    checked: bool = False
    agents: int = 0
    hours: int = 0
    stages: dict[str, int] = {}
    waiting: int = 0
    expired: int = 0
    kept_since_unix_ns: int = 0  # bronze's retention has removed what was accepted before; 0: nothing
    lost: dict[str, int] = {}
    doubled: dict[str, int] = {}
    changed: dict[str, int] = {}
    explained: int = 0
    rows: tuple[ConservationRow, ...] = ()
    rows_left_out: int = 0
    flows: tuple[TableFlow, ...] = ()
    gold: dict[str, int] = {}

    @property
    def wrong(self) -> bool:
        samples = any(sum(named.values()) for named in (self.lost, self.doubled, self.changed))
        return samples or any(flow.lost for flow in self.flows)


class AuditRecord(msgspec.Struct, frozen=True):
    """One audit, whole. `ok` is false when something is wrong; orphans that wait for their horizon are not wrong."""

    schema: Literal["lakebed.audit.v1"]
    audit_id: str
    began_at_unix_ns: int
    completed_at_unix_ns: int
    source: str
    verified: bool
    ok: bool
    objects: int
    size_bytes: int
    prefixes: dict[str, int]
    totals: tuple[FindingTotal, ...]
    findings: tuple[AuditFinding, ...]
    findings_left_out: int
    proof: GarbageProof
    work: tuple[AuditWorkFile, ...]
    work_left_out: int
    conservation: Conservation
    unseen: tuple[str, ...] = ()  # what this kind of audit cannot see, as text

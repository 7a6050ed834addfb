"""The values of ticks: manifests, parts, states, commit records, messages, and the errors about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from lakebed.core.errors import Conflict, Unprocessable

DEFAULT_ORG, DEFAULT_PROJECT = "local", "default"  # of a stack on this machine, where none are given
MANIFEST_VERSION = "1.0"
STATE_SCHEMA = "lakebed.tick.v1"
COMMIT_SCHEMA = "lakebed.tick-commit.v1"
MESSAGE_SCHEMA = "1.0"

State = Literal["uploading", "finalizing", "committed", "failed"]


class TickId(msgspec.Struct, frozen=True, order=True):
    """A tick's identity. Two orgs may use one id: a tick is always looked up with its org and project."""

    org_id: str
    project_id: str
    tick_id: str

    @property
    def path(self) -> str:
        return f"{self.org_id}/{self.project_id}/{self.tick_id}"


class StoredPart(msgspec.Struct, frozen=True):
    """A stored part: the hash that was verified while it was uploaded, and the key of its bytes."""

    sha256: str
    size_bytes: int
    received_at_ms: int
    key: str


class TickColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    type: str
    nullable: bool = True


class ManifestPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One uploaded Parquet file. `file_seq` is unique in the whole tick: it is the part's number in the upload."""

    file_seq: int
    sha256: str
    rows: int
    size: int = msgspec.field(name="bytes")
    file: str = ""  # its name at the agent


class TickTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of a tick: `delta` upserts its rows by primary key, `full` makes them the whole table.

    `partition_by` and `cluster_by` choose how the table's files are laid out when it is created or made whole.
    """

    name: str
    mode: str
    schema: tuple[TickColumn, ...]
    row_count: int
    parquets: tuple[ManifestPart, ...]
    primary_keys: tuple[str, ...] = ()
    partition_by: tuple[str, ...] = ()
    cluster_by: tuple[str, ...] = ()


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a finalize. `tick_id` and `project_id`, where given, must be those of the request."""

    tables: tuple[TickTable, ...]
    schema_version: str = MANIFEST_VERSION
    tick_id: str = ""
    project_id: str = ""
    dt: str = ""
    created_at: str = ""
    agent: str = ""

    @property
    def parts(self) -> Iterator[ManifestPart]:
        """Every part of the tick, table by table."""
        return (part for table in self.tables for part in table.parquets)

    @property
    def mode(self) -> str:
        """The mode of the tick, for messages: `delta`, `full` or `mixed`."""
        modes = {table.mode for table in self.tables}
        return modes.pop() if len(modes) == 1 else "mixed"

    @property
    def row_count(self) -> int:
        return sum(table.row_count for table in self.tables)


class BronzeTick(msgspec.Struct, frozen=True):
    """A verified tick for bronze: its tables as in the manifest, and the key of each part in the bucket.

    `epoch` is that of the project's lease: it only increases.
    """

    org_id: str
    project_id: str
    tick_id: str
    dt: str
    tables: tuple[TickTable, ...]
    keys: dict[int, str]
    epoch: int = 0


class BronzeResult(msgspec.Struct, frozen=True):
    """What a tick did to bronze. `versions` is each table's committed version: silver reads exactly that one."""

    rows_inserted: int
    rows_replaced: int
    versions: dict[str, int] = {}


class FinalizeResult(msgspec.Struct, frozen=True):
    """The response to a finalize that committed; cached, and returned unchanged to a repeat."""

    tick_id: str
    status: Literal["committed"]
    rows_inserted: int
    rows_replaced: int
    committed_at: str


class TickFailure(msgspec.Struct, frozen=True):
    """`run` names the record of the finalize that failed, which has its log; empty in older states."""

    error_class: str
    message: str
    run: str = ""


LOG_LINES, LOG_CHARS = 20, 200  # of a finalize that committed: the last lines, and the start of each


class TickState(msgspec.Struct, frozen=True):
    """The tick's register. `finalizing_epoch` is the epoch of the lease under which it was last finalized.

    `log` is what the finalize that committed it logged; empty in older states.
    """

    schema: str = STATE_SCHEMA
    org_id: str = ""
    project_id: str = ""
    tick_id: str = ""
    state: State = "uploading"
    parts: dict[str, StoredPart] = {}
    manifest: Any = None
    result: FinalizeResult | None = None
    failure: TickFailure | None = None
    finalizing_epoch: int = 0
    created_at_ms: int = 0
    updated_at_ms: int = 0
    committed_at_ms: int = 0
    log: tuple[str, ...] = ()

    @property
    def exists(self) -> bool:
        return bool(self.tick_id)


class CommitRecord(msgspec.Struct, frozen=True):
    """The one conditional write that commits a tick: created if absent, never changed. The rest derives from it."""

    schema: str
    org_id: str
    project_id: str
    tick_id: str
    dt: str
    mode: str
    manifest_sha256: str
    parts: dict[str, str]
    bronze: BronzeResult
    committed_at: str
    committed_at_ms: int
    attempt_id: str
    manifest_digest: str = ""  # of the manifest's content, whatever its spacing and order; empty in older records


class TickMessage(msgspec.Struct, frozen=True):
    """To silver: this tick is in bronze. The seed's body, version 1.0.

    `bronze_db_key` is the folder of the project's bronze tables and `bronze_db_etag` their committed versions, written
    `table=version` and joined by commas, where the seed has a zip's key and etag. `replay` is present, and true,
    only in the message of a replay.
    """

    org_id: str
    project_id: str
    tick_id: str
    mode: str
    dt: str
    bronze_db_key: str
    bronze_db_etag: str
    emitted_at: str
    schema_version: str = MESSAGE_SCHEMA
    replay: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def tick(self) -> TickId:
        return TickId(self.org_id, self.project_id, self.tick_id)

    @property
    def versions(self) -> dict[str, int]:
        pairs = [pair.rpartition("=") for pair in self.bronze_db_etag.split(",") if pair]
        return {name: int(version) for name, _, version in pairs if version.isascii() and version.isdigit()}


def etag_of(versions: dict[str, int]) -> str:
    return ",".join(f"{name}={version}" for name, version in sorted(versions.items()))


class SilverTick(msgspec.Struct, frozen=True):
    """One tick of a silver job, with the bronze version of each of its tables. With `replay` it is computed again."""

    tick_id: str
    dt: str
    mode: str
    versions: dict[str, int]
    replay: bool = False


class SilverResult(msgspec.Struct, frozen=True):
    """The result of a silver job; `detail` is kept in the audit row of each tick."""

    detail: dict[str, Any] = {}


class BadManifest(Unprocessable):
    """The manifest is wrong. `detail["error_class"]` is the kind of error."""

    code = "bad_manifest"

    def __init__(self, error_class: str, message: str, *, hint: str = "", **detail: Any) -> None:
        super().__init__(message, hint=hint, error_class=error_class, **detail)


class PartsDiffer(Conflict):
    """409: the uploaded parts are not those of the manifest. Send exactly the parts that are named."""

    code = "parts_differ"

    def __init__(
        self, missing: Iterable[int] = (), mismatched_sha: Iterable[int] = (), unlisted: Iterable[int] = ()
    ) -> None:
        self.missing, self.mismatched_sha, self.unlisted = sorted(missing), sorted(mismatched_sha), sorted(unlisted)
        super().__init__(
            f"{len(self.missing)} parts are missing, {len(self.mismatched_sha)} have another hash, "
            f"{len(self.unlisted)} are not in the manifest",
            hint="PUT what is missing; DELETE, then PUT what has another hash; DELETE what is not listed",
            missing=self.missing,
            mismatched_sha=self.mismatched_sha,
            unlisted=self.unlisted,
        )


class PartDiffers(Conflict):
    """409: another part has this number; nothing is overwritten."""

    code = "part_differs"

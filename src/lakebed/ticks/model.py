"""What a tick is: frozen values, and nothing that awaits."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lakebed.tick_manifest import TickTable

STATE_SCHEMA = "lakebed.tick.v1"
COMMIT_SCHEMA = "lakebed.tick-commit.v1"
MESSAGE_SCHEMA = "1.0"

State = Literal["uploading", "finalizing", "committed", "failed"]


class TickId(msgspec.Struct, frozen=True, order=True):
    """Whose tick it is. Two orgs may use one id: nothing of one is ever looked up without its org and project."""

    org_id: str
    project_id: str
    tick_id: str

    @property
    def path(self) -> str:
        return f"{self.org_id}/{self.project_id}/{self.tick_id}"


class Part(msgspec.Struct, frozen=True):
    """A stored part: the hash that was checked while it streamed, and the key of its bytes."""

    sha256: str
    size_bytes: int
    received_at_ms: int
    key: str


class BronzeTick(msgspec.Struct, frozen=True):
    """A verified tick for bronze: its tables as the manifest has them, and the key of each part in the bucket.

    `epoch` is that of the project's lease: it only goes up.
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


class Result(msgspec.Struct, frozen=True):
    """The answer to a finalize that committed; cached, and given again word for word."""

    tick_id: str
    status: Literal["committed"]
    rows_inserted: int
    rows_replaced: int
    committed_at: str


class Failure(msgspec.Struct, frozen=True):
    error_class: str
    message: str


class TickState(msgspec.Struct, frozen=True):
    """The tick's register. `finalizing_epoch` is the lease's epoch that is, or was, at work on it."""

    schema: str = STATE_SCHEMA
    org_id: str = ""
    project_id: str = ""
    tick_id: str = ""
    state: State = "uploading"
    parts: dict[str, Part] = {}
    manifest: Any = None
    result: Result | None = None
    failure: Failure | None = None
    finalizing_epoch: int = 0
    created_at_ms: int = 0
    updated_at_ms: int = 0
    committed_at_ms: int = 0

    @property
    def exists(self) -> bool:
        return bool(self.tick_id)


class CommitRecord(msgspec.Struct, frozen=True):
    """The one conditional write: created if absent, never changed. Everything after it is derived from it."""

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


class Message(msgspec.Struct, frozen=True):
    """To silver: this tick is in bronze. The seed's body, version 1.0.

    `bronze_db_key` is the folder of the project's bronze tables and `bronze_db_etag` their committed versions, written
    `table=version` and joined by commas, where the seed has a zip's key and etag. `replay` is there, and true, only in
    the message of a replay.
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
        return {name: int(version) for name, _, version in pairs if version.isdigit()}


def etag_of(versions: dict[str, int]) -> str:
    return ",".join(f"{name}={version}" for name, version in sorted(versions.items()))


class SilverTick(msgspec.Struct, frozen=True):
    """One tick of a silver job, with the bronze version of each of its tables. A replay is computed again."""

    tick_id: str
    dt: str
    mode: str
    versions: dict[str, int]
    replay: bool = False


class SilverResult(msgspec.Struct, frozen=True):
    """What a silver job says when it is done; `detail` is kept in the audit row of each tick."""

    detail: dict[str, Any] = {}

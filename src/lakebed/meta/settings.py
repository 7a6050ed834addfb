"""Settings of the metadata store that brokers coordinate through."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from lakebed.core.settings import Contradiction, Section, describe


class MetaSettings(Section, frozen=True):
    section: ClassVar[str] = "meta"

    backend: Annotated[
        Literal["sqlite", "bucket", "oxia", "memory"],
        describe(
            "Chooses where the log coordinates: sqlite on one host, bucket in object storage alone, oxia "
            "in an Oxia cluster, memory in one process.",
            when="brokers run on several hosts (bucket or oxia)",
        ),
    ] = "sqlite"
    path: Annotated[
        Path,
        describe(
            "SQLite file that all processes of this host share (sqlite only).",
            when="the file belongs in another folder",
        ),
    ] = Path(".lakebed/meta.sqlite")
    sync: Annotated[
        Literal["full", "normal"],
        describe(
            "Chooses what a commit survives (sqlite only): full a power loss, normal a crash of the process.",
            when="speed matters more than the last commits before a power loss",
        ),
    ] = "full"
    busy_timeout_s: Annotated[
        float, describe("Limits the wait for the transaction of another process (sqlite only).")
    ] = 5.0
    prefix: Annotated[str, describe("Folder of the entries in the bucket (bucket only).")] = "llog-meta"
    address: Annotated[str, describe("host:port of an Oxia server (oxia only).", when="meta.backend is oxia")] = (
        "127.0.0.1:6648"
    )
    namespace: Annotated[str, describe("Oxia namespace of the keys (oxia only).")] = "default"
    sorting: Annotated[
        Literal["hierarchical", "natural"],
        describe("States how the Oxia server sorts keys, its --key-sorting (oxia only)."),
    ] = "hierarchical"
    timeout_s: Annotated[float, describe("Limits the total time of one request (oxia only).")] = 10.0

    def check(self) -> None:
        if self.busy_timeout_s <= 0 or self.timeout_s <= 0:
            raise Contradiction("meta.busy_timeout_s", "meta.timeout_s", "both must be above 0 seconds")

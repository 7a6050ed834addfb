"""Where the bucket is and how patient we are with it."""

from __future__ import annotations

from typing import Annotated, ClassVar

from lakebed.settings import Contradiction, Secret, Section, describe


class StoreSettings(Section, frozen=True):
    section: ClassVar[str] = "store"

    url: Annotated[str, describe("s3://bucket, gs://bucket, az://container or memory:")] = "s3://lakebed"
    prefix: Annotated[str, describe("folder inside the bucket that this Lakebed lives under")] = ""
    moved_from: Annotated[
        str, describe("where this lake was copied from, s3://bucket/prefix, comma between: references there lead here")
    ] = ""
    endpoint: Annotated[str, describe("address of an S3-compatible server; empty for AWS")] = ""
    region: Annotated[str, describe("region the requests are signed for")] = "us-east-1"
    access_key_id: Annotated[Secret, describe("empty: the standard AWS environment and instance roles")] = Secret("")
    secret_access_key: Annotated[Secret, describe("goes with store.access_key_id")] = Secret("")
    authority: Annotated[str, describe("authority id this bucket must carry; empty: take the bucket's own")] = ""
    timeout_s: Annotated[float, describe("one request to the store, whole")] = 20.0
    connect_timeout_s: Annotated[float, describe("opening a connection to the store")] = 3.0
    retries: Annotated[int, describe("retries of one request inside the store client")] = 3
    retry_timeout_s: Annotated[float, describe("all retries of one request together")] = 30.0

    def check(self) -> None:
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise Contradiction("store.access_key_id", "store.secret_access_key", "one is set and the other is empty")
        if self.url.startswith("memory:") and self.endpoint:
            raise Contradiction("store.url", "store.endpoint", "a store in memory has no endpoint")
        if not self.url.startswith(("s3://", "gs://", "az://", "memory:")):
            raise Contradiction("store.url", "store.url", f"{self.url!r} names no known kind of store")

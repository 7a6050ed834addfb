"""Settings of the store: location, credentials, timeouts and retries."""

from __future__ import annotations

from typing import Annotated, ClassVar

from lakebed.core.settings import Contradiction, Secret, Section, describe


class StoreSettings(Section, frozen=True):
    section: ClassVar[str] = "store"

    url: Annotated[
        str,
        describe(
            "Location of the lake: s3://bucket, gs://bucket, az://container or memory:.",
            when="the lake is in your own bucket",
        ),
    ] = "s3://lakebed"
    prefix: Annotated[
        str, describe("Folder inside the bucket that holds this lake.", when="the bucket holds other data too")
    ] = ""
    moved_from: Annotated[
        str,
        describe(
            "Lists former locations of this lake, s3://bucket/prefix, separated by commas; stored "
            "references to them are read from here.",
            when="the lake was copied from another bucket or prefix",
        ),
    ] = ""
    endpoint: Annotated[
        str, describe("Address of an S3-compatible server; empty means AWS.", when="the store is not AWS")
    ] = ""
    region: Annotated[str, describe("Region that requests are signed for.", when="the bucket is in another region")] = (
        "us-east-1"
    )
    access_key_id: Annotated[
        Secret,
        describe(
            "Access key of the store; empty means the standard AWS environment and instance roles.",
            when="the store has a static key pair",
        ),
    ] = Secret("")
    secret_access_key: Annotated[
        Secret, describe("Secret that belongs to store.access_key_id.", when="store.access_key_id is set")
    ] = Secret("")
    authority: Annotated[
        str,
        describe(
            "Authority id that the bucket must have; empty accepts the id in the bucket.",
            when="a process must refuse to start on a copy or on the wrong bucket",
        ),
    ] = ""
    timeout_s: Annotated[float, describe("Limits the total time of one request to the store.")] = 20.0
    connect_timeout_s: Annotated[float, describe("Limits the time to open a connection to the store.")] = 3.0
    retries: Annotated[int, describe("Limits the retries of one request inside the store client.")] = 3
    retry_timeout_s: Annotated[float, describe("Limits the total time of all retries of one request.")] = 30.0
    fast_path: Annotated[
        bool,
        describe(
            "Sends small conditional PUTs without obstore where the endpoint is http:// and the key pair is static.",
            when="you suspect the fast path, or compare with obstore",
        ),
    ] = True

    def check(self) -> None:
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise Contradiction("store.access_key_id", "store.secret_access_key", "set both or neither")
        if self.url.startswith("memory:") and self.endpoint:
            raise Contradiction("store.url", "store.endpoint", "a store in memory has no endpoint")
        if not self.url.startswith(("s3://", "gs://", "az://", "memory:")):
            raise Contradiction("store.url", "store.url", f"{self.url!r} is not s3://, gs://, az:// or memory:")

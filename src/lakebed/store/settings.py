"""Settings of the store: location, credentials, timeouts and retries."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from lakebed.core.settings import Contradiction, Secret, Section, describe

CLOUDS = ("amazonaws.com", "googleapis.com", "core.windows.net", "cloudflarestorage.com", "backblazeb2.com")


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
    ca_file: Annotated[
        str,
        describe(
            "PEM file of the authorities that the store's certificate is verified with, for the whole process; empty "
            "means the system's."
        ),
    ] = ""
    encryption: Annotated[
        Literal["", "AES256", "aws:kms", "aws:kms:dsse"],
        describe(
            "Asks the store for server-side encryption of every object, except those that Spark's executors write; "
            "empty leaves it to the bucket's default."
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
        ),
    ] = True

    @property
    def billed(self) -> bool:
        """Whether each request costs money: the store is a cloud's, not a server of one's own."""
        if self.url.startswith("memory:"):
            return False
        return not self.endpoint or any(name in self.endpoint for name in CLOUDS)

    @property
    def location(self) -> str:
        """Bucket and prefix; empty for a store in memory, which has no name."""
        if self.url.startswith("memory:"):
            return ""
        return f"{self.url.rstrip('/')}/{self.prefix.strip('/')}".rstrip("/")

    def check(self) -> None:
        if ".mrap" in self.url + self.endpoint or ":accesspoint" in self.url:
            raise Contradiction(
                "store.url",
                "store.endpoint" if ".mrap" in self.endpoint else "store.url",
                "a multi-region access point routes writes to several buckets, so it cannot decide which write came "
                "first: name one bucket",
            )
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise Contradiction("store.access_key_id", "store.secret_access_key", "set both or neither")
        if self.url.startswith("memory:") and self.endpoint:
            raise Contradiction("store.url", "store.endpoint", "a store in memory has no endpoint")
        if not self.url.startswith(("s3://", "gs://", "az://", "memory:")):
            raise Contradiction("store.url", "store.url", f"{self.url!r} is not s3://, gs://, az:// or memory:")
        _, _, folder = self.url.partition("://")[2].rstrip("/").partition("/")
        if folder:
            raise Contradiction(
                "store.url",
                "store.prefix",
                f"{self.url!r} names a folder: name the bucket alone, and {folder!r} in store.prefix",
            )

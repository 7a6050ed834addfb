"""How an executor reaches the bucket: plain values that travel to it, and the file system made from them there."""

from __future__ import annotations

from typing import Any

import msgspec

from lakebed.core.errors import Invalid
from lakebed.store.settings import StoreSettings


class Location(msgspec.Struct, frozen=True):
    """The bucket in the terms of pyarrow and delta-rs. Carries secrets: it goes to executors, never to a log."""

    bucket: str
    prefix: str
    endpoint: str
    region: str
    access_key_id: str
    secret_access_key: str

    @classmethod
    def of(cls, settings: StoreSettings) -> Location:
        if not settings.url.startswith("s3://"):
            raise Invalid(f"tables are stored on S3, not on {settings.url!r}", hint="set store.url to s3://…")
        return cls(
            bucket=settings.url.removeprefix("s3://").strip("/"),
            prefix=settings.prefix.strip("/"),
            endpoint=settings.endpoint,
            region=settings.region,
            access_key_id=settings.access_key_id.reveal(),
            secret_access_key=settings.secret_access_key.reveal(),
        )

    def __repr__(self) -> str:
        return f"Location({self.bucket}/{self.prefix})"

    def path(self, key: str) -> str:
        """The key as `bucket/prefix/key`, for pyarrow."""
        return "/".join(part for part in (self.bucket, self.prefix, key) if part)

    def uri(self, key: str) -> str:
        return f"s3://{self.path(key)}"

    def filesystem(self) -> Any:
        """pyarrow's S3 file system: no obstore in executors, whose Python has no event loop."""
        from pyarrow.fs import S3FileSystem

        scheme, _, host = self.endpoint.rpartition("://")
        return S3FileSystem(
            access_key=self.access_key_id or None,
            secret_key=self.secret_access_key or None,
            region=self.region,
            endpoint_override=host or None,
            scheme=scheme or "https",
            request_timeout=30,
            connect_timeout=5,
            allow_delayed_open=True,  # a small file is one PUT, not an upload in parts
        )

    def storage_options(self) -> dict[str, str]:
        """For delta-rs, Polars and others that take the same options."""
        options = {"AWS_REGION": self.region, "AWS_ALLOW_HTTP": str(self.endpoint.startswith("http://")).lower()}
        if self.endpoint:
            options["AWS_ENDPOINT_URL"] = self.endpoint
        if self.access_key_id:
            options |= {"AWS_ACCESS_KEY_ID": self.access_key_id, "AWS_SECRET_ACCESS_KEY": self.secret_access_key}
        return options

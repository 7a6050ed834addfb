"""Reads a bucket synchronously, through boto3, for Spark tasks: listings page by page, also of versions, and objects.

A page is converted to columns at once, and only one page is in memory. Objects created during a listing may or may not
appear; objects that exist before and after it appear exactly once. Nothing here writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from typing import Any

import msgspec

from lakebed.core.errors import Corrupt, Denied, LakebedError, NotFound, Unavailable
from lakebed.store import admin
from lakebed.store.settings import StoreSettings

PAGE_KEYS = 1000  # S3's own limit
FOLDERS_MAX = 1000  # folders of one request; a folder with more is listed as one


class ObjectPage(msgspec.Struct, frozen=True):
    """One page, as columns of equal length. A delete marker has no size and no etag; without versions, no version."""

    key: list[str]
    size_bytes: list[int | None]
    modified_ns: list[int]
    etag: list[str | None]
    version_id: list[str | None]
    is_latest: list[bool]
    is_delete_marker: list[bool]


class BucketReader:
    """Reads the bucket of the settings. Keys are relative to `store.prefix`, as in the store."""

    def __init__(self, settings: StoreSettings, *, versions: bool = False) -> None:
        self._settings, self._versions = settings, versions
        self._bucket = settings.url.removeprefix("s3://").split("/", 1)[0]
        self._root = f"{settings.prefix.strip('/')}/" if settings.prefix else ""
        self._s3 = admin.client(settings, attempts=settings.retries + 1)

    def close(self) -> None:
        self._s3.close()

    def versioned(self) -> bool:
        """Whether the bucket keeps, or has ever kept, versions."""
        answer = self._call(self._s3.get_bucket_versioning, Bucket=self._bucket)
        return answer.get("Status") in ("Enabled", "Suspended")

    def folders(self, prefix: str) -> list[str] | None:
        """The folders directly below a folder, as prefixes; None when there are more than FOLDERS_MAX."""
        answer = self._list(prefix, {}, Delimiter="/", MaxKeys=FOLDERS_MAX)
        found = [each["Prefix"].removeprefix(self._root) for each in answer.get("CommonPrefixes", [])]
        # Objects count against the page too: a truncated page may hide folders.
        return None if answer.get("IsTruncated") else found

    def walk(self, prefix: str, *, deep: bool = True) -> Iterator[ObjectPage]:
        """Everything under a prefix; not `deep`: only what is directly in it."""
        more: dict[str, Any] = {} if deep else {"Delimiter": "/"}
        place: dict[str, Any] = {}
        while True:
            answer = self._list(prefix, place, MaxKeys=PAGE_KEYS, **more)
            if page := self._page(answer):
                yield page
            if not answer.get("IsTruncated"):
                return
            place = self._next(answer)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """The object, whole. Raises NotFound, or Corrupt when it is larger than it can be.

        A truncated body is requested again; when none is complete, Unavailable is raised.
        """
        return bytes(self._call(self._whole, key=key, bytes_max=bytes_max))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """These bytes of the object. Raises NotFound, or Corrupt when it is shorter.

        A truncated body is requested again; when none is complete, Unavailable is raised.
        """
        if not length:
            return b""
        try:
            data = bytes(self._call(self._part, key=key, start=start, length=length))
        except Corrupt:  # not one byte of it is there
            data = b""
        if len(data) != length:
            raise Corrupt(f"{key!r} ends before byte {start + length}")
        return data

    def _part(self, *, key: str, start: int, length: int) -> bytes:
        span = f"bytes={start}-{start + length - 1}"
        answer = self._s3.get_object(Bucket=self._bucket, Key=self._root + key, Range=span)
        with closing(answer["Body"]) as body:
            size = answer.get("ContentLength")
            data: bytes = body.read() if size is not None and size <= length else body.read(length)
        return data

    def _whole(self, *, key: str, bytes_max: int) -> bytes:
        answer = self._s3.get_object(Bucket=self._bucket, Key=self._root + key)
        with closing(answer["Body"]) as body:
            size = answer.get("ContentLength")
            data: bytes = body.read() if size is not None and size <= bytes_max else body.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise Corrupt(f"{key!r} has {size or 'more'} bytes, more than {bytes_max}")
        return data

    def _list(self, prefix: str, place: dict[str, Any], **more: Any) -> Any:
        call = self._s3.list_object_versions if self._versions else self._s3.list_objects_v2
        return self._call(call, Bucket=self._bucket, Prefix=self._root + prefix, **place, **more)

    def _next(self, answer: Any) -> dict[str, Any]:
        if not self._versions:
            return {"ContinuationToken": answer["NextContinuationToken"]}
        place = {"KeyMarker": answer["NextKeyMarker"]}
        return place | ({"VersionIdMarker": mark} if (mark := answer.get("NextVersionIdMarker")) else {})

    def _page(self, answer: Any) -> ObjectPage | None:
        found = answer.get("Versions" if self._versions else "Contents", [])
        markers = answer.get("DeleteMarkers", [])
        if not found and not markers:
            return None
        every = [*found, *markers]
        cut = len(self._root)
        return ObjectPage(
            key=[each["Key"][cut:] for each in every],
            size_bytes=[*(each["Size"] for each in found), *(None for _ in markers)],
            modified_ns=[_ns(each["LastModified"]) for each in every],
            etag=[*(each.get("ETag") for each in found), *(None for _ in markers)],
            version_id=[each.get("VersionId") for each in every],
            is_latest=[each.get("IsLatest", True) for each in every],
            is_delete_marker=[*(False for _ in found), *(True for _ in markers)],
        )

    def _call(self, call: Any, **arguments: Any) -> Any:
        """Calls boto3, and retries truncated and malformed responses: boto3 retries failed requests, not bodies.

        Everything here only reads, so a retry is harmless.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        for left in reversed(range(self._settings.retries + 1)):
            try:
                return call(**arguments)
            except ClientError as error:
                kind = KINDS.get(error.response.get("Error", {}).get("Code", ""), Unavailable)
                raise kind(f"bucket {self._bucket!r}: {error}") from error
            except (BotoCoreError, ResponseParserError) as error:
                if not left:
                    raise Unavailable(f"bucket {self._bucket!r}: {error}") from error
        raise AssertionError("the last attempt returns or raises")


KINDS: dict[str, type[LakebedError]] = {
    "AccessDenied": Denied,
    "InvalidAccessKeyId": Denied,
    "SignatureDoesNotMatch": Denied,
    "NoSuchBucket": NotFound,
    "NoSuchKey": NotFound,
    "404": NotFound,
    "InvalidRange": Corrupt,
    "416": Corrupt,
}


def _ns(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000_000) * 1000

"""Administration of a bucket: create it, read its configuration. All boto3 clients for S3 are created here.

Boto3 is synchronous and slow to import, so calls run in a thread and the import is deferred to the first call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from lakebed.core.errors import Denied, Unavailable
from lakebed.store.settings import StoreSettings

PROBE_KEY = ".lakebed-probe"  # written, read and removed by `ensure_bucket`
PROBE = b"?"  # not empty: a server may accept an empty object before its disks are ready
TRY_TIMEOUT_S = 5.0
MARKERS_MAX = 20  # delete markers in one response


async def ensure_bucket(settings: StoreSettings) -> None:
    """Creates the bucket if it is missing, and checks that it can be written and read. Idempotent.

    Raises Denied when the credentials are refused, Unavailable otherwise: retry while the server starts.
    """
    await asyncio.to_thread(_ensure_bucket, settings)


def client(settings: StoreSettings, *, attempts: int = 1) -> Any:
    """A boto3 S3 client for these settings, with this many attempts and short timeouts."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=settings.endpoint or None,
        region_name=settings.region,
        aws_access_key_id=settings.access_key_id.reveal() or None,
        aws_secret_access_key=settings.secret_access_key.reveal() or None,
        config=Config(
            # Checksums in trailers, the default, are not supported by every S3-compatible server.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=settings.connect_timeout_s,
            read_timeout=TRY_TIMEOUT_S if attempts == 1 else settings.timeout_s,
            retries={"total_max_attempts": attempts, "mode": "standard"},
            s3={"addressing_style": "path"},
        ),
    )


def _ensure_bucket(settings: StoreSettings) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    bucket = settings.url.removeprefix("s3://").split("/", 1)[0]
    s3 = client(settings)
    try:
        with suppress(s3.exceptions.BucketAlreadyOwnedByYou, s3.exceptions.BucketAlreadyExists):
            s3.create_bucket(Bucket=bucket)
        s3.put_object(Bucket=bucket, Key=PROBE_KEY, Body=PROBE)
        s3.get_object(Bucket=bucket, Key=PROBE_KEY)["Body"].read()
        s3.delete_object(Bucket=bucket, Key=PROBE_KEY)
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
            raise Denied(
                f"bucket {bucket!r}: {code}", hint="check store.access_key_id and store.secret_access_key"
            ) from error
        raise Unavailable(f"bucket {bucket!r}: {error}") from error
    except BotoCoreError as error:
        raise Unavailable(f"bucket {bucket!r}: {error}") from error
    finally:
        s3.close()


class LifecycleRule(msgspec.Struct, frozen=True):
    """The scope and effect of one rule. `expires`: it deletes objects, versions or markers."""

    id: str
    prefix: str
    enabled: bool
    expires: bool


class BucketConfiguration(msgspec.Struct, frozen=True):
    """What can delete objects without Lakebed."""

    versioned: bool
    rules: tuple[LifecycleRule, ...]
    delete_markers: tuple[str, ...]  # the first few under the given prefixes


async def bucket_state(settings: StoreSettings, prefixes: Sequence[str]) -> BucketConfiguration:
    """Versioning, lifecycle rules and delete markers. Raises Denied or Unavailable when they cannot be read."""
    return await asyncio.to_thread(_bucket_state, settings, prefixes)


def _bucket_state(settings: StoreSettings, prefixes: Sequence[str]) -> BucketConfiguration:
    from botocore.exceptions import BotoCoreError, ClientError

    bucket = settings.url.removeprefix("s3://").split("/", 1)[0]
    s3 = client(settings)
    try:
        versioned = s3.get_bucket_versioning(Bucket=bucket).get("Status") in ("Enabled", "Suspended")
        try:
            rules = s3.get_bucket_lifecycle_configuration(Bucket=bucket).get("Rules", [])
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") != "NoSuchLifecycleConfiguration":
                raise
            rules = []
        markers: list[str] = []
        for prefix in prefixes if versioned else ():
            page = s3.list_object_versions(Bucket=bucket, Prefix=prefix, MaxKeys=1000)
            markers += [found["Key"] for found in page.get("DeleteMarkers", []) if found.get("IsLatest")]
        return BucketConfiguration(versioned, tuple(map(_rule, rules)), tuple(markers[:MARKERS_MAX]))
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        kind = Denied if code == "AccessDenied" else Unavailable
        raise kind(
            f"bucket {bucket!r}: {error}",
            hint="allow s3:GetBucketVersioning, s3:GetLifecycleConfiguration and s3:ListBucketVersions",
        ) from error
    except BotoCoreError as error:
        raise Unavailable(f"bucket {bucket!r}: {error}") from error
    finally:
        s3.close()


def _rule(rule: Any) -> LifecycleRule:
    wanted = rule.get("Filter") or {}
    prefix = wanted.get("Prefix") or (wanted.get("And") or {}).get("Prefix") or rule.get("Prefix") or ""
    expires = bool({"Expiration", "NoncurrentVersionExpiration"} & set(rule))
    return LifecycleRule(rule.get("ID", ""), prefix, rule.get("Status") == "Enabled", expires)

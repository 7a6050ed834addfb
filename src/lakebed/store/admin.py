"""Administration of a bucket: create it, read its configuration. All boto3 clients for S3 are created here.

Boto3 is synchronous and slow to import, so calls run in a thread and the import is deferred to the first call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from lakebed.core.errors import AlreadyExists, Denied, Invalid, LakebedError, Unavailable
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


async def create_bucket(settings: StoreSettings, name: str) -> None:
    """Creates another bucket at the same store. Raises AlreadyExists, Invalid, Denied or Unavailable."""
    await asyncio.to_thread(_create_bucket, settings, name)


def client(settings: StoreSettings, *, attempts: int = 1) -> Any:
    """A boto3 S3 client for these settings, with this many attempts and short timeouts."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=settings.endpoint or None,
        region_name=settings.region,
        verify=settings.ca_file or None,
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


def _create_bucket(settings: StoreSettings, name: str) -> None:
    from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

    kinds: dict[str, type[LakebedError]] = {
        "BucketAlreadyExists": AlreadyExists,
        "BucketAlreadyOwnedByYou": AlreadyExists,
    }
    kinds |= {"InvalidBucketName": Invalid, "AccessDenied": Denied}
    s3 = client(settings)
    try:
        s3.create_bucket(Bucket=name)
    except ParamValidationError as error:
        raise Invalid(f"bucket {name!r}: not a valid name", hint="3 to 63 lower-case letters, digits and -") from error
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        raise kinds.get(code, Unavailable)(f"bucket {name!r}: {code or error}") from error
    except BotoCoreError as error:
        raise Unavailable(f"bucket {name!r}: {error}") from error
    finally:
        s3.close()


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
    denials: tuple[dict[str, Any], ...] | None = ()  # statements of the bucket policy that deny; None: unknown
    replicates_to: tuple[str, ...] | None = ()  # buckets that it is replicated to; None: unknown


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
            for page in s3.get_paginator("list_object_versions").paginate(Bucket=bucket, Prefix=prefix):
                markers += [found["Key"] for found in page.get("DeleteMarkers", []) if found.get("IsLatest")]
                if len(markers) >= MARKERS_MAX:
                    break
        found = tuple(map(_rule, rules)), tuple(markers[:MARKERS_MAX])
        return BucketConfiguration(versioned, *found, _denials(s3, bucket), _replicas(s3, bucket))
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


def _denials(s3: Any, bucket: str) -> tuple[dict[str, Any], ...] | None:
    """The denying statements of the bucket policy; None when the store does not answer that."""
    from botocore.exceptions import ClientError

    try:
        policy = msgspec.json.decode(s3.get_bucket_policy(Bucket=bucket)["Policy"])
    except ClientError as error:
        return () if error.response.get("Error", {}).get("Code") == "NoSuchBucketPolicy" else None
    except (msgspec.DecodeError, KeyError):
        return None
    return tuple(each for each in policy.get("Statement", []) if each.get("Effect") == "Deny")


def _replicas(s3: Any, bucket: str) -> tuple[str, ...] | None:
    """The buckets that this one is replicated to; None when the store does not answer that."""
    from botocore.exceptions import ClientError

    try:
        rules = s3.get_bucket_replication(Bucket=bucket)["ReplicationConfiguration"]["Rules"]
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code")
        return () if code == "ReplicationConfigurationNotFoundError" else None
    except KeyError:
        return None
    return tuple(each["Destination"]["Bucket"] for each in rules if each.get("Status") == "Enabled")


def _rule(rule: Any) -> LifecycleRule:
    wanted = rule.get("Filter") or {}
    prefix = wanted.get("Prefix") or (wanted.get("And") or {}).get("Prefix") or rule.get("Prefix") or ""
    expires = bool({"Expiration", "NoncurrentVersionExpiration"} & set(rule))
    return LifecycleRule(rule.get("ID", ""), prefix, rule.get("Status") == "Enabled", expires)

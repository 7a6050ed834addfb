"""What the data plane does not do: make a bucket. The only module that talks to S3 through boto3.

Boto3 is synchronous and heavy to import, so calls run in a thread and the import waits until one is made.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from lakebed.errors import Denied, Unavailable
from lakebed.store.settings import StoreSettings

PROBE_KEY = ".lakebed-probe"  # written, read and removed by `ensure_bucket`
PROBE = b"?"  # not empty: a server may take an empty object before it can reach its disks
TRY_TIMEOUT_S = 5.0


async def ensure_bucket(settings: StoreSettings) -> None:
    """Makes the bucket if it is missing and shows that it takes a write and gives it back. Idempotent.

    Raises Denied when the credentials are refused, Unavailable otherwise: ask again while the server starts.
    """
    await asyncio.to_thread(_ensure_bucket, settings)


def client(settings: StoreSettings) -> Any:
    """A boto3 S3 client for these settings, which asks once and does not wait long."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=settings.endpoint or None,
        region_name=settings.region,
        aws_access_key_id=settings.access_key_id.reveal() or None,
        aws_secret_access_key=settings.secret_access_key.reveal() or None,
        config=Config(
            # Checksums in trailers, the default, are not understood by every server that speaks S3.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=settings.connect_timeout_s,
            read_timeout=TRY_TIMEOUT_S,
            retries={"total_max_attempts": 1},
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

"""Calls to AWS: boto3 in threads, its errors as Lakebed's own. Boto3 retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from lakebed.core.errors import Denied, Unavailable
from lakebed.ticks.settings import TicksSettings

ATTEMPTS = 3
TIMEOUT_S = 10.0
REFUSED = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "UnrecognizedClientException",
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
    }
)


def client(kind: str, settings: TicksSettings) -> Any:
    """A boto3 client of `sqs` or `dynamodb` for these settings."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        kind,
        endpoint_url=settings.aws_endpoint or None,
        region_name=settings.aws_region,
        aws_access_key_id=settings.aws_access_key_id.reveal() or None,
        aws_secret_access_key=settings.aws_secret_access_key.reveal() or None,
        config=Config(
            connect_timeout=TIMEOUT_S,
            read_timeout=TIMEOUT_S + 20,  # a long poll of SQS waits up to 20 s
            retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
            max_pool_connections=32,
        ),
    )


async def call(what: str, method: Callable[..., Any], **arguments: Any) -> Any:
    """One call in a thread. Raises Denied, AwsError for any other error of the service, or Unavailable."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return await asyncio.to_thread(method, **arguments)
    except ClientError as error:
        code = code_of(error)
        if code in REFUSED:
            raise Denied(f"{what}: {code}", hint="check ticks.aws_access_key_id and its permissions") from error
        raise AwsError(f"{what}: {code}", aws_code=code) from error
    except BotoCoreError as error:
        raise Unavailable(f"{what}: {error}") from error


class AwsError(Unavailable):
    """AWS returned an error: `detail["aws_code"]` is its code."""

    code = "aws_rejected"


def code_of(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))

"""Removing versions through S3 itself, which keeps its own books on them and enforces object lock.

Raises NotFound, Denied (object lock, or no right to), Unavailable.
"""

from __future__ import annotations

import asyncio
from typing import Any

from lakebed.errors import Denied, NotFound, Unavailable
from lakebed.store.admin import client
from lakebed.store.settings import StoreSettings

DENIALS = ("AccessDenied", "InvalidRequest", "Forbidden", "403")
MISSING = ("NoSuchKey", "NoSuchVersion", "NoSuchBucket", "404")


class VersionRemover:
    """One client, made when first used; calls run in threads."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._client: Any = None

    async def remove(self, bucket: str, key: str, version_id: str) -> None:
        """Removes one version or marker for good. Versions are immutable: the id is the condition."""
        await asyncio.to_thread(self._delete, bucket, key, version_id)

    async def mark(self, bucket: str, key: str) -> None:
        """A plain delete: where versions are kept, a delete marker becomes current."""
        await asyncio.to_thread(self._delete, bucket, key, "")

    def _delete(self, bucket: str, key: str, version_id: str) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        self._client = self._client or client(self._settings)
        which = {"VersionId": version_id} if version_id else {}
        try:
            self._client.delete_object(Bucket=bucket, Key=key, **which)
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in MISSING:
                raise NotFound(f"{bucket}/{key}: {error}") from error
            if code in DENIALS:
                raise Denied(f"{bucket}/{key}: {error}") from error
            raise Unavailable(f"{bucket}/{key}: {error}") from error
        except BotoCoreError as error:
            raise Unavailable(f"{bucket}/{key}: {error}") from error

"""Asks a process of the stack over HTTP whether it is well."""

from __future__ import annotations

import asyncio
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

import msgspec

TIMEOUT_S = 3.0
BODY_BYTES_MAX = 64 * 1024


class Answer(msgspec.Struct, frozen=True):
    """Status 0 means that nobody answered; `body` then says why."""

    status: int
    body: str


async def ask(url: str, path: str, timeout_s: float = TIMEOUT_S) -> Answer:
    """One GET, never through a proxy. Never raises."""
    return await asyncio.to_thread(_ask, url, path, timeout_s)


def _ask(url: str, path: str, timeout_s: float) -> Answer:
    where = urlsplit(url)
    connection = HTTPConnection(where.hostname or "", where.port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return Answer(response.status, response.read(BODY_BYTES_MAX).decode(errors="replace"))
    except (OSError, HTTPException) as error:
        return Answer(0, str(error) or type(error).__name__)
    finally:
        connection.close()

"""Prices of store requests, of S3 Standard in us-east-1: for estimates, not for billing."""

from __future__ import annotations

from collections.abc import Mapping

DOLLARS_PER_PUT_OR_LIST = 0.005 / 1000
DOLLARS_PER_GET = 0.0004 / 1000
DOLLARS_PER_GIB_MONTH = 0.023

# By the verb of the seam; an upload is counted once, although a store charges each of its parts. Deletes are free.
DOLLARS: dict[str, float] = {
    "create": DOLLARS_PER_PUT_OR_LIST,
    "replace": DOLLARS_PER_PUT_OR_LIST,
    "upload": DOLLARS_PER_PUT_OR_LIST,
    "list": DOLLARS_PER_PUT_OR_LIST,
    "get": DOLLARS_PER_GET,
    "get_range": DOLLARS_PER_GET,
    "head": DOLLARS_PER_GET,
    "delete": 0.0,
}


def dollars(requests: Mapping[str, float]) -> float:
    """The price of requests, counted by verb as `lakebed_store_requests_total` counts them."""
    return sum(DOLLARS[verb] * count for verb, count in requests.items())

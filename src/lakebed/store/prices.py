"""Prices for estimates, not for billing: the only place that has them. docs/cost.md states them, a test compares.

They are what AWS listed for us-east-1, on demand, as far as we know in AS_OF; they were not checked on AWS's pages.
Put in your own: `python docs/charts/comparison.py --price put_or_list_1000=0.0054`, or change them here.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

AS_OF = "November 2026"


class ListPrices(msgspec.Struct, frozen=True):
    """In dollars."""

    put_or_list_1000: float = 0.005  # S3 Standard: 1,000 PUT, COPY, POST or LIST requests
    get_1000: float = 0.0004  # 1,000 GET or HEAD requests
    s3_gb_month: float = 0.023
    zone_gb: float = 0.02  # a GB from one zone to another: 0.01 out and 0.01 in
    disk_gb_month: float = 0.08  # gp3
    machine_month: float = 56.0  # m6g.large
    kinesis_in_gb: float = 0.08
    kinesis_out_gb: float = 0.04
    kinesis_kept_gb_month: float = 0.10  # beyond a day
    kinesis_stream_month: float = 29.0


LIST_PRICES = ListPrices()
DOLLARS_PER_PUT_OR_LIST = LIST_PRICES.put_or_list_1000 / 1000
DOLLARS_PER_GET = LIST_PRICES.get_1000 / 1000
DOLLARS_PER_GIB_MONTH = LIST_PRICES.s3_gb_month

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

"""Draws comparison.svg: the monthly cost of a log, and the time to an acknowledged record, beside other systems.

    python docs/charts/comparison.py                                  # writes docs/charts/comparison.svg
    python docs/charts/comparison.py --price machine_month=40         # with your prices: shows the totals, writes nothing

Prices are those of lakebed/store/prices.py, measurements those that docs/cost.md states; a test compares.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

import msgspec

from lakebed.store.prices import AS_OF, LIST_PRICES, ListPrices

# The load: records of 1 KB at 10 MB/s, read once, kept for seven days.
SECONDS_MONTH = 2_630_000
GB_MONTH = 10 * SECONDS_MONTH / 1000  # 10 MB/s
STORED_GB = 10 * 7 * 86_400 / 1000
FLIGHTS = 20 * SECONDS_MONTH  # blobs of one gateway: log.batch_max_delay_ms = 50


def costs(prices: ListPrices) -> dict[str, dict[str, float]]:
    """Dollars a month of each system, by what they are paid for."""
    put, get = prices.put_or_list_1000 / 1000, prices.get_1000 / 1000
    reads = 2 * get  # of each blob: one by a consumer of another zone, one by compaction
    return {
        "Lakebed, 1 gateway, metadata in SQLite": {
            "requests": FLIGHTS * (put + reads),
            "storage": STORED_GB * prices.s3_gb_month,
            "machines": prices.machine_month,
        },
        "Lakebed, 2 gateways, metadata in the bucket": {
            "requests": 2 * FLIGHTS * (4 * put + reads),
            "storage": STORED_GB * prices.s3_gb_month,
            "machines": 2 * prices.machine_month,
        },
        "Kafka, 3 brokers in 3 zones": {
            "network between zones": GB_MONTH * (2 / 3 + 2) * prices.zone_gb,
            "storage": 3 * STORED_GB * prices.disk_gb_month,
            "machines": 3 * prices.machine_month,
        },
        "Kinesis, on demand": {
            "requests": GB_MONTH * (prices.kinesis_in_gb + prices.kinesis_out_gb) + prices.kinesis_stream_month,
            "storage": STORED_GB * prices.kinesis_kept_gb_month,
        },
    }


COSTS = costs(LIST_PRICES)
# Time to an acknowledged record of 1 KB, one at a time in each of 8 lanes, on two quiet cores and a local store.
LATENCIES_MS = {"Redis Streams, fsync always": 0.4, "NATS JetStream, sync always": 1.4, "Lakebed, local S3 server": 8.7}
COLOURS = {"requests": "#3b6fb6", "storage": "#7aa37a", "machines": "#b9b9b9", "network between zones": "#c9803f"}
WIDTH, LEFT, BAR, GAP = 860, 310, 20, 10


def svg() -> str:
    top = 48
    parts = [_text(16, 24, f"A log of 10 MB/s, kept for 7 days: dollars a month (AWS list prices, {AS_OF})", size=15)]
    scale = (WIDTH - LEFT - 90) / max(sum(cost.values()) for cost in COSTS.values())
    for name, cost in COSTS.items():
        x = float(LEFT)
        parts.append(_text(LEFT - 10, top + 15, name, anchor="end"))
        for kind, dollars in cost.items():
            width = dollars * scale
            parts.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[kind]}"/>')
            x += width
        parts.append(_text(x + 8, top + 15, f"${sum(cost.values()):,.0f}"))
        top += BAR + GAP
    x = float(LEFT)
    for kind, colour in COLOURS.items():
        parts.append(f'<rect x="{x:.0f}" y="{top + 4}" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 16, top + 14, kind, size=12))
        x += 30 + 7 * len(kind)
    top += 52
    parts.append(
        _text(
            16,
            top,
            "One record to its acknowledgement: milliseconds (measured on one machine; two of them by throughput)",
            size=15,
        )
    )
    top += 16
    scale = (WIDTH - LEFT - 90) / max(LATENCIES_MS.values())
    for name, value in LATENCIES_MS.items():
        parts.append(_text(LEFT - 10, top + 15, name, anchor="end"))
        parts.append(
            f'<rect x="{LEFT}" y="{top}" width="{value * scale:.1f}" height="{BAR}" fill="{COLOURS["requests"]}"/>'
        )
        parts.append(_text(LEFT + value * scale + 8, top + 15, f"{value:g} ms"))
        top += BAR + GAP
    note = "Lakebed waits for the bucket: a PUT to S3 takes tens of milliseconds. Assumptions: docs/cost.md"
    parts.append(_text(16, top + 18, note, size=12))
    height = top + 34
    style = "text{font-family:system-ui,sans-serif;fill:#222}.bg{fill:#fff}"
    dark = "@media (prefers-color-scheme: dark){text{fill:#ddd}.bg{fill:#16181c}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="Cost and latency of Lakebed beside other systems"><style>{style}{dark}</style>'
        f'<rect class="bg" width="{WIDTH}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, text: str, *, size: int = 13, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--price", action="append", default=[], metavar="NAME=DOLLARS")
    given = {name: float(value) for name, _, value in (each.partition("=") for each in parser.parse_args().price)}
    if unknown := set(given) - set(ListPrices.__struct_fields__):
        parser.error(f"no price is named {', '.join(sorted(unknown))}: {', '.join(ListPrices.__struct_fields__)}")
    if not given:
        Path(__file__).with_suffix(".svg").write_text(svg())
    for name, cost in costs(msgspec.structs.replace(LIST_PRICES, **given)).items():
        print(f"{name}: ${sum(cost.values()):,.0f}", {kind: round(dollars) for kind, dollars in cost.items()})


if __name__ == "__main__":
    main()

"""`docs/scale.md`, made from the rows of `lakebed bench scale`: python -m lakebed.wiring.scale_page docs/scale.md"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

from lakebed.batches import paths
from lakebed.batches.model import BatchIdentity
from lakebed.store import prices
from lakebed.wiring.scale import GET_S, LIST_S, META_S, PUT_S, SIZES, L, M, ScaleRow, Size, rows_of
from lakebed.wiring.scale_loops import LOOPS

MONTH_S = 2.63e6
RANGES = 32  # of S3's key space, cut where an hour's keys are
HOUR_NS = paths.HOUR_NS
PUTS_MAX_S = 3_500  # of one range of keys, by S3's documentation
KEYS = 3_000

PACKED = 20  # frames of a pack: what a gateway of M takes in a second
COUNTED = "| batches: accept, index and reconcile 3,000 batches"  # the row of docs/cost.md, which a test counts

PLANS = {
    "live query": "one process follows all batches. Divide agents among query collectors by hash, and merge answers.",
    "reconciler": "16 hash ranges are at most 16 processes. Raise the number of ranges; their watermarks stay.",
    "retention": "one process removes at a time. Give each hash range of agents its own lease, and delete in groups.",
    "roller": "one roller plans and commits. Give each hash range of agents its own roller, state and generations.",
    "bronze step": "one driver plans a step. Load hash ranges of agents as steps of their own.",
    "queue": "a manifest takes some tens of swaps a second. Use more shards (`queue.shards`), or a topic.",
    "tick auditor": "one process reads row after row. Read rows side by side, and divide organisations by hash.",
    "lifecycle reader": "16 shards of the change log. Use more; on AWS the bucket's own lifecycle does this work.",
}


TEMPLATE = """# Scale

How much each loop of Lakebed does, and how much a company asks for. Made from `lakebed bench scale`.

Every loop runs on its own code over a store in memory whose requests take the time that S3 takes:
{latencies}.
The time of a loop is the time of its requests and the CPU time of its code, added. Their overlap is not counted.
No network, no throttling and no S3 was measured.
*Limit* is what the named processes do in a second, *headroom* is limit ÷ load.

## Sizes

{sizes}

## Loops

*Shared* loops have one limit however many processes there are.
For the roller and the bronze step the processes are tasks of Spark.
Their plan and commit stay with one process, and the limit accounts for it.
A batch has 700 samples of 20 series. Packed acceptance has `batches.pack_ms = 100`; the queue has 16 shards at M and L.
L is a plan: its limits are those of the same processes in larger numbers.

{loops}

## A day of outage at M

Agents keep what they cannot send. After a day they hold 86 million batches.
The hours until each loop has caught up, while new batches arrive:

{outage}

Without `batches.retention_days` M makes some 180 million objects a day: a billion in less than six days.
With packs it makes half. With a retention of seven days the bucket holds 1.3 billion objects, with packs 0.65 billion.

## Hot prefixes

S3 takes {puts_max} writes a second on one range of keys, and splits ranges that are busy.
The share of the busiest of {ranges} ranges, cut at one hour's keys and loaded with the next hour's.
3 % is even, 100 % is one range.

{prefixes}

Keys that begin with a time put all writes on the newest range. What is left of those is written rarely:
index segments (one per collector and flush, over four shards), notes of late batches, and audit notes.

## What breaks first at L

{plans}

## Cost

Requests of accepted batches with their index and check, at S3's list prices, and storage of one month.

{costs}

Machines are not included. [Cost](cost.md) has the counted requests of each operation.
"""

PEERS = (
    "| Mimir, same samples (general knowledge, not measured) | 8,000 to 12,000 | about 1,000,000 |",
    "| Kafka, same bytes in three zones (general knowledge, not measured) | about 5,000 | about 2,400,000 |",
)


def page(rows: Sequence[ScaleRow], cost_page: str) -> str:
    """The page. The prices of requests follow from what the table of the cost page counts."""
    found = {(row.loop, row.size): row for row in rows}
    waits = {"GET": GET_S, "PUT": PUT_S, "a page of LIST": LIST_S, "a call of meta": META_S}
    return TEMPLATE.format(
        latencies=", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in waits.items()),
        sizes="\n".join(_sizes()),
        loops="\n".join(_loops(found)),
        outage="\n".join(["| loop | hours |", "|---|---|", *_outage(found)]),
        puts_max=f"{PUTS_MAX_S:,}",
        ranges=RANGES,
        prefixes="\n".join(["| keys | busiest range | writes a second at L |", "|---|---|---|", *_prefixes()]),
        plans="\n".join(_plans(found)),
        costs="\n".join(["| | M, dollars a month | L, dollars a month |", "|---|---|---|", *_costs(cost_page), *PEERS]),
    )


def _loops(found: dict[tuple[str, str], ScaleRow]) -> list[str]:
    heads = " | ".join(f"{size.name}: load, limit, headroom (processes)" for size in SIZES)
    lines = [f"| loop | unit | {heads} |", "|---|---|---|---|---|"]
    for loop in LOOPS:
        cells = " | ".join(_cell(found[loop.name, size.name]) for size in SIZES)
        lines.append(f"| {loop.name}{' (shared)' if loop.shared else ''} | {loop.unit} | {cells} |")
    return lines


def _sizes() -> list[str]:
    head = ["| | " + " | ".join(size.name for size in SIZES) + " |", "|---|---|---|---|"]
    fields: list[tuple[str, Callable[[Size], float]]] = [
        ("batches a second", lambda size: size.batches_s),
        ("agents", lambda size: size.agents),
        ("gateways", lambda size: size.gateways),
        ("partitions of the log", lambda size: size.partitions),
        ("appends to the log a second", lambda size: size.appends_s),
        ("ticks a second", lambda size: size.ticks_s),
    ]
    return head + [f"| {name} | " + " | ".join(_short(value(size)) for size in SIZES) + " |" for name, value in fields]


def _cell(row: ScaleRow) -> str:
    return f"{_short(row.load)}, {_short(row.limit)}, **{_short(row.headroom)}** ({row.processes:,})"


def _outage(found: dict[tuple[str, str], ScaleRow]) -> list[str]:
    lines = []
    for name in ("accept", "derived writes", "reconciler", "roller", "bronze step"):
        row = found[name, M.name]
        spare = row.limit - row.load
        lines.append(f"| {name} | {row.load * 24 / spare:.1f} |" if spare > 0 else f"| {name} | never |")
    return lines


def _prefixes() -> list[str]:
    """The share of the busiest range of the keys, by the functions that make them."""

    def sha(number: int) -> str:
        return hashlib.sha256(str(number).encode()).hexdigest()

    def identity(number: int) -> BatchIdentity:
        return BatchIdentity(f"agent-{sha(number % 500)[:8]}", "boot", number, number)

    made: list[tuple[str, float, Callable[[int, int], str]]] = [
        ("`raw-blobs/v1/sha256/`", 1.0, lambda n, at: paths.blob_key(sha(n))),
        ("`raw-blobs/v1/packed/`", 0.05, lambda n, at: paths.pack_key(sha(n))),
        ("`accepted/v1/agent=`", 1.0, lambda n, at: paths.accepted_key(identity(n))),
        ("`accepted-index/v1/shard=`", L.gateways / 2 / L.batches_s, lambda n, at: paths.segment_key(at, at, sha(n))),
        ("`accepted-by-time/v1/` (on demand only)", 0.0, lambda n, at: paths.accepted_by_time_key(identity(n), at)),
    ]
    lines = []
    for name, writes, key in made:
        start_ns = 1_760_000_400_000_000_000  # the first instant of an hour
        step_ns = HOUR_NS // KEYS
        before = sorted(key(n, start_ns + n * step_ns) for n in range(KEYS))
        cuts = [before[len(before) * cut // RANGES] for cut in range(1, RANGES)]
        counts = [0] * RANGES
        for n in range(KEYS, 2 * KEYS):
            counts[bisect_right(cuts, key(n, start_ns + n * step_ns))] += 1
        lines.append(f"| {name} | {max(counts) / KEYS:.0%} | {_short(writes * L.batches_s)} |")
    return lines


def _plans(found: dict[tuple[str, str], ScaleRow]) -> list[str]:
    lacking = sorted((found[loop.name, L.name].headroom, loop.name) for loop in LOOPS if loop.name in PLANS)
    return [f"- **{name}** ({_short(headroom)}): {PLANS[name]}" for headroom, name in lacking if headroom < 1]


def _costs(cost_page: str) -> list[str]:
    row = next(line for line in cost_page.splitlines() if line.startswith(COUNTED))
    create, replace, get, _, _, listed = (int(cell.strip() or 0) for cell in row.split("|")[2:8])
    writes, reads = (create + replace + listed) / 3_000, get / 3_000
    ways = {"one blob each": writes, f"packs of {PACKED} frames": writes - 1 + 1 / PACKED}
    lines = []
    for name, each in ways.items():
        dollars = [
            size.batches_s * MONTH_S * (each * prices.DOLLARS_PER_PUT_OR_LIST + reads * prices.DOLLARS_PER_GET)
            for size in (M, L)
        ]
        lines.append(f"| Lakebed, {name} | {dollars[0]:,.0f} | {dollars[1]:,.0f} |")
    stored = [size.batches_s * 11_600 * MONTH_S / 2**30 * prices.DOLLARS_PER_GIB_MONTH for size in (M, L)]
    lines.append(f"| storage of 11.6 KB a batch | {stored[0]:,.0f} | {stored[1]:,.0f} |")
    return lines


def _short(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def main(place: str) -> None:
    rows = [row for loop in LOOPS for row in rows_of(loop, quick=False)]
    cost_page = Path(place).with_name("cost.md").read_text()
    Path(place).write_text(page(rows, cost_page))


if __name__ == "__main__":
    main(sys.argv[1])

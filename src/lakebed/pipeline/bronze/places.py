"""Where bronze lies: `bronze/<org>/<project>/<table>` for ticks, `bronze/<source>/lake/<table>` for all other sources.

Sources that belong to no org are batches (samples), topics and queues; their names are no orgs. A contract names one as
`batches.samples`, `topic.<table>` or `queue.<table>`, and silver and gold of them are those of the project `lake/main`.
Tables of before this layout stay where they are: they are read and written there.
"""

from __future__ import annotations

from lakebed.store.protocol import Store

SHARED = "lake"  # in the place of a project, for sources that have none
LAKE = (SHARED, "main")  # the org and project of silver and gold that are made of them
FOLDERS = {"batches": "batches", "topic": "topics", "queue": "queues"}  # the word in a contract → the folder
BATCHES, TOPICS, QUEUES = (f"bronze/{folder}/{SHARED}" for folder in FOLDERS.values())
SAMPLES = f"{BATCHES}/samples"
BEFORE = {  # a folder → where its tables were
    BATCHES: "batches",
    TOPICS: "topics",
    f"quarantine/topics/{SHARED}": "topics-quarantine",
}
UNREADABLE = f"quarantine/batches/{SHARED}/samples"  # batches that cannot be read
UNREADABLE_BEFORE = "batches/quarantine"


def quarantine_of(name: str) -> str:
    """The quarantine table of a bronze table."""
    return name.replace("bronze/", "quarantine/", 1)


def source_of(name: str) -> str:
    """The source in a contract's word: `batches.samples`, `topic.orders`; empty for a table of ticks."""
    kind, dot, table = name.partition(".")
    return f"bronze/{FOLDERS[kind]}/{SHARED}/{table}" if dot and table and kind in FOLDERS else ""


def word_of(name: str) -> str:
    """The word by which a contract names this bronze table; empty for a table of ticks."""
    layer, folder, shared, *rest = name.split("/")
    kind = next((kind for kind, each in FOLDERS.items() if each == folder), "")
    return f"{kind}.{rest[0]}" if layer == "bronze" and kind and shared == SHARED and len(rest) == 1 else ""


async def placed(store: Store, name: str) -> str:
    """Where this table is: at its name, or where it was before, if only that has a log."""
    folder, _, table = name.rpartition("/")
    before = UNREADABLE_BEFORE if name == UNREADABLE else f"{BEFORE[folder]}/{table}" if folder in BEFORE else ""
    if not before or "_delta_log" not in await store.children(f"tables/{before}/"):
        return name
    return name if "_delta_log" in await store.children(f"tables/{name}/") else before

"""Where tables lie. Bronze is `bronze/<source>/…`: `bronze/ticks/<org>/<project>/<table>`, and `bronze/<source>/lake/…`
for batches, topics and queues, which belong to no org. Other layers are `<layer>/<org>/<project>/<table>`.

A contract names a source without an org as `batches.samples`, `topic.<table>` or `queue.<table>`; silver and gold of
them are those of the project `lake/main`.
Tables of before this layout stay where they are: they are read and written there.
"""

from __future__ import annotations

from lakebed.delta.log import LOG_FOLDER
from lakebed.store.protocol import Store

LAYERS = ("bronze", "silver", "quarantine", "gold")  # in the order of data
TICKS = "bronze/ticks"
TICKS_BEFORE = "bronze"
SHARED = "lake"  # in the place of a project, for sources that have none
LAKE = (SHARED, "main")  # the org and project of silver and gold that are made of them
FOLDERS = {"batches": "batches", "topic": "topics", "queue": "queues"}  # the word in a contract → the folder
SOURCES = ("ticks", *FOLDERS.values())
BATCHES, TOPICS, QUEUES = (f"bronze/{folder}/{SHARED}" for folder in FOLDERS.values())
SAMPLES = f"{BATCHES}/samples"
BEFORE = {  # a folder → where its tables were
    BATCHES: "batches",
    TOPICS: "topics",
    f"quarantine/topics/{SHARED}": "topics-quarantine",
}
UNREADABLE = f"quarantine/batches/{SHARED}/samples"  # batches that cannot be read
UNREADABLE_BEFORE = "batches/quarantine"


def table_name(layer: str, org_id: str, project_id: str, name: str) -> str:
    """A table of a project; in bronze, one of ticks."""
    return f"{TICKS if layer == 'bronze' else layer}/{org_id}/{project_id}/{name}"


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
    if name.startswith(f"{TICKS}/"):
        before = f"{TICKS_BEFORE}/{name.removeprefix(f'{TICKS}/')}"
    if not before or not await _is_table(store, before):
        return name
    return name if await _is_table(store, name) else before


async def projects(store: Store, layer: str) -> list[tuple[str, str]]:
    """The org and project of everything in a layer; in bronze, of ticks."""
    found = set()
    for root in _roots(layer):
        orgs = [org for org in await store.children(f"tables/{root}/") if root != TICKS_BEFORE or org not in SOURCES]
        found |= {(org, project) for org in orgs for project in await store.children(f"tables/{root}/{org}/")}
    return sorted(found)


async def tables_of(store: Store, layer: str, org_id: str, project_id: str) -> dict[str, str]:
    """A project's tables in a layer, by name, and where each is; a folder in which nothing was committed is none."""
    found: dict[str, str] = {}
    for root in _roots(layer):
        folder = f"{root}/{org_id}/{project_id}"
        found = {name: f"{folder}/{name}" for name in await committed(store, folder)} | found
    return dict(sorted(found.items()))


async def committed(store: Store, folder: str) -> list[str]:
    """The names of the tables in a folder."""
    return [name for name in await store.children(f"tables/{folder}/") if await _is_table(store, f"{folder}/{name}")]


async def every_table(store: Store) -> list[str]:
    """Every table of every layer and source, by its log."""
    found = []
    for folder in (*BEFORE.values(), *(f"bronze/{folder}/{SHARED}" for folder in FOLDERS.values())):
        found += [f"{folder}/{name}" for name in await committed(store, folder)]
    for layer in LAYERS:
        for project in await projects(store, layer):
            found += (await tables_of(store, layer, *project)).values()
    return found


def _roots(layer: str) -> tuple[str, ...]:
    return (TICKS, TICKS_BEFORE) if layer == "bronze" else (layer,)


async def _is_table(store: Store, name: str) -> bool:
    return LOG_FOLDER in await store.children(f"tables/{name}/")

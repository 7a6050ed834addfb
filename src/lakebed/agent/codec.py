"""What an agent knows of numbers that no collector has: given up, parked, or still waiting. Read from its queue folder.

For audits: a number that is missing in the bucket and accounted for here was not lost on the way. Reads names and the
ledger only, so it may run beside the agent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from lakebed.agent import paths
from lakebed.core.errors import Corrupt, NotFound

Why = Literal["queued", "parked", "dropped"]


class Account(msgspec.Struct, frozen=True):
    """Numbers `first` to `last` of a boot, and where they are."""

    agent_id: str
    boot_id: str
    first: int
    last: int
    why: Why


def accounts(folder: Path) -> list[Account]:
    """Everything that the queue in this folder accounts for. Raises NotFound when there is no queue in it.

    A ledger line of drops that reach over several boots, or of batches that never got a place, names no numbers.
    """
    about = folder / paths.ABOUT
    try:
        agent_id = msgspec.json.decode(about.read_bytes(), type=dict)["agent_id"]
    except FileNotFoundError:
        raise NotFound(f"there is no agent queue in {folder}", hint="name the folder that holds queue.json") from None
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError) as error:
        raise Corrupt(f"{about} does not decode: {error}") from error
    found = [*_queued(folder), *_parked(folder), *_dropped(folder)]
    return [Account(agent_id, *place) for place in found]


def _queued(folder: Path) -> Iterator[tuple[str, int, int, Why]]:
    for file in folder.glob(f"{paths.BOOTS}/*/*{paths.BATCH}"):
        boot, batch = paths.parse_boot(file.parent.name), paths.parse_batch(file.name)
        if boot and batch:
            yield boot[1], batch[0], batch[1], "queued"


def _parked(folder: Path) -> Iterator[tuple[str, int, int, Why]]:
    for file in folder.glob(f"{paths.PARKED}/*{paths.BATCH}"):
        if (place := paths.parse_parked(file.name)) and (batch := paths.parse_batch(place[1])):
            yield place[0], batch[0], batch[1], "parked"


def _dropped(folder: Path) -> Iterator[tuple[str, int, int, Why]]:
    for path in (folder / paths.LEDGER, (folder / paths.LEDGER).with_suffix(".1.jsonl")):
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                entry: dict[str, Any] = msgspec.json.decode(line, type=dict)
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue  # the last line, cut off by a crash
            if entry.get("what") == "dropped_by_owner":
                yield entry["boot_id"], entry["seq_start"], entry["seq_end"], "dropped"
            elif entry.get("what") == "dropped_when_full" and "first" in entry:
                (boot, first), (last_boot, last) = entry["first"], entry["last"]
                if boot == last_boot:
                    yield boot, first, last, "dropped"

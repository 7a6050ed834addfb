"""The agent's queue on disk: one small file for each tick that is to be sent. It survives a crash at any moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from lakebed.core.errors import Corrupt
from lakebed.ticks import paths
from lakebed.ticks.packing import PackedTick

SUFFIX = ".tick.json"


class OutboxTick(msgspec.Struct, frozen=True):
    """A tick to be sent. One that the service refused is `failed_manual`: a person decides about it."""

    packed: PackedTick
    state: Literal["ready", "failed_manual"] = "ready"
    tries: int = 0
    error_class: str = ""
    message: str = ""
    folder: str = ""  # the folder in which an agent found it; empty for `lakebed ticks push`
    schema: str = "lakebed.tick-outbox.v1"

    def refused(self, error_class: str, message: str) -> OutboxTick:
        return msgspec.structs.replace(self, state="failed_manual", error_class=error_class, message=message)


class Outbox:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, waiting: OutboxTick) -> None:
        """Adds or changes a tick; on disk when it returns."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(waiting.packed.tick_id)
        half = file.with_suffix(".half")
        with half.open("wb") as out:
            out.write(msgspec.json.encode(waiting))
            out.flush()
            os.fsync(out.fileno())
        half.replace(file)
        self._sync()

    def has(self, tick_id: str) -> bool:
        """Whether the tick is in the outbox. Raises Invalid when it is not a tick's id."""
        return self._file(tick_id).is_file()

    def remove(self, tick_id: str) -> None:
        self._file(tick_id).unlink(missing_ok=True)
        self._sync()

    def waiting(self) -> Iterator[OutboxTick]:
        """Every tick, oldest first. Raises Corrupt for a file that does not decode."""
        for file in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                yield msgspec.json.decode(file.read_bytes(), type=OutboxTick)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise Corrupt(f"{file} does not decode: {error}", hint="move it away and push again") from error

    def _file(self, tick_id: str) -> Path:
        return self._folder / f"{paths.check_name('tick', tick_id)}{SUFFIX}"

    def _sync(self) -> None:
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

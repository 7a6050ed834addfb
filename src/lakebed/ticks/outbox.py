"""The agent's queue on disk: one small file for each tick that is to be sent. It survives a crash at any moment."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from lakebed.core import private
from lakebed.core.errors import Corrupt
from lakebed.ticks import paths
from lakebed.ticks.packing import PackedTick

SUFFIX = ".tick.json"
FILES_SUFFIX = ".files"
ATTEMPTS = ".attempts"  # beside the tick's file: one line for each attempt of a part, its number
REFUSALS_MAX = 10  # deliveries that the service answered with an error of this tick, and
REFUSED_MS = 3_600_000  # the time they span, before the tick is failed_manual


class OutboxTick(msgspec.Struct, frozen=True):
    """A tick to be sent. One that the service refused is `failed_manual`: a person decides about it."""

    packed: PackedTick
    state: Literal["ready", "failed_manual"] = "ready"
    tries: int = 0
    error_class: str = ""
    message: str = ""
    folder: str = ""  # the folder in which an agent found it; empty for `lakebed ticks push`
    refusals: int = 0  # deliveries that ended with an error of this tick
    refused_at_ms: int = 0  # when the first of them was
    schema: str = "lakebed.tick-outbox.v1"

    def refused(self, error_class: str, message: str) -> OutboxTick:
        return msgspec.structs.replace(self, state="failed_manual", error_class=error_class, message=message)

    def refused_again(self, message: str, *, now_ms: int) -> OutboxTick:
        """Counts a delivery that was answered with an error; enough of them over an hour make it failed_manual."""
        since_ms = self.refused_at_ms or now_ms
        counted = msgspec.structs.replace(
            self, refusals=self.refusals + 1, refused_at_ms=since_ms, message=message[:2000]
        )
        persistent = counted.refusals >= REFUSALS_MAX and now_ms - since_ms >= REFUSED_MS
        return counted.refused("refused_persistently", message[:2000]) if persistent else counted


class Outbox:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, waiting: OutboxTick) -> None:
        """Adds or changes a tick; on disk when it returns."""
        private.folder(self._folder)
        private.write(self._file(waiting.packed.tick_id), msgspec.json.encode(waiting))

    def has(self, tick_id: str) -> bool:
        """Whether the tick is in the outbox. Raises Invalid when it is not a tick's id."""
        return self._file(tick_id).is_file()

    def remove(self, tick_id: str) -> None:
        """Forgets a tick, and the files that were made for it; files of others stay."""
        if not self._folder.is_dir():
            return
        self._file(tick_id).unlink(missing_ok=True)
        self._attempts(tick_id).unlink(missing_ok=True)
        shutil.rmtree(self.files(tick_id), ignore_errors=True)
        private.sync_folder(self._folder)

    def files(self, tick_id: str) -> Path:
        """The folder for files made for this tick, such as Parquet converted from CSV. It may not exist."""
        return self._folder / f"{paths.check_name('tick', tick_id)}{FILES_SUFFIX}"

    def attempt(self, tick_id: str, seq: int) -> None:
        """Counts one more attempt to send a part. It survives a kill of the process."""
        with open(self._attempts(tick_id), "a", opener=private.opener) as out:
            out.write(f"{seq}\n")

    def attempts(self, tick_id: str) -> Counter[int]:
        """How often each part was sent."""
        try:
            lines = self._attempts(tick_id).read_text().split()
        except FileNotFoundError:
            return Counter()
        return Counter(int(line) for line in lines if line.isdigit())

    def waiting(self, unreadable: list[str] | None = None) -> Iterator[OutboxTick]:
        """Every tick, oldest first. Raises Corrupt for a file that does not decode; with a list, adds what is wrong
        with it there and passes it over.
        """
        for file in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                found = msgspec.json.decode(file.read_bytes(), type=OutboxTick)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                what = f"{file} does not decode: {error}"
                if unreadable is None:
                    raise Corrupt(what, hint="move it away and push again") from error
                unreadable.append(what)
                continue
            yield found

    def _file(self, tick_id: str) -> Path:
        return self._folder / f"{paths.check_name('tick', tick_id)}{SUFFIX}"

    def _attempts(self, tick_id: str) -> Path:
        return self._folder / f"{paths.check_name('tick', tick_id)}{ATTEMPTS}"

"""What tests of the stack share: an address of a bucket, and a child that is no process."""

from __future__ import annotations

import os

from lakebed.core.errors import Unavailable
from lakebed.embedded.endpoints import BucketEndpoints

BUCKET = BucketEndpoints("http://h:1", "h:2", "http://h:3", "h:4", "h:5", "lake", "eu-1", "the-id", "the-secret")


class FakeChild:
    def __init__(self, name: str, noted: list[str]) -> None:
        self.name, self.pid, self._noted, self.alive = name, os.getpid(), noted, False

    def running(self) -> bool:
        return self.alive

    def kill(self) -> None:
        self._noted.append(f"kill {self.name}")
        self.alive = False

    def rotate_log(self) -> None: ...

    def ended(self, why: str) -> Unavailable:
        return Unavailable(f"{why}: {self.name}")

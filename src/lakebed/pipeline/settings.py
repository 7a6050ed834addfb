"""Where Spark runs and how much it may take."""

from __future__ import annotations

from typing import Annotated, ClassVar

from lakebed.settings import Contradiction, Section, describe


class SparkSettings(Section, frozen=True):
    section: ClassVar[str] = "spark"

    master: Annotated[str, describe("master URL: local[*] for this machine, or a cluster's")] = "local[*]"
    remote: Annotated[str, describe("Spark Connect address, sc://host:port; empty: a session of our own")] = ""
    shuffle_partitions: Annotated[int, describe("partitions after a shuffle; 2 to 8 on one machine")] = 4
    driver_memory: Annotated[str, describe("heap of the driver, which on one machine is everything")] = "1g"
    quick: Annotated[bool, describe("compile lightly: starts sooner, runs long jobs slower")] = False
    conf: Annotated[dict[str, str], describe("more Spark configuration, over all of ours")] = {}
    start_timeout_s: Annotated[float, describe("longest wait for a session to start")] = 120.0

    def check(self) -> None:
        if self.remote and self.master != "local[*]":
            raise Contradiction("spark.remote", "spark.master", "a session is either remote or has a master of its own")
        if self.remote and not self.remote.startswith("sc://"):
            raise Contradiction("spark.remote", "spark.remote", f"{self.remote!r} is not of the form sc://host:port")
        if self.shuffle_partitions < 1:
            raise Contradiction("spark.shuffle_partitions", "spark.shuffle_partitions", "must be at least 1")

    @property
    def is_local(self) -> bool:
        return not self.remote and self.master.startswith("local")

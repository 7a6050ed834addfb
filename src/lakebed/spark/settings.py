"""Settings of Spark: where it runs, its memory and lineage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec

from lakebed.core.settings import Contradiction, Secret, Section, describe


class LineageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver of OpenLineage events. Without a url the standard OPENLINEAGE_* variables are used."""

    url: str = ""
    endpoint: str = "api/v1/lineage"
    api_key: Secret = Secret("")
    namespace: str = "lakebed"

    @property
    def address(self) -> str:
        return f"{self.url.rstrip('/')}/{self.endpoint.lstrip('/')}"

    def or_environment(self, env: Mapping[str, str]) -> LineageSettings:
        if self.url or env.get("OPENLINEAGE_DISABLED", "").lower() == "true":
            return self
        return LineageSettings(
            env.get("OPENLINEAGE_URL", ""),
            env.get("OPENLINEAGE_ENDPOINT", self.endpoint),
            Secret(env["OPENLINEAGE_API_KEY"]) if "OPENLINEAGE_API_KEY" in env else self.api_key,
            env.get("OPENLINEAGE_NAMESPACE", self.namespace),
        )


class SparkSettings(Section, frozen=True):
    section: ClassVar[str] = "spark"

    master: Annotated[
        str,
        describe("Spark master URL: local[*] for this machine, or the URL of a cluster.", when="jobs run on a cluster"),
    ] = "local[*]"
    remote: Annotated[
        str,
        describe(
            "Spark Connect address, sc://host:port; empty means a session inside Lakebed.",
            when="jobs run on a Spark Connect server",
        ),
    ] = ""
    shuffle_partitions: Annotated[int, describe("Sets the partitions after a shuffle; 2 to 8 on one machine.")] = 4
    driver_memory: Annotated[
        str,
        describe(
            "Heap of the Spark driver, which on one machine includes the executors.",
            when="jobs fail with out of memory",
        ),
    ] = "1g"
    quick: Annotated[bool, describe("Compiles less: Spark starts sooner and runs long jobs slower.")] = False
    ui: Annotated[
        bool, describe("Serves Spark's page of jobs and stages, without authentication; the console links to it.")
    ] = False
    conf: Annotated[
        dict[str, str],
        describe(
            "Adds Spark configuration, with priority over Lakebed's own.",
            when="Spark needs an option that has no setting here",
        ),
    ] = {}
    start_timeout_s: Annotated[float, describe("Limits the wait for a session to start.")] = 120.0
    lineage: Annotated[
        LineageSettings,
        describe("OpenLineage receiver: url, endpoint, api_key, namespace.", when="lineage events are collected"),
    ] = LineageSettings()

    def check(self) -> None:
        if self.lineage.url and not self.lineage.url.startswith(("http://", "https://")):
            raise Contradiction("spark.lineage", "spark.lineage", f"{self.lineage.url!r} is not an http(s) address")
        if self.remote and self.master != "local[*]":
            raise Contradiction("spark.remote", "spark.master", "set only one of them")
        if self.remote and not self.remote.startswith("sc://"):
            raise Contradiction(
                "spark.remote", "spark.remote", f"{self.remote!r} does not have the form sc://host:port"
            )
        if self.shuffle_partitions < 1:
            raise Contradiction("spark.shuffle_partitions", "spark.shuffle_partitions", "must be at least 1")

    @property
    def is_local(self) -> bool:
        return not self.remote and self.master.startswith("local")

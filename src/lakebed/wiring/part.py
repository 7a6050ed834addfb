"""What a row of the table of parts says. Loaded by the root of the command: it imports nothing of Lakebed."""

from __future__ import annotations

import msgspec


class Command(msgspec.Struct, frozen=True):
    """A command of `lakebed`: `module:name` of its function or app, its name, one line of help and its group.

    `extra` is the extra of the package that the command needs; the core is enough without one.
    """

    place: str
    name: str
    about: str
    group: str
    extra: str = ""


class SimWorld(msgspec.Struct, frozen=True):
    """A simulated world: `script` is an async function of one World."""

    name: str
    about: str
    script: str


class Part(msgspec.Struct, frozen=True):
    """Where a part plugs in, as `module:name`; empty where the part has nothing."""

    name: str
    about: str
    settings: str = ""  # a Section
    component: str = ""  # (Context) -> Component
    workers: str = ""  # (Context) -> Sequence[Worker]
    machine: str = ""  # () -> Diagnosis of this machine, for `lakebed doctor`
    checks: str = ""  # async (Context) -> Sequence[Diagnosis], for `lakebed doctor`
    warning: str = ""  # (Settings) -> a warning about them or "", for `lakebed status`
    commands: tuple[Command, ...] = ()
    source: str = ""  # a DataSource of Spark, registered with the others by `lakebed.spark.register`
    page: str = ""  # a PartPage of the console
    runs: str = ""  # a RunsReader of the console
    bench: str = ""  # async (BenchEnvironment) -> Sequence[Check], for `lakebed bench`
    load_test: str = ""  # async (BenchEnvironment, scenario, folder) -> Summary, for `lakebed bench --scenario`
    demo: str = ""  # a module with TITLE, NEXT and play(ScenarioContext), for `lakebed demo`
    worlds: tuple[SimWorld, ...] = ()
    offline: str = ""  # (Context) -> Authority | None: the bucket it knows, if it can start while that is away
    active_active: bool = True  # makes conditional writes, so the store is verified before it starts

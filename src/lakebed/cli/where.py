"""How a command finds its store: a running stack by `--dir`, or the settings; and how it records operator actions."""

from __future__ import annotations

import asyncio
import getpass
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.core.context import Context
from lakebed.core.errors import Invalid, LakebedError, NotFound
from lakebed.core.settings import Settings, load
from lakebed.core.trail import ActionOutcome

DEFAULT_DIR = Path(".lakebed")
DEFAULT_FILE = Path("lakebed.toml")

R = TypeVar("R")


@Parameter(name="*")
@dataclass(frozen=True)
class Where:
    """Options shared by every command that talks to a stack or a bucket."""

    dir: Annotated[Path | None, Parameter(help="the stack's folder (default: .lakebed)")] = None
    config: Annotated[Path | None, Parameter(help="settings file (default: lakebed.toml if there is one)")] = None

    def settings(self, flags: Mapping[str, Any] | None = None, *, stack: Mapping[str, Any] | None = None) -> Settings:
        """The settings from all layers; a running stack's addresses come between the file and the environment.

        `stack` gives those addresses when the caller has started a stack itself.
        """
        from lakebed.wiring.parts import sections

        file = self.settings_file
        named = file != DEFAULT_FILE or file.exists()
        return load(
            sections(),
            file=file if named else None,
            stack=self._stack() if stack is None else stack,
            env=os.environ,
            flags=flags,
        )

    def context(self, role: str, flags: Mapping[str, Any] | None = None) -> Context:
        """Raises NotFound when there is no store: no stack runs and the settings name none."""
        from lakebed.wiring.context import make_context  # loads the store client, which an agent does not need

        return make_context(self.reaching(flags), role=role)

    def reaching(self, flags: Mapping[str, Any] | None = None) -> Settings:
        """The settings, if they name a store. Raises NotFound otherwise."""
        settings = self.settings(flags)
        if not _names_a_store(settings):
            raise NotFound(
                f"no stack runs in {self.folder}, and no store is named",
                hint="start one with lakebed up, or set store.url (LAKEBED_STORE_URL) to yours",
            )
        return settings

    @property
    def settings_file(self) -> Path:
        """The settings file of this command; the default one may not exist."""
        return self.config or _env_path("LAKEBED_CONFIG") or DEFAULT_FILE

    @property
    def folder(self) -> Path:
        return self.dir or _env_path("LAKEBED_DIR") or DEFAULT_DIR

    @property
    def names_a_bucket(self) -> bool:
        """Whether a stack runs or a store is named, so this command need not start one."""
        return _names_a_store(self.settings())

    def _stack(self) -> dict[str, Any]:
        from lakebed.embedded.endpoints import ENDPOINTS_FILE, find

        named = self.dir or _env_path("LAKEBED_DIR")
        if named is None and not (DEFAULT_DIR / ENDPOINTS_FILE).exists():
            return {}
        running = find(self.folder)
        if running.settings_changed:
            _notice(
                f"notice: {running.settings_file} changed after the stack started, and its processes use the earlier"
                " settings: lakebed down, then lakebed up"
            )
        return dict(running.as_settings())


@cache
def _notice(text: str) -> None:
    """Says it once in a command, however often the settings are loaded."""
    say(text)


def in_loop(work: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """Runs a command's async work on one event loop."""
    return asyncio.run(work())


def as_operator(
    context: Context, what: str, subject: dict[str, str], reason: str = ""
) -> AbstractAsyncContextManager[ActionOutcome]:
    """Records what a command does for an operator in the audit trail, as `cli:` and the user of this machine."""
    return context.trail.record(f"cli:{getpass.getuser()}", what, subject, reason)


@contextmanager
def job_as_operator(context: Context, what: str, subject: dict[str, str], reason: str = "") -> Iterator[ActionOutcome]:
    """The same for a job that runs in the caller's thread, not on an event loop."""
    action = as_operator(context, what, subject, reason)
    with asyncio.Runner() as loop:
        outcome = loop.run(_begun(action))
        try:
            yield outcome
        except LakebedError as error:
            loop.run(_ended(action, error))
            raise
        loop.run(_ended(action, None))


async def _begun(action: AbstractAsyncContextManager[ActionOutcome]) -> ActionOutcome:
    return await action.__aenter__()


async def _ended(action: AbstractAsyncContextManager[ActionOutcome], error: LakebedError | None) -> None:
    try:
        await action.__aexit__(type(error) if error else None, error, None)
    except LakebedError as same:
        if same is not error:
            raise


def _names_a_store(settings: Settings) -> bool:
    return any(settings.source(key) != "default" for key in ("store.url", "store.endpoint"))


def _env_path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None


def settings(
    part: Annotated[str, Parameter(show_default=False, help="show only this part: its name or its section")] = "",
    /,
    *,
    advanced: Annotated[bool, Parameter(negative="", help="show advanced settings too")] = False,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show the settings, their values and where each comes from. Secrets are masked.

    Advanced settings are listed with --advanced, and always when they are set.
    """
    emit(where.settings().rows(section=_section(part) if part else "", advanced=advanced), output)


def _section(named: str) -> str:
    """The settings section of a part, given the part's name, the section or its former name. Raises Invalid."""
    from lakebed.wiring.parts import PARTS, resolve

    kinds = {part.name: resolve(part.settings) for part in PARTS if part.settings}
    former = {kind.former: kind.section for kind in kinds.values() if kind.former}
    known = {name: kind.section for name, kind in kinds.items()} | {
        kind.section: kind.section for kind in kinds.values()
    }
    if named in former:
        say(f"the section {named!r} is now {former[named]!r}; keys with the former name are still read")
    elif named not in known:
        raise Invalid(f"no part {named!r} has settings", hint=f"one of {', '.join(sorted(known))}")
    return str(former.get(named) or known[named])

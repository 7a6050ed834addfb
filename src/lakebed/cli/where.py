"""How a command finds what it talks to: a running stack by `--dir`, or the settings alone."""

from __future__ import annotations

import asyncio
import getpass
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter

from lakebed.context import Context, make_context
from lakebed.errors import LakebedError, NotFound
from lakebed.settings import Settings, load
from lakebed.trail import Told

DEFAULT_DIR = Path(".lakebed")
DEFAULT_FILE = Path("lakebed.toml")

R = TypeVar("R")


@Parameter(name="*")
@dataclass(frozen=True)
class Where:
    """Options shared by every command that talks to a stack or a bucket."""

    dir: Annotated[Path | None, Parameter(help="folder of a running stack (default: .lakebed if there is one)")] = None
    config: Annotated[Path | None, Parameter(help="settings file (default: lakebed.toml if there is one)")] = None

    def settings(self, flags: Mapping[str, Any] | None = None, *, stack: Mapping[str, Any] | None = None) -> Settings:
        """Settings by their layers; a running stack's addresses stand between the file and the environment.

        `stack` gives those addresses when the caller has started something itself.
        """
        from lakebed.parts import sections

        file = self.config or _env_path("LAKEBED_CONFIG") or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)
        return load(sections(), file=file, stack=self._stack() if stack is None else stack, env=os.environ, flags=flags)

    def context(self, role: str, flags: Mapping[str, Any] | None = None) -> Context:
        """Raises NotFound when there is no store to talk to: neither a stack that runs nor one that was named."""
        return make_context(self.reaching(flags), role=role)

    def reaching(self, flags: Mapping[str, Any] | None = None) -> Settings:
        """The settings, if they name a store. Raises NotFound."""
        settings = self.settings(flags)
        if not _names_a_store(settings):
            raise NotFound(
                f"no stack runs in {self.folder}, and no store is named",
                hint="lakebed up starts one here; or set store.url (LAKEBED_STORE_URL) to yours",
            )
        return settings

    @property
    def folder(self) -> Path:
        return self.dir or _env_path("LAKEBED_DIR") or DEFAULT_DIR

    @property
    def names_a_bucket(self) -> bool:
        """Whether a stack or a store was named, so that nothing needs to be started for this command."""
        return _names_a_store(self.settings())

    def _stack(self) -> dict[str, Any]:
        from lakebed.embedded.endpoints import ENDPOINTS_FILE, find

        named = self.dir or _env_path("LAKEBED_DIR")
        if named is None and not (DEFAULT_DIR / ENDPOINTS_FILE).exists():
            return {}
        return dict(find(self.folder).as_settings())


def in_loop(work: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """Runs a command's async work on one event loop."""
    return asyncio.run(work())


def by_hand(
    context: Context, what: str, subject: dict[str, str], reason: str = ""
) -> AbstractAsyncContextManager[Told]:
    """Around what a command does for an operator: on the trail as `cli:` and the user of this machine."""
    return context.trail.record(f"cli:{getpass.getuser()}", what, subject, reason)


@contextmanager
def job_by_hand(context: Context, what: str, subject: dict[str, str], reason: str = "") -> Iterator[Told]:
    """The same around a job, which runs in the caller's thread and not on an event loop."""
    deed = by_hand(context, what, subject, reason)
    with asyncio.Runner() as loop:
        told = loop.run(_begun(deed))
        try:
            yield told
        except LakebedError as error:
            loop.run(_ended(deed, error))
            raise
        loop.run(_ended(deed, None))


async def _begun(deed: AbstractAsyncContextManager[Told]) -> Told:
    return await deed.__aenter__()


async def _ended(deed: AbstractAsyncContextManager[Told], error: LakebedError | None) -> None:
    try:
        await deed.__aexit__(type(error) if error else None, error, None)
    except LakebedError as same:
        if same is not error:
            raise


def _names_a_store(settings: Settings) -> bool:
    sources = {row["key"]: row["source"] for row in settings.rows()}
    return any(sources[key] != "default" for key in ("store.url", "store.endpoint"))


def _env_path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None

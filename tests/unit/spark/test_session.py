"""One session a process: who asks while it starts waits for the same start, and a failed start is tried again."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.core.errors import Conflict, LakebedError, Unavailable
from lakebed.core.settings import load
from lakebed.spark import session
from lakebed.spark.settings import SparkSettings


class Starts:
    """Starts of Spark, which end as they are told."""

    def __init__(self) -> None:
        self.begun: list[tuple[SparkSettings, Future[Any]]] = []

    def __call__(self, target: Any, args: tuple[SparkSettings, Future[Any]], **_: Any) -> Starts:
        self.begun.append(args)
        return self

    def start(self) -> None: ...


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    made = Starts()
    monkeypatch.setattr(session, "_started", None)
    monkeypatch.setattr(session, "threading", SimpleNamespace(Thread=made))
    return made


def settings(**said: Any) -> SparkSettings:
    flags = {f"spark.{name}": value for name, value in said.items()}
    return load([SparkSettings], flags={"spark.start_timeout_s": 0.01, **flags}, env={}).of(SparkSettings)


def test_a_start_that_failed_is_tried_again_at_the_next_use(starts: Starts) -> None:
    """Its error is told to all who waited for it; the next start may be by other settings."""
    states = [session.state()]
    session.warm(settings())
    states.append(session.state())
    starts.begun[0][1].set_exception(Unavailable("Spark did not start: no memory"))
    states.append(session.state())
    held = session.current()

    with pytest.raises(Unavailable, match="within 0 s"):  # another start, which takes its time
        session.open_session(settings())
    starts.begun[1][1].set_exception(Unavailable("Spark did not start: no Java"))
    session.warm(settings(quick=True))
    starts.begun[2][1].set_result("a session")

    assert (["off", "starting", "failed"], None) == (states, held)
    assert [False, False, True] == [each.quick for each, _ in starts.begun]
    assert ("ready", "a session") == (session.state(), session.current())


@pytest.mark.parametrize("ready", [False, True])
def test_there_is_one_start_for_all_who_ask_and_none_with_other_settings(starts: Starts, ready: bool) -> None:
    """Where lineage goes is no part of a session; everything else of the settings is."""
    lineage = {"lineage": {"url": "http://lineage:5000"}}
    session.warm(settings())
    if ready:
        starts.begun[0][1].set_result("a session")
    session.warm(settings(**lineage))
    with pytest.raises(Conflict, match="other settings"):
        session.warm(settings(driver_memory="2g"))
    try:
        found: Any = session.open_session(settings())
    except LakebedError as error:
        found = type(error)

    assert ("a session" if ready else Unavailable, 1) == (found, len(starts.begun))

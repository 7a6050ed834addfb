"""A process whose store is away at its start: it retries, and raises what waiting cannot change."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakebed import __version__
from lakebed.batches.landed import SpoolAuthority
from lakebed.batches.settings import BatchesSettings
from lakebed.core.clock import ManualClock, now_ms
from lakebed.core.errors import Denied, Unavailable
from lakebed.core.retry import RETRY_BASE_S, RETRY_CAP_S, until_available
from lakebed.core.settings import Settings
from lakebed.gateway.settings import GatewaySettings
from lakebed.store.settings import StoreSettings
from lakebed.wiring import boot as module
from lakebed.wiring.boot import WaitingApp, _booted, boot_when_ready, offline_authority
from support.gateway_fixtures import context_with


async def test_pauses_between_two_tries_grow_up_to_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason that is reported is the last one."""
    clock = ManualClock()
    context, waited, requested = context_with(clock), [], []  # type: ignore[var-annotated]
    waiting = WaitingApp(context)
    tries = 0

    async def boot() -> Any:
        nonlocal tries
        tries += 1
        if tries == 4:
            return "authority"
        raise Unavailable(f"refused {tries}")

    async def sleep(seconds: float) -> None:
        waited.append((seconds, waiting.reason))

    def jitter(attempt: int, **bounds: float) -> float:
        requested.append((attempt, bounds))
        return float(attempt)

    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(context.ids, "jitter_s", jitter)

    assert "authority" == await until_available(context, boot, waiting.waits)

    assert [(number + RETRY_BASE_S, f"refused {number}") for number in (1, 2, 3)] == waited
    assert [(number, {"base_s": RETRY_BASE_S, "cap_s": RETRY_CAP_S}) for number in (1, 2, 3)] == requested


async def test_what_waiting_cannot_change_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def boot(*_: Any) -> Any:
        nonlocal tries
        tries += 1
        raise Denied("wrong key")

    monkeypatch.setattr(module, "boot", boot)
    with socket.socket() as bound, pytest.raises(Denied, match="wrong key"):
        await boot_when_ready(context_with(ManualClock()), (), bound)

    assert 1 == tries


async def test_a_stop_signal_ends_the_wait_and_its_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised: there is no authority, and the process ends."""
    reached = asyncio.Event()

    async def boot(*_: Any) -> Any:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "boot", boot)
    monkeypatch.setattr(module, "QUIET_S", 60.0)
    before = signal.getsignal(signal.SIGTERM)
    with socket.socket() as bound:
        task = asyncio.create_task(boot_when_ready(context_with(ManualClock()), (), bound))
        await reached.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await task is None

    assert before == signal.getsignal(signal.SIGTERM)


async def test_parts_are_given_on_and_a_store_that_answers_needs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    async def boot(context: Any, parts: Any) -> Any:
        given.append(parts)
        return "authority"

    monkeypatch.setattr(module, "boot", boot)
    with socket.socket() as bound:
        assert "authority" == await boot_when_ready(context_with(ManualClock()), ("log",), bound)  # type: ignore[comparison-overlap]

    assert [("log",)] == given


async def test_health_says_who_waits_since_when() -> None:
    """The report has the fields of a gateway that runs, with the store as its only component."""
    clock = ManualClock()
    began_ms = now_ms(clock)
    waiting = WaitingApp(context_with(clock))
    await clock.advance(30.0)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await waiting({"type": "http", "path": "/health", "method": "GET", "headers": []}, asyncio.Event().wait, send)  # type: ignore[arg-type]

    report = msgspec.json.decode(sent[1]["body"])
    reported = "waiting for the store: no response yet"
    assert {"store": {"status": "down", "detail": reported}} == report["components"]
    assert ("down", "node-1", __version__, "", began_ms) == (
        report["status"], report["node"], report["version"], report["authority"], report["started_at_ms"],
    )  # fmt: skip
    assert (b"cache-control", b"no-store") in sent[0]["headers"]


@pytest.mark.parametrize("path", ["/healthz", "/v1/batches"])
async def test_every_request_is_503_with_a_time_to_retry_and_a_head_has_no_body(path: str) -> None:
    """A HEAD has the headers of its GET, the length included; the connection is closed after each."""
    waiting = WaitingApp(context_with(ManualClock()))
    answers: dict[str, tuple[int, dict[bytes, bytes], bytes]] = {}
    for method in ("GET", "HEAD"):
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        scope: Any = {"type": "http", "path": path, "method": method, "headers": []}
        await waiting(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
        answers[method] = (sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"])

    (status, headers, body), (head_status, head, empty) = answers["GET"], answers["HEAD"]
    assert (503, 503, b"close", b"") == (status, head_status, headers[b"connection"], empty)
    assert body and set(headers) == set(head)
    if path != "/healthz":
        assert b"retry-after" in headers


async def test_a_slow_start_is_answered_for_and_a_quick_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is away the address answers; the answering ends before the result is given."""
    answering: list[str] = []
    go = asyncio.Event()

    @asynccontextmanager
    async def answers(waiting: WaitingApp, bound: socket.socket, tls: object) -> AsyncIterator[None]:
        answering.append("began")
        go.set()
        yield
        answering.append("ended")

    async def boot(*_: Any) -> Any:
        await go.wait()
        return "authority"

    monkeypatch.setattr(module, "boot", boot)
    monkeypatch.setattr(module, "_answering", answers)
    monkeypatch.setattr(module, "QUIET_S", 0.01)
    with socket.socket() as bound:
        async with asyncio.timeout(30):
            slow = await boot_when_ready(context_with(ManualClock()), (), bound)
        assert ("authority", ["began", "ended"]) == (slow, answering)
        monkeypatch.setattr(module, "QUIET_S", 30.0)
        await boot_when_ready(context_with(ManualClock()), (), bound)

    assert ["began", "ended"] == answering


@pytest.mark.parametrize(
    ("parts", "authority", "starts"),
    [
        (("batches",), "", True),
        (("batches",), "mine", True),
        (("batches",), "other", False),
        (("batches", "queue"), "", False),
        ((), "", False),
    ],
)
async def test_a_collector_with_a_local_spool_starts_while_its_bucket_is_away(
    parts: tuple[str, ...], authority: str, starts: bool, tmp_path: Path
) -> None:
    """Once it has landed in that bucket: not with another one, and not where other parts need the bucket."""
    settings = StoreSettings(url="memory:", authority=authority)
    spool = BatchesSettings(acceptance="local_spool", spool_dir=tmp_path)
    sections = Settings({StoreSettings: settings, BatchesSettings: spool}, {})
    context = msgspec.structs.replace(context_with(ManualClock()), settings=sections)
    assert offline_authority(context, parts) is None
    home = msgspec.structs.replace(settings, authority="mine")
    await SpoolAuthority(tmp_path, home).confirm(context)

    known = offline_authority(context, parts)

    assert starts == (known is not None)
    assert known is None or known.authority_id == "mine"


@pytest.mark.parametrize("keys", [0, 1])
async def test_a_wait_for_the_store_ends_at_once_with_a_spool_and_keys(
    keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys of its own the collector waits, because the bucket may have some, and the reason says so."""

    async def boot(*_: Any) -> Any:
        raise Unavailable("refused")

    monkeypatch.setattr(module, "boot", boot)
    monkeypatch.setattr(module, "offline_authority", lambda *_: "known")
    gateway = GatewaySettings.of({"keys": [{"name": "agent", "secret": "s" * 40, "rights": ["*"]}] * keys})
    context = msgspec.structs.replace(context_with(ManualClock()), settings=Settings({GatewaySettings: gateway}, {}))

    if keys:
        assert "known" == await _booted(context, ("batches",))  # type: ignore[comparison-overlap]
    else:
        with pytest.raises(Unavailable, match=r"set gateway\.keys .* to start without it: refused"):
            await _booted(context, ("batches",))

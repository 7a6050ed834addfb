"""A filer that hangs, lies or refuses: every answer is typed, and none is waited for without end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from lakebed.core.clock import SystemClock
from lakebed.core.errors import Corrupt, Invalid, LakebedError, NotFound, OutcomeUnknown, Stale, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.filer.client import FilerClient
from lakebed.filer.model import Clause, ConditionKind, FilerEvent, Transaction

PATIENT_S = 60.0  # where an answer is expected: a pause must not pass for a filer that hangs
HURRIED_S = 3.0  # where one hangs: waited for once in a test
CHANGE = Transaction("/buckets/b/k", (Clause(ConditionKind.EXISTS),), ())

Answer = Callable[[Any], Awaitable[bytes]]


class ScriptedFiler:
    """A gRPC server that gives one answer to everything, and counts how often it was asked."""

    def __init__(self) -> None:
        self.answer: Answer = _say(b"")
        self.asked = 0
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((_Everything(self),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def one(self, _: bytes, context: Any) -> bytes:
        self.asked += 1
        return await self.answer(context)

    async def many(self, _: bytes, context: Any) -> AsyncIterator[bytes]:
        self.asked += 1
        yield await self.answer(context)


class _Everything(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, filer: ScriptedFiler) -> None:
        self._filer = filer

    def service(self, details: Any) -> Any:
        if details.method.endswith(("ListEntries", "SubscribeMetadata")):
            return grpc.unary_stream_rpc_method_handler(self._filer.many)
        return grpc.unary_unary_rpc_method_handler(self._filer.one)


def _say(data: bytes) -> Answer:
    async def answer(_: Any) -> bytes:
        return data

    return answer


def _refuse(code: Any, text: str) -> Answer:
    async def answer(context: Any) -> bytes:
        await context.abort(code, text)
        raise AssertionError

    return answer


async def _hang(_: Any) -> bytes:
    await asyncio.sleep(600)
    return b""


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[tuple[ScriptedFiler, ScriptedFiler]]:
    made = (ScriptedFiler(), ScriptedFiler())
    for server in made:
        await server.start()
    yield made
    for server in made:
        await server.stop()


def client_of(servers: tuple[ScriptedFiler, ScriptedFiler], timeout_s: float) -> FilerClient:
    addresses = [server.address for server in servers]
    return FilerClient(
        addresses, Runtime(clock=SystemClock(), ids=Ids(), metrics=Metrics()), timeout_s=timeout_s, idle_s=timeout_s
    )


@pytest_asyncio.fixture
async def filer(servers: tuple[ScriptedFiler, ScriptedFiler]) -> AsyncIterator[FilerClient]:
    async with client_of(servers, PATIENT_S) as made:
        yield made


@pytest_asyncio.fixture
async def hurried(servers: tuple[ScriptedFiler, ScriptedFiler]) -> AsyncIterator[FilerClient]:
    async with client_of(servers, HURRIED_S) as made:
        yield made


async def told(filer: FilerClient) -> list[FilerEvent]:
    return [event async for event in filer.subscribe(["/buckets/"], since_ns=1)]


@pytest.mark.parametrize("garbage", [b"\x0a\xff", b"\xff" * 40, b"\x0a\x03\x0a\xff\xff"])
async def test_garbage_is_corrupt(
    servers: tuple[ScriptedFiler, ScriptedFiler], filer: FilerClient, garbage: bytes
) -> None:
    """Whatever was asked: bytes that are no message are never taken for an answer."""
    servers[0].answer = _say(garbage)

    for ask in (filer.lookup("/", "k"), filer.page("/"), filer.transact(CHANGE)):
        with pytest.raises(Corrupt):
            await ask
    if garbage != b"\x0a\x03\x0a\xff\xff":  # in a stream this is a folder whose name is not UTF-8
        with pytest.raises(Corrupt):
            await told(filer)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"\x0a\x06failed\x10\x06", Stale),
        (b"\x0a\x11no entry is found", NotFound),
        (b"\x0a\x0adisk is up", Unavailable),
        (b"\x10\x04", Unavailable),
    ],
)
async def test_a_refused_change_says_why(
    servers: tuple[ScriptedFiler, ScriptedFiler], filer: FilerClient, answer: bytes, error: type[LakebedError]
) -> None:
    """Only a condition that does not hold is Stale; an error never passes for success."""
    servers[0].answer = _say(answer)

    with pytest.raises(error):
        await filer.transact(CHANGE)
    assert 0 == servers[1].asked  # it was an answer: nobody else is asked


async def test_a_filer_that_hangs_is_left_for_another(
    servers: tuple[ScriptedFiler, ScriptedFiler], hurried: FilerClient
) -> None:
    """A read goes on to the next one, and later reads begin there."""
    servers[0].answer, servers[1].answer = _hang, _say(b"\x0a\x03\x0a\x01k")

    assert "k" == (await hurried.lookup("/", "k")).name
    assert ["k"] == [entry.name for entry in await hurried.page("/")]
    assert (1, 2) == (servers[0].asked, servers[1].asked)


async def test_a_change_without_an_answer_is_of_unknown_outcome(
    servers: tuple[ScriptedFiler, ScriptedFiler], hurried: FilerClient
) -> None:
    """It may have been made: it is not sent to another filer behind the caller's back."""
    servers[0].answer = _hang

    with pytest.raises(OutcomeUnknown):
        await hurried.transact(CHANGE)
    assert 0 == servers[1].asked


async def test_a_silent_stream_is_given_up(servers: tuple[ScriptedFiler, ScriptedFiler], hurried: FilerClient) -> None:
    """And the next one begins with the other filer."""
    servers[0].answer, servers[1].answer = _hang, _say(b"\x18\x07")

    with pytest.raises(Unavailable):
        await told(hurried)
    assert [7] == [event.ts_ns for event in await told(hurried)]


async def test_refusals_of_the_server_are_typed(
    servers: tuple[ScriptedFiler, ScriptedFiler], filer: FilerClient
) -> None:
    """Missing is NotFound, too old is Invalid; a filer that does not know us is no object lock but Unavailable."""
    meant = [
        (grpc.StatusCode.UNKNOWN, "filer: no entry is found in filer store", NotFound),
        (grpc.StatusCode.UNIMPLEMENTED, "unknown method", Invalid),
        (grpc.StatusCode.UNAUTHENTICATED, "who are you", Unavailable),
        (grpc.StatusCode.PERMISSION_DENIED, "no", Unavailable),
        (grpc.StatusCode.INTERNAL, "oops", Unavailable),
    ]
    for code, text, error in meant:
        for server in servers:
            server.answer = _refuse(code, text)
        with pytest.raises(error):
            await filer.lookup("/", "k")

"""A filer that answers as scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import grpc.aio

from lakebed.core.clock import ManualClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.filer.client import FilerClient
from lakebed.filer.codec import write_entry
from lakebed.filer.model import Clause, ConditionKind, FilerEntry, Transaction
from lakebed.filer.protobuf import encode_field

Answer = bytes | grpc.StatusCode


class Stream:
    """A call of gRPC whose messages are read by a thread."""

    def __init__(self, messages: Iterable[bytes]) -> None:
        self._messages = messages

    def cancel(self) -> None:
        pass

    def __iter__(self) -> Iterator[bytes]:
        yield from self._messages


class Scripted(FilerClient):
    """Two filers; `answer` is asked for each request, by endpoint."""

    def __init__(self, answer: Callable[[str, bytes], Any]) -> None:
        super().__init__(["one", "two"], Runtime(clock=ManualClock(), ids=Ids.seeded(1), metrics=Metrics()))
        self._answer, self.asked = answer, list[str]()

    def _channel(self, endpoint: str) -> Any:
        client = self

        class Channel:
            def unary_unary(self, method: str, **_: Any) -> Any:
                async def call(request: bytes, timeout: float) -> bytes:
                    client.asked.append(endpoint)
                    found: Answer = client._answer(endpoint, request)
                    if isinstance(found, grpc.StatusCode):
                        nothing = grpc.aio.Metadata()
                        raise grpc.aio.AioRpcError(found, nothing, nothing, details="scripted")
                    return found

                return call

        return Channel()

    def _stream(self, endpoint: str, method: str, request: bytes, timeout_s: float | None) -> Any:
        return Stream(self._answer(endpoint, request))


def change(ts_ns: int) -> bytes:
    notification = encode_field(2, write_entry(FilerEntry("k")))
    return encode_field(1, b"/buckets/b") + encode_field(2, notification) + encode_field(3, ts_ns)


GUARDED = Transaction("/buckets/b/k", (Clause(ConditionKind.NOT_EXISTS),), ())

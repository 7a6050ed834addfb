"""Connections to filers and masters: plain, with TLS, or with mutual TLS as SeaweedFS's `security.toml` has it.

The files are `grpc.ca`, and `grpc.client.cert` and `grpc.client.key`, of that file. They are read when a connection is
made. SeaweedFS compares no host names, so its certificates often name roles ("filer01"); `server_name` is then the name
that the filers' certificates carry.

Streams of the server are read by threads over connections of their own: a message costs a sixth of the CPU that
`grpc.aio` needs for it, and a listing or the log's last two minutes come with one message for each entry or change.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import grpc.experimental
import msgspec

from lakebed.core.errors import Corrupt, Invalid, LakebedError, NotFound, Unavailable
from lakebed.filer.codec import ABSENT, MESSAGE_BYTES_MAX

_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Each client has its own connections: its end must not end another's.
    ("grpc.use_local_subchannel_pool", 1),
)
_STREAMING = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)  # the thread that reads is the only one
READERS = 16  # listings that are read at the same time
ENOUGH_BYTES = 64 * 1024  # of messages, or LINGER_S, and they are given: threads that take turns for each cost most
LINGER_S = 0.005
AHEAD_BYTES = 4 * 1024 * 1024  # read and not yet taken


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files: the authority that signed the filers' certificates, and this client's own certificate and key."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""


class Connections:
    """Two connections per address, for single answers and for streams, made at the first use."""

    def __init__(self, tls: TlsFiles = TlsFiles()) -> None:
        self._tls = tls
        self._channels: dict[str, Any] = {}
        self._streaming: dict[str, Any] = {}
        self._readers = ThreadPoolExecutor(READERS, "filer")

    def to(self, address: str) -> Any:
        """Raises Invalid when a TLS file cannot be read."""
        if address not in self._channels:
            self._channels[address] = self._open(grpc.aio, address, _OPTIONS)
        return self._channels[address]

    def streaming(self, address: str) -> Any:
        """For streams of the server, whose calls block. Raises Invalid when a TLS file cannot be read."""
        if address not in self._streaming:
            self._streaming[address] = self._open(grpc, address, (*_OPTIONS, _STREAMING))
        return self._streaming[address]

    async def all_of(self, call: Any) -> list[bytes]:
        """Every message of a stream that has a timeout. Raises RpcError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, list, call)
        finally:
            call.cancel()

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()
        streaming, self._streaming = list(self._streaming.values()), {}
        for channel in streaming:
            channel.close()  # its calls end, and so do the threads that read them
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _open(self, made_by: Any, address: str, options: tuple[tuple[str, Any], ...]) -> Any:
        if not self._tls.ca:
            return made_by.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(
            _read("filer.tls_ca", self._tls.ca),
            _read("filer.tls_key", self._tls.key),
            _read("filer.tls_cert", self._tls.cert),
        )
        name = (("grpc.ssl_target_name_override", self._tls.server_name),) if self._tls.server_name else ()
        return made_by.secure_channel(address, credentials, options=options + name)


class MessageStream:
    """A call whose messages a thread reads ahead, until it ends or `cancel` is called, which must be."""

    def __init__(self, call: Any) -> None:
        self._call, self._loop = call, asyncio.get_running_loop()
        self._lock, self._room = threading.Lock(), threading.Event()
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._messages: list[bytes] = []
        self._bytes = 0
        self._done = False
        self._error: Exception | None = None
        threading.Thread(target=self._read_ahead, args=(iter(call),), name="filer stream", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether it ended without an error. A stream that broke has not ended: `take` raises why."""
        return self._done and self._error is None and not self._messages

    async def take(self, patience_s: float) -> list[bytes]:
        """What has come; empty when nothing did for so long, or the stream `ended`. Raises RpcError when it broke."""
        while await _within(patience_s, self._some):
            await _within(LINGER_S, self._enough)
            with self._lock:
                found, self._messages, self._bytes = self._messages, [], 0
                if not self._done:
                    self._some.clear()
                    self._enough.clear()
            self._room.set()
            if found or (self._done and self._error is None):
                return found
            if self._done and self._error is not None:
                raise self._error
        return []

    def cancel(self) -> None:
        self._call.cancel()
        with self._lock:
            self._messages, self._bytes = [], 0
        self._room.set()

    def _read_ahead(self, messages: Iterator[bytes]) -> None:
        try:
            for message in messages:
                with self._lock:
                    self._messages.append(message)
                    before, self._bytes = self._bytes, self._bytes + len(message)
                    first, after = len(self._messages) == 1, self._bytes
                if first:
                    self._tell(self._some)
                if before < ENOUGH_BYTES <= after:
                    self._tell(self._enough)
                if after > AHEAD_BYTES:
                    self._wait_for_room()
        except Exception as error:  # it is raised where the messages are taken
            self._error = error
        self._done = True
        self._tell(self._some, self._enough)

    def _wait_for_room(self) -> None:
        self._room.clear()
        with self._lock:
            full = self._bytes > AHEAD_BYTES  # unless they were taken meanwhile
        if full:
            self._room.wait()

    def _tell(self, *events: asyncio.Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            for event in events:
                self._loop.call_soon_threadsafe(event.set)


async def _within(patience_s: float, event: asyncio.Event) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await event.wait()
    return event.is_set()


def _read(setting: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise Invalid(f"{setting} cannot be read: {error}", hint=f"set {setting} to a PEM file") from error


def grpc_address(node: str) -> str:
    """The gRPC address of a cluster node, which is `host:port.grpc_port`, or `host:port` with the port 10000 higher."""
    host, _, ports = node.rpartition(":")
    http, _, rpc = ports.partition(".")
    if not host or not http.isdigit() or (rpc and not rpc.isdigit()):
        raise Invalid(f"a master names a filer at {node!r}, which is no address")
    return f"{host}:{rpc or int(http) + 10_000}"


def meaning(error: Any, endpoint: str, about: str) -> LakebedError:
    """What a failed call means to the caller."""
    code, details = error.code(), error.details() or ""
    if ABSENT in details or code is grpc.StatusCode.NOT_FOUND:
        return NotFound(f"{about} does not exist")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return Invalid(f"{about}: the filer at {endpoint} refused the request: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Invalid(f"the filer at {endpoint} is too old: {details}", hint="SeaweedFS 4.48 or later is needed")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Corrupt(f"{about}: the response of the filer at {endpoint} is too large: {details}")
    return Unavailable(
        f"{about}: the filer at {endpoint} does not answer: {code.name.lower()}: {details}",
        hint="check that it runs, and that filer.grpc has its gRPC port: the HTTP port plus 10000 by default",
    )

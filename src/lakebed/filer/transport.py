"""Connections to filers and masters: plain, with TLS, or with mutual TLS as SeaweedFS's `security.toml` has it.

The files are `grpc.ca`, and `grpc.client.cert` and `grpc.client.key`, of that file. They are read when a connection is
made. SeaweedFS compares no host names, so its certificates often name roles ("filer01"); `server_name` is then the name
that the filers' certificates carry.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
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


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files: the authority that signed the filers' certificates, and this client's own certificate and key."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""


class Connections:
    """One connection per address, made at the first use."""

    def __init__(self, tls: TlsFiles = TlsFiles()) -> None:
        self._tls = tls
        self._channels: dict[str, Any] = {}

    def to(self, address: str) -> Any:
        """Raises Invalid when a TLS file cannot be read."""
        if address not in self._channels:
            self._channels[address] = self._open(address)
        return self._channels[address]

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    def _open(self, address: str) -> Any:
        if not self._tls.ca:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            _read("filer.tls_ca", self._tls.ca),
            _read("filer.tls_key", self._tls.key),
            _read("filer.tls_cert", self._tls.cert),
        )
        name = (("grpc.ssl_target_name_override", self._tls.server_name),) if self._tls.server_name else ()
        return grpc.aio.secure_channel(address, credentials, options=_OPTIONS + name)


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

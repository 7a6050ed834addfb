"""A collector for the agent's tests: real HTTP, real frames, the rules of acceptance, and faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from lakebed.batches.codec.frame import decode
from lakebed.batches.model import BatchIdentity

Fault = Callable[
    [int, BatchIdentity], str
]  # (number of the request, identity) -> "", "drop", "lose", "busy", "conflict"


class TestCollector:
    """Accepts a batch once by identity and hash. `fault` may spoil a request: drop it unread, lose the answer after
    acceptance, answer 503, or claim that other bytes were accepted.
    """

    __test__ = False

    def __init__(self, fault: Fault = lambda number, identity: "") -> None:
        self.fault = fault
        self.accepted: dict[BatchIdentity, str] = {}
        self.values: list[float] = []  # of accepted batches, each counted once
        self.boots: dict[str, list[float]] = {}  # the same, by boot
        self.order: list[BatchIdentity] = []  # as they arrived, repeats included
        self.duplicates = 0
        self.tokens: set[str] = set()
        self.target = '# TYPE shop_orders counter\nshop_orders{shop="a"} 815.25\nnot a sample\n'  # GET /target
        self._held = socket.socket()  # the port stays its own while it is stopped: nobody else gets it meanwhile
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port: int = self._held.getsockname()[1]
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, reuse_port=True)

    async def stop(self) -> None:
        """Closes the port and every connection; what was accepted stays. `start` opens the same port again."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.close()
        self._server = None

    def close(self) -> None:
        """Lets the port go."""
        self._held.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                if head[0].startswith("GET /target "):
                    status, extra, data = 200, "", self.target.encode()
                else:
                    answer = self._answer(head[0], headers, body)
                    if answer is None:
                        break
                    status, output, extra = answer
                    data = msgspec.json.encode(output)
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n{extra}\r\n".encode() + data)
                await writer.drain()
        self._open.discard(writer)
        writer.close()

    def _answer(self, line: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, Any], str] | None:
        assert line.startswith("POST /v1/batches "), line
        self.tokens.add(headers.get("authorization", ""))
        batch, sha256 = decode(body), hashlib.sha256(body).hexdigest()
        identity = batch.identity
        self.order.append(identity)
        fault = self.fault(len(self.order), identity)
        if fault == "drop":
            return None
        if fault == "busy":
            return 503, {"code": "unavailable"}, "retry-after: 0\r\n"
        if fault == "conflict":
            hashes = {"accepted_frame_sha256": "ab" * 32, "submitted_frame_sha256": sha256}
            return (
                409,
                {
                    "type": "urn:lakebed:problem:identity_conflict",
                    "code": "identity_conflict",
                    "message": "other bytes stand",
                    **hashes,
                },
                "",
            )
        status_row = self.accepted.get(identity)
        if status_row is None:
            self.accepted[identity] = sha256
            self.values += batch.columns.values.tolist()
            self.boots.setdefault(identity.boot_id, []).extend(batch.columns.values.tolist())
        elif status_row != sha256:
            return (
                409,
                {
                    "type": "urn:lakebed:problem:identity_conflict",
                    "code": "identity_conflict",
                    "accepted_frame_sha256": status_row,
                },
                "",
            )
        else:
            self.duplicates += 1
        if fault == "lose":
            return None
        return 200, {"duplicate": status_row is not None, "frame_sha256": sha256}, ""

"""What the door reads from the head of a request, in one pass over its headers."""

from __future__ import annotations

from collections.abc import Iterable


class Asked:
    __slots__ = ("api_key", "authorization", "chunked", "cookie", "host", "length", "origin", "request_id", "token")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.authorization: bytes | None = None
        self.api_key: bytes | None = None
        self.length: bytes | None = None
        self.request_id: bytes | None = None
        self.host: bytes | None = None
        self.origin: bytes | None = None
        self.cookie: bytes | None = None
        self.token: bytes | None = None
        self.chunked = False
        for name, value in headers:
            if name == b"host":
                self.host = value
            elif name == b"content-length":
                self.length = value
            elif name == b"authorization":
                self.authorization = value
            elif name == b"x-request-id":
                self.request_id = value
            elif name == b"x-api-key":
                self.api_key = value
            elif name == b"transfer-encoding":
                self.chunked = True
            elif name == b"origin":
                self.origin = value
            elif name == b"cookie":
                self.cookie = value
            elif name == b"x-csrf-token":
                self.token = value

"""A gateway with its fast path and one without it give the same bytes to the same requests."""

from __future__ import annotations

import asyncio
import re

import pytest

from lakebed.gateway.fast.direct import DIRECT_BYTES_MAX
from lakebed.gateway.protocol import HEAD_BYTES_MAX, HEAD_LINES_MAX
from support.hot_gateway import HANDLERS, LOOPS, MUCH, SECRET, Server, post, serving

CLOSES = b"connection: close\r\n"
BROKEN = "a request with something that is not HTTP behind it"
KEY = f"Authorization: Bearer {SECRET}\r\nX-Blind: yes\r\n"
REQUESTS = {
    "small": post(b"small", KEY),
    "empty": post(b"", KEY),
    "own request id": post(b"small", KEY + "X-Request-Id: mine-1\r\n"),
    "bad request id": post(b"small", KEY + "X-Request-Id: \x01\r\n"),
    "close": post(b"small", KEY + "Connection: close\r\n"),
    "HTTP/1.0": post(b"small", KEY, version="1.0"),
    "query": post(b"small", KEY, path="/hot?a=1"),
    "expect": post(b"small", KEY + "Expect: 100-continue\r\n"),
    "larger than the fast path takes": post(MUCH, KEY),
    "larger than the route takes": post(b"", KEY).replace(b"Length: 0", b"Length: %d" % (4 * DIRECT_BYTES_MAX + 1)),
    "length that is no number": post(b"", KEY).replace(b"Content-Length: 0", b"Content-Length: x"),
    "error": post(b"refuse", KEY),
    "unexpected error": post(b"break", KEY),
    "no key": post(b"small"),
    "wrong key": post(b"small", KEY.replace("0", "1")),
    "wrong method": post(b"", KEY).replace(b"POST", b"PUT"),
    "HEAD": post(b"", KEY).replace(b"POST", b"HEAD"),
    "no such route": post(b"small", KEY, path="/nope"),
    "another route": post(b"", KEY, path="/openapi.json").replace(b"POST", b"GET"),
    "not HTTP": b"no such thing\r\n\r\n",
    "head with too many lines": post(b"", KEY + "".join(f"X-{n}: y\r\n" for n in range(HEAD_LINES_MAX))),
    "head with too many bytes": post(b"", KEY + f"X-Big: {'z' * HEAD_BYTES_MAX}\r\n"),
    BROKEN: post(b"small", KEY) + b"no such thing\r\n\r\n",
    "chunked": (
        f"POST /hot HTTP/1.1\r\nHost: localhost\r\n{KEY}Transfer-Encoding: chunked\r\n\r\n5\r\nsmall\r\n0\r\n\r\n"
    ).encode(),
}
CHANGES = re.compile(rb"[0-9a-f]{8}0{4}[0-9a-f]{4}|date: [^\r]*|Date: [^\r]*")  # ids that the gateway makes, and times


async def whole_answer(reader: asyncio.StreamReader, headless: bool) -> bytes:
    """One answer as it comes: to the end of the connection, or as long as its head reports. Empty for none."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
        if raw.startswith(b"HTTP/1.1 100 "):
            return raw + await whole_answer(reader, headless)
        if b"\r\nconnection: close\r\n" in raw:
            return raw + await reader.read()
        length = re.search(rb"\r\ncontent-length: (\d+)\r\n", raw)
        assert length is not None
        return raw if headless else raw + await reader.readexactly(int(length[1]))
    except asyncio.IncompleteReadError as cut:
        return cut.partial


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_the_fast_path_changes_no_byte_of_an_answer(loop: str, path: str) -> None:
    """Each request of the table, sent to a gateway with the fast path and to one without: equal bytes come back."""

    async def play(server: Server) -> dict[str, bytes]:
        found = {}
        for name, data in REQUESTS.items():
            client = await server.connect()
            client.writer.write(data.replace(b" /hot", b" " + path.encode(), 1))
            raw = await whole_answer(client.reader, data.startswith(b"HEAD"))
            client.writer.close()
            found[name] = b"\r\n".join(sorted(CHANGES.sub(b"", raw).split(b"\r\n")))
        return found

    keys = [{"name": "agent", "secret": SECRET, "rights": ["*"]}]
    fast = serving(loop, play, fast_path=True, keys=keys)
    plain = serving(loop, play, fast_path=False, keys=keys)

    assert [BROKEN] == [name for name, raw in fast.items() if not raw]  # closed: the answer would be out of order
    closed = {name for name in REQUESTS if plain[name] != fast[name]}
    assert {"no key", "wrong key"} == closed  # refused before the body is read: ASGI closes the connection with it
    for name in REQUESTS:
        assert (name, plain[name].replace(CLOSES, b"")) == (name, fast[name].replace(CLOSES, b""))

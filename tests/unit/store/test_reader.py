"""The bucket as Spark tasks read it: an answer that is cut short is asked for again, never taken for the object."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lakebed.core.errors import Corrupt, NotFound, Unavailable
from lakebed.store.reader import BucketReader
from lakebed.store.settings import StoreSettings

DATA = bytes(range(256)) * 40
PAGE = (
    b"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>a</Key>"
    b"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag><Size>1</Size></Contents></ListBucketResult>"
)


class Server:
    """Answers each GET by the next of its steps; the last one stays."""

    def __init__(self) -> None:
        self.steps, self.asked = ["whole"], 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.asked += 1
                step = outer.steps.pop(0) if len(outer.steps) > 1 else outer.steps[0]
                body = PAGE if "list-type" in self.path else DATA
                if step == "missing":
                    self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                elif step == "chunked cut":
                    self.chunked(body[: len(body) // 2], end=False)
                elif step == "chunked":
                    self.chunked(body, end=True)
                elif step == "half xml":
                    self.answer(200, body[: len(body) // 2])
                else:
                    self.answer(200, body, cut=step == "cut")

            def answer(self, status: int, body: bytes, *, cut: bool = False) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if cut else body)
                self.close_connection = cut

            def chunked(self, body: bytes, *, end: bool) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n" + (b"0\r\n\r\n" if end else b""))
                self.close_connection = not end

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()

    def reader(self) -> BucketReader:
        values = {
            "url": "s3://b",
            "endpoint": f"http://127.0.0.1:{self.http.server_port}",
            "access_key_id": "key",
            "secret_access_key": "secret",
            "retries": 2,
        }
        return BucketReader(StoreSettings.of(values))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.mark.parametrize("cut", ["cut", "chunked cut"])
def test_a_body_that_is_cut_short_is_asked_for_again(server: Server, cut: str) -> None:
    """Two answers end half-way, the third one is the object."""
    server.steps = [cut, cut, "whole"]

    assert DATA == server.reader().get("k", bytes_max=len(DATA))
    assert 3 == server.asked


@pytest.mark.parametrize("cut", ["cut", "chunked cut"])
def test_a_body_that_never_comes_whole_is_unavailable(server: Server, cut: str) -> None:
    """Not Corrupt, and not half the bytes; the number of tries has a limit."""
    server.steps = [cut]

    with pytest.raises(Unavailable):
        server.reader().get("k", bytes_max=len(DATA))
    assert 3 == server.asked


@pytest.mark.parametrize("cut", ["cut", "chunked cut", "half xml"])
def test_a_page_that_is_cut_short_is_asked_for_again(server: Server, cut: str) -> None:
    """Half a listing is none: what it leaves out would be taken for missing."""
    server.steps = [cut, "whole"]
    pages = [page.key for page in server.reader().walk("")]
    server.steps = [cut]

    assert [["a"]] == pages
    with pytest.raises(Unavailable):
        list(server.reader().walk(""))


def test_what_came_whole_is_judged_by_its_size(server: Server) -> None:
    """Exactly the limit is fine, one byte more is Corrupt, with a length in the answer or without."""
    for step in ("whole", "chunked"):
        server.steps = [step]
        assert DATA == server.reader().get("k", bytes_max=len(DATA))
        with pytest.raises(Corrupt):
            server.reader().get("k", bytes_max=len(DATA) - 1)
    server.steps = ["missing"]
    with pytest.raises(NotFound):
        server.reader().get("k", bytes_max=1)

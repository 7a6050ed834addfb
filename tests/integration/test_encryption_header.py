"""Server-side encryption that was asked for is asked of the store."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lakebed.core.settings import Secret
from lakebed.store.connect import connect
from lakebed.store.settings import StoreSettings
from support.runtimes import runtime_of


@pytest.mark.parametrize("encryption", ["", "AES256", "aws:kms"])
async def test_each_write_carries_the_encryption_header(encryption: str) -> None:
    """Also where the fast path would send small writes; without the setting no write has the header."""
    seen: list[str] = []

    class Recording(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append(self.headers.get("x-amz-server-side-encryption", ""))
            self.send_response(200)
            self.send_header("etag", '"x"')
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Recording)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        settings = StoreSettings.of(
            {
                "url": "s3://lake",
                "endpoint": f"http://127.0.0.1:{server.server_port}",
                "access_key_id": Secret("a"),
                "secret_access_key": Secret("b"),
                "encryption": encryption,
            }
        )
        await connect(settings, runtime_of()).create("a/b.json", b"{}")
    finally:
        server.shutdown()

    assert [encryption] == seen

"""A proxy before the real bucket that notes every request: who reads what, from whichever process, is counted."""

from __future__ import annotations

import re
import socket
import threading
from urllib.parse import unquote

REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) (/\S*) HTTP/1\.1\r\n")


class CountingProxy:
    """`with CountingProxy("127.0.0.1:8333") as proxy:` … `proxy.gets()`. Bytes pass as they are; lines are noted."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.seen: list[tuple[str, str]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def gets(self) -> list[str]:
        """Keys of the objects that were fetched, bucket first; listings are none."""
        found = [path for method, path in self.seen if method == "GET" and "?" not in path]
        return [unquote(path).lstrip("/") for path in found]

    def __enter__(self) -> CountingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(self._target)
            for source, sink, noted in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass, args=(source, sink, noted), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, noted: bool) -> None:
        try:
            while data := source.recv(65536):
                if noted:
                    self.seen += [(m.decode(), path.decode()) for m, path in REQUEST.findall(data)]
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            sink.close()

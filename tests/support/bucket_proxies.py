"""A proxy before a bucket that can drop the conditions of requests: an endpoint that ignores them."""

from __future__ import annotations

import re
import socket
import threading

HEAD_END = b"\r\n\r\n"
CONDITION = re.compile(rb"\r\nif-(?:none-)?match:[^\r]*", re.IGNORECASE)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class StrippingProxy:
    """`with StrippingProxy("127.0.0.1:8333") as proxy:` … `proxy.strips = True`. All else passes as it is."""

    def __init__(self, target: str, *, strips: bool = True, port: int = 0) -> None:
        host, _, theirs = target.rpartition(":")
        self._target = (host, int(theirs))
        self._listening = socket.create_server(("127.0.0.1", port))
        self.strips = strips

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> StrippingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._target)
            except OSError:  # closed
                return
            threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
            threading.Thread(target=self._answers, args=(server, client), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        held = b""
        try:
            while True:
                while HEAD_END not in held:
                    if not (more := client.recv(65536)):
                        return server.shutdown(socket.SHUT_WR)
                    held += more
                head, _, held = held.partition(HEAD_END)
                length = LENGTH.search(head)
                left = int(length[1]) if length else 0
                server.sendall((CONDITION.sub(b"", head) if self.strips else head) + HEAD_END)
                while left:
                    held = held or client.recv(65536)
                    if not held:
                        return server.close()
                    server.sendall(held[:left])
                    left, held = max(0, left - len(held)), held[left:]
        except OSError:
            server.close()

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while data := server.recv(65536):
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            client.close()

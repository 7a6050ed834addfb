"""Free loopback ports, reserved until their server listens.

A reserved port is bound but not listened on. It is bound exclusively, so two holders never get the same one; then it is
opened to servers that set SO_REUSEADDR (Go's and asyncio's do), which may listen on it while it is still reserved. No
other program can take it between choosing and listening.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids

HOST = "127.0.0.1"
LOWEST, HIGHEST = 20_000, 32_000  # below where Linux takes ports for outgoing connections from
TRIES_MAX = 200


class HeldPorts:
    """Distinct ports, held until `release` (or the end of the `with`)."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._held: dict[int, socket.socket] = {}

    def take(self, preferred: int = 0) -> int:
        """The port `preferred` if it is free, otherwise another. Raises Unavailable when none is free."""
        if preferred and (self._hold(preferred) or self._hold(preferred, lingering=True)):
            return preferred
        for _ in range(TRIES_MAX):
            port = int(self._ids.uniform(LOWEST, HIGHEST))
            if self._hold(port):
                return port
        raise Unavailable(
            f"no free port on {HOST} in {TRIES_MAX} tries", hint="lakebed doctor checks whether ports can be opened"
        )

    def take_all(self, names: Iterable[str], preferred: dict[str, int]) -> dict[str, int]:
        return {name: self.take(preferred.get(name, 0)) for name in names}

    def release(self) -> None:
        for held in self._held.values():
            held.close()
        self._held.clear()

    def _hold(self, port: int, *, lingering: bool = False) -> bool:
        """Binds the port exclusively; with `lingering`, also while closed connections of its last server linger on it,
        but then another holder of the same port is not detected.
        """
        if port in self._held:
            return False
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(lingering))
            holder.bind((HOST, port))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            holder.close()
            return False
        self._held[port] = holder
        return True

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

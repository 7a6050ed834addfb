"""Held ports: distinct, exclusive, and still free for the server they are meant for."""

from __future__ import annotations

import socket

from lakebed.core.ids import Ids
from lakebed.embedded.ports import HeldPorts


def test_no_two_holders_get_the_same_port() -> None:
    """Two holders that draw the same numbers still hold distinct ports."""
    with HeldPorts(Ids.seeded(7)) as one, HeldPorts(Ids.seeded(7)) as other:
        taken = [holder.take() for _ in range(20) for holder in (one, other)]

    assert len(set(taken)) == 40


def test_the_server_it_was_promised_to_can_listen_on_a_held_port() -> None:
    """A server that sets SO_REUSEADDR listens while the port is still held; nobody else gets it."""
    with HeldPorts(Ids()) as held:
        port = held.take()

        with socket.create_server(("127.0.0.1", port)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
            with HeldPorts(Ids()) as other:
                assert other.take(preferred=port) != port


def test_a_wished_port_is_kept_even_when_closed_connections_linger_on_it() -> None:
    """The port a server had a moment ago is free for its next start."""
    with HeldPorts(Ids()) as held:
        port = held.take()
    with socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(server.getsockname(), timeout=5)
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first is the one whose address lingers
        client.close()

    with HeldPorts(Ids()) as held:
        assert held.take(preferred=port) == port


def test_a_port_that_is_released_is_free() -> None:
    """Nothing is kept after the with."""
    with HeldPorts(Ids()) as held:
        port = held.take()

    socket.create_server(("127.0.0.1", port)).close()

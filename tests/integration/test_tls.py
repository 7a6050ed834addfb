"""TLS on real sockets: gateways, their clients, client certificates, and a store with an authority of its own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from cryptography import x509

from lakebed.agent.transport import HttpTransport
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid, NotFound, Unavailable
from lakebed.core.tls import client_context
from lakebed.gateway.app import build
from lakebed.gateway.listen import bind, server_config, with_tls
from lakebed.gateway.settings import GatewaySettings
from lakebed.gateway.state import state_of
from lakebed.lake.client import LakeClient
from lakebed.log.brokers import BrokerRecord
from lakebed.log.notices import MovedNotice, NoticeConnection
from lakebed.store.connect import connect
from lakebed.store.settings import StoreSettings
from support.certificates import Authority
from support.gateway_fixtures import context_with
from support.hot_gateway import Hot
from support.runtimes import runtime_of

DEADLINE_S = 30.0
SECRET = "0123456789abcdef-writer"
KEYS = [
    {"name": "writer", "secret": SECRET, "rights": ["*"]},
    {"name": "agent", "certificate": "agent-7", "rights": ["*"]},
]


@asynccontextmanager
async def gateway(authority: Authority, **settings: Any) -> AsyncIterator[tuple[str, Any]]:
    cert, key = authority.sign("gateway")
    context = context_with(tls_cert=str(cert), tls_key=str(key), keys=KEYS, **settings)
    made = context.settings.of(GatewaySettings)
    app = build(context, [Hot()])
    server = uvicorn.Server(with_tls(server_config(app, made), state_of(app).key_watch.tls))
    bound = bind("127.0.0.1", 0)
    running = asyncio.create_task(server.serve(sockets=[bound]))
    async with asyncio.timeout(DEADLINE_S):
        while not server.started:
            await asyncio.sleep(0.01)
    try:
        yield f"https://127.0.0.1:{bound.getsockname()[1]}", app
    finally:
        server.should_exit = True
        await running


@pytest.mark.parametrize("fast_path", [True, False])
async def test_bodies_of_every_size_arrive_whole_over_tls(tmp_path: Path, fast_path: bool) -> None:
    """Small ones on the fast path, larger ones straight into their buffer, through the TLS layer."""
    authority = Authority(tmp_path)
    sizes = [0, 1, 70_000, 900_000]

    async with gateway(authority, fast_path=fast_path) as (url, _):
        verify = client_context(authority.file)
        async with httpx2.AsyncClient(base_url=url, verify=verify, headers={"x-api-key": SECRET}) as client:
            answers = [await client.post("/hot", content=b"m" * size) for size in sizes]

    assert [200] * len(sizes) == [answer.status_code for answer in answers]
    assert sizes == [answer.json()["bytes"] for answer in answers]


async def test_a_gateway_that_cannot_be_verified_gets_no_key(tmp_path: Path) -> None:
    """Another authority, no authority, plain HTTP: agents and the Python client send nothing."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")

    async with gateway(authority) as (url, _):
        for ca in (None, other.file):
            transport = HttpTransport(
                token=SECRET, timeout_s=5, connect_timeout_s=5, concurrency=1, verify=client_context(ca)
            )
            async with transport:
                with pytest.raises(Unavailable):
                    await transport.post(url, b"frame")
            lake = await LakeClient.to_gateway(url, SystemClock(), key=SECRET, ca_file=ca, timeout_s=1)
            with pytest.raises(Unavailable):
                await lake.call("GET", "/healthz")
            await lake.close()
        transport = HttpTransport(
            token=SECRET, timeout_s=5, connect_timeout_s=5, concurrency=1, verify=client_context(authority.file)
        )
        async with transport:
            known = await transport.post(url, b"frame")
        lake = await LakeClient.to_gateway(url, SystemClock(), key=SECRET, ca_file=authority.file, timeout_s=5)
        health = await lake.call("GET", "/healthz", accept=(503,))
        await lake.close()
        with pytest.raises(httpx2.HTTPError):
            async with httpx2.AsyncClient() as client:
                await client.get(url.replace("https", "http") + "/healthz")

    assert 404 == known.status  # verified, authenticated, and no such route here
    assert health.status_code in (200, 503)


async def test_a_certificate_that_is_replaced_is_shown_to_new_connections(tmp_path: Path) -> None:
    """Within seconds and without a restart; one that does not fit its key changes nothing."""
    authority = Authority(tmp_path)

    async with gateway(authority) as (url, app):
        first = await _serial(url)
        authority.sign("gateway")
        state_of(app).key_watch.tls.refresh()
        second = await _serial(url)
        authority.sign("gateway", into="other")
        (tmp_path / "gateway.key").write_bytes((tmp_path / "other.key").read_bytes())
        state_of(app).key_watch.tls.refresh()
        third = await _serial(url)

    assert first != second
    assert second == third


async def test_a_client_certificate_is_a_principal(tmp_path: Path) -> None:
    """Signed by the authority that is configured, and named by a key; a key in the request still decides."""
    authority, clients, strangers = (
        Authority(tmp_path),
        Authority(tmp_path, "clients"),
        Authority(tmp_path, "strangers"),
    )

    async def ask(files: tuple[Path, Path] | None, **headers: str) -> str:
        verify = client_context(authority.file, *(files or ()))
        async with httpx2.AsyncClient(verify=verify, headers=headers) as client:
            small = await client.post(url + "/hot", content=b"x")
            large = await client.post(url + "/hot?a=1", content=b"x")
            assert small.status_code == large.status_code
            return str(small.json().get("who", small.status_code))

    async with gateway(authority, tls_client_ca=str(clients.file)) as (url, _):
        known = await ask(clients.sign("agent-7"))
        unnamed = await ask(clients.sign("agent-8"))
        without = await ask(None)
        keyed = await ask(clients.sign("agent-7", into="again"), **{"x-api-key": SECRET})
        wrong = await ask(clients.sign("agent-7", into="more"), **{"x-api-key": "wrong"})
        with pytest.raises(httpx2.HTTPError):
            await ask(strangers.sign("agent-7", into="forged"))

    assert ("agent", "401", "401", "writer", "401") == (known, unnamed, without, keyed, wrong)


async def test_a_store_is_verified_with_its_own_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`store.ca_file` is what obstore trusts; without it the same server is not believed."""
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.sign("store"))
    server = await asyncio.start_server(_no_such_key, "127.0.0.1", 0, ssl=context)
    settings = StoreSettings(
        url="s3://lake", endpoint=f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", retries=0
    ).as_layer()
    values = {name.partition(".")[2]: value for name, value in settings.items()}
    values |= {"access_key_id": "a", "secret_access_key": "b"}
    monkeypatch.setenv("SSL_CERT_FILE", "")
    monkeypatch.delenv("SSL_CERT_FILE")

    async with server:
        with pytest.raises(Unavailable):
            await connect(StoreSettings.of(values), runtime_of(SystemClock())).get("key")
        with pytest.raises(NotFound):
            await connect(StoreSettings.of(values | {"ca_file": str(authority.file)}), runtime_of(SystemClock())).get(
                "key"
            )
    with pytest.raises(Invalid, match="ca_file"):
        connect(StoreSettings.of(values | {"ca_file": str(tmp_path / "absent")}), runtime_of(SystemClock()))


async def test_brokers_verify_each_other_with_the_gateways_authority(tmp_path: Path) -> None:
    """`gateway.tls_ca` holds for notices too; a broker that cannot be verified gets no token."""
    authority, got = Authority(tmp_path), list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.sign("broker"))
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    broker = BrokerRecord("b", f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", token="the token")

    async with server:
        with pytest.raises(ssl.SSLError):
            await NoticeConnection(broker).post(MovedNotice([]))
        assert [] == got
        known = NoticeConnection(broker, authority.file)
        await known.post(MovedNotice([]))
        known.close()

    assert b"the token" in got[0]


async def _no_such_key(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """S3's answer for a key that is not there, to every request."""
    body = b"<Error><Code>NoSuchKey</Code></Error>"
    while await reader.readline():
        while (await reader.readline()).strip():
            pass
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
    writer.close()


async def _serial(url: str) -> int:
    """The number of the certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(shown).serial_number

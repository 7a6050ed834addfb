"""A filer with mutual TLS as SeaweedFS's `security.toml` has it, and filers found through a master: the real binary."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.embedded.weed import Weed
from lakebed.filer.client import FilerClient
from lakebed.filer.settings import FilerSettings

pytestmark = pytest.mark.full
NAME = "filer01"  # certificates of SeaweedFS name roles, not hosts


def certificate(folder: Path, name: str, authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None) -> None:
    """`name.crt` and `name.key`, signed by the authority, or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer, signing_key = (authority[0].subject, authority[1]) if authority else (subject, key)
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .sign(signing_key, hashes.SHA256())
    )
    (folder / f"{name}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def certificates(folder: Path) -> None:
    certificate(folder, "authority", None)
    ca = x509.load_pem_x509_certificate((folder / "authority.crt").read_bytes())
    key = serialization.load_pem_private_key((folder / "authority.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    certificate(folder, NAME, (ca, key))
    certificate(folder, "stranger", None)


def runtime() -> Runtime:
    return Runtime(clock=SystemClock(), ids=Ids(), metrics=Metrics())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FilerSettings]:
    """A server whose gRPC demands certificates, and settings that reach it."""
    folder = tmp_path_factory.mktemp("tls")
    certificates(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEED_GRPC_CA", str(folder / "authority.crt"))
        for role in ("MASTER", "VOLUME", "FILER", "S3", "CLIENT"):
            patch.setenv(f"WEED_GRPC_{role}_CERT", str(folder / f"{NAME}.crt"))
            patch.setenv(f"WEED_GRPC_{role}_KEY", str(folder / f"{NAME}.key"))
        weed = Weed(folder / "weed", runtime=runtime())
        endpoints = await weed.start()
    try:
        yield FilerSettings(
            grpc=endpoints.filer_grpc,
            masters=f"127.0.0.1:{weed._read_identity().ports['master.grpc']}",
            tls_ca=str(folder / "authority.crt"),
            tls_cert=str(folder / f"{NAME}.crt"),
            tls_key=str(folder / f"{NAME}.key"),
            tls_server_name=NAME,
            timeout_s=3.0,
        )
    finally:
        await weed.stop(0.0)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_filer_with_mutual_tls_answers_the_one_who_shows_a_certificate(secured: FilerSettings) -> None:
    """Reads, listings and the change log go through; the certificate may name a role instead of the host."""
    async with FilerClient.of(msgspec.structs.replace(secured, masters=""), runtime()) as filer:
        assert "lakebed" == (await filer.lookup("/buckets", "lakebed")).name
        assert "lakebed" in {entry.name for entry in await filer.page("/buckets")}
        until_ns = SystemClock().now_ns()
        events = [event async for event in filer.subscribe(["/buckets/"], since_ns=0, until_ns=until_ns)]
    assert any(not event.heartbeat for event in events)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("lacking", [("tls_ca", "tls_cert", "tls_key"), ("tls_cert", "tls_key"), ("tls_server_name",)])
async def test_a_filer_with_mutual_tls_is_unavailable_to_others(
    secured: FilerSettings, lacking: tuple[str, ...]
) -> None:
    """Without TLS, without a certificate, or under a name that the filer's certificate does not have."""
    known = msgspec.structs.replace(secured, masters="", timeout_s=1.0, **dict.fromkeys(lacking, ""))

    async with FilerClient.of(known, runtime()) as filer:
        with pytest.raises(Unavailable):
            await filer.lookup("/buckets", "lakebed")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_filer_is_not_trusted_that_another_authority_signed(secured: FilerSettings) -> None:
    """The address alone proves nothing."""
    other = str(Path(secured.tls_ca).with_name("stranger.crt"))

    async with FilerClient.of(msgspec.structs.replace(secured, masters="", tls_ca=other), runtime()) as filer:
        with pytest.raises(Unavailable):
            await filer.lookup("/buckets", "lakebed")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tls_file_that_is_missing_is_named(secured: FilerSettings) -> None:
    """The setting is in the message."""
    wrong = msgspec.structs.replace(secured, masters="", tls_cert="/nowhere.crt")

    async with FilerClient.of(wrong, runtime()) as filer:
        with pytest.raises(Invalid, match=r"filer\.tls_cert"):
            await filer.lookup("/buckets", "lakebed")


@pytest.mark.asyncio(loop_scope="module")
async def test_filers_are_discovered_through_a_master(secured: FilerSettings) -> None:
    """No filer is named: the master names it, over the same TLS, and it answers. A dead master is passed over."""
    masters = f"127.0.0.1:1,{secured.masters}"

    async with FilerClient.of(msgspec.structs.replace(secured, grpc="", masters=masters), runtime()) as filer:
        assert [secured.grpc] == await filer.known()
        assert "lakebed" == (await filer.lookup("/buckets", "lakebed")).name

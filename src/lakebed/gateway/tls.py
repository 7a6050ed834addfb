"""TLS of the gateway: one context whose certificate is replaced when its files change, for new connections.

With `gateway.tls_client_ca` a client may show a certificate instead of a key: the names in it are looked up in the keys
(`certificate = "agent-7"`). Clients without a certificate still connect and present a key.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lakebed.core.context import Context, Diagnosis
from lakebed.core.errors import Invalid
from lakebed.core.logs import logger
from lakebed.core.settings import Settings
from lakebed.gateway.keys import key_list
from lakebed.gateway.settings import LOOPBACK, GatewaySettings

PLAIN = "keys cross the network in plain text"
FIX = "set gateway.tls_cert and gateway.tls_key, or gateway.tls_elsewhere where a proxy in front has TLS"

log = logger("gateway")


class ServerTls:
    """The TLS context of one server."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._cert, self._key = cert, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._stamp = self._load()
        if client_ca is not None:
            try:
                self.context.load_verify_locations(client_ca)
            except (OSError, ssl.SSLError) as error:
                raise Invalid(f"gateway.tls_client_ca {client_ca} cannot be used: {error}") from error
            self.context.verify_mode = ssl.CERT_OPTIONAL

    @classmethod
    def of(cls, settings: GatewaySettings) -> ServerTls | None:
        """None without a certificate. Raises Invalid when it cannot be used."""
        if settings.tls_cert is None or settings.tls_key is None:
            return None
        return cls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)

    def refresh(self) -> None:
        """Loads the certificate again when its files changed. One that cannot be used is logged; the former stays."""
        try:
            if self._stamps() != self._stamp:
                self._stamp = self._load()
                log.info("certificate loaded", file=str(self._cert))
        except (Invalid, OSError) as error:
            log.warning("certificate not loaded", file=str(self._cert), error=str(error))

    def _load(self) -> tuple[int, ...]:
        try:
            stamps = self._stamps()
            self.context.load_cert_chain(self._cert, self._key)
        except (OSError, ssl.SSLError) as error:
            raise Invalid(
                f"gateway.tls_cert {self._cert} and gateway.tls_key {self._key} cannot be used: {error}",
                hint="PEM files that belong together: the certificate with its chain, and its key",
            ) from error
        return stamps

    def _stamps(self) -> tuple[int, ...]:
        found = [file.stat() for file in (self._cert, self._key)]
        return tuple(number for each in found for number in (each.st_mtime_ns, each.st_size, each.st_ino))


def certificate_names(transport: Any) -> tuple[str, ...]:
    """The names in the verified client certificate of a connection: common name, DNS and URI names; empty without."""
    tls = transport.get_extra_info("ssl_object")
    shown = tls.getpeercert() if tls is not None else None
    if not shown:
        return ()
    names = [value for field in shown.get("subject", ()) for name, value in field if name == "commonName"]
    names += [value for kind, value in shown.get("subjectAltName", ()) if kind in ("DNS", "URI")]
    return tuple(dict.fromkeys(names))


def is_plain(settings: GatewaySettings) -> bool:
    """Whether others send their keys to this gateway without TLS."""
    return settings.host not in LOOPBACK and settings.tls_cert is None and not settings.tls_elsewhere


def warning(settings: Settings) -> str:
    """For `lakebed status`, which a gateway with keys shows its status only."""
    return f"{PLAIN}: {FIX}" if is_plain(settings.of(GatewaySettings)) else ""


async def checks(context: Context) -> Sequence[Diagnosis]:
    """For `lakebed doctor`: how keys reach the gateway, and where they are."""
    settings = context.settings.of(GatewaySettings)
    stored = (await key_list(context).read()).value.keys
    keys = f"{len(settings.keys)} keys in the settings, {len(stored)} in the bucket"
    if is_plain(settings):
        return [Diagnosis("gateway TLS", "warn", f"{PLAIN} to {settings.host}: {keys}", FIX)]
    how = "TLS" if settings.tls_cert else "loopback only" if settings.host in LOOPBACK else "TLS in front of it"
    return [Diagnosis("gateway TLS", "pass", f"{how}; {keys}")]

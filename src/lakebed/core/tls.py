"""TLS of our clients: the certificate of a server is always verified, with the system's authorities or one's own."""

from __future__ import annotations

import ssl
from pathlib import Path

from lakebed.core.errors import Invalid


def client_context(
    ca: Path | str | None, cert: Path | str | None = None, key: Path | str | None = None
) -> ssl.SSLContext:
    """Verifies servers with the authorities in the PEM file `ca`, else with the system's; shows `cert` if there is one.

    Raises Invalid, naming the file that cannot be used.
    """
    try:
        made = ssl.create_default_context(cafile=str(ca) if ca else None)
        if cert:
            made.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        named = ", ".join(str(file) for file in (ca, cert, key) if file)
        raise Invalid(f"TLS files {named} cannot be used: {error}", hint="PEM files that this user may read") from error
    return made

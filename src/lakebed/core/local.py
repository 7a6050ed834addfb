"""Which callers a server on loopback without keys answers: programs of this machine, never a web page of another site.

A browser on this machine reaches loopback too. It names the site in `Host` when a site's name resolves to this machine
(DNS rebinding), in `Origin` and in `Sec-Fetch-Site` when a page of another site sends the request.
"""

from __future__ import annotations

import ipaddress
import re

HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]@/]+))(?::[0-9]{1,5})?")
# Sec-Fetch-Site of a client that is no browser, of our own pages, and of an address that was typed.
OWN_SITES = (None, b"same-origin", b"none")


def is_local(host: bytes) -> bool:
    """An address, or localhost. Any other name, also one without a dot, could be a site that resolves to this host."""
    found = HOST.fullmatch(host.decode("latin-1").lower())
    if found is None:
        return False
    name = found[1] or found[2]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_same_origin(host: bytes | None, origin: bytes | None) -> bool:
    """False when a page of another site sent this: browsers send the origin of such requests."""
    return origin is None or origin.partition(b"://")[2] == host


def is_own_page(host: bytes | None, origin: bytes | None, site: bytes | None) -> bool:
    """False for a request of a page of another site, also one that sends no origin: an image, a script, a form."""
    return is_same_origin(host, origin) and site in OWN_SITES

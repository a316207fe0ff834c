"""Who may use the HTTP API."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from tieredkv.calls import Call, Misuse


def check_access(call: Call, who: str) -> None:
    """Refuse everybody but programs and pages of this machine, if the server is to.

    A web page in the user's browser must not reach the API: neither as itself, which its Origin
    tells, nor under a name of its own that leads here, which the Host tells.

    Raises:
        Misuse: 403, or 404 if ``who`` is "off".
    """
    if who == "off":
        raise Misuse(404, "not_found", "there is no such path")
    if who == "anywhere":
        return
    if not _is_loopback(call.client):
        raise Misuse(
            403,
            "not_local",
            "only this machine is answered here; --cache-api anywhere answers others, too",
        )
    host = (call.headers.get("Host") or "").lower()
    if not _is_loopback(_hostname(f"//{host}")):
        raise Misuse(403, "foreign_host", "ask for localhost or 127.0.0.1 by its name")
    origin = call.headers.get("Origin")
    if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
        raise Misuse(403, "foreign_origin", "pages of other sites are not answered here")


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback

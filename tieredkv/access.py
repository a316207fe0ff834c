"""Who may use the HTTP API."""

from __future__ import annotations

import ipaddress
import re

from tieredkv.calls import Call, Misuse

# What a browser sends, and nothing that two readers could take for two names.
_HOST = re.compile(r"(?:(?P<name>[a-z0-9.-]+)|\[(?P<ipv6>[0-9a-f:.]+)\])(?::[0-9]*)?")

# Whoever forwards requests of others from this machine is no program that means the cache.
_OF_PROXIES = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")


def check_access(call: Call, who: str) -> None:
    """Refuse everybody but programs and pages of this machine, if the server is to, and pages of
    other sites in any case.

    A web page in the user's browser must not reach the API: neither as itself, which its Origin
    tells, nor under a name of its own that leads here, which the Host tells.

    Raises:
        Misuse: 403, or 404 if ``who`` is "off".
    """
    if who == "off":
        raise Misuse(404, "not_found", "there is no such path")
    if who != "anywhere":
        _check_local(call)
    host = (call.headers.get("Host") or "").lower()
    origin = call.headers.get("Origin")
    if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
        raise Misuse(403, "foreign_origin", "pages of other sites are not answered here")


def _check_local(call: Call) -> None:
    if not _is_loopback(call.client):
        raise Misuse(
            403,
            "not_local",
            "only this machine is answered here; --cache-api anywhere answers others, too",
        )
    if any(name in call.headers for name in _OF_PROXIES):
        raise Misuse(
            403,
            "forwarded",
            "this comes through a proxy, from anybody; --cache-api anywhere answers, too",
        )
    host = (call.headers.get("Host") or "").lower()
    found = _HOST.fullmatch(host)
    if found is None or not _is_loopback(found["ipv6"] or found["name"]):
        raise Misuse(403, "foreign_host", "ask for localhost or 127.0.0.1 by its name")


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

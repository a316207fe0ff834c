"""The page at ``/cache``: its files, and the headers that they are served with.

The files are plain HTML, CSS and JS, as they are in this directory. They ask for nothing outside
of the server, and show whatever a prompt holds as text.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_ROOT = "/cache"
_START = "index.html"

# No script or style but those files, and no request but to the server that they came from.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
# What each of the files is to be served with.
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def asset(path: str) -> tuple[bytes, str] | None:
    """Content and content type of the page's file at the path of a URL, without its query.

    ``/cache`` is the page itself, ``/cache/app.js`` the file of that name; None for all else. The
    files are read once. Any thread may call.
    """
    return _assets().get(path)


@cache
def _assets() -> dict[str, tuple[bytes, str]]:
    """By path, so that no path of a request is ever one of the file system."""
    found = {}
    for file in resources.files(__name__).iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind:
            path = _ROOT if file.name == _START else f"{_ROOT}/{file.name}"
            found[path] = (file.read_bytes(), kind)
    return found

"""From a URL to the engine that it names. Their libraries are imported only then."""

from __future__ import annotations

from tieredkv.engines.base import Engine, RemoteRefused, Timeouts, redacted

_REDIS = ("redis", "rediss", "valkey", "valkeys")


def open_engine(url: str, timeouts: Timeouts) -> Engine:
    """The engine at ``url``. Connects to nothing yet.

    Raises:
        RemoteRefused: no engine has such URLs, or its library isn't installed.
    """
    scheme = url.partition("://")[0].lower()
    try:
        if scheme == "s3":
            from tieredkv.engines.s3 import S3Engine

            return S3Engine(url, timeouts)
        if scheme in _REDIS:
            from tieredkv.engines.redis import RedisEngine

            return RedisEngine(url, timeouts)
    except ModuleNotFoundError as e:
        raise RemoteRefused(
            f"{redacted(url)}: the package {e.name} isn't installed: pip install 'tieredkv[remote]'"
        ) from e
    raise RemoteRefused(
        f"{redacted(url)}: no engine for {scheme}://; there are s3, {', '.join(_REDIS)}"
    )

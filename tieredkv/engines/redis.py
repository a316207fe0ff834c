"""Objects in a Redis or Valkey server, by Redis' own client.

Each has a time to live, which a use begins anew. What children a block has is in sorted sets, one
for each time to live that has passed: a set of them all would never end.
"""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tieredkv.engines.base import (
    EngineFault,
    RemoteRefused,
    Timeouts,
    is_loopback,
    parse,
    redacted,
)
from tieredkv.units import duration

_T = TypeVar("_T")

_SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
_PREFIX = "tieredkv"
_TTL = "7d"
# What the client would take from the URL, and what is decided here.
_OURS = frozenset(
    ("decode_responses", "socket_timeout", "socket_connect_timeout", "retry_on_timeout")
)
_BATCH = 512
_DETAIL = 300


class RedisEngine:
    """See `base.Engine`."""

    batch = _BATCH

    def __init__(self, url: str, timeouts: Timeouts) -> None:
        """Connects to nothing yet.

        Args:
            url: ``redis://user:password@host:port/db?key=value…``, or ``valkey``, and with TLS
                ``rediss`` or ``valkeys``. Keys are ``ttl``, how long an object lives after its last
                use ("7d" if it isn't there, "none" for ever), ``prefix`` of all names
                ("tieredkv"), and those of the client's ``from_url``.
            timeouts: of calls.

        Raises:
            RemoteRefused: something about the URL makes no sense.
        """
        parts, query = parse(url)
        self.title = redacted(url)
        self._prefix = query.pop("prefix", _PREFIX)
        self._ttl = _seconds(query.pop("ttl", _TTL), self.title)
        for key in _OURS & query.keys():
            raise RemoteRefused(
                f"{self.title}: {key} is not for the URL; there is a timeout of ours"
            )
        allowed = query.pop("allow_plain", "").lower() in ("1", "true", "yes")
        scheme = _SCHEMES[parts.scheme]
        if scheme == "redis" and not allowed and not is_loopback(parts.hostname or ""):
            raise RemoteRefused(
                f"{self.title}: prompts would cross the network in the clear; use "
                f"{parts.scheme}s://, or add allow_plain=true to the URL"
            )
        plain = urlunsplit((scheme, parts.netloc, parts.path, urlencode(query), ""))

        def client(seconds: float) -> redis.Redis:
            return redis.Redis.from_url(
                plain,
                socket_timeout=seconds,
                socket_connect_timeout=seconds,
                retry=Retry(NoBackoff(), 0),
            )

        try:
            self._reads, self._writes = client(timeouts.read), client(timeouts.write)
        except (ValueError, TypeError) as e:
            raise RemoteRefused(f"{self.title}: {e}") from e

    def get(self, name: str, limit: int) -> bytes | None:
        """See `base.Engine.get`."""
        found: Any = _guarded(lambda: self._reads.getrange(self._key(name), 0, limit))
        return bytes(found) if 0 < len(found) <= limit else None

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See `base.Engine.exists`. All in one exchange."""

        def ask() -> list[bool]:
            with self._reads.pipeline(transaction=False) as asked:
                for name in names:
                    asked.exists(self._key(name))
                return [bool(n) for n in asked.execute()]

        return _guarded(ask) if names else []

    def put(self, name: str, data: bytes) -> None:
        """See `base.Engine.put`."""
        _guarded(lambda: self._writes.set(self._key(name), data, ex=self._ttl))

    def enlist(self, folder: str, member: str) -> None:
        """See `base.Engine.enlist`."""
        key = self._sets(folder)[0]

        def add() -> None:
            with self._writes.pipeline(transaction=False) as asked:
                asked.zadd(key, {member: 0})
                if self._ttl:
                    asked.expire(key, 2 * self._ttl)
                asked.execute()

        _guarded(add)

    def members(self, folder: str, start: str, limit: int) -> list[str]:
        """See `base.Engine.members`."""
        low = f"({start}" if start else "-"

        def ask() -> list[str]:
            with self._reads.pipeline(transaction=False) as asked:
                for key in self._sets(folder):
                    asked.zrange(key, low, "+", bylex=True, offset=0, num=limit)
                found = {m.decode() for members in asked.execute() for m in members}
                return sorted(found)[:limit]

        return _guarded(ask)

    def refresh(self, names: Sequence[str]) -> None:
        """See `base.Engine.refresh`."""
        ttl = self._ttl
        if ttl is None or not names:
            return

        def ask() -> None:
            with self._writes.pipeline(transaction=False) as asked:
                for name in names:
                    asked.expire(self._key(name), ttl)
                asked.execute()

        _guarded(ask)

    def close(self) -> None:
        """See `base.Engine.close`."""
        for client in (self._reads, self._writes):
            client.connection_pool.disconnect()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _sets(self, folder: str) -> list[str]:
        """Where a folder's members are: those added now, and those of the time to live before."""
        if not self._ttl:
            return [f"{self._key(folder)}/0"]
        now = int(time.time()) // self._ttl
        return [f"{self._key(folder)}/{age}" for age in (now, now - 1)]


def _guarded(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except redis.exceptions.TimeoutError as e:
        raise EngineFault("timeout", str(e)[:_DETAIL]) from e
    except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError) as e:
        raise EngineFault("refused", str(e)[:_DETAIL]) from e
    except redis.exceptions.OutOfMemoryError as e:
        raise EngineFault("full", str(e)[:_DETAIL]) from e
    except redis.exceptions.ConnectionError as e:
        raise EngineFault("unreachable", str(e)[:_DETAIL]) from e
    # A server that isn't one can answer with anything, and the client's parser with any error.
    except (redis.exceptions.RedisError, OSError, ValueError, TypeError, IndexError) as e:
        raise EngineFault("other", str(e)[:_DETAIL]) from e


def _seconds(text: str, title: str) -> int | None:
    if text == "none":
        return None
    try:
        return max(1, int(duration(text)))
    except ArgumentTypeError as e:
        raise RemoteRefused(f"{title}: ttl: {e}") from e

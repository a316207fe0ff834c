"""What the remote tier asks of a store that machines share, and how it says no."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

from tieredkv.core import TieredKVError


class EngineFault(TieredKVError):
    """A call that an engine didn't answer, or refused. ``kind`` labels its counter: timeout,
    unreachable, refused, full, other.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class RemoteRefused(TieredKVError, ValueError):
    """The remote tier can't be used as it was asked for; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a call may take: one that a request waits for, and an upload's."""

    read: float
    write: float


class Engine(Protocol):
    """Objects by name, and lists of members by folder. Names and members are printable ASCII,
    members without a slash. Any thread may call. Every call ends within its timeout, or a little
    later, and raises nothing but `EngineFault`.
    """

    @property
    def title(self) -> str:
        """What to call it in messages: no secrets."""

    @property
    def batch(self) -> int:
        """Names that one `exists` is asked for in about the time of one."""

    def get(self, name: str, limit: int) -> bytes | memoryview | None:
        """An object's bytes; None if it is absent or has more than ``limit``."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """For each name, whether there is an object."""

    def put(self, name: str, data: bytes) -> None:
        """Make an object, in place of one that has this name. All of it or nothing is there."""

    def enlist(self, folder: str, member: str) -> None:
        """Add a member to a folder; again is once."""

    def members(self, folder: str, start: str, limit: int) -> list[str]:
        """The first ``limit`` members that sort after ``start``, in order."""

    def refresh(self, names: Sequence[str]) -> None:
        """Let objects live on as if they were put now, where the engine can do that cheaply."""

    def close(self) -> None:
        """Let go of connections; calls under way may fail."""


def parse(url: str) -> tuple[SplitResult, dict[str, str]]:
    """An engine's URL, and its query, of which each key may be there once.

    Raises:
        RemoteRefused: it is no such URL.
    """
    parts = urlsplit(url)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query = dict(pairs)
    if not parts.hostname or len(query) < len(pairs):
        raise RemoteRefused(f"{redacted(url)}: not a URL like s3://bucket/prefix or redis://host/0")
    return parts, query


def redacted(url: str) -> str:
    """A URL without what may be secret: user, password, query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def is_loopback(host: str) -> bool:
    """Whether a host's name is one of this machine's own."""
    return host in ("localhost", "::1") or host.startswith("127.")

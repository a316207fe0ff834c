"""Ranks: processes that serve one model together, each with a part of it.

Each of them keeps its part of a prompt's state in a cache of its own, and may lose it alone. But
all must restore the same tokens: one that computed what another restored would answer with
nonsense, and wait for it for ever at the next step. So how many tokens they restore is agreed.

Whatever happens to one rank, all make the same exchanges in the same order: what a rank does next
depends on what was exchanged alone, and its own faults come up only after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# Exchanges about one length, and lengths that are tried to be read. With more of them a prompt is
# computed: it has been read so often by then.
_EXCHANGES = 64
_LOADS = 4


class Ranks(Protocol):
    """This process among those that serve a model with it.

    All ranks call the same methods in the same order, on the thread that generates: a call
    returns when all have made it, and never if one of them is gone.
    """

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def shard(self) -> str:
        """This rank's part of a model, see `core.Namespace`."""

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers that each rank gives, by rank: as many of each, and below 2**31."""

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes that each rank gives, by rank."""


class Alone:
    """One process with all of its models."""

    size = 1
    shard = "0/1"

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """See `Ranks.exchange`."""
        return [list(numbers)]

    def gather(self, data: bytes) -> list[bytes]:
        """See `Ranks.gather`."""
        return [data]


class Distributed:
    """The ranks of an MLX group.

    Sums are all it asks of the group, since every backend has them. They run on the stream of
    the thread that generates, between the model's own, so that they are in one order everywhere.
    """

    def __init__(self, group: mx.distributed.Group, mode: str) -> None:
        """``mode`` is how models are cut: "tensor" or "pipeline"."""
        self._group = group
        self._mode = mode

    @property
    def size(self) -> int:
        """See `Ranks.size`."""
        return self._group.size()

    @property
    def shard(self) -> str:
        """See `Ranks.shard`."""
        return f"{self._group.rank()}/{self.size}/{self._mode}"

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """See `Ranks.exchange`."""
        table = np.zeros((self.size, len(numbers)), np.int32)
        table[self._group.rank()] = numbers
        whole: list[list[int]] = self._sum(table).tolist()
        return whole

    def gather(self, data: bytes) -> list[bytes]:
        """See `Ranks.gather`."""
        sizes = [size for (size,) in self.exchange([len(data)])]
        ends = np.cumsum(sizes).tolist()
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        whole = np.zeros(ends[-1], np.uint8)
        rank = self._group.rank()
        whole[starts[rank] : ends[rank]] = np.frombuffer(data, np.uint8)
        together = self._sum(whole).tobytes() if len(whole) else b""
        return [together[a:b] for a, b in zip(starts, ends, strict=True)]

    def _sum(self, numbers: NDArray[Any]) -> NDArray[Any]:
        return np.array(mx.distributed.all_sum(mx.array(numbers), group=self._group))


def unanimous(ranks: Ranks, own: bool) -> bool:
    """Whether it holds on every rank."""
    return all(each for (each,) in ranks.exchange([int(own)]))


class Search(Protocol[T_co]):
    """One rank's search for the longest prefix of a prompt that it can restore."""

    def find(self, most: int) -> int:
        """How many tokens of it, at most ``most``; 0 for none."""

    def load(self) -> tuple[T_co | None, int]:
        """State of what was found last, or of less of it if that is damaged, and how many tokens
        it is of; without a state how many tokens to search next, which are fewer.
        """


class Attempt(Generic[T]):
    """A search whose faults are kept until the ranks are done with each other."""

    def __init__(self, begin: Callable[[], Search[T] | None]) -> None:
        """``begin`` makes the search; None if there can be nothing to find."""
        self.n_longest = 0
        self.fault: Exception | None = None
        self._begin: Callable[[], Search[T] | None] | None = begin
        self._search: Search[T] | None = None

    def find(self, most: int) -> int:
        """`Search.find`; 0 after a fault."""
        try:
            if self._begin is not None:
                begin, self._begin = self._begin, None
                self._search = begin()
            n = self._search.find(most) if self._search is not None and not self.fault else 0
        except Exception as e:  # noqa: BLE001 - raised again once all ranks know of the miss
            self.fault = e
            return 0
        self.n_longest = max(self.n_longest, n)
        return n

    def load(self, found: int) -> tuple[T | None, int]:
        """`Search.load` of what was ``found``; nothing after a fault."""
        if self._search is None or self.fault is not None:
            return None, 0
        try:
            state, n = self._search.load()
        except Exception as e:  # noqa: BLE001 - as in `find`
            self.fault = e
            return None, 0
        return state, n if state is not None else min(n, found - 1)


def agreed(ranks: Ranks, most: int, own: Attempt[T]) -> T | None:
    """This rank's state of the longest prefix, of at most ``most`` tokens, that every rank can
    restore; None if there is none, on all of them.

    Raises:
        Exception: this rank's fault, of which all others have made a miss.
    """
    n = most
    for _ in range(_LOADS):
        n = _common(ranks, n, own.find)
        if not n:
            break
        state, reach = own.load(n)
        rows = ranks.exchange([reach, int(state is not None)])
        n = min(reach for reach, _ in rows)
        if all(row == [n, 1] for row in rows):
            return state
    if own.fault is not None:
        raise own.fault
    return None


def _common(ranks: Ranks, most: int, find: Callable[[int], int]) -> int:
    """The greatest length up to ``most`` that all ranks find."""
    for _ in range(_EXCHANGES):
        if most <= 0:
            break
        found = [n for (n,) in ranks.exchange([find(most)])]
        most = min(found)
        if most == max(found):
            return most
    return 0

"""What is promised, and where in a benchmark run it shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Figures of a run: extra_info by name of the benchmark, parameters included.
Run = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure of a benchmark, what it is, and the most or the least it may be.

    One without bounds is no claim but a figure to know.
    """

    what: str
    bench: str
    key: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def goal(self) -> str:
        """The bound, as people write it."""
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return "" if self.at_least is None else f"≥ {self.at_least:g}"

    def is_reached(self, value: float) -> bool:
        """Whether a measured value is within the bounds."""
        low = self.at_least is None or value >= self.at_least
        return low and (self.at_most is None or value <= self.at_most)


def _hot(mode: str, point: str, what: str) -> tuple[Claim, ...]:
    bench = f"test_hot_hit[{mode}-{point}]"
    return (
        Claim(f"hot hit, {what}, {mode}: over mlx-lm's", bench, "ours / mlx-lm", at_most=1),
        Claim(f"hot hit, {what}, {mode}: over one memcpy", bench, "ours / memcpy"),
    )


def _decode(n: int) -> Iterator[Claim]:
    bench = f"test_decode_beside_the_writer[{n}]"
    streams = "1 stream" if n == 1 else f"{n} streams"
    bounds = {"p50": 1.02, "p99": 1.5, "max": None}
    for name, bound in bounds.items():
        what = f"decode step beside a saturated writer, {streams}, {name}: over an idle one's"
        yield Claim(what, bench, f"writer / idle, {name}", at_most=bound)
    what = f"the same beside the same work in another process, {streams}, p50"
    yield Claim(what, bench, "writer process / idle, p50")


_LOOKUP = "test_lookup_among_ten_entries[32768-100]"
_STORE = "test_memory_under_random_inserts_and_fetches"
_BRANCHES = "test_twenty_branches_over_one_prefix"
_SERVER = "test_throughput_of_eight_streams"

CLAIMS = (
    Claim("lookup, 32k tokens, 10 entries: mlx-lm's over ours", _LOOKUP, "mlx-lm / ours", None, 1),
    Claim("the same: over packing and hashing", _LOOKUP, "ours / packing and hashing", 3),
    Claim(
        "lookup in 100k blocks: over one in 1k",
        "test_lookup_as_the_store_grows",
        "ours / 1k blocks",
        3,
    ),
    Claim(
        "instructions of a lookup, 2k tokens: over mlx-lm's",
        "test_instructions",
        "lookup, ours / mlx-lm",
        1,
    ),
    Claim(
        "index memory a token: over mlx-lm's", "test_index_memory_per_token", "ours / mlx-lm", 0.05
    ),
    *_hot("sequential", "8B-2048", "8B, 2k tokens"),
    *_hot("batched", "8B-2048", "8B, 2k tokens"),
    Claim(
        "memory beyond what is held, during a hot hit: over mlx-lm's",
        "test_hot_hit[sequential-8B-2048]",
        "extra memory, ours / mlx-lm",
        1.15,
    ),
    Claim(
        "promote, 8B, 2k tokens: over zstd-3 of safetensors",
        "test_promote[8B-2048]",
        "ours / zstd-3 safetensors",
        1,
    ),
    Claim(
        "the same: over plain safetensors",
        "test_promote[8B-2048]",
        "ours / safetensors",
    ),
    Claim("the same: over one memcpy", "test_promote[8B-2048]", "ours / memcpy"),
    Claim(
        "disk of a prompt, 8B: over its raw bytes",
        "test_promote[8B-2048]",
        "encoded / raw bytes",
    ),
    Claim(
        "insert until durable, 8B, 2k tokens: over a safetensors file",
        "test_insert[8B-2048]",
        "until durable, ours / safetensors",
    ),
    Claim(
        "insert on the generation thread, 8B, 2k tokens: over one memcpy",
        "test_insert[8B-2048]",
        "ours / memcpy",
    ),
    *_decode(1),
    *_decode(4),
    Claim(
        "server, 8 streams, tokens a second: over mlx-lm's",
        _SERVER,
        "throughput, ours / mlx-lm",
        at_least=0.98,
    ),
    Claim("the same, CPU time a token: over mlx-lm's", _SERVER, "CPU time a token, ours / mlx-lm"),
    Claim(
        "20 branches over one prefix, file: over 20 safetensors files",
        f"{_BRANCHES}[2048-0.1]",
        "ratio",
        0.1,
    ),
    Claim("memory held at most: over the cap, 10,000 operations", _STORE, "ratio", 1),
    Claim(
        "bytes written in churn: over the new blocks'",
        "test_churn",
        "bytes written / encoded bytes of new blocks",
    ),
    Claim("file in churn: over its cap", "test_churn", "file / cap", 1),
    Claim("opening 100,000 blocks, seconds", "test_open", "seconds", 0.1),
    Claim(
        "tokens found at 3% of the blocks: over whole entries' LRU",
        "test_eviction",
        "default / whole-lru, 0.03",
        at_least=1,
    ),
)

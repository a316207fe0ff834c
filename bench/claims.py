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


def _hot(mode: str, most: float) -> tuple[Claim, ...]:
    bench = f"test_hot_hit[{mode}-SmolLM2-8192]"
    return (
        Claim(f"hot hit, 190 MB, {mode}: over mlx-lm's", bench, "ours / mlx-lm", most),
        Claim("the same: over one memcpy", bench, "ours / memcpy", 1.5),
    )


def _promote(shape: str) -> tuple[Claim, ...]:
    bench = f"test_promote[{shape}-2048]"
    cold = f"test_promote_from_a_cold_page_cache[{shape}]"
    what = f"promote, {shape}, 2k tokens"
    return (
        Claim(f"{what}: over zstd-3 of safetensors", bench, "ours / zstd-3 safetensors", 0.4),
        Claim("the same: over plain safetensors", bench, "ours / safetensors", 0.8),
        Claim("the same: over one memcpy", bench, "ours / memcpy"),
        Claim(f"{what}, cold page cache: over reading the bytes", cold, "ours / pread", 1.3),
        Claim("the same: over a warm page cache", cold, "ours / warm page cache"),
        Claim(f"disk, {shape}: over raw bytes", bench, "encoded / raw bytes", 0.68),
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


def _eviction() -> Iterator[Claim]:
    for share in (0.01, 0.03, 0.1, 0.3):
        what = f"tokens found with room for {share:.0%} of the blocks: over leaf-LRU"
        yield Claim(what, "test_eviction", f"default / leaf-lru, {share}", None, 0.99)


_LOOKUP = "test_lookup_among_ten_entries[32768-100]"
_STORE = "test_memory_under_random_inserts_and_fetches"
_BRANCHES = "test_twenty_branches_over_one_prefix"
_SERVER = "test_throughput_of_eight_streams"

CLAIMS = (
    Claim(
        "lookup, 32k tokens, 10 entries: mlx-lm's over ours", _LOOKUP, "mlx-lm / ours", None, 1000
    ),
    Claim("the same: over packing and hashing", _LOOKUP, "ours / packing and hashing", 2),
    Claim(
        "lookup in 100k blocks: over one in 1k",
        "test_lookup_as_the_store_grows",
        "ours / 1k blocks",
        1.5,
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
    *_hot("sequential", 1),
    *_hot("batched", 0.75),
    Claim(
        "memory beyond what is held, during a hot hit: over mlx-lm's",
        "test_hot_hit[sequential-SmolLM2-8192]",
        "extra memory, ours / mlx-lm",
        1.15,
    ),
    *_promote("SmolLM2"),
    *_promote("8B"),
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
        1.1,
    ),
    Claim("file in churn: over its live bytes", "test_churn", "file / live bytes", 1.05),
    Claim("the same: over its cap", "test_churn", "file / cap", 1),
    Claim("opening 100,000 blocks, seconds", "test_open", "seconds", 0.1),
    *_eviction(),
    Claim(
        "milliseconds of the policy a request, 100,000 blocks: beyond leaf-LRU's",
        "test_policy_of_a_request",
        "ms, beyond leaf-lru",
        1,
    ),
)

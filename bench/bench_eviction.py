"""What the policies of ``bench.sim`` find of a made trace, over the size of the tier."""

from __future__ import annotations

from random import Random

from pytest_benchmark.fixture import BenchmarkFixture

from bench import sim, traces

REQUESTS = 2500
CAPACITIES = (0.01, 0.03, 0.1, 0.3)
# Of those that there are; what the tiers do is the first.
POLICIES = ("default", "leaf-lru", "whole-lru", "gdsf", "s3fifo", "clairvoyant")


def test_eviction(benchmark: BenchmarkFixture) -> None:
    """Share of the prompts' tokens that is found, in the second half of a mixed trace."""
    rows = traces.rows(traces.mixed(Random(1), REQUESTS))
    paths = [(int(str(row["input_length"])), row["hash_ids"]) for row in rows]
    trace = sim.trace_of(paths, traces.BLOCK_TOKENS)
    found = benchmark.pedantic(sim.compare, args=(trace, CAPACITIES, POLICIES), rounds=1)
    rates = {
        (policy, share): figures["token_hit_second_half"]
        for policy, by_share in found.items()
        for share, figures in by_share.items()
    }
    benchmark.extra_info |= {f"{policy}, {share}": rate for (policy, share), rate in rates.items()}
    benchmark.extra_info |= {
        f"default / {policy}, {share}": rates["default", share] / rate
        for (policy, share), rate in rates.items()
        if policy in ("leaf-lru", "whole-lru")
    }

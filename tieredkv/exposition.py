"""What ``GET /metrics`` answers: each metric's name, meaning and value, in Prometheus' format.

``python -m tieredkv.exposition`` prints docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tieredkv.core import Distribution, StoreDetails, StoreStats
from tieredkv.journal import Totals

Values = Mapping[tuple[str, ...], float | Distribution]


@dataclass(frozen=True, slots=True)
class Reading:
    """All that metrics are made of, as of one moment."""

    version: str
    stats: StoreStats
    details: StoreDetails
    totals: Totals
    pinned_bytes: int


@dataclass(frozen=True, slots=True)
class Described:
    """A metric: its name as exposed, its kind, what it means, its labels, and its values by them.

    ``kind`` is "counter", "gauge" or "histogram".
    """

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...]
    values: Callable[[Reading], Values]


def _one(value: Callable[[Reading], float | Distribution]) -> Callable[[Reading], Values]:
    return lambda reading: {(): value(reading)}


# Where tokens of a hit can come from.
_LEVELS = ("hot", "cold", "remote")


def _each(counts: Callable[[Reading], Mapping[str, int]]) -> Callable[[Reading], Values]:
    return lambda reading: {(label,): n for label, n in sorted(counts(reading).items())}


def _tiers(attribute: str) -> Callable[[Reading], Values]:
    return lambda reading: {
        ("hot",): getattr(reading.stats.hot, attribute),
        ("cold",): getattr(reading.stats.cold, attribute),
    }


def _departures(reading: Reading) -> dict[tuple[str, ...], Distribution]:
    return {
        (tier, reason): ages
        for tier, reasons in reading.details.departures.items()
        for reason, ages in sorted(reasons.items())
    }


def _hits(reading: Reading) -> Values:
    return {(tier,): reading.details.hits.get(tier, 0) for tier in _LEVELS}


def _hit_tokens(reading: Reading) -> Values:
    return {(tier,): getattr(reading.stats, f"hit_tokens_{tier}") for tier in _LEVELS}


METRICS = (
    Described(
        "tieredkv_build_info",
        "gauge",
        "Always 1; the version is the label",
        ("version",),
        lambda r: {(r.version,): 1},
    ),
    Described(
        "tieredkv_requests_total",
        "counter",
        "Requests for a completion by HTTP status; 499: the client left",
        ("status",),
        lambda r: {(str(status),): n for status, n in sorted(r.totals.requests.items())},
    ),
    Described(
        "tieredkv_prompt_tokens_total",
        "counter",
        "Tokens of prompts by where their state came from: hot, cold, remote, computed",
        ("source",),
        _each(lambda r: r.totals.tokens),
    ),
    Described(
        "tieredkv_generated_tokens_total",
        "counter",
        "Tokens that were generated",
        (),
        _one(lambda r: r.totals.generated),
    ),
    Described(
        "tieredkv_first_token_seconds",
        "histogram",
        "From a request's coming to its first token, waiting included",
        (),
        _one(lambda r: r.totals.first_token_seconds),
    ),
    Described(
        "tieredkv_prefill_seconds",
        "histogram",
        "From the look-up of a prompt to its first token",
        (),
        _one(lambda r: r.totals.prefill_seconds),
    ),
    Described(
        "tieredkv_hits_total",
        "counter",
        "Prompts of which something was reused, by tier; cold: some of it was read from disk",
        ("tier",),
        _hits,
    ),
    Described(
        "tieredkv_hit_tokens_total",
        "counter",
        "Tokens that were reused, by the tier that had them",
        ("tier",),
        _hit_tokens,
    ),
    Described(
        "tieredkv_misses_total",
        "counter",
        "Prompts of which nothing was reused, by reason",
        ("reason",),
        _each(lambda r: r.stats.misses),
    ),
    Described(
        "tieredkv_prefill_avoided_tokens_total",
        "counter",
        "Tokens that did not have to be computed: those of all hits",
        (),
        _one(
            lambda r: r.stats.hit_tokens_hot + r.stats.hit_tokens_cold + r.stats.hit_tokens_remote
        ),
    ),
    Described(
        "tieredkv_saved_seconds",
        "gauge",
        "Estimate of the time that hits have saved: for each model the tokens reused times the "
        "seconds a token that it takes to compute them now, less the time of promotes; nothing "
        "for a model that has not computed a prompt of 32 tokens yet. Can fall",
        (),
        _one(lambda r: r.details.saved_seconds),
    ),
    Described(
        "tieredkv_recomputed_total",
        "counter",
        "Hits on disk that were not taken, since computing was expected to be faster",
        (),
        _one(lambda r: r.stats.recomputed),
    ),
    Described(
        "tieredkv_unshared_tokens_total",
        "counter",
        "Tokens that this rank could have reused, but another one couldn't",
        (),
        _one(lambda r: r.stats.unshared_tokens),
    ),
    Described(
        "tieredkv_inserts_total",
        "counter",
        "Prompts whose state was stored, checkpoints included",
        (),
        _one(lambda r: r.stats.inserts),
    ),
    Described(
        "tieredkv_refused_total",
        "counter",
        "Prompts whose state was not stored, by reason",
        ("reason",),
        _each(lambda r: r.stats.refused),
    ),
    Described(
        "tieredkv_dropped_blocks_total",
        "counter",
        "Blocks that were lost on their way into a tier, by reason",
        ("reason",),
        _each(lambda r: r.stats.dropped),
    ),
    Described(
        "tieredkv_unadmitted_blocks_total",
        "counter",
        "New blocks that --cold-admit kept from the disk",
        (),
        _one(lambda r: r.stats.unadmitted),
    ),
    Described(
        "tieredkv_faults_total",
        "counter",
        "Faults that were served without, by kind",
        ("kind",),
        _each(lambda r: r.stats.faults),
    ),
    Described(
        "tieredkv_tier_bytes",
        "gauge",
        "Bytes in use, by tier",
        ("tier",),
        _tiers("n_bytes"),
    ),
    Described(
        "tieredkv_tier_cap_bytes",
        "gauge",
        "Caps on the bytes in use, by tier; 0: there is no such tier",
        ("tier",),
        _tiers("cap_bytes"),
    ),
    Described(
        "tieredkv_tier_blocks", "gauge", "Blocks held, by tier", ("tier",), _tiers("n_blocks")
    ),
    Described(
        "tieredkv_pinned_bytes",
        "gauge",
        "Bytes on disk that are pinned",
        (),
        _one(lambda r: r.pinned_bytes),
    ),
    Described(
        "tieredkv_entries",
        "gauge",
        "Prompts that memory has whole",
        (),
        _one(lambda r: r.stats.entries),
    ),
    Described(
        "tieredkv_queue_bytes",
        "gauge",
        "Bytes that wait to be written to disk; they are part of the hot tier's",
        (),
        _one(lambda r: r.stats.queue_bytes),
    ),
    Described(
        "tieredkv_queue_blocks",
        "gauge",
        "Blocks that wait to be written to disk",
        (),
        _one(lambda r: r.stats.queue_blocks),
    ),
    Described(
        "tieredkv_promoted_blocks_total",
        "counter",
        "Blocks that were read from disk",
        (),
        _one(lambda r: r.stats.promotes),
    ),
    Described(
        "tieredkv_promote_seconds",
        "histogram",
        "Reading a prompt's blocks from disk into memory",
        (),
        _one(lambda r: r.details.promote_seconds),
    ),
    Described(
        "tieredkv_commit_seconds",
        "histogram",
        "One write to disk until it is durable, waiting for other processes included",
        (),
        _one(lambda r: r.details.commit_seconds),
    ),
    Described(
        "tieredkv_evictions_total",
        "counter",
        "Blocks that left a tier, by reason: room (for others), trim (memory was given back), "
        "entries (--prompt-cache-size), ttl, prune",
        ("tier", "reason"),
        lambda r: {labels: ages.n for labels, ages in _departures(r).items()},
    ),
    Described(
        "tieredkv_evicted_age_seconds",
        "histogram",
        "How long blocks had not been used when they left",
        ("tier", "reason"),
        _departures,
    ),
    Described(
        "tieredkv_demotes_total",
        "counter",
        "Blocks among those that left memory that the disk has",
        (),
        _one(lambda r: r.stats.demotes),
    ),
    Described(
        "tieredkv_yielded_bytes_total",
        "counter",
        "Bytes that the hot tier gave back because MLX needed memory",
        (),
        _one(lambda r: r.stats.yielded_bytes),
    ),
    Described(
        "tieredkv_encoded_bytes_total",
        "counter",
        "Encoded bytes of blocks that were written",
        (),
        _one(lambda r: r.stats.bytes_written),
    ),
    Described(
        "tieredkv_raw_bytes_total",
        "counter",
        "Bytes in memory of the blocks that were written: what is beyond "
        "`tieredkv_encoded_bytes_total` was saved by encoding",
        (),
        _one(lambda r: r.details.raw_bytes),
    ),
    Described(
        "tieredkv_disk_bytes_total",
        "counter",
        "Bytes that went to the disk, all else than blocks included",
        (),
        _one(lambda r: r.stats.disk_bytes),
    ),
)

_FAMILIES: dict[str, Callable[..., Metric]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class _StoreCollector(Collector):
    """The metrics of one reading."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        for described in METRICS:
            make = _FAMILIES[described.kind]
            family = make(described.name, described.meaning, labels=described.labels)
            for labels, value in described.values(self._reading).items():
                _add(family, labels, value)
            yield family


def _add(family: Metric, labels: tuple[str, ...], value: float | Distribution) -> None:
    if isinstance(family, HistogramMetricFamily) and isinstance(value, Distribution):
        edges = [*map(str, value.bounds), "+Inf"]
        family.add_metric(
            labels, list(zip(edges, accumulate(value.counts), strict=True)), value.total
        )
    elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
        family.add_metric(labels, float(value))  # type: ignore[arg-type]  # no distribution here


def exposition(reading: Reading, accept: str) -> tuple[bytes, str]:
    """The metrics in the format that a scraper's Accept header asks for, and its content type.

    With those of the process where the system tells them: on Linux.
    """
    registry = CollectorRegistry()
    registry.register(_StoreCollector(reading))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def table() -> str:
    """docs/metrics.md."""
    rows = [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels) or '-'} "
        f"| {m.meaning} |"
        for m in METRICS
    ]
    return "\n".join([_HEAD, "| name | type | labels | meaning |", "|---|---|---|---|", *rows, ""])


_HEAD = """\
# Metrics

`GET /metrics` of a running server, in Prometheus' text format or OpenMetrics, whichever the scraper
asks for. Counters and histograms begin at zero with the server. On Linux those of the process are
there too (`process_cpu_seconds_total`, `process_resident_memory_bytes`, …).

```yaml
scrape_configs:
  - job_name: tieredkv
    static_configs:
      - targets: ["127.0.0.1:8080"]
```

A Prometheus on another machine is answered with `--cache-api anywhere` only, see
[api.md](api.md#who-is-answered). [grafana/tieredkv.json](grafana/tieredkv.json) is a dashboard of
these: in Grafana, Dashboards, New, Import.

This page is made by `python -m tieredkv.exposition > docs/metrics.md`; a test compares the two.
"""


if __name__ == "__main__":
    print(table(), end="")

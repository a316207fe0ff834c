"""What is counted, how it is exposed, and that tables and dashboard name what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import caches
import pytest
import tiny
from caches import MODEL
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus
from server import Local

from tieredkv import TieredPromptCache
from tieredkv.core import FetchReport
from tieredkv.exposition import METRICS, Reading, table
from tieredkv.journal import Course, Journal, RequestReport
from tieredkv.metrics import Faults, Histogram
from tieredkv.pace import Pace
from tieredkv.texts import Texts

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "docs" / "grafana" / "tieredkv.json"
STORY = "Monday: the Aurora left with timber. Tuesday: fog, nobody moved. " * 6


# ---- a real server, scraped


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """One that has hit in both tiers, missed, and refused a request."""
    root = tmp_path_factory.mktemp("metrics")
    model = tiny.save(root / "model")
    with Local(model, root / "cold") as before:
        before.chat(STORY)
        assert before.cache.flush(30)
    with Local(model, root / "cold") as server:
        server.chat(STORY)
        server.chat(STORY)
        server.chat("Something else")
        assert server.post({"messages": []}).status == 400
        assert server.cache.flush(30)
        # A request is written down once it has been answered.
        deadline = time.monotonic() + 20
        while sum(server.generator.journal.totals().requests.values()) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield server


def scrape(server: Local, accept: str = "*/*") -> tuple[str, str]:
    """The content type and the text of the metrics."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/metrics", headers={"Accept": accept}
    )
    with urllib.request.urlopen(request) as response:
        return response.headers["Content-Type"], response.read().decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in prometheus(text)
        for sample in family.samples
    }


def test_every_metric_of_the_table_is_scraped_with_its_type(server: Local) -> None:
    """A name that is documented and not there makes a dashboard's panel empty."""
    content_type, text = scrape(server)
    assert content_type.startswith("text/plain")
    kinds = {family.name: family.type for family in prometheus(text)}
    for metric in METRICS:
        # The parser leaves out the suffix of counters.
        assert kinds[metric.name.removesuffix("_total")] == metric.kind, metric.name
    ours = {name for name in kinds if name.startswith("tieredkv_")}
    assert ours == {metric.name.removesuffix("_total") for metric in METRICS}


def test_what_is_scraped_is_what_happened(server: Local) -> None:
    """Metrics that count something else than they say are worse than none."""
    stats, found = server.cache.stats(), samples(scrape(server)[1])
    n = stats.hit_tokens_cold
    assert n > 300
    assert found["tieredkv_hit_tokens_total", (("tier", "cold"),)] == n
    assert found["tieredkv_hit_tokens_total", (("tier", "hot"),)] == stats.hit_tokens_hot
    assert found["tieredkv_hits_total", (("tier", "cold"),)] == 1
    # Whatever both chats begin with is a hit as well.
    assert found["tieredkv_hits_total", (("tier", "hot"),)] == stats.hits - 1
    assert found["tieredkv_prefill_avoided_tokens_total", ()] == n + stats.hit_tokens_hot
    assert found["tieredkv_prompt_tokens_total", (("source", "cold"),)] == n
    assert found["tieredkv_requests_total", (("status", "200"),)] == 3
    assert found["tieredkv_requests_total", (("status", "400"),)] == 1
    assert found["tieredkv_first_token_seconds_count", ()] == 3
    assert found["tieredkv_promote_seconds_count", ()] == 1
    assert found["tieredkv_promote_seconds_sum", ()] > 0
    assert found["tieredkv_commit_seconds_count", ()] == stats.commits
    assert found["tieredkv_tier_bytes", (("tier", "cold"),)] == stats.cold.n_bytes
    assert found["tieredkv_encoded_bytes_total", ()] == stats.bytes_written > 0
    assert found["tieredkv_raw_bytes_total", ()] > found["tieredkv_encoded_bytes_total", ()]


def test_no_counter_falls_when_a_block_grows_by_being_encoded(server: Local) -> None:
    """Prometheus takes a counter that falls for a restart, and shows all of it as new."""
    cache = server.cache
    stats, details = cache.stats(), cache.details()
    before = Reading("1", stats, details, server.generator.journal.totals(), 0)
    stats = replace(stats, bytes_written=stats.bytes_written + 300)
    after = replace(before, stats=stats, details=replace(details, raw_bytes=details.raw_bytes + 1))
    for metric in METRICS:
        if metric.kind == "counter":
            was = metric.values(before)
            for labels, value in metric.values(after).items():
                assert value >= was[labels], metric.name  # type: ignore[operator]  # no distributions


def test_a_scraper_that_asks_for_openmetrics_gets_it(server: Local) -> None:
    """Prometheus asks for it by default, and its parser is stricter."""
    content_type, text = scrape(server, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert "tieredkv_hits" in {family.name for family in openmetrics(text)}


def test_promtool_finds_nothing_wrong(server: Local) -> None:
    """Prometheus' own check of names, types and help texts."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    text = scrape(server)[1]
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


# ---- documents


def test_the_table_of_metrics_is_that_of_the_code() -> None:
    """People build alerts on it."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == table(), "python -m tieredkv.exposition > docs/metrics.md"


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def expressions() -> list[str]:
    return [
        target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])
    ]


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    """A renamed metric would leave a panel empty, and nobody would be told."""
    known = {metric.name: {*metric.labels, "job", "instance", "le"} for metric in METRICS}
    for metric in METRICS:
        if metric.kind == "histogram":
            known |= {f"{metric.name}_{part}": known[metric.name] for part in ("bucket", "count")}
    asked = set()
    for expression in expressions():
        names = set(re.findall(r"tieredkv_\w+", expression))
        asked |= names
        labels = set(re.findall(r"(\w+)=~?\"", expression))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            labels |= set(group.split(", "))
        assert names, expression
        assert all(labels <= known[name] for name in names), expression
    # And what there is can be seen.
    bases = {re.sub("_(bucket|count)$", "", name) for name in asked}
    assert {metric.name for metric in METRICS} - bases == {"tieredkv_build_info"}


def test_the_dashboard_is_as_grafana_takes_it() -> None:
    """Grafana drops what it doesn't know, and draws what overlaps on top of each other."""
    board = dashboard()
    assert board["title"]
    assert board["uid"]
    assert isinstance(board["schemaVersion"], int)
    assert "id" not in board  # it is the importing server's to give
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels:
        at = panel["gridPos"]
        assert at["w"] > 0 <= at["x"]
        assert at["h"] > 0 <= at["y"]
        assert at["x"] + at["w"] <= 24
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["type"] in ("stat", "timeseries")
        assert panel["datasource"] == source
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"] == source for target in panel["targets"])
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = (
            one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"],
            one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"],
        )
        assert any(apart), (one, other)


def test_the_dashboard_s_questions_are_promql(tmp_path: Path) -> None:
    """One that can't be parsed is a panel with an error."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    plain = [
        e.replace("$__rate_interval", "5m").replace("$__range", "3h").replace("$", "x")
        for e in expressions()
    ]
    rules = [{"record": f"panel:{i}", "expr": e} for i, e in enumerate(plain)]
    # JSON is YAML.
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- counting


def test_an_observation_is_counted_in_the_first_bucket_that_has_it() -> None:
    """Quantiles would be off by a bucket, and a clock set back would make sums fall."""
    histogram = Histogram((1.0, 2.0))
    for value in (-5.0, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    reading = histogram.reading()
    assert (reading.counts, reading.n, reading.total) == ((2, 2, 1), 5, 103.5)


def test_a_flood_of_one_fault_leaves_the_others_to_be_seen() -> None:
    """The one that explains the flood came before it."""
    faults = Faults()
    faults.note("disk_full", "no space")
    for _ in range(1000):
        faults.note("dropped", "queue_full")
    assert [fault.kind for fault in faults.recent()] == ["dropped", "disk_full"]
    for i in range(1000):
        faults.note("corrupt", f"block {i}")
    assert len(faults.recent()) == 50
    assert len(Faults().recent()) == 0


def insert(cache: TieredPromptCache, first: int, n: int = 8) -> list[int]:
    tokens = list(range(first, first + n))
    cache.insert_cache(MODEL, tokens, caches.make(tokens))
    return tokens


def test_blocks_that_leave_are_told_by_tier_reason_and_age(tmp_path: Path) -> None:
    """Whether a cap is too small can only be told by what leaves, and how fresh it was."""
    # Room for two prompts in memory.
    with TieredPromptCache(tmp_path, hot_bytes=3000, block_tokens=4) as cache:
        for i in range(6):
            insert(cache, i * 100)
            assert cache.flush(10)
        left = cache.details().departures
        assert left["hot"].keys() == {"room"}
        cache.trim_to(n_bytes=0)
        left = cache.details().departures
        stats = cache.stats()
        assert left["hot"].keys() == {"room", "trim"}
        assert sum(ages.n for ages in left["hot"].values()) == stats.demotes + stats.evictions_hot
        # All were used within these seconds.
        assert all(sum(ages.counts[:3]) == ages.n for ages in left["hot"].values())


def test_blocks_that_a_full_disk_gives_up_are_told(tmp_path: Path) -> None:
    """A cold tier that is too small looks like one that works, but for this."""
    with TieredPromptCache(tmp_path, cold_bytes=1 << 20, block_tokens=256) as cache:
        for i in range(12):
            tokens = list(range(i * 10_000, i * 10_000 + 1024))
            cache.insert_cache(MODEL, tokens, caches.make(tokens, layers=8))
            assert cache.flush(10)
        ages = cache.details().departures["cold"]["room"]
        assert ages.n == cache.stats().evictions_cold > 0


def test_a_fetch_tells_which_tier_its_tokens_came_from(tmp_path: Path) -> None:
    """Usage, log and metrics of a request are made of it."""
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        tokens = insert(cache, 0)
        cache.fetch_nearest_cache(MODEL, [*tokens, 77])
        assert cache.last_fetch == FetchReport(9, n_hot=8)
        cache.flush(10)
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        cache.fetch_nearest_cache(MODEL, [*tokens, 77])
        fetch = cache.last_fetch
        assert (fetch.n_prompt, fetch.n_hot, fetch.n_cold, fetch.miss) == (9, 0, 8, None)
        assert 0 < fetch.promote_seconds < 10
        cache.fetch_nearest_cache(MODEL, [78, 79])
        assert cache.last_fetch == FetchReport(2, miss="absent")
        cache.fetch_nearest_cache(MODEL, "no tokens")  # type: ignore[arg-type]  # a host's fault
        assert cache.last_fetch.miss == "fault"
        assert cache.details().faults[0].kind == "fetch"


def test_saved_time_is_what_computing_takes_less_what_reading_took() -> None:
    """The figure that says whether the cache is worth its disk."""
    pace = Pace()
    pace.spared("model", 1000, 0.5)
    assert pace.saved_seconds() == 0  # of a model whose pace isn't known
    pace.prefilled("model", 100, 1.0)
    assert pace.saved_seconds() == pytest.approx(9.5)
    for i in range(100):
        pace.spared(i, 1, 0.0)
    assert pace.saved_seconds() == pytest.approx(9.5)  # though it is not among the last


# ---- the journal


def report(status: int = 200, **more: Any) -> RequestReport:
    tokens = {"prompt_tokens": 10, "hot_tokens": 5, "cold_tokens": 3, "computed_tokens": 2}
    times = {"promote_ms": 1.0, "prefill_ms": 2.0, "first_token_ms": 30.0, "total_ms": 40.0}
    given: dict[str, Any] = {
        "time": 0.0,
        "id": "x",
        "model": "m",
        "status": status,
        "generated_tokens": 4,
        **tokens,
        **times,
    }
    return RequestReport(**given | more)


def test_the_journal_keeps_an_hour_of_minutes_and_no_more() -> None:
    """A server that runs for months must not grow, nor its page draw gaps as if they were use."""
    now = [1_000_000.0]
    journal = Journal(lambda: now[0])
    for _ in range(200):
        journal.add(report())
        now[0] += 60
    now[0] += 120
    minutes = journal.history()
    assert len(minutes) == 60
    assert [b.time - a.time for a, b in pairwise(minutes)] == [60] * 59
    assert (minutes[0].requests, minutes[0].hot, minutes[0].computed) == (1, 5, 2)
    assert [minute.requests for minute in minutes[-3:]] == [0, 0, 0]
    assert len(journal.requests()) == 50
    assert journal.totals().requests == {200: 200}


def test_a_log_line_can_be_parsed_whatever_a_client_calls_its_model() -> None:
    """A name with a newline would forge a line of the log."""
    line = report(model='a b="c"\n').log_line()
    assert "\n" not in line
    assert 'model="a b=\\"c\\"\\n"' in line
    assert "promote_ms=1.0" in line
    assert "prompt=10 hot=5 cold=3 computed=2 generated=4" in line
    assert "prefill_ms=-" in report(prefill_ms=None).log_line()


def test_a_request_that_stopped_early_computed_what_it_did() -> None:
    """A client that leaves would count as all of its prompt."""
    course = Course()
    course.note_fetch(FetchReport(100, n_hot=20))
    course.note_progress(30)
    made = course.report("x", "m", 499)
    assert (made.computed_tokens, made.first_token_ms) == (30, None)
    course.note_token()
    assert course.report("x", "m", 200).computed_tokens == 80


def test_texts_are_made_by_who_has_the_tokenizer_only() -> None:
    """A tokenizer that two threads use at once fails in the one that generates."""
    texts, decoded = Texts(), []

    def decode(tokens: list[int]) -> str:
        decoded.append(tokens)
        if tokens == [13]:
            raise RuntimeError("a foreign tokenizer")
        return f"text of {tokens}"

    assert texts.of("m", "a", [1, -5, 2]) is None
    assert texts.of("m", "bad", [13]) is None
    assert texts.of("other", "a", [3]) is None
    assert decoded == []
    texts.make("m", decode)
    assert texts.of("m", "a", [1, -5, 2]) == "text of [1, 2]"
    assert texts.of("m", "bad", [13]) is None
    texts.make("m", decode)
    assert decoded == [[1, 2], [13]]
    for i in range(1000):
        texts.of("m", str(i), [i])
        texts.make("m", decode)
    assert texts.of("m", "a", [1, -5, 2]) is None  # forgotten, and wanted anew

"""The simulation of machines that share a tier."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.fleet import Fleet, Timed, main, outcome, parse
from bench.sim import trace_of

BLOCK = 100
# A token is a byte, a disk reads 1,000 tokens a second, a network 100, a model computes 10.
FLEET = Fleet(
    n_machines=2,
    token_bytes=1.0,
    disk_bytes=10_000.0,
    disk_rate=1000.0,
    network_rate=100.0,
    latency=0.5,
    prefill_rate=10.0,
    shared_bytes=10_000.0,
    server_rate=100.0,
    route="round",
)


def served(fleet: Fleet, prompts: list[list[int]], every: float = 1000.0):
    trace = trace_of(((len(path) * BLOCK, path) for path in prompts), BLOCK)
    requests = [Timed(i * every, r) for i, r in enumerate(trace.requests)]
    return outcome(fleet, requests, trace)


def test_what_one_machine_computed_another_fetches():
    """If this failed, the sharing would not be what is simulated."""
    found = served(FLEET, [[1, 2], [1, 2], [1, 2]])
    assert (found.disk, found.shared, found.computed) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert (found.fetched_bytes, found.uploaded_bytes, found.shared_bytes) == (200, 200, 200)
    # Computed; fetched; read from the first one's disk.
    assert found.seconds == pytest.approx((20 + (0.5 + 2) + 0.2) / 3)
    assert found.seconds_alone == pytest.approx((20 + 20 + 0.2) / 3)
    assert found.saved == pytest.approx(1 - 22.7 / 40.2)


def test_what_is_faster_computed_is_not_fetched():
    """If this failed, a slow network would be said to save time."""
    found = served(replace(FLEET, network_rate=5.0), [[1, 2], [1, 2]])
    assert (found.shared, found.skipped, found.computed) == (0, 0.5, 1)
    assert found.saved == 0
    assert found.stops_paying is None


def test_a_fetch_waits_for_those_before_it():
    """If this failed, one server would be enough for any number of machines."""
    prompts = [[1, 2, 3, 4]] * 4
    apart = served(replace(FLEET, n_machines=4), prompts, every=100.0)
    at_once = served(replace(FLEET, n_machines=4), prompts, every=0.0)
    assert apart.seconds == pytest.approx((40 + 3 * 4.5) / 4)
    assert at_once.seconds == pytest.approx((40 + 4.5 + 8.5 + 12.5) / 4)


def test_with_reused_only_what_came_back_is_uploaded():
    """If this failed, the cost of the policy would be told wrong."""
    found = served(replace(FLEET, n_machines=1, upload="reused"), [[1, 2], [1, 3], [1, 4]])
    assert found.uploaded_bytes == BLOCK


def test_the_network_below_which_nothing_is_saved_is_found():
    """If this failed, a user would buy the wrong network."""
    found = served(replace(FLEET, latency=0.0), [[1, 2], [1, 2]])
    # 1% of 40 s is saved when a fetch of 200 bytes takes 19.6 s.
    assert found.stops_paying == pytest.approx(200 / 19.6, rel=0.01)


def test_a_prefix_goes_where_it_is():
    """If this failed, routing by prefix would be no better than chance."""
    found = served(replace(FLEET, route="prefix"), [[1, 2], [1, 2, 3], [1, 2, 4]])
    assert found.disk == pytest.approx(4 / 8)


def test_a_conversation_stays_where_it_began():
    """If this failed, sticky sessions would be told worse than they are."""
    prompts = [[1, 2], [1, 5], [1, 2, 3], [1, 5, 6], [1, 2, 3, 4]]
    found = served(replace(FLEET, route="sticky", shared_bytes=0.0), prompts)
    assert found.disk >= (2 + 2 + 3) / 14


def test_uploads_that_would_wait_too_long_are_dropped():
    """If this failed, a slow server would be told to hold what it can't."""
    found = served(replace(FLEET, server_rate=1.0), [[1, 2], [3, 4], [5, 6]], every=0.0)
    assert (found.uploaded_bytes, found.dropped_bytes) == (200, 400)


def test_the_command_prints_a_row_for_each_number_of_machines(tmp_path: Path, capsys):
    """If this failed, the documented command would not work."""
    rows = [
        {"timestamp": i, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
        for i in range(8)
    ]
    path = tmp_path / "trace"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert main([str(path), "--machines", "1", "3", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["1", "3"]
    assert figures["1"]["disk"] == pytest.approx(7 / 8)
    assert main([str(path), "--machines", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_what_is_no_trace_is_refused_with_its_name(tmp_path: Path, capsys):
    """If this failed, a wrong path would end in a traceback."""
    path = tmp_path / "no-trace"
    path.write_text('{"timestamp": 1}')
    with pytest.raises(SystemExit, match="2"):
        main([str(path)])
    assert "no-trace" in capsys.readouterr().err


def test_the_times_of_a_trace_are_seconds():
    """If this failed, loads and waits would be off by a thousand."""
    row = {"timestamp": 1500, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    requests, trace = parse([json.dumps(row)])
    assert [t.at for t in requests] == [1.5]
    assert trace.block_tokens == 512

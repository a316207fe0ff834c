"""The table and pictures of a benchmark run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import report
from bench.claims import CLAIMS, Claim

FACTOR = Claim("ours over theirs", "test_a[1]", "ours / theirs", at_most=1.02)
RATE = Claim("tokens found", "test_b", "rate", at_least=0.9)
KNOWN = Claim("bytes", "test_b", "bytes")


def written(figures: dict[str, dict[str, float]]) -> str:
    """What pytest-benchmark would write."""
    benches = [{"name": name, "extra_info": info} for name, info in figures.items()]
    return json.dumps({"benchmarks": benches, "datetime": "2026-01-02T03:04:05"})


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def rows(figures: dict[str, dict[str, float]], *claims: Claim) -> list[list[str]]:
    run = report.run_of(json.loads(written(figures)))
    return [cells(line) for line in report.table(run, claims).splitlines()[2:]]


def test_a_claim_is_reached_up_to_its_bound() -> None:
    """The table would call a goal missed that was just met, or the other way round."""
    figures = {"test_a[1]": {"ours / theirs": 1.02}, "test_b": {"rate": 0.9}}
    assert [r[3] for r in rows(figures, FACTOR, RATE)] == ["yes", "yes"]


def test_a_claim_beyond_its_bound_is_not_reached() -> None:
    """A regression would be reported as a success."""
    figures = {"test_a[1]": {"ours / theirs": 1.03}, "test_b": {"rate": 0.89}}
    assert [r[3] for r in rows(figures, FACTOR, RATE)] == ["**no**", "**no**"]


def test_what_was_skipped_is_said_to_be_not_measured() -> None:
    """A benchmark that didn't run would end the report, or pass for one that did."""
    assert rows({"test_b": {"bytes": 1.0}}, FACTOR) == [
        ["ours over theirs", "≤ 1.02", "not measured", ""]
    ]


def test_a_figure_without_a_goal_is_neither_reached_nor_missed() -> None:
    """A limit that nobody promised to reach would look like a failure."""
    assert rows({"test_b": {"bytes": 1234567.0}}, KNOWN) == [["bytes", "", "1,234,567", ""]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with some points of every picture."""
    times = {"seconds": 0.1, "seconds, memcpy": 0.05}
    promote = {**times, "seconds, zstd-3 safetensors": 0.3, "seconds, safetensors": 0.2}
    hot = {**times, "seconds, mlx-lm": 0.2}
    figures: dict[str, dict[str, float]] = {
        "test_prefill": {"seconds, 256": 9.0, "seconds, 2048": 80.0},
        "test_eviction": {"default, 0.01": 0.2, "default, 0.3": 0.4, "whole-lru, 0.01": 0.1},
    }
    for n in (256, 2048):
        for shape in ("SmolLM2", "8B"):
            figures[f"test_promote[{shape}-{n}]"] = promote
        for mode in ("sequential", "batched"):
            figures[f"test_hot_hit[{mode}-8B-{n}]"] = hot
    path = tmp_path / "bench.json"
    path.write_text(written(figures), encoding="utf-8")
    return path


def test_the_report_writes_its_table_and_small_pictures(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make bench` would end without what the README shows, or with megabytes of it."""
    folder = run.parent / "shown"
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--figures", str(folder)])
    report.main()
    table = run.with_suffix(".md").read_text(encoding="utf-8")
    assert table.count("\n|") == len(CLAIMS) + 1
    assert {p.name for p in folder.iterdir()} == {"promote.png", "hot-hit.png", "eviction.png"}
    for path in folder.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 60_000


def test_a_picture_without_figures_is_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of some benchmarks alone would fail, or draw empty axes."""
    run.write_text(written({"test_eviction": {"default, 0.1": 0.5}}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["report", str(run)])
    report.main()
    assert [p.name for p in (run.parent / "figures").iterdir()] == ["eviction.png"]

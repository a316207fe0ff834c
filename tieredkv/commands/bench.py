"""``tieredkv bench``: what this machine makes of a cold tier."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tieredkv.commands.console import FINE, STATUS, Progress, add_command
from tieredkv.core import TieredKVError
from tieredkv.units import bytes_text

if TYPE_CHECKING:
    from tieredkv.selftest import Report

_BENCH_HELP = f"""\
examples:
  tieredkv bench                                   disk, codec and promote, in some seconds
  tieredkv bench --model ./model                   and from how many tokens on a hit pays
  tieredkv bench --dir /Volumes/fast/prompts       another disk

Measures in a folder of its own beside the cold tier's, which takes up to 2 GB and is removed at the
end. Prompts that are stored there are not touched. Best on a machine that does nothing else.

{STATUS.format(failed="too little disk is free, or the model can't be loaded")}
"""


class _NoModel(TieredKVError):
    """The model can't be loaded."""


def add(commands: Any) -> None:
    """Add the command's parser."""
    bench = add_command(
        commands,
        "bench",
        "a quick self-test of this machine: disk, promote, prefill, break-even",
        "Measure how fast this machine writes, reads and promotes stored prompts, and, with a "
        "model, from how many tokens on that is faster than to compute them again.",
        _BENCH_HELP,
        run,
    )
    bench.add_argument("--model", metavar="PATH|REPO", help="measure its prefill and its state")


def run(options: argparse.Namespace) -> int:
    """Measure, and say what it means."""
    from tieredkv.selftest import measure  # late: it loads mlx

    progress = Progress("measuring")
    try:
        report = measure(options.dir, options.model, progress)
    except (OSError, ValueError) as e:
        raise _NoModel(f"{options.model or 'the self-test'} failed: {e}") from e
    finally:
        progress.end()
    if options.json:
        print(json.dumps(asdict(report) | {"verdict": _verdict(report)}, indent=2))
        return FINE
    print("\n".join([*_table(report), "", _verdict(report)]))
    return FINE


def _table(report: Report) -> list[str]:
    rows = [
        ("disk, written and synced", _rate(report.disk.write)),
        ("disk, read", _rate(report.disk.read)),
        ("state, encoded and written", f"{_rate(report.encoded)}, packed to {report.ratio:.2f}"),
    ]
    rows += [
        (
            f"promote of {p.n_tokens:,} tokens",
            f"{p.seconds * 1000:,.0f} ms, {bytes_text(p.n_bytes)} of state, "
            f"{_rate(p.n_bytes / p.seconds)}",
        )
        for p in report.promoted
    ]
    if report.prefill is not None:
        rows.append(("prefill", f"{report.prefill:,.0f} tokens/s"))
    width = max(len(name) for name, _ in rows)
    return [report.directory, *(f"  {name.ljust(width)}  {value}" for name, value in rows)]


def _rate(per_second: float) -> str:
    return f"{bytes_text(per_second)}/s"


def _verdict(report: Report) -> str:
    if report.prefill is None:
        return (
            f"State as large as that of a model of 8B comes back at {report.promote:,.0f} tokens "
            "a second: a hit on disk pays for every such model whose prefill is slower. --model "
            "measures yours."
        )
    last = report.promoted[-1]
    computed = last.n_tokens / report.prefill
    if report.break_even is None:
        return (
            f"Here it is faster to compute than to read: {last.n_tokens:,} tokens take "
            f"{computed * 1000:,.0f} ms, and {last.seconds * 1000:,.0f} ms from disk. The "
            "memory tier alone pays: --prompt-cache-dir none."
        )
    return (
        f"A hit on disk pays from {report.break_even:,} tokens on: {last.n_tokens:,} tokens come "
        f"back in {last.seconds * 1000:,.0f} ms and take {computed * 1000:,.0f} ms to compute, "
        f"{computed / last.seconds:.1f} times as long."
    )

"""Tables and pictures of a benchmark run.

    python -m bench.report build/bench.json [--figures DIR]

Prints all figures, writes the promised ones as a Markdown table beside the run (``bench.md``), and
pictures into DIR, or into ``figures`` beside the run.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import figures
from bench.claims import CLAIMS, Claim, Run


def run_of(written: Mapping[str, Any]) -> Run:
    """What pytest-benchmark wrote, by benchmark; without those that were skipped."""
    return {bench["name"]: bench["extra_info"] for bench in written["benchmarks"]}


def table(run: Run, claims: Iterable[Claim] = CLAIMS) -> str:
    """The claims as a Markdown table. What wasn't measured says so."""
    rows = [_row(claim, run.get(claim.bench, {}).get(claim.key)) for claim in claims]
    return "\n".join(["| what | goal | measured | reached |", "|---|---|---|---|", *rows, ""])


def _row(claim: Claim, value: float | None) -> str:
    if value is None:
        return f"| {claim.what} | {claim.goal} | not measured | |"
    reached = ("yes" if claim.is_reached(value) else "**no**") if claim.goal else ""
    return f"| {claim.what} | {claim.goal} | {number(value)} | {reached} |"


def number(value: float) -> str:
    """Three digits after the point, none of a large one: what just misses a bound must show."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"


def machine(written: Mapping[str, Any]) -> str:
    """What the run was made on, in a line."""
    info = written.get("machine_info", {})
    cpu = info.get("cpu", {})
    return (
        f"{cpu.get('count', '?')} cores ({cpu.get('brand_raw', platform.processor() or '?')}), "
        f"{info.get('system', '?')}, Python {info.get('python_version', '?')}, "
        f"{written.get('datetime', '?')[:10]}"
    )


def lines(run: Run) -> Iterator[str]:
    """Each benchmark's figures; ratios and seconds have a point."""
    for name, figures_of in run.items():
        yield name
        for what, value in figures_of.items():
            yield (
                f"  {value:>15,.3f}  {what}"
                if isinstance(value, float)
                else f"  {value:>15,}  {what}"
            )


def main() -> None:
    """Print, and write table and pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, help="JSON of pytest-benchmark")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="where the pictures go")
    args = parser.parse_args()
    written = json.loads(args.run.read_text(encoding="utf-8"))
    run = run_of(written)
    print("\n".join(lines(run)))
    markdown = args.run.with_suffix(".md")
    markdown.write_text(f"{table(run)}\nOn {machine(written)}.\n", encoding="utf-8")
    folder = args.figures or args.run.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(run, folder)
    print(f"\n{table(run)}\nwritten: {markdown}, {', '.join(map(str, drawn))}")


if __name__ == "__main__":
    main()

"""Prints the figures of a benchmark run: ``python -m bench.report build/bench.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> int:
    """Print each benchmark's figures; ratios have a point."""
    for bench in json.loads(Path(sys.argv[1]).read_text())["benchmarks"]:
        print(bench["name"])
        for name, value in bench["extra_info"].items():
            print(
                f"  {value:>15,.3f}  {name}"
                if isinstance(value, float)
                else f"  {value:>15,}  {name}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

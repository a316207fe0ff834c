"""Prints the ratios of a benchmark run: ``python -m bench.report build/bench.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> int:
    """Print one line for each benchmark that has a ratio."""
    for bench in json.loads(Path(sys.argv[1]).read_text())["benchmarks"]:
        info = bench["extra_info"]
        if "ratio" in info:
            figures = ", ".join(f"{k} {v:,}" for k, v in info.items() if k != "ratio")
            print(f"{info['ratio']:.3f}  {bench['name']}  ({figures})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

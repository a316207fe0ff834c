"""Instructions of lookups and evictions: the same on every run, whatever else a machine does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench import instructions

# mlx-lm changes a limit when it is imported, which valgrind refuses.
_MAIN = """
import resource
resource.setrlimit = lambda *_: None
from bench import instructions
instructions.main()
"""


def counted(folder: Path) -> dict[str, int]:
    """Instructions of each section, less those of an empty one."""
    out = folder / "callgrind"
    command = [
        *("valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"),
        *(f"--dump-before={instructions.MARK}", sys.executable, "-c", _MAIN),
    ]
    env = os.environ | {"PYTHONHASHSEED": "0"}
    subprocess.run(command, check=True, env=env, capture_output=True, timeout=300)
    names = list(instructions.sections())
    # What is imported may call it as well; the sections come last.
    parts = sorted(folder.glob("callgrind.*"), key=lambda p: int(p.suffix[1:]))[-len(names) :]
    if len(parts) < len(names):
        pytest.skip(f"callgrind doesn't see {instructions.MARK}: this Python has zlib inside it")
    totals = [int(re.findall(r"^totals: (\d+)", p.read_text(), re.MULTILINE)[0]) for p in parts]
    return {name: n - totals[0] for name, n in zip(names[1:], totals[1:], strict=True)}


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind isn't installed")
def test_instructions(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Of prompts of 2,048 tokens: among 10 and 100 others, against mlx-lm's trie of the 10."""
    found = benchmark.pedantic(counted, args=(tmp_path,), rounds=1)
    ours = found["lookup, among few"]
    benchmark.extra_info |= {f"instructions, {name}": n for name, n in found.items()}
    benchmark.extra_info |= {
        "lookup, ours / mlx-lm": ours / found["mlx-lm"],
        "lookup, ours / packing and hashing": ours / found["packing and hashing"],
        "lookup, among many / few": found["lookup, among many"] / ours,
        "evict, of many / few": found["evict, of many"] / found["evict, of few"],
    }
    assert found["lookup, among many"] / ours <= 3

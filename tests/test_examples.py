"""The examples run as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import tiny

EXAMPLE = Path(__file__).resolve().parent.parent / "docs" / "examples" / "rag.py"


def run(model: Path, folder: Path) -> str:
    command = [sys.executable, str(EXAMPLE), "--model", str(model), "--dir", str(folder)]
    done = subprocess.run(
        [*command, "--max-tokens", "4"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def reused(out: str) -> list[tuple[int, int]]:
    """Of each question, tokens that were reused and those of its prompt."""
    found = re.findall(r"(\d+) of (\d+) prompt tokens reused", out)
    return [(int(a), int(b)) for a, b in found]


def test_the_second_run_of_the_retrieval_example_reuses_its_prompts(tmp_path: Path) -> None:
    """It is the first program that many people will try."""
    model = tiny.save(tmp_path / "model", "qwen3")
    first, second = (run(model, tmp_path / "store") for _ in range(2))
    assert len(reused(first)) == 4
    assert reused(first)[0][0] == 0
    assert all(n == total - 1 for n, total in reused(second))
    assert second.count("when it was first asked") == 4

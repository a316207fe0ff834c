"""Fixtures that several test files share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# bench/ is no part of the installed package, and pytest only adds tests/ to the path.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16, downloaded and converted on first use.

    bfloat16, not float32: on MLX's CPU backend its matrix products take half the time.
    """
    from bench.model import ensure

    return ensure("bfloat16")

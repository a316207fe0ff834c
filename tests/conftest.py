"""Fixtures that several test files share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import S3, Redis

# bench/ is no part of the installed package, and pytest only adds tests/ to the path.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16, downloaded and converted on first use.

    bfloat16, not float32: on MLX's CPU backend its matrix products take half the time.
    """
    from bench.model import ensure

    return ensure("bfloat16")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A server of S3 that nobody kills: tests have a prefix each."""
    with S3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def redis() -> Iterator[Redis]:
    """A server of Redis that nobody kills: tests have a prefix each."""
    with Redis() as server:
        yield server

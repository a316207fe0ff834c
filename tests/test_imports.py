"""The check that keeps the package's imports going down catches each way to break the rule."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECK = ROOT / ".ci" / "imports.py"

GOOD = {
    "__init__": "from tieredkv.store import TieredStore\n",
    "core": "import numpy\n",
    "keys": "from tieredkv.core import Block\n",
    "layout": "import mlx.core as mx\nimport mlx_lm\nfrom tieredkv import core, keys\n",
    "tiers/__init__": '"""Tiers."""\n',
    "tiers/gate": "import fcntl\n",
    "tiers/environment": "import lmdb\n",
    "tiers/cold": "from tieredkv.tiers import gate\nfrom .gate import Gate\n",
    "store": "from tieredkv.tiers.cold import ColdTier\nimport tieredkv.keys\n",
}


def run(package: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHECK), str(package)], capture_output=True, text=True, check=False
    )


def write(directory: Path, sources: dict[str, str]) -> Path:
    package = directory / "tieredkv"
    for name, source in sources.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package


def test_the_package_itself_passes():
    """If this failed, a module of the package would import one that is not below it."""
    done = run(ROOT / "tieredkv")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_a_partial_tree_whose_imports_go_down_passes(tmp_path):
    """If this failed, the check would demand modules that need not exist, or reject good ones."""
    done = run(write(tmp_path, GOOD))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("core", "import tieredkv.store", "core imports store, which is above it"),
        ("keys", "from tieredkv.store import X", "keys imports store, which is above it"),
        ("keys", "from .tiers import cold", "keys imports tiers.cold, which is above it"),
        ("tiers/gate", "from .cold import C", "tiers.gate imports tiers.cold, which is above it"),
        ("tiers/gate", "from ..store import S", "tiers.gate imports store, which is above it"),
        (
            "keys",
            "def f():\n    from tieredkv import server",
            "keys imports server, which is above",
        ),
        ("codec", "from tieredkv import policy", "codec imports policy, which is beside it"),
        ("metrics", "from tieredkv import keys", "metrics imports keys, which is beside it"),
        ("tiers/hot", "from .cold import C", "tiers.hot imports tiers.cold, which is beside it"),
        ("tiers/writer", "from . import cold", "tiers.writer imports tiers.cold, which is beside"),
        ("store", "from tieredkv import Config", "store imports the package itself"),
        ("store", "import tieredkv", "store imports the package itself"),
        ("store", "import mlx.core as mx", "store imports mlx, which only restored, patch, layout"),
        ("tiers/hot", "from mlx_lm.models import cache", "tiers.hot imports mlx_lm, which only"),
        ("cli", "import lmdb", "cli imports lmdb, which only tiers.environment, tiers.health may"),
        ("tiers/__init__", "from tieredkv.tiers.cold import C", "holds nothing but a docstring"),
        ("helpers", "", "helpers has no row in LAYERS"),
        ("store", "import tieredkv.tiers.odd", "store imports tiers.odd, which has no row"),
    ],
)
def test_a_violation_fails_and_is_named(tmp_path, module, source, message):
    """If this failed, an import that breaks the rule would pass, or say nothing useful."""
    odd = {"tiers/odd": ""} if "odd" in source else {}
    done = run(write(tmp_path, GOOD | odd | {module: f"x = 1\n{source}\n"}))
    assert done.returncode == 1
    assert message in done.stdout
    assert f"{module}.py:" in done.stdout

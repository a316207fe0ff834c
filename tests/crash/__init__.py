"""What the store is put through: kills at any point, power loss, damage, a full and a slow disk,
and calls that fail while a server answers.

Each module is a program too, ``python -m tests.crash.kill`` and so on; the tests named
``test_crash_*`` run a short form of each.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# The helpers beside this package, which pytest finds by itself.
_HELPERS = str(ROOT / "tests")
if _HELPERS not in sys.path:
    sys.path.insert(0, _HELPERS)

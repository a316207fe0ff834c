"""The preloaded disk of powerloss.c: compiled when it is first needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from . import ROOT
from .posix_lmdb import compiler

SOURCE = Path(__file__).with_name("powerloss.c")
LIBRARY = ROOT / "build" / "powerloss.so"


def why_not() -> str | None:
    """Why this machine can't have it, None if it can."""
    if sys.platform != "linux":
        return "writes are intercepted with LD_PRELOAD, which is Linux's"
    return None if compiler() else "there is no C compiler"


def build() -> Path:
    """The compiled library; CalledProcessError if it can't be compiled."""
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > SOURCE.stat().st_mtime:
        return LIBRARY
    LIBRARY.parent.mkdir(exist_ok=True)
    # Under a name of its own first: another process may be at it too.
    made = LIBRARY.with_suffix(f".{os.getpid()}")
    command = [str(compiler()), "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-o", str(made), str(SOURCE), "-ldl", "-lpthread"], check=True)
    made.rename(LIBRARY)
    return LIBRARY


def environment(
    log: Path | None = None, full: Path | None = None, stall: Path | None = None
) -> dict[str, str]:
    """The environment of a process on such a disk; see the source for what the files mean."""
    asked = {"SHIM_LOG": log, "SHIM_FULL": full, "SHIM_STALL": stall}
    shim = {name: str(path) for name, path in asked.items() if path}
    return {**os.environ, **shim, "LD_PRELOAD": str(build())}

"""py-lmdb built with POSIX semaphores, LMDB's locks on macOS, for use on any system.

``python -m tests.crash.posix_lmdb`` builds it into build/posix-lmdb, which goes on PYTHONPATH of
what is to use it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import lmdb

from . import ROOT

FOLDER = ROOT / "build" / "posix-lmdb"
_DEFINE = "-DMDB_USE_POSIX_SEM=1"


def compiler() -> str | None:
    """The C compiler that Python extensions are built with, None if there is none."""
    from shutil import which

    configured = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    return which(configured) or which("cc")


def is_in_use() -> bool:
    """Whether this process has imported that build."""
    return Path(lmdb.__file__).is_relative_to(FOLDER)


def build() -> Path:
    """Build it, of the version that is installed, unless that was done; the folder it is in.

    Raises:
        subprocess.CalledProcessError: there is no compiler, or no way to the package index.
    """
    wanted = version("lmdb")
    if (FOLDER / f"lmdb-{wanted}.dist-info").exists():
        return FOLDER
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-binary", "lmdb", "--no-deps", "--no-cache-dir", "--upgrade"]
    command += ["--target", str(FOLDER), f"lmdb=={wanted}"]
    flags = f"{os.environ.get('CFLAGS', '')} {_DEFINE}".strip()
    subprocess.run(command, check=True, env={**os.environ, "CFLAGS": flags})
    return FOLDER


def environment() -> dict[str, str]:
    """The environment of a process that is to use it."""
    paths = [str(build()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_again(module: str, arguments: list[str]) -> int:
    """Run a module as a program with it; the exit status."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environment(), cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    print(build())

"""Builds the source archive and from it the wheel, installs that, and tests what is installed.

The tests are copied away from the sources, so that ``import tieredkv`` can only mean the wheel's.
Its dependencies are those of the environment that runs this: a fresh one would have to download
them once more.

Usage: ``python .ci/wheel.py``
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheel"
PACKAGE = "tieredkv"

# Fast ones that, together, go through all of the package: files, command line, tiers, mlx-lm.
TESTS = ("wheel", "cli", "layout", "model_identity", "prompt_cache", "upstream")


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command without anything of ours on its path; end with its status if it fails."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    status = subprocess.run(command, cwd=cwd, env=env).returncode
    if status:
        sys.exit(status)


def built() -> Path:
    """The wheel, made from the source archive beside it."""
    # Not from the working directory (-P): there is a folder named build.
    log = WORK / "build.log"
    command = (sys.executable, "-P", "-m", "build", "--outdir", WORK / "dist", ROOT)
    with log.open("wb") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    if status:
        print(log.read_text(errors="replace"))
        sys.exit(status)
    (wheel,) = (WORK / "dist").glob("*.whl")
    return wheel


def problems(wheel: Path) -> list[str]:
    """What is wrong with the wheel: files that it lacks or has too many, and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith(f"{PACKAGE}/")}
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        Metadata.from_email(archive.read(name), validate=True)
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    missing = [f"the wheel lacks {name}" for name in sorted(sources - packed)]
    return missing + [f"the wheel has a stray {name}" for name in sorted(packed - sources)]


def installed(wheel: Path) -> Path:
    """The interpreter of a new environment with the wheel in it."""
    folder = WORK / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    # After the install: pip would find the sources, which this environment has in place of it.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    own = folder / "lib" / version / "site-packages"
    (own / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n", encoding="utf-8")
    return python


def test(python: Path) -> None:
    """Run the tests away from the sources."""
    folder = WORK / "tests"
    for name in ("tests", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    files = [f"tests/test_{name}.py" for name in TESTS]
    run(python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, cwd=folder)


def main() -> int:
    """Build, look, install, test."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    wheel = built()
    found = problems(wheel)
    for problem in found:
        print(f"wheel: {problem}")
    if found:
        return 1
    os.environ["TIEREDKV_WHEEL"] = "1"
    test(installed(wheel))
    return 0


if __name__ == "__main__":
    sys.exit(main())

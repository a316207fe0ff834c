"""What `make wheel` installed is what the other tests then run. Only there: see `.ci/wheel.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distribution, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tieredkv

pytestmark = pytest.mark.skipif(
    "TIEREDKV_WHEEL" not in os.environ, reason="looks at the installed wheel: run `make wheel`"
)


def test_it_is_the_installed_package() -> None:
    """All the other tests would run the sources, and say nothing about the wheel."""
    assert Path(tieredkv.__file__).is_relative_to(sys.prefix)


def test_processes_of_tests_have_it_too() -> None:
    """Tests of the command line and the server would run the sources."""
    program = "import tieredkv; print(tieredkv.__file__)"
    out = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert out.strip() == tieredkv.__file__


def test_type_checkers_see_its_types() -> None:
    """mypy would treat every public name as Any."""
    assert (Path(tieredkv.__file__).parent / "py.typed").is_file()


def test_the_command_is_there() -> None:
    """`pip install` would give people a package without the command that all docs begin with."""
    command = Path(sys.prefix) / "bin" / "tieredkv"
    out = subprocess.run([command, "--version"], check=True, capture_output=True, text=True).stdout
    assert out.split() == ["tieredkv", version("tieredkv")]


def test_what_it_requires_is_what_was_tested() -> None:
    """The tests would pass with libraries that an installation doesn't get."""
    for requirement in map(Requirement, requires("tieredkv") or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            assert requirement.specifier.contains(version(requirement.name))


def test_the_licence_is_with_it() -> None:
    """MIT asks for the text in every copy."""
    files = distribution("tieredkv").files or ()
    assert any(file.name == "LICENSE" for file in files)

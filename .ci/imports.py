"""Fails when an import of the package goes up or sideways, or a library leaves its rooms.

Reads the sources, imports nothing. Imports inside functions and under ``TYPE_CHECKING`` count
like all others: a cycle of names is as hard to read as a cycle of modules.

Usage: ``python .ci/imports.py [PACKAGE_DIRECTORY]``
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "tieredkv"

# From the bottom up. A module may import from the rows below its own, never from its own row.
LAYERS = (
    ("core", "page.__init__"),
    ("admission", "keys", "metrics", "pace", "prompt_files", "texts", "units"),
    ("matching",),
    ("journal", "restored"),
    ("exposition",),
    ("identity", "codec", "policy", "hazard", "layout"),
    ("prompts", "quantize"),
    (
        "tiers.gate",
        "tiers.health",
        "tiers.readahead",
        "tiers.records",
        "tiers.stamp",
        "tiers.traffic",
    ),
    ("tiers.ledger", "tiers.swap"),
    (
        "explain",
        "tiers.audit",
        "tiers.environment",
        "tiers.loader",
        "tiers.pins",
        "tiers.pruning",
    ),
    ("tiers.portable", "tiers.tree", "tiers.usage"),
    ("tiers.selection",),
    ("tiers.hot", "tiers.cold", "tiers.null", "tiers.rebuild", "tiers.writer"),
    ("inquiry", "store"),
    ("prompt_cache",),
    ("calls", "prefill", "patch", "selftest"),
    ("access", "library", "mlxfile", "steering"),
    ("api",),
    ("flags", "handler"),
    ("generation",),
    ("server",),
    ("warming",),
    ("commands.console",),
    ("commands.salts",),
    ("commands.mlxfiles",),
    (
        "commands.bench",
        "commands.compact",
        "commands.completion",
        "commands.explain",
        "commands.exporting",
        "commands.importing",
        "commands.ls",
        "commands.pin",
        "commands.prune",
        "commands.stats",
        "commands.warm",
    ),
    ("commands.unpin", "commands.verify"),
    ("cli",),
    ("__main__",),
)
# The package files: the public names, imported by no module, and those that are a docstring.
TOP = "__init__"
EMPTY = ("commands.__init__", "tiers.__init__")

# The only modules that may import these libraries.
ROOMS = {
    "mlx": (
        "restored",
        "patch",
        "layout",
        "tiers.hot",
        "prompt_cache",
        "prefill",
        "library",
        "mlxfile",
        "selftest",
        "generation",
        "server",
    ),
    "mlx_lm": (
        "restored",
        "layout",
        "prompt_cache",
        "prompts",
        "selftest",
        "patch",
        "library",
        "mlxfile",
        "flags",
        "handler",
        "generation",
        "server",
        "warming",
    ),
    "prometheus_client": ("exposition",),
    "lmdb": ("tiers.environment", "tiers.health"),
}

LEVELS = {module: level for level, row in enumerate(LAYERS) for module in row}


@dataclass(frozen=True, slots=True)
class Import:
    """A dotted name that a module imports, absolute, and the line of the statement."""

    line: int
    target: str


def module_of(path: Path, package: Path) -> str:
    """``tiers/cold.py`` as ``tiers.cold``, relative to the package."""
    return ".".join(path.relative_to(package).with_suffix("").parts)


def imports_of(source: str, module: str, package: str) -> Iterator[Import]:
    """Every import statement of ``module``, with relative ones resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, package)
            yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _absolute(node: ast.ImportFrom, module: str, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = [package, *module.split(".")][: -node.level]
    return ".".join([*parts, node.module] if node.module else parts)


def _modules(package: Path) -> set[str]:
    return {module_of(path, package) for path in package.rglob("*.py")}


def _resolve(target: str, modules: set[str]) -> str:
    """The module that the dotted name below the package lives in; a package's is ``__init__``."""
    parts = target.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        for module in (name, f"{name}.__init__"):
            if module in modules or module in LEVELS:
                return module
    return TOP


def _inside(module: str, target: str) -> str | None:
    """What is wrong with ``module`` importing the package's module ``target``, None if nothing."""
    if target == TOP:
        return f"{module} imports the package itself, which imports all the others"
    if module == TOP or target in EMPTY:
        return None
    if target not in LEVELS:
        return f"{module} imports {target}, which has no row in LAYERS"
    above = LEVELS[target] - LEVELS[module]
    if above > 0:
        return f"{module} imports {target}, which is above it"
    if above == 0:
        return f"{module} imports {target}, which is beside it"
    return None


def _outside(module: str, target: str) -> str | None:
    """What is wrong with ``module`` importing the library name ``target``, None if nothing."""
    library = target.split(".")[0]
    rooms = ROOMS.get(library)
    if rooms is None or module in rooms:
        return None
    return f"{module} imports {library}, which only {', '.join(rooms)} may"


def check(package: Path) -> list[str]:
    """One line per violation: file, line and what is wrong. Modules may be missing."""
    # A dict keeps the order and drops what one statement would say once for each of its names.
    problems: dict[str, None] = {}
    modules = _modules(package)
    prefix = f"{package.name}."
    for path in sorted(package.rglob("*.py")):
        module = module_of(path, package)
        if module not in LEVELS and module not in (TOP, *EMPTY):
            problems[f"{path}:1: {module} has no row in LAYERS of .ci/imports.py"] = None
            continue
        for found in imports_of(path.read_text(encoding="utf-8"), module, package.name):
            problem = _problem(module, found.target, prefix, modules)
            if problem:
                problems[f"{path}:{found.line}: {problem}"] = None
    return list(problems)


def _problem(module: str, target: str, prefix: str, modules: set[str]) -> str | None:
    if not f"{target}.".startswith(prefix):
        return _outside(module, target)
    below = target.removeprefix(prefix)
    if module in EMPTY:
        return f"{module} imports {below}, but holds nothing but a docstring"
    return _inside(module, _resolve(below, modules))


def main(arguments: list[str]) -> int:
    """Check the package directory given, or the project's own."""
    package = Path(arguments[0]).resolve() if arguments else PACKAGE
    problems = check(package)
    for problem in problems:
        print(problem)
    if problems:
        print(f"imports: {len(problems)} violations; they may only go down:")
        for row in reversed(LAYERS):
            print(f"  {', '.join(row)}")
        return 1
    print(f"imports: {len(_modules(package))} modules, all imports go down")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

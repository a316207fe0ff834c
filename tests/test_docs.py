"""What the docs say of flags, sizes, files and links is so. `make docs` says if the site builds."""

from __future__ import annotations

import ast
import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import pytest
import yaml
from mlx_lm.models.cache import make_prompt_cache

from bench import architectures, sizing
from bench.architectures import config_of
from tieredkv import layout
from tieredkv.cli import commands
from tieredkv.flags import parser

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
UNITS = DOCS / "units"


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


# ---- flags


def flags_of_the_cache() -> set[str]:
    """Flags that `tieredkv serve` adds to mlx-lm's, and mlx-lm's own of the prompt cache."""
    p = parser()
    (group,) = [g for g in p._action_groups if g.title == "tiered prompt cache"]
    ours = {flag for action in group._group_actions for flag in action.option_strings}
    return ours | {f for f in p._option_string_actions if f.startswith("--prompt-cache-")}


def test_every_flag_of_the_cache_is_documented_and_no_other() -> None:
    """Operators would not find a flag, or be told of one that the server refuses."""
    table = read("docs/operations.md").partition("## Flags")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(--[a-z-]+)", table, re.MULTILINE)) == flags_of_the_cache()


def test_the_readme_names_every_command_and_no_other() -> None:
    """A command that isn't there is looked for first, one that isn't named never found."""
    rows = re.findall(r"^\| `tieredkv (.*?) \|", read("README.md"), re.MULTILINE)
    named = {name.strip("`") for row in rows for name in row.split(", ")}
    assert named | {"serve"} == set(commands().choices)


# ---- log lines


@cache
def parsed() -> tuple[ast.AST, ...]:
    """Every node of the package's sources."""
    paths = (ROOT / "tieredkv").rglob("*.py")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    return tuple(node for tree in trees for node in ast.walk(tree))


def constants(nodes: Iterable[ast.AST]) -> list[str]:
    """String constants, those of f-strings and adjacent ones as one."""
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def is_logged(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether it logs something that an operator should look at."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "_LOG"
        and node.func.attr in ("warning", "error", "exception")
    )


def pieces(text: str) -> list[str]:
    """What a format always says, in pieces that are long enough to be searched for."""
    found = re.split(r"%[.0-9]*[a-z]|[:;,] ", text)
    return [piece for part in found if len(piece := part.strip(" ;,()")) > 9]


def table_of_the_log() -> str:
    return read("docs/operations.md").partition("## What the log says")[2].partition("\n## ")[0]


def test_what_the_page_says_is_logged_is_what_the_server_says() -> None:
    """Who searches the page for what a server logged would find nothing."""
    cells = re.findall(r"^\| (`.*?) \|", table_of_the_log(), re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    # Taken apart where the server puts them together.
    parts = {part for text in quoted for part in re.split(r"…|\b[NXY]\b|: | \(|\)", text)}
    words = {part.strip(" ;,.") for part in parts} - {""}
    said = "\n".join(constants(parsed()))
    assert len(words) > 20
    assert sorted(part for part in words if part not in said) == []


def test_what_the_server_warns_of_is_on_the_page() -> None:
    """An operator would see a warning, and nothing about what to do."""
    formats = [text for node in parsed() if is_logged(node) for text in constants(node.args[:1])]
    assert len(formats) > 10
    table = table_of_the_log()
    assert [text for text in formats if not any(p in table for p in pieces(text))] == []


# ---- sizes


def test_the_table_of_sizes_is_what_the_layout_says() -> None:
    """Caps would be chosen by what the package took once."""
    page = sizing.PAGE.read_text(encoding="utf-8")
    assert sizing.written(page) == page, "run: python -m bench.sizing --write"


def expected(name: str, config: dict[str, Any]) -> sizing.Layers:
    """The layers of a small model, made as the table's are."""
    n, dtype = config["num_hidden_layers"], "float32"
    if name == "deepseek_v3":
        return sizing.latent(n, config["kv_lora_rank"], config["qk_rope_head_dim"], dtype)
    heads, width = config["num_key_value_heads"], config["head_dim"]
    full = sizing.attention(1, heads, width, dtype)
    if name == "qwen3_next":
        every = config["full_attention_interval"]
        return tuple(
            layer
            for i in range(n)
            for layer in (full if i % every == every - 1 else sizing.recurrent(1))
        )
    if name != "gemma3_text":
        return full * n
    every = config["sliding_window_pattern"]
    ring = sizing.sliding(1, heads, width, config["sliding_window"], dtype)
    return tuple(layer for i in range(n) for layer in (full if i % every == every - 1 else ring))


def prefilled(name: str) -> list[Any]:
    """Caches of a small model after 40 tokens."""
    model = architectures.build(name)
    caches: list[Any] = make_prompt_cache(model)
    architectures.feed(model, caches, list(range(1, 41)))
    return caches


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gemma3_text", "qwen3_next"])
def test_sizes_are_computed_as_models_have_them(name: str) -> None:
    """A kind of layer would be counted wrong, and with it each model that has it."""
    assert layout.inspect(prefilled(name), 40).layers == expected(name, config_of(name))


def test_recurrent_state_is_computed_as_a_model_has_it() -> None:
    """Snapshots of hybrid models, most of what they take, would be counted wrong."""
    config = config_of("qwen3_next")
    keys, values = (
        (config[f"linear_num_{kind}_heads"], config[f"linear_{kind}_head_dim"])
        for kind in ("key", "value")
    )
    state = sizing.gated_delta(keys, values, config["linear_conv_kernel_dim"], "float32")
    first = prefilled("qwen3_next")[0]
    assert [a.shape for a in first.cache] == [spec.shape for spec in state]


@pytest.mark.parametrize(
    ("name", "measured"), [("Gemma 3 27B", 0.80), ("Gemma 3 1B", 0.74), ("gpt-oss-20b", 0.52)]
)
def test_sizes_on_disk_are_near_what_was_measured(name: str, measured: float) -> None:
    """The table would promise room that isn't there; see docs/decisions.md for the figures."""
    (model,) = [m for m in sizing.MODELS if m.name == name]
    leaf = model.layers[0].leaves[0]
    plain = sizing.Model("", sizing.attention(len(model.layers), leaf.heads, leaf.width))
    share = sizing.a_prompt(model, 4396).encoded / (sizing.a_token(plain).raw * 4396)
    assert share == pytest.approx(measured, abs=0.02)


# ---- files


def test_the_launchd_file_starts_a_server_with_flags_that_it_takes() -> None:
    """A Mac would not start it, and say so only in a log that nobody looks at."""
    found = plistlib.loads((UNITS / "tieredkv.serve.plist").read_bytes())
    command, serve, *arguments = found["ProgramArguments"]
    assert (Path(command).name, serve) == ("tieredkv", "serve")
    assert parser().parse_args(arguments).prompt_cache_dir.startswith("/Users/YOU/")
    assert found["Umask"] == 0o077


def test_the_systemd_file_starts_a_server_with_flags_that_it_takes() -> None:
    """A unit with a wrong flag is restarted for ever."""
    text = read("docs/units/tieredkv.service").replace("\\\n", " ")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    command, serve, *arguments = line.split()
    assert (Path(command).name, serve) == ("tieredkv", "serve")
    assert parser().parse_args(arguments).prompt_cache_dir == "/var/cache/tieredkv"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """systemd ignores what it doesn't know, such as hardening with a typing error in it."""
    unit = tmp_path / "tieredkv.service"
    text = read("docs/units/tieredkv.service")
    unit.write_text(text.replace("/opt/tieredkv/bin/tieredkv", sys.executable), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True
    )
    # It complains of the machine's other units as well.
    assert [line for line in done.stderr.splitlines() if unit.name in line] == []


# ---- links, and what other files name


def links(page: Path) -> Iterator[str]:
    """Relative links of a page outside of the site, without what comes after a #."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            yield target


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    """The first page that people see would send them nowhere."""
    found = list(links(ROOT / name))
    assert found
    assert [target for target in found if not (ROOT / target).exists()] == []


def targets() -> set[str]:
    """What `make` can make by name."""
    (line,) = re.findall(r"^\.PHONY:(.*)$", read("Makefile"), re.MULTILINE)
    return set(line.split())


@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/contributing.md", ".github/pull_request_template.md"],
)
def test_targets_of_make_that_are_named_are_there(name: str) -> None:
    """Who follows the page would be stopped by make."""
    named = re.findall(r"(?:^|`)make ((?:[a-z]+ ?)+)", read(name), re.MULTILINE)
    words = {word for words in named for word in words.split()}
    assert words
    assert words <= targets()


def test_github_runs_what_ci_runs_on_both_systems() -> None:
    """A pull request would be called good by checks of another kind, or on one system."""
    (job,) = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"].values()
    systems = {name.partition("-")[0] for name in job["strategy"]["matrix"]["os"]}
    assert systems == {"ubuntu", "macos"}
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == ".ci/run"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert set(re.findall(r"\bmake ([a-z]+)", read(".ci/run"))) <= targets()


def test_hooks_check_what_lint_checks() -> None:
    """A commit would pass here and fail in CI."""
    (repo,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    hooks = {hook["entry"].removeprefix(".venv/bin/") for hook in repo["hooks"]}
    recipe = read("Makefile").partition("\nlint:")[2].partition("\n\n")[0]
    lint = {line.removeprefix("\t@$(BIN)/") for line in recipe.splitlines() if "$(BIN)" in line}
    assert {h.split(" --")[0].removesuffix(" .") for h in hooks} == {
        x.split(" --")[0].removesuffix(" .") for x in lint
    }


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_a_form_asks_for_what_is_needed(name: str) -> None:
    """GitHub shows a form that it can't read as none at all."""
    form = yaml.safe_load(read(f".github/ISSUE_TEMPLATE/{name}.yml"))
    ids = {field["id"] for field in form["body"] if field["type"] != "markdown"}
    needed = {"bug": {"versions", "log", "how"}, "feature": {"problem"}}
    assert needed[name] <= ids

"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import caches
import mlx.core as mx
import pytest
from caches import MODEL

from tieredkv import TieredPromptCache
from tieredkv.cli import commands, main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cold tier with two prompts of one model and one of another, salted."""
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        for tokens in ([*range(9)], [50, 51, 52]):
            cache.insert_cache(MODEL, tokens, caches.make(tokens, mx.bfloat16))
    with TieredPromptCache(tmp_path, block_tokens=4, salt=b"very secret") as cache:
        cache.insert_cache(("other", None, None), [1, 2], caches.make([1, 2]))
    return tmp_path


def test_stats_tell_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator looks here before deleting anything."""
    assert main(["stats", "--dir", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "5 blocks" in out
    assert "\nmodel\n" in out
    assert "\nother (salted)\n" in out
    assert "2 KVCache 2x4 bfloat16" in out
    assert "very secret" not in out


def test_stats_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts read this one; sizes are bytes, times nanoseconds."""
    assert main(["stats", "--dir", str(folder), "--json"]) == 0
    usage = json.loads(capsys.readouterr().out)
    by_model = {n["model"]: n for n in usage["namespaces"]}
    assert by_model["name:model"]["blocks"] == 4
    assert by_model["name:other"]["salted"] is True
    assert usage["file_bytes"] == (folder / "data.mdb").stat().st_size
    one = by_model["name:model"]
    assert 0 < one["oldest_use"] <= one["newest_use"]


def test_stats_work_while_another_process_writes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A running server is the usual case."""
    program = (
        "import sys; from tieredkv import TieredPromptCache\n"
        "cache = TieredPromptCache(sys.argv[1], block_tokens=4)\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "open\n"
    assert main(["stats", "--dir", str(folder)]) == 0
    assert "5 blocks" in capsys.readouterr().out
    other.communicate("")
    assert other.returncode == 0


def test_stats_of_nothing_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error in the directory must not look like an empty cache, nor create one."""
    assert main(["stats", "--dir", str(tmp_path / "absent")]) == 1
    assert "no cold tier" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_stats_do_not_load_mlx(folder: Path) -> None:
    """Seconds of start-up for a report of milliseconds."""
    program = (
        "import sys; from tieredkv.cli import main; main(sys.argv[1:]);"
        "assert not {'mlx.core', 'mlx_lm'} & sys.modules.keys()"
    )
    subprocess.run(
        [sys.executable, "-c", program, "stats", "--dir", str(folder)],
        check=True,
        capture_output=True,
    )


@pytest.mark.parametrize("command", ["", *commands().choices])
def test_help_is_there_for_every_command(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must be enough to get going, and come without a traceback."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: tieredkv")
    if command != "serve":
        assert "examples:" in out
        assert "exit status: 0 fine, 1 " in out


def test_the_public_names_are_these() -> None:
    """Each of them is a promise; each one more is too."""
    import tieredkv

    assert tieredkv.__all__ == [
        "Config",
        "GenerationThread",
        "Hit",
        "Namespace",
        "PinRefused",
        "Pinned",
        "Problem",
        "Quantization",
        "Remote",
        "SaltedPrompt",
        "StoreStats",
        "TieredKVError",
        "TieredPromptCache",
        "TieredStore",
        "adopt",
        "generate",
        "serve",
        "stream_generate",
    ]
    assert all(getattr(tieredkv, name) for name in tieredkv.__all__)


def run(folder: Path, *arguments: str | bytes, **more: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "tieredkv", arguments[0], "--dir", folder, *arguments[1:]]
    return subprocess.run(command, capture_output=True, check=False, **more)


@pytest.mark.parametrize("command", ["ls", "stats"])
def test_a_terminal_that_knows_ascii_only_gets_all_that_it_can_show(
    folder: Path, command: str
) -> None:
    """Over ssh and in cron the locale is often C: the branches of a tree ended it."""
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = run(folder, command, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"model" in done.stdout


def test_a_command_whose_output_is_closed_does_its_work(folder: Path) -> None:
    """Programs are started so by those who want nothing of them."""
    program = [sys.executable, "-m", "tieredkv", "stats", "--dir", str(folder)]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "-", *program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("flag", ["--salt", "--cache-salt", "--api-key"])
def test_what_is_no_text_is_refused_in_a_line(folder: Path, flag: str) -> None:
    """A traceback tells nobody that a variable of a script holds bytes of another encoding."""
    done = run(folder, "prune", flag, b"\xff", "--dry-run")
    assert done.returncode == 2
    assert b"is no UTF-8 text" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [["ls"], ["stats"], ["pin"], ["prune", "--unsalted", "--dry-run"]]
)
def test_a_terminal_obeys_no_name_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """Hosts take names from their clients, who could clear an operator's screen, or worse."""
    model = ("evil\x1b[2J\x1b]0;owned\x07", None, None)
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        cache.insert_cache(model, [1, 2, 3, 4], caches.make([1, 2, 3, 4]))
        assert cache.flush(10)
        cache.pin(model, [1, 2, 3, 4])
        cache.insert_cache(model, [5, 6], caches.make([5, 6]))
    assert main([*arguments, "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "evil" in out
    assert set(out) & {"\x1b", "\x07"} == set()

"""The commands that compute or tokenize: ``explain``, ``bench`` and ``completion``; their page."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from server import Local

from tieredkv import selftest
from tieredkv.cli import main

REFERENCE = Path(__file__).resolve().parent.parent / ".ci" / "reference.py"

ASKED = [
    {"role": "system", "content": "You are a calm and patient assistant of few words."},
    {"role": "user", "content": "Where does the river rise that flows through Hamburg?"},
]
OTHERWISE = [ASKED[0], {"role": "user", "content": "Where does the sun rise in winter?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "model", "qwen3")


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def written(folder: Path, messages: Any) -> str:
    path = folder / "request.json"
    path.write_text(json.dumps(messages))
    return str(path)


def test_explain_refuses_what_is_no_text_in_a_line(model: Path, tmp_path: Path) -> None:
    """A file of another encoding on standard input ended in a traceback."""
    (tmp_path / "cold").mkdir()
    command = [sys.executable, "-m", "tieredkv", "explain", "--dir", str(tmp_path / "cold")]
    # As where the locale is C: what is no text is passed on.
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:surrogateescape"}
    done = subprocess.run(
        [*command, "--model", str(model)], input=b"caf\xe9", capture_output=True, env=env
    )
    assert done.returncode == 1
    assert b"tokenized" in done.stderr
    assert b"Traceback" not in done.stderr


def test_explain_says_what_the_server_will_do(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another template, namespace or tokenizer than the server's, and all it says is wrong."""
    folder = tmp_path / "cold"
    with Local(model, folder) as server:
        server.chat(ASKED)
        server.chat(ASKED, cache_salt="alice")
    asked = ["explain", "--dir", str(folder), "--model", str(model), "--messages"]
    same = answered(capsys, *asked, written(tmp_path, ASKED))
    other = answered(capsys, *asked, written(tmp_path, {"messages": OTHERWISE}))
    salted = answered(capsys, *asked, written(tmp_path, ASKED), "--cache-salt", "alice")
    foreign = answered(capsys, *asked, written(tmp_path, ASKED), "--cache-salt", "bob")
    with Local(model, folder) as server:
        reply = server.chat(ASKED)
        assert (same["n_tokens"], same["n_prompt"]) == (reply.n_cached, reply.n_prompt)
        assert other["n_tokens"] == server.chat(OTHERWISE).n_cached
    assert same["reason"] == salted["reason"] == "hit"
    assert foreign["reason"] == "other_salt"
    assert other["reason"] == "diverged"
    assert other["divergence"]["before_text"].endswith("here does the ")
    assert other["divergence"]["prompt_text"].startswith("sun")
    assert other["divergence"]["stored_text"].startswith("river")


def test_explain_for_people(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Text from a file, a flag or standard input is the same prompt, and the answer has the words
    at which two prompts part.
    """
    folder = tmp_path / "cold"
    with Local(model, folder) as server:
        body = {"prompt": "Once upon a time there was", "max_tokens": 2}
        assert server.post(body, "/v1/completions").status == 200
    text = "Once upon a hill and so on"
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    asked = ["explain", "--dir", str(folder), "--model", str(model)]
    outputs = []
    for given in (["--text", text], [str(file)], ["-"], []):
        monkeypatch.setattr(sys, "stdin", file.open())
        assert main([*asked, *given]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1
    assert "hill and" in outputs[0]
    assert "time ther" in outputs[0]
    assert "they part at token" in outputs[0]


def test_explain_by_token_ids_needs_no_tokenizer(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model whose files are gone is looked for all the same."""
    folder = tmp_path / "cold"
    with Local(model, folder) as server:
        server.chat(ASKED)
    found = answered(
        capsys, "explain", "--dir", str(folder), "--model", "org/gone", "--tokens", "[1, 2, 3]"
    )
    assert (found["reason"], found["differences"][0]["field"]) == ("absent", "model")


@pytest.mark.parametrize(
    "given",
    [
        ["--tokens", "[1, 2.5]"],
        ["--tokens", "nowhere.json"],
        ["--tokens", "[99999999999999999999]"],
        ["--messages", "nowhere.json"],
        ["--text", "x", "--tokenizer", "nowhere"],
    ],
)
def test_explain_refuses_what_is_no_prompt(
    model: Path, tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With a line that says why, and no traceback."""
    with Local(model, tmp_path / "cold"):
        pass
    assert main(["explain", "--dir", str(tmp_path / "cold"), "--model", str(model), *given]) == 1
    assert capsys.readouterr().err.startswith("tieredkv: ")


def test_bench_measures_and_leaves_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """People run it on the machine that they work on."""
    report = answered(capsys, "bench", "--dir", str(tmp_path / "cold"), "--model", str(model))
    assert min(report["disk"].values()) > 0
    assert [p["n_tokens"] for p in report["promoted"]] == list(selftest.SIZES)
    assert report["prefill"] > 0
    assert "tokens" in report["verdict"]
    assert list(tmp_path.iterdir()) == []


def test_bench_needs_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A self-test that fills the disk does what it should warn of."""
    monkeypatch.setattr(selftest, "NEEDED_BYTES", shutil.disk_usage(tmp_path).total + 1)
    assert main(["bench", "--dir", str(tmp_path / "cold")]) == 1
    assert "free" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_bench_cleans_up_after_an_interrupt(tmp_path: Path) -> None:
    """Ctrl-C in the middle of it must not leave a gigabyte behind."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tieredkv", "bench", "--dir", str(tmp_path / "cold")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("tieredkv-bench-*/store")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said == "tieredkv: stopped\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_commands_and_flags(tmp_path: Path) -> None:
    """A script that bash can't read breaks every shell that sources it."""
    script = tmp_path / "completion"
    with script.open("w") as out:
        command = [sys.executable, "-m", "tieredkv", "completion", "bash"]
        subprocess.run(command, check=True, stdout=out)
    tried = f"source {script}; " + "".join(
        f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; "
        'COMPREPLY=(); _shtab_tieredkv; echo "${COMPREPLY[@]}"; '
        for words in ("tieredkv exp", "tieredkv ls --sor", "tieredkv serve --prompt-cache-di")
    )
    done = subprocess.run(["bash", "-ec", tried], check=True, capture_output=True, text=True)
    first, second, third = done.stdout.splitlines()
    assert "explain" in first.split()
    assert "--sort" in second.split()
    assert {"--prompt-cache-dir", "--prompt-cache-disk-bytes"} <= set(third.split())


def test_zsh_gets_a_script_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the shell of every Mac."""
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef tieredkv")


def test_the_page_of_the_command_line_is_up_to_date() -> None:
    """A flag that isn't in docs/cli.md isn't found. ``python .ci/reference.py`` writes it anew."""
    env = {**os.environ, "COLUMNS": "50"}
    done = subprocess.run(
        [sys.executable, str(REFERENCE), "--check"], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr

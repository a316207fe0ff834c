"""Prompts that are computed ahead: the server finds them, whatever is asked about them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from server import Local

from tieredkv.cli import main
from tieredkv.prompt_files import BadPrompt, read
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdReader
from tieredkv.tiers.pruning import Criteria
from tieredkv.tiers.selection import Selection

TEXT = "the quiet notes of a tin sun in a stone house " * 8
SYSTEM = "answer of the tests, in a tone of stone. " * 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("warm")
    names = ("qwen3", "falcon_h1", "gemma3_text")
    return {name: tiny.save(root / name, name) for name in names}


def warm(
    capsys: pytest.CaptureFixture[str], model: Path, folder: Path, *more: object
) -> dict[str, Any]:
    """What it says, as JSON."""
    capsys.readouterr()
    flags = ["--model", str(model), "--dir", str(folder), "--prefill-checkpoint", "128", "--json"]
    main(["warm", *flags, *map(str, more)])
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("kind", ["falcon_h1", "gemma3_text"])
def test_another_question_hits_all_that_was_warmed(
    models: dict[str, Path], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A document is warmed once and asked about many times; its state must reach to its end, also
    where layers have it at few positions only, and not change the answer.
    """
    store, document = tmp_path / "store", tmp_path / "document.txt"
    document.write_text(TEXT)
    said = warm(capsys, models[kind], store, document)
    assert (said["done"], said["failed"]) == (1, 0)
    with Local(models[kind], store) as server, Local(models[kind], "none") as plain:
        for question in ("\n\nWhat is it?", " and more?"):
            reply = server.chat(TEXT + question)
            assert reply.n_cached >= said["tokens"]
            assert reply.text == plain.chat(TEXT + question).text
        assert reply.n_prompt - said["tokens"] < 60


def test_a_system_prompt_is_warm_for_all_questions(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is what most requests share."""
    store = tmp_path / "store"
    messages = [{"role": "system", "content": SYSTEM}]
    said = warm(
        capsys, models["falcon_h1"], store, write(tmp_path / "x.jsonl", {"messages": messages})
    )
    with Local(models["falcon_h1"], store) as server:
        assert server.chat([*messages, user("what?")]).n_cached >= said["tokens"] > 200


def test_all_forms_of_prompts_are_found(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is a form that requests have, under the salt that they have."""
    store = tmp_path / "store"
    conversation = [user("a b"), {"role": "assistant", "content": TEXT}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    tokens = tiny.tokenizer().encode(TEXT * 2).ids
    lines = write(
        tmp_path / "x.jsonl",
        {"prompt": TEXT},
        {"tokens": tokens, "id": "ids"},
        {"messages": conversation},
        {"messages": [user(SYSTEM)], "tools": [tool]},
        {"messages": [user(SYSTEM)], "cache_salt": "alice"},
    )
    said = warm(capsys, models["qwen3"], store, lines)
    assert (said["done"], said["failed"]) == (5, 0)
    by_name = {r["name"]: r for r in said["results"]}
    assert by_name["ids"]["tokens"] == len(tokens)
    n = [r["tokens"] for r in said["results"]]
    with Local(models["qwen3"], store) as server:

        def complete(prompt: str) -> int:
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
            return server.post(body, "/v1/completions").n_cached

        assert complete(TEXT + "and?") >= n[0]
        assert complete(TEXT * 2 + "xyz") >= n[1] - 1
        assert server.chat([*conversation, user("more?")]).n_cached >= n[2]
        assert server.chat([user(SYSTEM + "?")], tools=[tool]).n_cached >= n[3]
        assert server.chat([user(SYSTEM + "?")], cache_salt="alice").n_cached >= n[4]
        assert server.chat([user(SYSTEM + "?")]).n_cached < 20


def test_a_second_run_computes_nothing(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is run again every night, or after a crash."""
    store = tmp_path / "store"
    lines = write(tmp_path / "x.jsonl", *({"messages": [user(c + TEXT)], "id": c} for c in "abc"))
    first = warm(capsys, models["falcon_h1"], store, lines)
    second = warm(capsys, models["falcon_h1"], store, lines)
    assert first["computed"] > 600
    assert first["bytes_written"] > 0
    assert (second["done"], second["computed"], second["bytes_written"]) == (3, 0, 0)
    assert second["reused"] == second["tokens"] == first["tokens"]


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_ended_goes_on(
    models: dict[str, Path], tmp_path: Path, sig: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours of computing must not depend on nobody closing the lid."""
    store = tmp_path / "store"
    lines = write(tmp_path / "x.jsonl", *({"tokens": [i + 3] * 3000} for i in range(40)))
    command = [sys.executable, "-m", "tieredkv", "warm", "--model", str(models["qwen3"])]
    command += ["--dir", str(store), "--prefill-checkpoint", "256", "--json", str(lines)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as run:
        data = store / "data.mdb"
        deadline = time.monotonic() + 60
        while not (data.exists() and data.stat().st_size > 600_000):
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run.send_signal(sig)
        out, err = run.communicate(timeout=60)
    assert run.returncode == (1 if sig == signal.SIGINT else -sig), err
    if sig == signal.SIGINT:
        said = json.loads(out)
        assert said["stopped"]
        assert said["done"] < 40
    few = write(tmp_path / "few.jsonl", {"tokens": [3] * 3000})
    assert warm(capsys, models["qwen3"], store, few)["reused"] >= 256
    assert main(["verify", "--dir", str(store)]) == 0


def test_what_is_warmed_can_be_pinned(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a night computed must not be gone by noon; also if it was stored before."""
    store, document = tmp_path / "store", tmp_path / "document.txt"
    document.write_text(TEXT)
    warm(capsys, models["falcon_h1"], store, document)
    said = warm(capsys, models["falcon_h1"], store, document, "--pin")
    assert (said["done"], said["computed"]) == (1, 0)
    assert main(["prune", "--dir", str(store), "--to", "0", "--yes"]) == 0
    assert warm(capsys, models["falcon_h1"], store, document)["computed"] == 0


def test_what_cannot_be_pinned_is_said(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be believed to be safe."""
    document = tmp_path / "document.txt"
    document.write_text(TEXT)
    flags = ("--pin", "--pin-share", "0")
    said = warm(capsys, models["qwen3"], tmp_path / "store", document, *flags)
    assert said["failed"] == 1
    assert "not pinned" in said["results"][0]["error"]


def test_what_expires_lives_on_when_it_is_warmed_again(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A nightly run with --ttl 36h must keep alive what it is run for."""
    store, document = tmp_path / "store", tmp_path / "document.txt"
    document.write_text(TEXT)
    expires = []
    for ttl in ("1h", "3h"):
        said = warm(capsys, models["qwen3"], store, document, "--ttl", ttl)
        assert said["done"] == 1
        reader = ColdReader(store, QuantizingCodec())
        expires.append(max(row.use.expires for row in reader.choose(Selection(Criteria())).rows))
        reader.close()
    assert said["computed"] < 20
    assert expires[1] - expires[0] > 7000 * 10**9


def test_quantized_state_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server with --kv-bits has namespaces of its own."""
    model = tiny.save(tmp_path / "model", "qwen3", head_dim=32)
    store, document = tmp_path / "store", tmp_path / "document.txt"
    document.write_text(TEXT)
    flags = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "128")
    said = warm(capsys, model, store, document, *flags)
    assert said["done"] == 1
    with Local(model, store, *flags, "--prefill-checkpoint", "128") as server:
        assert server.chat(TEXT + "?").n_cached >= 256


def test_a_prompt_that_cannot_be_rendered_is_said_and_the_others_are_warmed(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bad line of a thousand must not cost the night."""
    bad = {"messages": [{"role": "user", "content": [{"type": "video"}]}], "id": "bad"}
    lines = write(tmp_path / "x.jsonl", bad, {"messages": [user(TEXT)]})
    said = warm(capsys, models["qwen3"], tmp_path / "store", lines)
    assert (said["done"], said["failed"]) == (1, 1)
    assert said["results"][0]["error"]


def test_a_prompt_that_memory_cannot_hold_is_said(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What isn't stored would be computed again with the first request, and nobody knew why."""
    document = tmp_path / "document.txt"
    document.write_text(TEXT)
    flags = ("--prompt-cache-bytes", "1000")
    said = warm(capsys, models["qwen3"], tmp_path / "store", document, *flags)
    assert said["failed"] == 1
    assert said["results"][0]["lost"]


def test_a_model_that_cannot_be_loaded_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typo is the most common reason."""
    document = tmp_path / "document.txt"
    document.write_text(TEXT)
    said = warm(capsys, tmp_path / "absent", tmp_path / "store", document)
    assert said["error"]


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "{",
        "{}",
        '{"prompt": "a", "tokens": [1]}',
        '{"prompt": ""}',
        '{"tokens": []}',
        '{"tokens": [true]}',
        '{"messages": []}',
        '{"messages": [{"content": "a"}]}',
        '{"messages": [{"role": "user"}], "tools": "x"}',
        '{"prompt": "a", "typo": 1}',
        '{"prompt": "a", "cache_salt": 1}',
        "[" * 100_000,
    ],
)
def test_a_line_that_holds_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    """Found out before the model is loaded, not after an hour."""
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(BadPrompt, match=r"x\.jsonl:3: "):
        list(read(path, "user"))

"""mlx-lm's own prompt-cache files: it reads ours and goes on alike, and we read its."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.cache_prompt
import mlx_lm.generate
import pytest
import tiny
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from tieredkv import TieredPromptCache, stream_generate
from tieredkv.cli import main
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdReader
from tieredkv.tiers.pruning import Criteria
from tieredkv.tiers.selection import Selection

TEXT = "the quiet notes of a tin sun in a stone house " * 6
QUESTION = " and what is that?"
KINDS = ("qwen3", "gemma3_text", "falcon_h1", "llama4_text")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mlxfile")
    return {name: tiny.save(root / name, name) for name in KINDS}


def upstream(monkeypatch: pytest.MonkeyPatch, module: Any, *argv: object) -> str:
    """What a command of mlx-lm prints; run here, since it starts no faster elsewhere."""
    monkeypatch.setattr(sys, "argv", ["mlx_lm", *map(str, argv)])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        module.main()
    return out.getvalue()


def go_on(monkeypatch: pytest.MonkeyPatch, file: Path) -> str:
    flags = ("--max-tokens", 8, "--temp", 0, "--verbose", False)
    command = ("--prompt-cache-file", file, "--prompt", QUESTION, *flags)
    return upstream(monkeypatch, sys.modules["mlx_lm.generate"], *command)


def cache_prompt(monkeypatch: pytest.MonkeyPatch, model: Path, file: Path, *more: object) -> None:
    command = ("--model", model, "--prompt", TEXT, "--prompt-cache-file", file, *more)
    upstream(monkeypatch, mlx_lm.cache_prompt, *command)


def ask(model: Path, store: Path | None) -> tuple[str, int]:
    """The answer to the prompt and the question, and how many tokens were reused for it."""
    loaded, tokenizer = mlx_lm.load(str(model))
    messages = [{"role": "user", "content": TEXT + QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    with TieredPromptCache(store) as cache:
        cache.bind((str(model), None, None), loaded)
        said = list(stream_generate(cache, loaded, tokenizer, prompt, max_tokens=8))
    return "".join(r.text for r in said), said[0].cached_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_mlx_lm_goes_on_from_what_was_exported(
    models: dict[str, Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who leaves must be able to take along what was computed, whatever the layers keep."""
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    command = ["export", str(ours), "--mlx", "--model", str(models[kind]), "--text", TEXT]
    assert main([*command, "--dir", str(tmp_path / "store")]) == 0
    cache_prompt(monkeypatch, models[kind], theirs)
    said = go_on(monkeypatch, ours)
    assert said == go_on(monkeypatch, theirs)
    assert said.strip() == ask(models[kind], None)[0].strip()


def ids(store: Path, n_tokens: int) -> list[str]:
    """Of the chains in a store whose last block makes them so long."""
    reader = ColdReader(store, QuantizingCodec())
    try:
        rows = [r for r in reader.choose(Selection(Criteria())).rows if not r.is_state]
    finally:
        reader.close()
    by_key = {row.key: row for row in rows}

    def length(row: Any) -> int:
        above = by_key.get(row.record.parent)
        return len(row.record.tokens) // 8 + (length(above) if above else 0)

    return [row.key.hex()[:16] for row in rows if length(row) == n_tokens]


@pytest.mark.parametrize("kind", ["qwen3", "falcon_h1"])
def test_a_stored_prefix_is_exported_by_its_id(
    models: dict[str, Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a model to load, byte for byte what the store has."""
    store, file = tmp_path / "store", tmp_path / "x.safetensors"
    model, tokenizer = mlx_lm.load(str(models[kind]))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": TEXT}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    with TieredPromptCache(store) as cache:
        cache.bind(str(models[kind]), model)
        said = list(stream_generate(cache, model, tokenizer, prompt, max_tokens=1))
    n = len(prompt) + len(said)
    (wanted,) = ids(store, n)
    assert main(["export", str(file), "--mlx", "--id", wanted, "--dir", str(store)]) == 0
    caches, metadata = load_prompt_cache(str(file), return_metadata=True)
    assert metadata["model"] == str(models[kind])
    assert [c.offset for c in caches if hasattr(c, "offset")][:1] in ([n], [])
    assert go_on(monkeypatch, file)


@pytest.mark.parametrize("kind", ["gemma3_text", "falcon_h1"])
def test_what_mlx_lm_wrote_hits(
    models: dict[str, Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of years are worth something, and the answer stays that of a cold run."""
    file, store = tmp_path / "x.safetensors", tmp_path / "store"
    cache_prompt(monkeypatch, models[kind], file)
    command = ["import", str(file), "--mlx", "--model", str(models[kind]), "--dir", str(store)]
    assert main([*command, "--text", TEXT]) == 0
    said, n = ask(models[kind], store)
    assert n > len(TEXT) // 2
    assert said == ask(models[kind], None)[0]


def test_a_trusted_file_is_not_computed(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With hours of prefill in it, and nobody else's hands on it."""
    file, store = tmp_path / "x.safetensors", tmp_path / "store"
    cache_prompt(monkeypatch, models["qwen3"], file)
    command = ["import", str(file), "--mlx", "--model", str(models["qwen3"]), "--dir", str(store)]
    assert main([*command, "--text", TEXT, "--trust"]) == 0
    assert capsys.readouterr().out.endswith(" tokens stored\n")
    said, n = ask(models["qwen3"], store)
    assert n > len(TEXT) // 2
    assert said == ask(models["qwen3"], None)[0]


@pytest.fixture
def file(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "file.safetensors"
    cache_prompt(monkeypatch, models["qwen3"], path)
    return path


def refused(
    capsys: pytest.CaptureFixture[str], file: Path, model: Path, store: Path, *more: str
) -> str:
    capsys.readouterr()
    command = ["import", str(file), "--mlx", "--model", str(model), "--dir", str(store), "--json"]
    assert main([*command, *more]) == 1
    out = capsys.readouterr()
    assert "Traceback" not in out.err
    reader = TieredPromptCache(store)
    assert reader.stats().cold.n_blocks == 0
    reader.close()
    return str(json.loads(out.out)["error"])


@pytest.mark.parametrize("where", [0.1, 0.99])
def test_a_file_of_another_prompt_is_refused(
    models: dict[str, Path],
    tmp_path: Path,
    file: Path,
    where: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One wrong letter, early or late, would be a wrong answer."""
    i = int(len(TEXT) * where)
    other = TEXT[:i] + "Z" + TEXT[i + 1 :]
    # Pairs of letters are tokens: as many must remain.
    tokens = [tiny.tokenizer().encode(t).ids for t in (TEXT, other)]
    if len(tokens[0]) != len(tokens[1]):
        i = TEXT.index("q", i) if "q" in TEXT[i:] else TEXT.rindex("q")
        other = TEXT[:i] + "Z" + TEXT[i + 1 :]
    why = refused(capsys, file, models["qwen3"], tmp_path / "s", "--text", other)
    assert "another prompt" in why


def test_a_file_of_other_weights_is_refused(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fine-tune has caches of the same shape."""
    other = tiny.save(tmp_path / "other", "qwen3", seed=5)
    assert "other weights" in refused(capsys, file, other, tmp_path / "s", "--text", TEXT)


def test_a_file_of_another_length_is_refused(
    models: dict[str, Path], tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trusted or not: the key would promise tokens that the state doesn't have."""
    for more in ([], ["--trust"]):
        why = refused(capsys, file, models["qwen3"], tmp_path / "s", "--text", TEXT + "x y", *more)
        assert "tokens where" in why


@pytest.mark.parametrize(
    "flags", [("--max-kv-size", 64), ("--kv-bits", 8, "--quantized-kv-start", 0)]
)
def test_a_file_of_another_kind_of_cache_is_refused(
    tmp_path: Path,
    flags: Sequence[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """State that this model would not have had is no state of this model."""
    model = tiny.save(tmp_path / "model", "qwen3", head_dim=64)
    path = tmp_path / "x.safetensors"
    cache_prompt(monkeypatch, model, path, *flags)
    assert "another kind" in refused(capsys, path, model, tmp_path / "s", "--text", TEXT)


def junk(path: Path) -> None:
    path.write_bytes(b"\xff" * 4000)


def weights(path: Path) -> None:
    mx.save_safetensors(str(path), {"a": mx.zeros(3)})


def hostile_class(path: Path) -> None:
    """Names are looked up in a module that has more than caches."""
    caches = load_prompt_cache(str(path))
    type(caches[0]).__name__ = "KVCache"
    save_prompt_cache(str(path), caches, {"model": "x"})
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"KVCache"', b'"tree_map"'[:9], 1))


def huge_header(path: Path) -> None:
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")


@pytest.mark.parametrize("harm", [junk, weights, hostile_class, huge_header])
def test_a_file_that_is_none_is_refused(
    models: dict[str, Path],
    tmp_path: Path,
    file: Path,
    harm: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It must end in a sentence, and in nothing stored."""
    harm(file)
    for more in ([], ["--trust"]):
        assert refused(capsys, file, models["qwen3"], tmp_path / "s", "--text", TEXT, *more)


def test_a_hybrid_prefix_without_state_at_its_end_is_said(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a state would be another answer."""
    store = tmp_path / "store"
    model, tokenizer = mlx_lm.load(str(models["falcon_h1"]))
    with TieredPromptCache(store, block_tokens=16) as cache:
        cache.bind(str(models["falcon_h1"]), model)
        list(stream_generate(cache, model, tokenizer, TEXT, max_tokens=1, checkpoint_tokens=0))
    (middle,) = ids(store, 16)
    command = ["export", str(tmp_path / "x.safetensors"), "--mlx", "--id", middle]
    assert main([*command, "--dir", str(store)]) == 1
    assert "no state" in capsys.readouterr().err
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["export", "x", "--mlx"],
        ["export", "x", "--mlx", "--text", "a"],
        ["export", "x", "--mlx", "--id", "123456", "--id", "1234567"],
        ["import", "x", "--mlx", "--model", "m"],
        ["import", "x", "--mlx", "--text", "a"],
        ["import", "x", "--mlx", "--model", "m", "--tokens", "[]"],
    ],
)
def test_what_is_missing_is_named_before_a_model_is_loaded(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading one takes a minute."""
    with pytest.raises(SystemExit) as ended:
        main([*flags, "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err

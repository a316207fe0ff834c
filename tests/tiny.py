"""Model folders with random weights, small enough that a server answers in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.architectures import build, config_of

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)
# Pairs that text is merged into, but that a random model's single characters are not: replies
# come back as other tokens than they were generated as.
MERGES = [(a, b) for a in "aeioutns" for b in "aeioutnsr"]
VOCABULARY = 384

# As most templates are: turns between markers, and the tools in the system prompt.
CHAT = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# A reply's thoughts are shown to the model until the user speaks again, and dropped then.
THINKING = """\
{%- set user = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set user.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
{%- set text = (message.content or '').split('</think>')[-1].lstrip('\\n') %}
{%- if loop.index0 > user.last and message.reasoning %}<think>
{{ message.reasoning }}
</think>

{% endif %}{{ text }}
{%- else %}{{ message.content }}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% else %}<think>

</think>

{% endif %}
{%- endif %}"""


def tokenizer() -> Tokenizer:
    """Bytes, some pairs of letters, and the special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(a + b for a, b in MERGES)]
    made = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(w, special=True) for w in SPECIAL])
    return made


def _shift(model: Any, seed: int, part: float) -> None:
    """Move every weight by a part of its own size, another one for each seed."""
    mx.random.seed(seed)
    flat: Any = tree_flatten(model.parameters())
    moved = [(n, a + part * mx.std(a) * mx.random.normal(a.shape)) for n, a in flat]
    model.update(tree_unflatten([(n, m.astype(mx.float32)) for n, m in moved]))


def save(
    folder: Path,
    name: str = "llama",
    *,
    seed: int = 0,
    part: float = 1.0,
    dtype: mx.Dtype = mx.float32,
    template: str = CHAT,
    **config: Any,
) -> Path:
    """Make a folder that ``mlx_lm.load`` takes, or write other weights into one.

    ``seed`` and ``part`` say how the weights differ from those of seed 0; ``name`` is a module
    of ``mlx_lm.models``; ``config`` is part of its configuration.
    """
    folder.mkdir(exist_ok=True)
    config = {"vocab_size": VOCABULARY, **config}
    model = build(name, **config)
    if seed:
        _shift(model, seed, part)
    model.set_dtype(dtype)
    model.save_weights(str(folder / "model.safetensors"))
    words = tokenizer()
    end = words.token_to_id("<|im_end|>")
    described = config_of(name) | config | {"eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(described))
    words.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def save_adapter(folder: Path, seed: int, name: str = "llama") -> Path:
    """Make a folder of low-rank weights for the model of ``save``, far from doing nothing."""
    folder.mkdir()
    model = build(name, vocab_size=VOCABULARY)
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0}
    model.freeze()
    linear_to_lora_layers(model, 4, parameters)
    mx.random.seed(seed)
    flat: Any = tree_flatten(model.trainable_parameters())
    mx.save_safetensors(
        str(folder / "adapters.safetensors"),
        {n: mx.random.normal(a.shape) * 0.2 for n, a in flat},
    )
    described = {"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder

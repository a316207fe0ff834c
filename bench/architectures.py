"""Every architecture in ``mlx_lm.models``, small, with random weights.

``python -m bench.architectures`` stores and restores each of them and prints what it took.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pkgutil
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)

from tieredkv import TieredPromptCache, layout
from tieredkv.codec import PlaneCodec
from tieredkv.core import Block, Refused, TensorSpec

VOCAB = 128
WINDOW = 16

# Values by field name. A field that is here gets its value even if the class has a default,
# since defaults are those of the full-size model; any other required field is an error.
GENERIC: dict[str, Any] = {
    # sizes
    "vocab_size": VOCAB,
    "num_vocab": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    **dict.fromkeys(["hidden_size", "hidden_dim", "model_dim", "d_model", "n_embd"], 64),
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layers", "n_layer"], 4),
    "num_transformer_layers": 4,
    **dict.fromkeys(
        [
            "intermediate_size",
            "ffn_hidden_size",
            "ff_intermediate_size",
            "intermediate_size_mlp",
            "n_inner",
        ],
        96,
    ),
    # heads
    **dict.fromkeys(["num_attention_heads", "num_heads", "n_heads", "n_head"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "n_kv_heads"], 2),
    "num_global_key_value_heads": 2,
    "num_attention_groups": 2,
    "num_query_heads": 4,
    **dict.fromkeys(["head_dim", "global_head_dim", "hidden_size_per_head", "kv_channels"], 16),
    "rotary_dim": 8,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    # experts
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"], 4),
    **dict.fromkeys(
        [
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_topk",
            "moe_k",
            "moe_top_k",
            "top_k_experts",
        ],
        2,
    ),
    **dict.fromkeys(
        ["n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"],
        1,
    ),
    **dict.fromkeys(
        [
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "expert_ffn_hidden_size",
            "share_expert_dim",
        ],
        32,
    ),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group"], 1),
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    # windows
    **dict.fromkeys(
        ["sliding_window", "sliding_window_size", "attention_window_size", "window_size"], WINDOW
    ),
    "sliding_window_pattern": 2,
    "full_attention_interval": 2,
    "layer_group_size": 2,
    "group_norm_size": 2,
    # recurrence
    "state_size": 8,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "conv_L_cache": 3,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "time_step_rank": 4,
    "mamba_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "n_groups": 1,
    # norms and rope
    **dict.fromkeys(
        [
            "rms_norm_eps",
            "norm_eps",
            "layer_norm_eps",
            "layer_norm_epsilon",
            "norm_epsilon",
            "layernorm_epsilon",
        ],
        1e-5,
    ),
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "model_max_length"], 512),
    # switches
    **dict.fromkeys(
        [
            "attention_bias",
            "mlp_bias",
            "use_bias",
            "use_qkv_bias",
            "tie_word_embeddings",
            "mamba_proj_bias",
            "conv_bias",
        ],
        False,
    ),
    **dict.fromkeys(["use_conv_bias", "mamba_conv_bias", "use_qk_norm", "use_expert_bias"], True),
}


def _types(*pair: str) -> list[str]:
    return [*pair] * 2


_SLIDING = _types("sliding_attention", "full_attention")
_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_ROPES = {
    "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_attention": {"rope_theta": 1000.0, "rope_type": "default"},
}
_HALF_ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 1.0,
}
_MINICPM = {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2}
_LONGCAT = {
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "num_layers": 2,
    "ngram_vocab_size_ratio": 2,
    "emb_neighbor_num": 3,
    "emb_split_num": 2,
}
_KDA = {
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "gate_lower_bound": -5.0,
}
_LFM2 = {
    "block_dim": 64,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": _types("conv", "full_attention"),
}

# What an architecture's config has to say beside the generic values.
OVERRIDES: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": _SLIDING},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": _SLIDING, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": _SLIDING},
    "gemma3n": {
        "layer_types": _SLIDING,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "final_logit_softcapping": 30.0,
        "rope_local_base_freq": 1000.0,
    },
    "gemma4_text": {"num_kv_shared_layers": 0, "partial_rotary_factor": 1.0},
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0}},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE | {"layer_types": _types("mamba", "attention")},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {
        "linear_attn_config": _KDA,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2,
    },
    "kimi_linear": {"linear_attn_config": _KDA},
    "laguna": {"layer_types": _SLIDING},
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "lille-130m": {"block_size": 512},
    "llama": {"layer_types": _SLIDING},
    "llama4": {
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 2,
        "rope_scaling": None,
        "num_experts_per_tok": 1,
    },
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mamba2": {"time_step_limit": (0.001, 100.0), "num_heads": 4, "head_dim": 32},
    "mellum": {"layer_types": _SLIDING, "rope_parameters": _ROPES},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minicpm": _MINICPM,
    "minicpm3": _MINICPM | {"rope_scaling": _YARN},
    "minimax_m3_vl": {
        "dense_intermediate_size": 96,
        "index_block_size": 8,
        "index_topk_blocks": 2,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_freq": [0, 1, 0, 1],
    },
    "ministral3": {"layer_types": _SLIDING, "rope_parameters": _YARN},
    "mistral4": {"rope_parameters": _YARN},
    "muse_spark": {
        "post_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0},
        "layer_rope_theta": [10000.0, 0.0] * 2,
        "layer_types": _SLIDING,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 1.0,
        "moe_hidden_size": 64,
        "num_shared_experts": 0,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
        ]
        * 2
    },
    "nemotron_h": {"hybrid_override_pattern": "M*ME", "num_hidden_layers": 4},
    "olmo_hybrid": {
        "layer_types": _types("linear_attention", "full_attention"),
        "linear_allow_neg_eigval": True,
        "linear_num_key_heads": 4,
    },
    "openelm": {
        "ffn_dim_divisor": 8,
        "ffn_multipliers": [1.0] * 4,
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2] * 4,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 2,
    },
    "phixtral": {"rotary_dim": 8},
    "plamo": {"n_shared_head": 2},
    "qwen3_5": {
        "num_experts": 0,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "qwen3_5_moe": {"rope_parameters": _HALF_ROPE},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "spark2_5": {"layer_types": _SLIDING, "rope_parameters": _ROPES},
    "step3p5": {"layer_types": _SLIDING, "moe_layers_enum": "1,2,3"},
    "deepseek_v41": {"compress_ratios": (0,) * 4},
}

# Wrappers: the module and class of their ``text_config``. It takes the wrapper's overrides.
TEXT: dict[str, tuple[str, str]] = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma3n": ("gemma3n", "TextConfig"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "kimi_k3": ("kimi_k3", "TextArgs"),
    "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "mistral3": ("ministral3", "ModelArgs"),
    "muse_spark": ("muse_spark", "TextArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}

# Modules with a Model that can't be made here, and why.
LEFT_OUT: dict[str, str] = {
    "bitnet": "its linear layers are a Metal kernel; there is no CPU version",
    "muse_spark": "its experts are a Metal kernel; there is no CPU version",
    "olmo": "its module ends the process if the package ai2-olmo isn't installed",
    "phi3small": "its block-sparse attention aborts the process on the CPU",
    "prism_hadamard_qwen35": "takes only packed 2-bit weights with their manifest",
}


def module_of(name: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{name}")


def _fields(name: str, cls: str) -> dict[str, Any]:
    known = dataclasses.fields(getattr(module_of(name), cls))
    values = {f.name: GENERIC[f.name] for f in known if f.name in GENERIC}
    return values | {"model_type": name} | OVERRIDES.get(name, {})


def config_of(name: str) -> dict[str, Any]:
    """A small config of an architecture."""
    if name not in TEXT:
        return _fields(name, "ModelArgs")
    text = _fields(*TEXT[name]) | OVERRIDES.get(name, {})
    return {"model_type": name, "vocab_size": VOCAB, "text_config": text}


# A random recurrence forgets within a few tokens, so that a wrong state of it would go unnoticed.
# These parameters set how fast it does, and these values make it remember.
_MEMORY = {"A_log": -3.5, "recurrent_param": -4.0, "w_lora.lora.2.bias": -4.0}


def _weights(name: str, array: mx.array) -> mx.array:
    for ending, value in _MEMORY.items():
        if name.endswith(ending):
            return mx.full(array.shape, value, array.dtype)
    if mx.issubdtype(array.dtype, mx.floating) and not mx.any(array).item():
        # Made to be overwritten by a checkpoint: as zeros it would hide the layer.
        return mx.random.normal(array.shape, array.dtype) * 0.1
    return array


def build(name: str, **more: Any) -> Any:
    """The architecture with random weights, the same ones every time. ``more`` is config."""
    module = module_of(name)
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config_of(name) | more))
    flat: Any = tree_flatten(model.parameters())
    model.update(tree_unflatten([(n, _weights(n, a)) for n, a in flat]))
    mx.eval(model.parameters())
    return model


@cache
def names() -> tuple[str, ...]:
    """Modules of ``mlx_lm.models`` with a model that can be made here."""
    modules = [m.name for m in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return tuple(n for n in modules if n not in LEFT_OUT and hasattr(module_of(n), "Model"))


# ---- what a server does with a model


# Prompt tokens after each prefill step, then all tokens after some decode steps: rings have
# wrapped by then, and stand somewhere in the middle. No boundary is a multiple of the window:
# chunked attention would see nothing of its state there.
PREFILL = (20, 40, 59)
DECODED = (61, 63)


def feed(model: Any, caches: list[Any], tokens: Sequence[int]) -> mx.array:
    """Logits of ``tokens``, evaluated, with all state."""
    logits = model(mx.array([list(tokens)]), cache=caches)
    mx.eval(logits, [c.state for c in caches if not c.empty()])
    layout.vouch(caches)
    return logits


def greedy(logits: mx.array) -> int:
    """The most likely next token."""
    return int(mx.argmax(logits[0, -1]).item())


def continued(model: Any, caches: list[Any], tokens: Sequence[int]) -> list[mx.array]:
    """Logits of ``tokens`` and of four greedy tokens after them. Changes the caches."""
    found = [feed(model, caches, tokens)]
    for _ in range(4):
        found.append(feed(model, caches, [greedy(found[-1])]))
    return found


@dataclasses.dataclass(frozen=True)
class Recording:
    """One prompt with its answer and the live caches as they were at each boundary."""

    tokens: list[int]
    live: dict[int, list[Any]]

    def at(self, n_tokens: int) -> list[Any]:
        """Private caches of the first tokens: of a boundary, or cut from the next one's."""
        boundary = min(b for b in self.live if b >= n_tokens)
        caches = copy.deepcopy(self.live[boundary])
        if boundary > n_tokens and is_windowed(caches):
            _cut(caches, n_tokens)
        elif boundary > n_tokens:
            trimmed = trim_prompt_cache(caches, boundary - n_tokens)
            assert trimmed == boundary - n_tokens
        return caches


def _cut(caches: list[Any], n_tokens: int) -> None:
    """Take the last tokens out of caches after a step of prefill, which left rings long enough."""
    for c in flat(caches):
        if isinstance(c, RotatingKVCache):
            assert c._idx == c.keys.shape[2]
            stop = c._idx - (c.offset - n_tokens)
            start = max(0, stop - c.max_size)
            c.keys, c.values = c.keys[:, :, start:stop], c.values[:, :, start:stop]
            c.offset, c._idx = n_tokens, stop - start
        else:
            c.trim(c.offset - n_tokens)


def record(model: Any, seed: int) -> Recording:
    """Run a prompt and a few decode steps as a server does, without any prompt cache."""
    tokens = np.random.default_rng(seed).integers(1, VOCAB - 1, PREFILL[-1]).tolist()
    caches = make_prompt_cache(model)
    live: dict[int, list[Any]] = {}
    for start, stop in pairwise((0, *PREFILL)):
        logits = feed(model, caches, tokens[start:stop])
        live[stop] = copy.deepcopy(caches)
    while len(tokens) < DECODED[-1]:
        tokens.append(greedy(logits))
        logits = feed(model, caches, tokens[-1:])
        if len(tokens) in DECODED:
            live[len(tokens)] = copy.deepcopy(caches)
    return Recording(tokens, live)


# ---- what the caches hold


def flat(caches: Sequence[Any]) -> list[Any]:
    """The caches of all layers with lists of caches taken apart."""
    found: list[Any] = []
    for c in caches:
        found.extend(flat(c.caches) if isinstance(c, CacheList) else [c])
    return found


def is_sliced(caches: Sequence[Any]) -> bool:
    """Whether every layer has rows per token, so that any prefix is a hit."""
    return all(type(c) in (KVCache, QuantizedKVCache, ConcatenateKVCache) for c in flat(caches))


def is_windowed(caches: Sequence[Any]) -> bool:
    """Whether any block's end is a hit, but not any prefix: rings, and rows per token else."""
    rings = [c for c in flat(caches) if type(c) is RotatingKVCache]
    others = [c for c in flat(caches) if type(c) is not RotatingKVCache]
    return bool(rings) and not any(c.keep for c in rings) and is_sliced(others)


def _arrays(cache: Any) -> list[mx.array | None]:
    """State without what is spare or out of the window, and rings in the order of time."""
    if isinstance(cache, ArraysCache):
        return list(cache.cache)
    if isinstance(cache, QuantizedKVCache):
        return [a[..., : cache.offset, :] for a in (*cache.keys, *cache.values)]
    pair = (cache.keys, cache.values)
    if isinstance(cache, RotatingKVCache):
        ordered = [cache._temporal_order(a) for a in pair]
        return [a[..., -min(cache.max_size, a.shape[2]) :, :] for a in ordered]
    if isinstance(cache, ChunkedKVCache):
        return [a[..., : cache.offset - cache.start_position, :] for a in pair]
    return [a[..., : cache.offset, :] for a in pair]


def state(caches: Sequence[Any]) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Every array of the caches: dtype, shape and bytes."""
    return [
        (str(a.dtype), a.shape, bytes(memoryview(mx.contiguous(a).reshape(-1).view(mx.uint8))))
        for c in flat(caches)
        for a in _arrays(c)
        if a is not None
    ]


# ---- stored and restored


BLOCK_TOKENS = 8


def key_of(name: str) -> tuple[str, None, None]:
    """The model key that a server would use."""
    return (f"no such folder/{name}", None, None)


def store(cache: TieredPromptCache, name: str, recording: Recording) -> None:
    """Insert the recording's state of every boundary, as a server does on its way."""
    for n, caches in recording.live.items():
        cache.insert_cache(key_of(name), recording.tokens[:n], copy.deepcopy(caches))


def prompts(recording: Recording) -> list[tuple[list[int], int]]:
    """Prompts and the hit lengths they must get."""
    tokens, end = recording.tokens, DECODED[-1]
    every = BLOCK_TOKENS if is_windowed(recording.live[end]) else 1
    anywhere = every > 1 or is_sliced(recording.live[end])
    at_end, inside = PREFILL[-1] - 1, 50
    return [
        (tokens[: PREFILL[-1]], at_end // every * every if anywhere else PREFILL[-2]),
        ([*tokens[: PREFILL[-1]], 5, 6, 7], PREFILL[-1]),
        ([*tokens[:inside], 126, 6, 7], inside // every * every if anywhere else PREFILL[-2]),
        ([*tokens[: DECODED[0]], 126], DECODED[0]),
        ([*tokens, 9], end),
        ([*tokens, 9, 8, 7], end),
    ]


def differences(cache: TieredPromptCache, name: str, model: Any, recording: Recording) -> list[str]:
    """How the answers of ``cache`` differ from those of no cache: not at all, it is hoped."""
    found: list[str] = []
    for prompt, expected in prompts(recording):
        got, rest = cache.fetch_nearest_cache(key_of(name), prompt)
        n = len(prompt) - len(rest)
        if n != expected or got is None:
            found.append(f"hit of {n} instead of {expected} tokens of {len(prompt)}")
            continue
        live = recording.at(n)
        if state(got) != state(live):
            found.append(f"state of {n} tokens")
        wanted, answer = continued(model, live, rest), continued(model, got, rest)
        equal = [mx.array_equal(a, b).item() for a, b in zip(wanted, answer, strict=True)]
        if not all(equal):
            found.append(f"logits after {n} tokens and {len(rest)} more: equal {equal}")
        if [greedy(x) for x in wanted] != [greedy(x) for x in answer]:
            found.append(f"tokens after {n} tokens and {len(rest)} more")
    return found


# ---- the table


@dataclasses.dataclass(frozen=True)
class Row:
    """What an architecture's state takes and whether it came back."""

    name: str
    classes: tuple[str, ...]
    block_bytes: float
    snapshot_bytes: int
    refused: str = ""
    differences: tuple[str, ...] = ()


def _encoded(specs: tuple[TensorSpec, ...], tensors: tuple[mx.array, ...], n_tokens: int) -> int:
    block = Block(b"", b"", b"", b"\0" * 8 * n_tokens, specs, tensors)
    return len(PlaneCodec().encode(block))


def _stored_bytes(caches: list[Any], n_tokens: int) -> tuple[float, int]:
    """Encoded bytes per token of the blocks, and of the snapshot."""
    shape = layout.inspect(caches, n_tokens)
    last = n_tokens - n_tokens % BLOCK_TOKENS
    spans = [(i, i + BLOCK_TOKENS) for i in range(0, last, BLOCK_TOKENS)]
    specs = shape.specs(BLOCK_TOKENS)
    blocks = [_encoded(specs, t, BLOCK_TOKENS) for t in layout.capture(caches, shape, spans)]
    plan = layout.SnapshotPlan(caches)
    snapshot = 0 if shape.is_sliced else _encoded(plan.specs(), plan.capture(), 0)
    return (sum(blocks) if specs else 0) / last, snapshot


def examine(name: str) -> Row:
    """Store and restore an architecture in memory and on disk."""
    model = build(name)
    recording = record(model, seed=1)
    end = DECODED[-1]
    classes = tuple(sorted({type(c).__name__ for c in flat(recording.live[end])}))
    try:
        block_bytes, snapshot_bytes = _stored_bytes(recording.at(end), end)
    except Refused as e:
        return Row(name, classes, 0, 0, refused=str(e))
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        with TieredPromptCache(folder, block_tokens=BLOCK_TOKENS) as cache:
            cache.bind(key_of(name), model)
            store(cache, name, recording)
            found += differences(cache, name, model, recording)
        with TieredPromptCache(folder, block_tokens=BLOCK_TOKENS) as cache:
            cache.bind(key_of(name), model)
            found += differences(cache, name, model, recording)
    return Row(name, classes, block_bytes, snapshot_bytes, differences=tuple(found))


def main() -> None:
    """Print a row per architecture and the totals."""
    rows = []
    for name in sys.argv[1:] or names():
        row = examine(name)
        rows.append(row)
        verdict = row.refused or "; ".join(row.differences) or "identical"
        sizes = f"{row.block_bytes:8.0f} {row.snapshot_bytes:8d}"
        print(f"{name:22} {'+'.join(row.classes):36} {sizes}  {verdict}", flush=True)
    identical = [r for r in rows if not r.refused and not r.differences]
    print(f"\n{len(rows)} made, {len(identical)} bit-identical", end="")
    print(f", {sum(bool(r.refused) for r in rows)} refused, {len(LEFT_OUT)} left out:")
    for name, why in LEFT_OUT.items():
        print(f"  {name}: {why}")


if __name__ == "__main__":
    main()

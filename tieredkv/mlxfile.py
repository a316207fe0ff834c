"""mlx-lm's own prompt-cache files: a prefix of a store as one, and one into a store.

Those files have the state of a prompt, and not its tokens. So whoever reads one has to say which
prompt it is of, and that is not believed: the prompt is computed, and compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from tieredkv import keys, layout
from tieredkv.core import Block, BlockKey, Hit, Refused, TieredKVError
from tieredkv.layout import Difference, Layout
from tieredkv.prompt_cache import TieredPromptCache
from tieredkv.prompt_files import Prompt
from tieredkv.restored import Copiers

_STEP_TOKENS = 2048

# How far a file's state may be from the computed one. The rows of the first layer are those of the
# tokens themselves: rounding otherwise everywhere (float32 for bfloat16) made a difference of
# 0.005, the likest of wrong tokens one of 0.37. In all layers it was 0.04; other weights make 1.
TOLERANCE = Difference(first=0.05, all=0.2)

# What mlx-lm raises for a file that isn't one of its own.
_UNREADABLE = (
    *(RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(OSError, OverflowError, RecursionError),
)


class NotStored(TieredKVError):
    """A file, or a prompt, that can't be written or read as it was asked; the message says why."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file holds: ``computed`` of the tokens were not in the store."""

    tokens: int
    computed: int


# ---- the model


class Prompter:
    """A model that was loaded for its tokenizer, its caches and its prefill. On one thread."""

    def __init__(self, path: str, adapter: str | None, trust_remote_code: bool) -> None:
        """Load the model.

        Raises:
            NotStored: it can't be loaded.
        """
        config = {"trust_remote_code": trust_remote_code}
        try:
            self.model, self.tokenizer = load(
                path,
                adapter_path=adapter,
                tokenizer_config=config,
                trust_remote_code=trust_remote_code,
            )
        except Exception as error:
            raise NotStored(f"{path} can't be loaded: {error}") from error
        self.path = path
        self.key = (path, adapter, None)

    def tokens(self, prompt: Prompt) -> list[int]:
        """A prompt's tokens as ``mlx_lm.cache_prompt`` makes them: up to where it goes on.

        Raises:
            NotStored: the chat template refuses it.
        """
        if prompt.tokens:
            return list(prompt.tokens)
        if prompt.text:
            return list(self.tokenizer.encode(prompt.text))
        messages = [dict(message) for message in prompt.messages]
        if not self.tokenizer.has_chat_template:
            return list(self.tokenizer.encode(str(messages[-1].get("content", ""))))
        try:
            return list(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=list(map(dict, prompt.tools)) or None,
                    add_generation_prompt=False,
                    continue_final_message=True,
                    **dict(prompt.template),
                )
            )
        except Exception as error:
            raise NotStored(f"{prompt.name}: {error}") from error

    def compute(
        self, tokens: Sequence[int], caches: list[Any], progress: Callable[[int, int], None]
    ) -> None:
        """Compute ``tokens`` into caches that hold what comes before them."""
        layout.vouch(caches)
        for start in range(0, len(tokens), _STEP_TOKENS):
            part = tokens[start : start + _STEP_TOKENS]
            self.model(mx.array(list(part))[None], cache=caches)
            mx.eval([c.state for c in caches])
            mx.clear_cache()
            progress(start + len(part), len(tokens))


# ---- ours to mlx-lm's


def save_prompt(
    path: Path,
    prompter: Prompter,
    cache: TieredPromptCache,
    tokens: Sequence[int],
    progress: Callable[[int, int], None],
) -> Saved:
    """Write the state of ``tokens``: what the store has of it, and the rest computed.

    Raises:
        OSError: it can't be written.
    """
    # One token is left of every prompt, so of one more none is.
    live, rest = cache.fetch_nearest_cache(prompter.key, [*tokens, tokens[-1]])
    lacking = rest[:-1]
    if live is None:
        live = make_prompt_cache(prompter.model)
    prompter.compute(lacking, live, progress)
    _save(path, live, prompter.path)
    return Saved(len(tokens), len(lacking))


def save_blocks(
    path: Path, model: str, described: str, blocks: Sequence[Block], state: Sequence[Block]
) -> Saved:
    """Write the prefix that ``blocks`` are, of a namespace of the layout ``described``. ``state``
    are snapshots and windows that hang on them.

    Raises:
        NotStored: its layout needs state at its end that isn't there.
        OSError: it can't be written.
    """
    shape = Layout.from_json(described)
    hit = _hit(shape, blocks, {b.key: b for b in state})
    if hit is None or not layout.fits(shape, hit):
        raise NotStored(
            "the layers of this model that can't be cut have no state at the end of this block; "
            "give the prompt instead of an id, and what is lacking is computed"
        )
    _save(path, layout.restore(shape, hit, hit.n_tokens, Copiers()), model)
    return Saved(hit.n_tokens, 0)


def _hit(shape: Layout, blocks: Sequence[Block], state: dict[BlockKey, Block]) -> Hit | None:
    n_tokens = sum(block.n_tokens for block in blocks)
    snapshot = state.get(keys.snapshot_key(blocks[-1].key))
    if shape.is_sliced or snapshot:
        return Hit(tuple(blocks), n_tokens, snapshot)
    n = shape.n_windows(blocks[0].n_tokens) if shape.window else 0
    windows = [state.get(keys.window_key(block.key)) for block in blocks[-n:] if n]
    whole = tuple(window for window in windows if window is not None)
    return Hit(tuple(blocks), n_tokens, None, whole) if n and len(whole) == len(windows) else None


def _save(path: Path, caches: list[Any], model: str) -> None:
    """Write caches as ``mlx_lm.generate --prompt-cache-file`` reads them; whole or not at all."""
    layout.trim(caches)
    metadata = {"model": model, "tokenizer_config": json.dumps({"trust_remote_code": False})}
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".safetensors", dir=path.parent)
    os.close(handle)
    try:
        save_prompt_cache(name, caches, metadata)
        with open(name, "rb") as file:
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


# ---- mlx-lm's to ours


def insert_file(
    path: Path,
    prompter: Prompter,
    cache: TieredPromptCache,
    tokens: Sequence[int],
    progress: Callable[[int, int], None],
) -> Difference:
    """Compute ``tokens``, compare with what the file holds, and store the computed state. How far
    the two are apart.

    What is stored is not the file's: that may have been computed in other steps, or by another
    version, and a hit must be what this machine computes.

    Raises:
        NotStored: the file is of another prompt or model, or none.
    """
    theirs = _read(path, prompter, tokens)
    live, rest = cache.fetch_nearest_cache(prompter.key, [*tokens, tokens[-1]])
    if live is None:
        live = make_prompt_cache(prompter.model)
    prompter.compute(rest[:-1], live, progress)
    off = layout.difference(theirs, live, len(tokens))
    if not (off.first <= TOLERANCE.first and off.all <= TOLERANCE.all):
        raise NotStored(
            f"{path} is of another prompt, or of other weights: its state is {off.first:.2g} from "
            f"the computed one in the first layer and {off.all:.2g} in all, where "
            f"{TOLERANCE.first} and {TOLERANCE.all} may be rounding"
        )
    cache.insert_cache(prompter.key, list(tokens), live, cache_type="user")
    return off


def trust_file(
    path: Path, prompter: Prompter, cache: TieredPromptCache, tokens: Sequence[int]
) -> None:
    """Store what the file holds as the state of ``tokens``, without computing it.

    Raises:
        NotStored: it can't be that, as far as it shows.
    """
    theirs = _read(path, prompter, tokens)
    cache.insert_cache(prompter.key, list(tokens), theirs, cache_type="user")


def _read(path: Path, prompter: Prompter, tokens: Sequence[int]) -> list[Any]:
    """The file's caches, if they are of the model's kind and hold as many tokens."""
    try:
        caches, metadata = load_prompt_cache(str(path), return_metadata=True)
        shape = layout.inspect(caches, len(tokens))
    except Refused as error:
        raise NotStored(f"{path} isn't of this prompt: {error}") from error
    except _UNREADABLE as error:
        raise NotStored(f"{path} is no prompt cache of mlx-lm: {error}") from error
    if shape != layout.probe([prompter.model]):
        made_by = metadata.get("model", "") if isinstance(metadata, dict) else ""
        raise NotStored(
            f"{path} has caches of another kind than {prompter.path} makes: it was made with "
            f"{made_by or 'another model'}, or with --max-kv-size or --kv-bits"
        )
    return list(caches)

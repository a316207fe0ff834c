"""The ways a request can take through the server, with tiny models: none may change its answer."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import caches
import hostile
import mlx.core as mx
import pytest
import tiny
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from server import Endpoint, Local, Reply, Server, wait_until_written

import tieredkv.generation
import tieredkv.server
from tieredkv import TieredPromptCache

UNCACHED = ("none", "--prompt-cache-bytes", "0")
TOOL = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "The height of the tide at a harbour.",
        "parameters": {"type": "object", "properties": {"harbour": {"type": "string"}}},
    },
}
LOG = (
    "Monday: the Aurora left with timber. Tuesday: fog, nobody moved. Wednesday: the Petrel came "
    "in with herring and a torn sail. Thursday: the Aurora came back, her timber sold. "
)
SYSTEM = {"role": "system", "content": "You are a harbour master. Answer in one sentence."}


USER = [{"role": "user", "content": "Once"}]


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for what happens on another thread."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, and one much like it to draft for it."""
    root = tmp_path_factory.mktemp("models")
    return {
        "target": tiny.save(root / "target", "qwen3", head_dim=32),
        "draft": tiny.save(root / "draft", "qwen3", seed=3, part=0.02, head_dim=32),
    }


# ---- what makes a request sequential, and what changes the answer on either path

CASES: dict[str, dict[str, Any]] = {
    "batched": {},
    "seed": {"seed": 7},
    "sampled": {"seed": 7, "temperature": 0.9, "top_p": 0.9},
    "draft": {"draft_model": "DRAFT"},
    "draft-penalty": {"draft_model": "DRAFT", "presence_penalty": -1.5},
    "logprobs": {"logprobs": True},
    "top-logprobs": {"logprobs": True, "top_logprobs": 4},
    "top-logprobs-seed": {"logprobs": True, "top_logprobs": 4, "seed": 7},
    "logit-bias": {"logit_bias": {"260": 12.5, "65": -100}},
    "logit-bias-seed": {"logit_bias": {"260": 12.5, "65": -100}, "seed": 7},
    "tools": {"tools": [TOOL]},
    "tools-seed": {"tools": [TOOL], "seed": 7},
    "penalties": {"presence_penalty": -1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "penalties-seed": {"presence_penalty": -1.5, "presence_context_size": 300, "seed": 7},
}


def ask(endpoint: Endpoint, case: str, draft: Path) -> Reply:
    """The case's request, about a text of its own."""
    more = {k: str(draft) if v == "DRAFT" else v for k, v in CASES[case].items()}
    return endpoint.chat([SYSTEM, {"role": "user", "content": f"{case}: {LOG}"}], **more)


@pytest.fixture(scope="module")
def answers(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Reply]]:
    """Each case's reply without a cache, to a new prompt, to a known one, and after kill -9."""
    root, draft = tmp_path_factory.mktemp("answers"), folders["draft"]
    found: dict[str, list[Reply]] = {case: [] for case in CASES}
    with Local(folders["target"], *UNCACHED) as server:
        for case in CASES:
            found[case].append(ask(server, case, draft))
    with Server(folders["target"], root / "cache", root / "log") as server:
        for _ in range(2):
            for case in CASES:
                found[case].append(ask(server, case, draft))
        wait_until_written(root / "cache")
        server.kill()
    with Server(folders["target"], root / "cache", root / "log") as server:
        for case in CASES:
            found[case].append(ask(server, case, draft))
    return found


def steps(reply: Reply) -> list[Any]:
    """Tokens with the logits behind them, rounded: batches of another size round otherwise."""
    found = []
    for step in reply.logprobs:
        top = [(t["id"], round(t["logprob"], 3)) for t in step.get("top_logprobs", ())]
        found.append((step["id"], round(step["logprob"], 3), sorted(top)))
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_hit_answers_as_no_cache_does(answers: dict[str, list[Reply]], case: str) -> None:
    """On every path, from memory and from disk: the answer would depend on who asked before."""
    without, new, known, restarted = answers[case]
    assert without.n_cached == 0
    assert new.n_cached < new.n_prompt - len(LOG) // 2
    assert known.n_cached == restarted.n_cached == without.n_prompt - 1
    assert without.text
    assert [r.text for r in (new, known, restarted)] == [without.text] * 3
    if "logprobs" in case:
        assert [steps(r) for r in (new, known, restarted)] == [steps(without)] * 3


def test_the_cases_differ(answers: dict[str, list[Reply]]) -> None:
    """A parameter without an effect would be tested by none of them."""
    assert answers["tools"][0].n_prompt > answers["batched"][0].n_prompt + 50
    assert len({replies[0].text for replies in answers.values()}) > len(CASES) // 2


# ---- cached_tokens


def streamed(server: Endpoint, **body: Any) -> tuple[int, int, int]:
    """Prompt tokens, cached ones, and those that the server said it had to compute."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
    with server.send({**options, **body}) as connection, connection.makefile("rb") as lines:
        raw = lines.read()
    total = {int(x.split(b"/")[-1]) for x in raw.splitlines() if x.startswith(b": keepalive")}
    assert len(total) == 1
    data = [x.removeprefix(b"data: ") for x in raw.splitlines() if x.startswith(b"data: {")]
    usage = json.loads(data[-1])["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], total.pop()


@pytest.mark.parametrize("case", ["batched", "seed", "draft", "tools", "logprobs"])
def test_cached_tokens_are_those_that_were_not_computed(
    folders: dict[str, Path], tmp_path: Path, case: str
) -> None:
    """Clients are billed by it, and operators size their caches by it."""
    more = {k: str(folders["draft"]) if v == "DRAFT" else v for k, v in CASES[case].items()}
    with Local(folders["target"], tmp_path / "cache") as server:
        for question in ("Who sold timber?", "Who sold timber?", "Who sold herring?"):
            messages = [{"role": "user", "content": LOG + question}]
            prompt, cached, computed = streamed(server, messages=messages, **more)
            assert cached + computed == prompt
        assert prompt - 40 < cached < prompt - 1


def test_tools_make_another_prompt(folders: dict[str, Path], tmp_path: Path) -> None:
    """The template puts them first: what was computed without them is of no use with them."""
    messages = [{"role": "user", "content": LOG}]
    with Local(folders["target"], tmp_path / "cache") as server:
        plain = server.chat(messages)
        with_tools = server.chat(messages, tools=[TOOL])
        # No more than the markers that every prompt begins with.
        assert with_tools.n_cached < 5
        assert server.chat(messages).n_cached == plain.n_prompt - 1
        again = server.chat(messages, tools=[TOOL])
        assert (again.text, again.n_cached) == (with_tools.text, with_tools.n_prompt - 1)


# ---- what is kept on disk, and how


def test_a_server_that_keeps_what_comes_back_in_eight_bits(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The two flags must reach the cache, and no server without them what was kept with them."""
    flags = ("--cold-quantize", "q8", "--cold-admit", "reused")
    kept, once = ([{"role": "user", "content": f"{x}: {LOG}"}] for x in ("kept", "once"))
    with Local(folders["target"], tmp_path / "cache", *flags) as server:
        server.chat(once)
        first = server.chat(kept)
        assert server.chat(kept).text == first.text
    assert "are not exact" in caplog.text
    with Local(folders["target"], tmp_path / "cache", *flags) as server:
        assert server.chat(kept).n_cached == first.n_prompt - 1
        # No more than the markers that every prompt begins with.
        assert server.chat(once).n_cached < 10
    with Local(folders["target"], tmp_path / "cache") as server:
        assert server.chat(kept).n_cached == 0


# ---- a draft model


def test_state_that_ends_before_its_key_is_refused_and_other_state_restored(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """A reply's last token is in the state of both models only if it is a draft's that was
    accepted, with more of them to come; upstream stores the others too, and answers wrong then.
    """
    target, tokenizer = load(str(folders["target"]))
    draft, _ = load(str(folders["draft"]))
    key = (str(folders["target"]), None, str(folders["draft"]))

    def speculate(prompt: list[int], live: list[Any], n: int) -> list[int]:
        # Ended from outside, as the server does at a stop word.
        kw = {"max_tokens": 30, "draft_model": draft, "num_draft_tokens": 4}
        parts = stream_generate(target, tokenizer, prompt, prompt_cache=live, **kw)
        return [part.token for _, part in zip(range(n), parts, strict=False)]

    def plain(prompt: list[int], n: int) -> list[int]:
        return [r.token for r in stream_generate(target, tokenizer, prompt, max_tokens=n)]

    refused, hits = 0, 0
    with TieredPromptCache(tmp_path, block_tokens=8) as cache:
        cache.bind(key, target, draft)
        for i in range(20):
            prompt = tokenizer.encode(f"{i}. {LOG[i : i + 30]}")
            live = [*make_prompt_cache(target), *make_prompt_cache(draft)]
            tokens = [*prompt, *speculate(prompt, live, 1 + i % 7)]
            assert tokens == prompt + plain(prompt, 1 + i % 7)
            fits = {c.offset for c in live} == {len(tokens)}
            cache.insert_cache(key, tokens, live)
            more = [*tokens, *tokenizer.encode(" And then?")]
            got, rest = cache.fetch_nearest_cache(key, more)
            if not fits:
                refused += 1
                assert len(more) - len(rest) < len(prompt)
                continue
            hits += 1
            assert len(more) - len(rest) == len(tokens)
            assert {c.offset for c in got} == {len(tokens)}
            assert speculate(rest, got, 9) == plain(more, 9)
        assert sum(cache.stats().refused.values()) == refused
    # Both happen, or half of this was not tested.
    assert refused > 2
    assert hits > 2


def test_a_draft_model_answers_alike_with_and_without_a_cache(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Twenty prompts, each asked twice and once more after a restart, with --draft-model."""
    flags = ("--draft-model", str(folders["draft"]))
    prompts = [f"{i}: {LOG[i : 90 + i]}" for i in range(20)]
    target, tokenizer = load(str(folders["target"]))
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True)
        for p in prompts
    ]
    expected = [
        "".join(r.text for r in stream_generate(target, tokenizer, ids, max_tokens=8))
        for ids in rendered
    ]
    with Local(folders["target"], tmp_path / "cache", *flags) as server:
        for _ in range(2):
            replies = [server.chat(p) for p in prompts]
            assert [r.text for r in replies] == expected
        assert [r.n_cached for r in replies] == [r.n_prompt - 1 for r in replies]
    with Local(folders["target"], tmp_path / "cache", *flags) as server:
        replies = [server.chat(p) for p in prompts]
        assert [r.text for r in replies] == expected
        assert [r.n_cached for r in replies] == [r.n_prompt - 1 for r in replies]


@pytest.mark.parametrize("drafted", [False, True])
def test_penalties_are_those_of_upstream(
    folders: dict[str, Path], tmp_path: Path, drafted: bool
) -> None:
    """The prompt is computed before upstream's generator is called, and would be out of sight;
    with a draft model it is out of sight in upstream's, too.
    """
    # Negative: what was seen is said again.
    penalties = {"presence_penalty": -9.0, "presence_context_size": 300}
    target, tokenizer = load(str(folders["target"]))
    draft = load(str(folders["draft"]))[0] if drafted else None
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": LOG}], add_generation_prompt=True
    )
    processors = make_logits_processors(**penalties)
    parts = stream_generate(
        target, tokenizer, ids, max_tokens=8, draft_model=draft, logits_processors=processors
    )
    expected = "".join(r.text for r in parts)
    more = {"draft_model": str(folders["draft"])} if drafted else {"seed": 1}
    with Local(folders["target"], tmp_path / "cache") as server:
        replies = [server.chat(LOG, **penalties, **more) for _ in range(2)]
    assert [r.text for r in replies] == [expected] * 2
    assert replies[1].n_cached == len(ids) - 1


STEP = 16


@pytest.mark.parametrize("with_draft", [[], ["--draft-model"]], ids=["alone", "draft"])
def test_a_quantized_cache_answers_as_upstream_does(
    folders: dict[str, Path], tmp_path: Path, with_draft: list[str]
) -> None:
    """A hit elsewhere than at a step's end moves the moment of quantization. With a draft the list
    that is stored is frozen then: reuse was garbage.
    """
    draft = [*with_draft, *([str(folders["draft"])] if with_draft else [])]
    flags = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "40", *draft)
    flags = (*flags, "--prefill-step-size", str(STEP))
    target, tokenizer = load(str(folders["target"]))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": LOG}], add_generation_prompt=True
    )
    kw: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 40}
    if with_draft:
        kw |= {"draft_model": load(str(folders["draft"]))[0], "num_draft_tokens": 3}
    parts = stream_generate(target, tokenizer, ids, max_tokens=8, prefill_step_size=STEP, **kw)
    expected = "".join(r.text for r in parts)
    cached = 0 if with_draft else (len(ids) - 1) // STEP * STEP
    for n_cached in (0, cached, cached):
        with Local(folders["target"], tmp_path / "cache", *flags) as server:
            reply = server.chat(LOG)
            assert (reply.text, reply.n_cached) == (expected, n_cached)
            assert server.cache.stats().faults == {}


def test_a_target_that_can_not_be_rewound_is_the_clients_error(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Upstream drops the connection without a word."""
    hybrid = tiny.save(tmp_path / "hybrid", "falcon_h1")
    body = {"messages": [{"role": "user", "content": LOG}], "draft_model": str(folders["draft"])}
    with Local(hybrid, "none") as server:
        for _ in range(2):
            reply = server.post(body)
            assert reply.status == 400
            assert "trimmable" in reply.body["error"]
        with server.send({**body, "stream": True}) as connection, connection.makefile() as lines:
            assert "trimmable" in json.loads(list(lines)[-2].removeprefix("data: "))["error"]
        assert server.chat(LOG).text


# ---- thoughts

# All layers sliceable, a hybrid whose layers all have both kinds of state, a sliding window.
ALONE: dict[str, int] = {"seed": 7}
KINDS = pytest.mark.parametrize(
    ("kind", "path"),
    [("qwen3", ALONE), ("falcon_h1", {}), ("falcon_h1", ALONE), ("gemma3_text", {})],
    ids=lambda x: "batched" if x == {} else "sequential" if x == ALONE else x,
)
PATHS = pytest.mark.parametrize("path", [{}, {"seed": 7}], ids=["batched", "sequential"])


def assert_reused(
    model: Path,
    folder: Path,
    first: list[dict[str, Any]],
    second: list[dict[str, Any]],
    n_cached: int,
    **options: Any,
) -> None:
    """Of ``second``, after ``first``, so many tokens are reused, and it is answered as uncached."""
    with Local(model, *UNCACHED) as server:
        expected = server.chat(second, **options)
    with Local(model, folder) as server:
        server.chat(first, **options)
        reply = server.chat(second, **options)
    assert (reply.text, reply.n_cached) == (expected.text, n_cached)


def shared(tokenizer: Any, turns: list[list[dict[str, Any]]], **kw: Any) -> tuple[int, int]:
    """Tokens of the first turn's prompt, and how many of them the second one begins with."""
    one, two = (tokenizer.apply_chat_template(t, add_generation_prompt=True, **kw) for t in turns)
    same = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))
    return len(one), same


def tokenizer_of(folder: Path) -> Any:
    return load(str(folder))[1]


@KINDS
def test_the_next_turn_reuses_all_up_to_the_thoughts(
    tmp_path: Path, kind: str, path: dict[str, int]
) -> None:
    """The template drops them: a state that ends in them would be lost, and the turn with it."""
    assert_the_next_turn_reuses_what_it_shares(tmp_path, kind, True, path)


@PATHS
def test_thoughts_that_are_turned_off_are_dropped_as_well(
    tmp_path: Path, path: dict[str, int]
) -> None:
    """The template then writes an empty block of them, in the last turn only."""
    assert_the_next_turn_reuses_what_it_shares(tmp_path, "lfm2", False, path)


def assert_the_next_turn_reuses_what_it_shares(
    folder: Path, kind: str, thinks: bool, path: dict[str, int]
) -> None:
    model = tiny.save(folder / "model", kind, template=tiny.THINKING)
    question = [SYSTEM, {"role": "user", "content": LOG + "Who sold timber?"}]
    more = [
        *question,
        {"role": "assistant", "content": "the Aurora sold it, outright."},
        {"role": "user", "content": "And the herring?"},
    ]
    options = {"chat_template_kwargs": {"enable_thinking": thinks}, **path}
    n, same = shared(tokenizer_of(model), [question, more], enable_thinking=thinks)
    assert same < n
    assert_reused(model, folder / "cache", question, more, same, **options)


@KINDS
def test_a_turn_after_a_tools_answer_reuses_all_up_to_the_thoughts(
    tmp_path: Path, kind: str, path: dict[str, int]
) -> None:
    """An agent's turns are of this kind: each would be computed from the last user's on."""
    model = tiny.save(tmp_path / "model", kind, template=tiny.THINKING)
    first = [
        *(SYSTEM, {"role": "user", "content": "How is the tide?"}),
        *({"role": "assistant", "content": "<tool_call>"}, {"role": "tool", "content": LOG}),
    ]
    second = [
        *first,
        *({"role": "assistant", "content": "one more"}, {"role": "tool", "content": "low"}),
    ]
    n, same = shared(tokenizer_of(model), [first, second], enable_thinking=True)
    assert same < n
    assert_reused(model, tmp_path / "cache", first, second, same, **path)


@KINDS
def test_a_reply_that_comes_back_as_other_tokens_costs_the_reply_only(
    tmp_path: Path, kind: str, path: dict[str, int]
) -> None:
    """Text has one tokenization and a model may have chosen another."""
    model = tiny.save(tmp_path / "model", kind)
    question = [{"role": "user", "content": LOG}]
    with Local(model, tmp_path / "cache") as server:
        first = server.chat(question, **path)
        more = [
            *question,
            *({"role": "assistant", "content": "a" + first.text},),
            {"role": "user", "content": "Again?"},
        ]
        reply = server.chat(more, **path)
    # Where not every prefix can be restored, the prompt's last token is computed again.
    assert first.n_prompt - 1 <= reply.n_cached <= first.n_prompt
    with Local(model, *UNCACHED) as server:
        assert server.chat(more, **path).text == reply.text


# ---- images

IMAGE, OTHER = -1 - 0xFEDCBA987654321, -1 - 0xFEDCBA987654320


@pytest.mark.parametrize("reopened", [False, True], ids=["hot", "reopened"])
def test_image_ids_are_told_apart_to_the_token(tmp_path: Path, reopened: bool) -> None:
    """Two images of one size give the same tokens: one was described in place of the other."""
    tokens = [5, 6, *[IMAGE] * 6, 7, 8, 9]
    cache = TieredPromptCache(tmp_path, block_tokens=4)
    cache.insert_cache(caches.MODEL, tokens, caches.make(tokens), cache_type="user")
    assert cache.flush(20)
    if reopened:
        cache.close()
        cache = TieredPromptCache(tmp_path, block_tokens=4)
    else:
        cache.trim_to(n_bytes=0)
    with cache:
        for prompt, n in (
            ([*tokens, 1], 11),
            ([5, 6, *[OTHER] * 6, 7], 2),
            ([5, 6, *[IMAGE] * 4, OTHER, OTHER, 7], 6),
            ([5, 6, *[IMAGE] * 5, OTHER, 7, 8], 7),
            ([5, 6, *[IMAGE] * 6, OTHER], 8),
            ([5, 6, *[IMAGE & 0x7FFFFFFF] * 6, 7], 2),
        ):
            got, rest = cache.fetch_nearest_cache(caches.MODEL, prompt)
            assert rest == prompt[n:]
            assert caches.holds(got, prompt[:n])


PATCH = "<tool_response>"
PATCHES = 6
SEEING = tiny.CHAT.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text or '" + PATCH * PATCHES + "' }}{% endfor %}"
    "{% endif %}",
)


class Eyes:
    """A processor of images of one size, each a row of values for every patch."""

    image_token = PATCH

    def __call__(self, text: str, images: list[mx.array]) -> tuple[str, list[mx.array]]:
        return text, images


def image(url: str) -> mx.array:
    """Rows that depend on the URL, in the place of a decoder."""
    return mx.random.normal((PATCHES, 64), key=mx.random.key(sum(url.encode())))


def give_eyes(server: Local) -> None:
    """Let the server's text model see: an image's rows are added to those of its patches."""
    provider = server.generator.model_provider
    wait_for(lambda: provider.tokenizer is not None and provider.is_batchable)
    model, token = provider.model, provider.tokenizer.convert_tokens_to_ids(PATCH)

    def embed_inputs(tokens: mx.array, pixel_values: list[mx.array]) -> mx.array:
        rows, seen = model.model.embed_tokens(tokens), iter(mx.concatenate(pixel_values))
        pairs = zip(tokens.tolist(), rows, strict=True)
        return mx.stack([row + next(seen) if t == token else row for t, row in pairs])

    model.embed_inputs = embed_inputs
    provider.processor = Eyes()


def looking_at(url: str, *more: str) -> list[dict[str, Any]]:
    """A conversation about an image."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": LOG}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    for i, text in enumerate(more):
        turns.append({"role": "user" if i % 2 else "assistant", "content": text})
    return turns


def test_images_are_told_apart_through_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are alike; state of one, found by them, would describe it as the other, or
    as the mere text of such tokens.
    """
    monkeypatch.setattr(tieredkv.server.upstream, "_decode_image", image)
    model = tiny.save(tmp_path / "model", "qwen3", template=SEEING)
    one, two = "data:,one", "data:,two"
    longer = looking_at(one, "A ship.", "Which one?")
    as_text = [{"role": "user", "content": PATCH * PATCHES + LOG}]
    asked = (looking_at(one), longer, looking_at(two), as_text, looking_at(one))
    with Local(model, *UNCACHED) as server:
        give_eyes(server)
        right = [server.chat(messages).text for messages in asked]
    assert len(set(right)) == 4
    with Local(model, tmp_path / "cache") as server:
        give_eyes(server)
        replies = [server.chat(messages) for messages in asked]
    assert [r.text for r in replies] == right
    begin = tokenizer_of(model).encode("<|im_start|>user\n")
    cached = [r.n_cached for r in replies]
    assert cached[:1] + cached[2:4] == [0, len(begin), len(begin)]
    assert cached[1] >= replies[0].n_prompt - 1
    assert cached[4] == replies[0].n_prompt - 1


# ---- clients that leave

LONG = " ".join(f"{i}: {LOG}" for i in range(40))
# A prefill of many steps, each of which can be the last.
SMALL_STEPS = ("--prefill-step-size", "16", "--prefill-checkpoint", "16")


def n_inserts(server: Local) -> int:
    return server.cache.stats().inserts


def wait_until_idle(server: Local) -> None:
    """Until the generation thread has nothing more to insert."""
    seen = -1
    while seen != n_inserts(server):
        seen = n_inserts(server)
        time.sleep(0.8)


def n_to_compute(server: Local, **body: Any) -> int:
    """How many of a text prompt's tokens are not cached, as far as is known from the first step."""
    request = {"max_tokens": 1, "stream": True, **body}
    with server.send(request, "/v1/completions") as connection, connection.makefile("rb") as lines:
        first = next(line for line in lines if line.startswith(b": keepalive"))
    wait_until_idle(server)
    return int(first.split(b"/")[-1])


@PATHS
def test_a_client_that_leaves_without_streaming_stops_its_prefill(
    folders: dict[str, Path], tmp_path: Path, path: dict[str, int]
) -> None:
    """Upstream computes the whole prompt, and all of the answer, for nobody."""
    n = len(tokenizer_of(folders["target"]).encode(LONG))
    with Local(folders["target"], tmp_path / "cache", *SMALL_STEPS) as server:
        body = {"prompt": LONG, "max_tokens": 2, **path}
        connection = server.send(body, "/v1/completions")
        wait_for(lambda: n_inserts(server) >= 4)
        connection.close()
        wait_until_idle(server)
        cached = n - n_to_compute(server, prompt=LONG, **path)
    # Whole checkpoints, and what the next steps did before the connection was looked at.
    assert cached % 16 == 0
    assert 64 <= cached < n / 2


def test_without_checkpoints_a_batched_prefill_cut_short_keeps_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """What a batch has of a prompt that is not done is only in the batch."""
    flags = (*SMALL_STEPS[:2], "--prefill-checkpoint", "0")
    with Local(folders["target"], tmp_path / "cache", *flags) as server:
        connection = server.send({"prompt": LONG, "max_tokens": 2}, "/v1/completions")
        time.sleep(0.3)
        connection.close()
        wait_until_idle(server)
        assert n_inserts(server) == 0


@PATHS
def test_a_client_that_leaves_in_the_middle_of_its_answer_stops_it(
    folders: dict[str, Path], path: dict[str, int]
) -> None:
    """A request of the other path waits until the answer to nobody is complete."""
    with Local(folders["target"], "none") as server:
        ban = {"logit_bias": {str(tiny.tokenizer().token_to_id("<|im_end|>")): -1000}}
        connection = server.send({"messages": USER, "max_tokens": 10**6, **ban, **path})
        time.sleep(0.5)
        connection.close()
        started = time.monotonic()
        assert server.chat("Next, please.", **({} if path else {"seed": 1})).text
        assert time.monotonic() - started < 10


def test_a_client_that_leaves_while_it_waits_is_never_served(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Impatient clients ask again: each time its model would be loaded, and all be computed."""
    target, other = str(folders["target"]), str(folders["draft"])
    with Local(folders["target"], tmp_path / "cache", *SMALL_STEPS) as server:
        body = {"prompt": LONG[:1800], "max_tokens": 1, "seed": 1}
        first = server.send(body, "/v1/completions")
        wait_for(lambda: n_inserts(server) >= 1)
        server.send({**body, "model": other}, "/v1/completions").close()
        with first, first.makefile("rb") as answer:
            assert b"200" in answer.readline()
        wait_until_idle(server)
        assert server.generator.model_provider.model_key == (target, None, None)


def test_a_client_that_stays_gets_its_answer_however_long_it_takes(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """One that sends something after its request, or waits for seconds, has not left."""
    with Local(folders["target"], tmp_path / "cache", *SMALL_STEPS) as server:
        started = time.monotonic()
        body = {"prompt": LONG[:1800], "max_tokens": 1, "seed": 1}
        connection = server.send(body, "/v1/completions")
        connection.sendall(b"\r\n")
        with connection, connection.makefile("rb") as answer:
            assert b"200" in answer.readline()
            assert b'"finish_reason": "length"' in answer.read()
        assert time.monotonic() - started > 3 * tieredkv.generation._LOOK_SECONDS


# ---- malformed requests


@pytest.fixture(scope="module")
def under_attack(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("attack")
    with Server(folders["target"], root / "cache", root / "log") as server:
        yield server


def test_hundreds_of_malformed_requests_are_all_answered(under_attack: Server) -> None:
    """Upstream's generation thread dies of about the sixtieth, and everybody's service with it."""
    outcome = hostile.attack(under_attack, 400)
    assert outcome.faults == []
    assert set(outcome.statuses) == {200, 400, 404}


@pytest.mark.parametrize(
    "body",
    [
        *({"messages": []}, {"messages": {}}, {"messages": "x"}, {}, {"messages": [{}]}),
        *({"messages": USER, "stop": ["x" * 10**6]}, {"messages": USER, "stop": ["\ud800"]}),
        *({"messages": USER, "top_k": True, "temperature": 1}, {"messages": USER, "seed": -1}),
        *({"messages": USER, "temperature": float("nan")}, {"messages": USER, "max_tokens": -1}),
        {"messages": USER, "temperature": 1, "xtc_probability": 0.5, "xtc_threshold": 0.7},
        *({"messages": USER, "stream_options": []}, {"messages": USER, "stream_options": "x"}),
        *({"messages": USER, "tools": "x"}, {"messages": USER, "tools": [5]}),
        *({"messages": USER, "logit_bias": {"5": None}}, {"messages": USER, "draft_model": 5}),
        *({"messages": USER, "logit_bias": {"9999999": 1}}, {"messages": USER, "min_p": 10**400}),
        {"messages": USER, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"messages": USER, "chat_template_kwargs": {"padding": "max_length", "max_length": 9**9}},
        *(b"[" * 100_000, b"\xff", b'{"max_tokens": ' + b"9" * 5000 + b"}"),
    ],
    ids=lambda body: repr(body)[:60],
)
def test_a_request_that_can_not_be_served_is_a_400_with_a_text(
    under_attack: Server, body: Any
) -> None:
    """A dropped connection looks like a crash, and upstream's thread does die of some."""
    reply = under_attack.post(body)
    assert reply.status == 400
    assert reply.body["error"]
    assert under_attack.chat(USER).text


@pytest.mark.parametrize(
    "more",
    [
        *({"stream_options": {}, "stream": True}, {"repetition_context_size": 2**70}),
        *({"temperature": 10**30}, {"temperature": 5e-324}, {"logit_bias": {"5": -1e308}}),
        *({"logit_bias": {"5": 1e308}}, {"repetition_penalty": 1e308}, {"top_k": 2**70}),
    ],
    ids=str,
)
def test_extreme_parameters_are_served(under_attack: Server, more: dict[str, Any]) -> None:
    """They are allowed, and each of them is more than some type in the machine can hold."""
    body = {"messages": USER, "max_tokens": 2, "repetition_penalty": 1.1, "seed": 1, **more}
    for request in (body, {k: v for k, v in body.items() if k != "seed"}):
        path = "/v1/chat/completions"
        status, text = hostile.answer(under_attack, path, json.dumps(request).encode())
        assert (status, b"error" in text) == (200, False)
    assert under_attack.chat(USER).text


@PATHS
def test_a_prompt_of_one_token_is_answered(under_attack: Server, path: dict[str, int]) -> None:
    """There is nothing before its last token: nothing to prefill, to store or to find."""
    body = {"prompt": "?", "max_tokens": 3, "temperature": 0, **path}
    first, again = (under_attack.post(body, "/v1/completions") for _ in range(2))
    assert (first.n_prompt, first.n_cached, again.n_cached) == (1, 0, 0)
    assert first.text
    assert again.text == first.text


@pytest.mark.parametrize(
    ("length", "status"), [("-1", 400), ("x", 400), ("9" * 30, 413), (str(10**12), 413)]
)
def test_lengths_that_make_no_sense_are_refused(
    under_attack: Server, length: str, status: int
) -> None:
    """The handler would wait for bytes that never come, or take memory for all of them."""
    with socket.create_connection(("127.0.0.1", under_attack.port), timeout=10) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).split()[1] == str(status).encode()


@pytest.mark.parametrize("more", [{"model": "no/such"}, {"adapters": "no/such", "model": "SELF"}])
def test_a_model_that_can_not_be_loaded_is_a_404_and_the_next_request_is_served(
    under_attack: Server, folders: dict[str, Path], more: dict[str, str]
) -> None:
    """The model in memory is dropped for it, and must come back with all its prompts."""
    before = under_attack.chat(USER)
    named = {k: str(folders["target"]) if v == "SELF" else v for k, v in more.items()}
    assert under_attack.post({"messages": USER, **named}).status == 404
    after = under_attack.chat(USER)
    assert (after.text, after.n_cached) == (before.text, before.n_prompt - 1)


# ---- tenants


def test_requests_with_other_salts_share_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    """A hit's speed would tell a tenant what others have asked."""
    with Local(folders["target"], tmp_path / "cache") as server:
        first = server.chat(LOG, cache_salt="a")
        n = first.n_prompt - 1
        hits = [server.chat(LOG, **more).n_cached for more in SALTS]
        assert hits == [n, 0, 0, n, n]
        assert server.chat(LOG, cache_salt="a").text == first.text
        wait_until_written(tmp_path / "cache")
    with Local(folders["target"], tmp_path / "cache") as server:
        assert [server.chat(LOG, **more).n_cached for more in SALTS] == [n] * len(SALTS)
        assert server.chat(LOG, cache_salt="c").n_cached == 0


SALTS: tuple[dict[str, Any], ...] = (
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {},
    {"cache_salt": "b", "seed": 1},
    {"seed": 1},
)


def test_api_keys_are_kept_apart_if_so_told(folders: dict[str, Path]) -> None:
    """Without the flag a key is what upstream takes it for: nothing."""
    for flags, shared in (([], True), (["--cache-salt-from-api-key"], False)):
        with Local(folders["target"], "none", *flags) as server:
            hits = []
            for key in ("one", "two", "one"):
                client = server.client.with_options(api_key=key)
                reply = client.chat.completions.create(
                    model="default_model",
                    messages=[{"role": "user", "content": LOG}],
                    max_tokens=4,
                )
                hits.append(reply.usage.prompt_tokens_details.cached_tokens > 0)
            assert hits == [False, shared, True]


@pytest.mark.parametrize("salt", ["", 5, ["a"], "a" * 1025, "\ud800"])
def test_a_salt_that_is_none_is_refused(folders: dict[str, Path], salt: object) -> None:
    """A tenant that believed itself apart would not be."""
    with Local(folders["target"], "none") as server:
        body = {"messages": [{"role": "user", "content": LOG}], "cache_salt": salt}
        reply = server.post(body)
        assert reply.status == 400
        assert "cache_salt" in reply.body["error"]


# ---- batches


def test_a_window_of_a_batch_has_no_padding_in_it(tmp_path: Path) -> None:
    """Beside a longer prompt, over several steps, mlx-lm's rings take padding for tokens."""
    folder = tiny.save(tmp_path / "model", "gpt_oss", sliding_window=16, seed=3)
    dice = random.Random(1)
    short, long = ("".join(dice.choices("bcdfghjklmpqvwxyz", k=n)) for n in (600, 3000))
    later = [short[:257] + tail for tail in ("bb", "cd", "fg")]
    flags = ("--prefill-step-size", "512")

    def ask(server: Local, prompt: str) -> Reply:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": True}
        return server.post(body, "/v1/completions")

    def logprobs(reply: Reply) -> list[float]:
        return [x["logprob"] for x in reply.body["choices"][0]["logprobs"]["content"]]

    with Local(folder, "none", *flags) as server:
        cold = [logprobs(ask(server, prompt)) for prompt in later]
    with Local(folder, "none", *flags) as server:
        beside = [threading.Thread(target=ask, args=(server, p)) for p in (long, short)]
        for thread in beside:
            thread.start()
            time.sleep(0.01)
        for thread in beside:
            thread.join()
        replies = [ask(server, prompt) for prompt in later]
        assert [logprobs(reply) for reply in replies] == cold
        assert replies[-1].n_cached == 256

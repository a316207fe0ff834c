"""The server as users run it: a process, an OpenAI client, a real model."""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server import Server, free_port

import tieredkv.server
import tieredkv.units
from tieredkv import TieredPromptCache

SYSTEM = "You are a harbour master. You know every ship, answer in one short sentence."
STORY = (
    "Here is the log of the last week. Monday: the Aurora left with timber. Tuesday: fog, nobody "
    "moved. Wednesday: the Petrel came in with herring and a torn sail. Thursday: the Aurora came "
    "back, her timber sold. Friday: two strangers asked for the Petrel's captain. "
)
MESSAGES = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": STORY + "Which ship had a torn sail?"},
]


def ask(
    server: Server, messages: list[dict[str, str]] = MESSAGES, **kw: Any
) -> tuple[str, int, int]:
    """Reply, prompt tokens and cached tokens."""
    kw = {"max_tokens": 8, "temperature": 0, **kw}
    r = server.client.chat.completions.create(model="default_model", messages=messages, **kw)
    details = r.usage.prompt_tokens_details
    return r.choices[0].message.content or "", r.usage.prompt_tokens, details.cached_tokens


def ask_streaming(server: Server, **kw: Any) -> tuple[str, int, int]:
    """The same, streamed."""
    kw = {"max_tokens": 8, "temperature": 0, "messages": MESSAGES, **kw}
    stream = server.client.chat.completions.create(
        model="default_model", stream=True, stream_options={"include_usage": True}, **kw
    )
    text, usage = "", None
    for chunk in stream:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = chunk.usage or usage
    return text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def test_a_killed_server_comes_back_warm(smollm2: Path, tmp_path: Path) -> None:
    """The promise: after a kill -9 the same prompt is answered the same, from disk."""
    folder, log = tmp_path / "cache", tmp_path / "log"
    with Server(smollm2, folder, log) as server:
        cold, n, cached = ask_streaming(server)
        assert cached == 0
        wait_for_commit(folder)
        server.kill()
    with Server(smollm2, folder, log) as server:
        assert ask_streaming(server) == (cold, n, n - 1)
        assert ask(server) == (cold, n, n - 1)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what happens just after a reply has been sent."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_commit(folder: Path) -> None:
    """The queue is bounded and drained at once, but a kill may come before its first commit."""
    with TieredPromptCache(folder) as other:
        wait_for(lambda: other.stats().cold.n_blocks > 0)


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with Server(smollm2, folder / "cache", folder / "log") as s:
        yield s


# The path that a request takes: batched, or one at a time because of its seed.
PATHS = pytest.mark.parametrize("path", [{}, {"seed": 7}], ids=["batched", "sequential"])


@PATHS
def test_an_exact_repeat_is_answered_the_same(server: Server, path: dict[str, int]) -> None:
    """Upstream has no token left to compute then: an empty reply, or a dead thread."""
    messages = [{"role": "user", "content": f"Say hello to the harbour. {path}"}]
    first, n, _ = ask(server, messages, **path)
    assert ask(server, messages, **path) == (first, n, n - 1)
    assert ask_streaming(server, messages=messages, **path) == (first, n, n - 1)


@PATHS
def test_a_prompt_and_its_completion_as_prompt(server: Server, path: dict[str, int]) -> None:
    """The whole prompt is known, its last token included: one must be left all the same."""
    prompt = f"{len(path)} ships. Once upon a time"
    create = server.client.completions.create
    kw = {"model": "default_model", "temperature": 0, "max_tokens": 6, **path}
    first = create(prompt=prompt, **kw)
    again = create(prompt=prompt + first.choices[0].text, **kw)
    n = first.usage.prompt_tokens + first.usage.completion_tokens
    assert again.usage.prompt_tokens == n
    assert again.usage.prompt_tokens_details.cached_tokens == n - 1
    assert again.choices[0].text


def test_a_conversation_goes_on_from_where_it_was(server: Server) -> None:
    """The second turn must not prefill the first."""
    reply, n, _ = ask(server)
    more = [
        *MESSAGES,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "And which one sold timber?"},
    ]
    _, longer, cached = ask(server, more)
    assert n <= cached < longer


def test_cached_tokens_are_exact_to_the_token(server: Server) -> None:
    """A prompt that differs in its last word reuses all that comes before."""
    messages = [{"role": "user", "content": STORY + "Who wrote this log, the master"}]
    other = [{"role": "user", "content": STORY + "Who wrote this log, the captain"}]
    ask(server, messages)
    _, n, cached = ask(server, other)
    assert n - 12 < cached < n - 1


@pytest.mark.parametrize(
    "bad",
    [
        {"stop": 5},
        {"stop": [None]},
        {"stop": [["a"]]},
        {"seed": -1},
        {"seed": 2**70},
        {"logit_bias": {"49152": 1.0}},
        {"logit_bias": {"-1": 1.0}},
    ],
    ids=str,
)
def test_parameters_out_of_range_are_the_clients_error(server: Server, bad: dict[str, Any]) -> None:
    """Upstream's thread, or the whole process, dies of each of them."""
    with pytest.raises(openai.BadRequestError):
        ask(server, max_tokens=1, extra_body=bad)
    assert server.health() == 200


@PATHS
def test_a_top_k_of_more_than_all_tokens_is_all_tokens(
    server: Server, path: dict[str, int]
) -> None:
    """It ends upstream's generation thread."""
    text, _, _ = ask(server, max_tokens=2, temperature=0.5, extra_body={"top_k": 60_000}, **path)
    assert text
    assert server.health() == 200


def test_a_list_of_prompts_is_an_error_and_not_the_end(server: Server) -> None:
    """Upstream takes one prompt; its generation thread dies of several."""
    with pytest.raises(openai.APIStatusError):
        server.client.completions.create(model="default_model", prompt=["a", "b"], max_tokens=2)
    assert server.health() == 200


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_the_clients_error(server: Server, prompt: Any) -> None:
    """Upstream's generation thread dies of it, and every later request with it."""
    with pytest.raises(openai.BadRequestError):
        server.client.completions.create(model="default_model", prompt=prompt, max_tokens=2)
    assert server.health() == 200


def test_empty_messages_are_the_clients_error(server: Server) -> None:
    """There is nothing to answer."""
    with pytest.raises(openai.BadRequestError):
        ask(server, [])
    assert server.health() == 200


def test_concurrent_requests_while_blocks_are_written_and_promoted(
    smollm2: Path, tmp_path: Path
) -> None:
    """Requests in one batch must not get each other's state, wherever it comes from."""
    flags = ("--prompt-cache-bytes", "3MB")  # about 130 tokens: constant demotes and promotes
    prompts = [
        [{"role": "user", "content": STORY[: 60 + 40 * i] + f" Who is number {i}?"}]
        for i in range(4)
    ]
    with Server(smollm2, tmp_path / "cache", tmp_path / "log", *flags) as s:
        alone = [ask(s, p, max_tokens=4)[0] for p in prompts]
        results: queue.Queue[tuple[int, str]] = queue.Queue()

        def work(i: int) -> None:
            for turn in range(3):
                k = (i + turn) % len(prompts)
                results.put((k, ask(s, prompts[k], max_tokens=4)[0]))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        answers = [results.get_nowait() for _ in range(12)]
        assert all(text == alone[k] for k, text in answers)
        assert s.health() == 200
        assert s.stop() == 0


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_quickly_in_the_middle_of_a_request(
    smollm2: Path, tmp_path: Path, sig: int
) -> None:
    """A server that hangs at its end gets killed by its supervisor, or blocks its port."""
    with Server(smollm2, tmp_path / "cache", tmp_path / "log") as s:
        stream = s.client.chat.completions.create(
            model="default_model", messages=MESSAGES, max_tokens=500, stream=True
        )
        next(iter(stream))
        started = time.monotonic()
        assert s.stop(sig) == 0
        assert time.monotonic() - started < 10


@PATHS
def test_penalties_see_the_cached_tokens(server: Server, path: dict[str, int]) -> None:
    """A penalty that forgets what came from the cache changes the answer with each hit."""
    kw = {"extra_body": {"repetition_penalty": 1.8, "repetition_context_size": 200}, **path}
    messages = [{"role": "user", "content": f"Ships, ships, ships and ships. Repeat. {path}"}]
    first, n, cached = ask(server, messages, max_tokens=12, **kw)
    assert cached < n - 1
    assert ask(server, messages, max_tokens=12, **kw) == (first, n, n - 1)


@pytest.mark.parametrize("seed", [None, 7], ids=["batched", "sequential"])
@pytest.mark.parametrize("end", ["kill", "disconnect"])
def test_a_prefill_cut_short_loses_at_most_a_checkpoint(
    smollm2: Path, tmp_path: Path, seed: int | None, end: str
) -> None:
    """Minutes of prefill would be done again because of a crash or an impatient client."""
    flags = ("--prefill-checkpoint", "16", "--prefill-step-size", "16")
    folder, log = tmp_path / "cache", tmp_path / "log"
    with Server(smollm2, folder, log, *flags) as s:
        done = s.leave_at({"kill": 0.7, "disconnect": 0.3}[end], MESSAGES, seed)
        if end == "disconnect":
            _, n, cached = ask(s, max_tokens=1, seed=seed)
            assert n - 1 > cached >= done - 16
            return
        s.kill()
    with Server(smollm2, folder, log, *flags) as s:
        _, n, cached = ask(s, max_tokens=1, seed=seed)
        # One checkpoint may have been on its way to the disk.
        assert n - 1 > cached >= done - 32


def test_a_second_signal_ends_it_at_once_and_without_a_crash(smollm2: Path, tmp_path: Path) -> None:
    """An interrupt in the middle of ending left mlx running under a dying interpreter."""
    with Server(smollm2, tmp_path / "cache", tmp_path / "log") as s:
        stream = s.client.chat.completions.create(
            model="default_model", messages=MESSAGES, max_tokens=500, stream=True
        )
        next(iter(stream))
        s.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        assert s.stop(signal.SIGTERM) in (0, 128 + signal.SIGTERM)


def test_a_quantized_cache_is_reused_at_the_end_of_a_step(smollm2: Path, tmp_path: Path) -> None:
    """Elsewhere a hit would move the moment of quantization, and change the answer."""
    flags = ("--kv-bits", "4", "--quantized-kv-start", "20", "--prefill-step-size", "16")
    with Server(smollm2, tmp_path / "cache", tmp_path / "log", *flags) as s:
        first = ask(s)
        assert first[2] == 0
        again = ask(s)
    assert again[:2] == first[:2]
    assert again[2] > 0
    assert again[2] % 16 == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--prompt-cache-size", "-1"],
        ["--prompt-cache-dir", ""],
        ["--prompt-cache-disk-bytes", "0"],
        ["--prompt-cache-bytes", "much"],
    ],
    ids=str,
)
def test_flags_that_make_no_sense_are_a_usage_error(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback doesn't say which flag it was."""
    with pytest.raises(SystemExit) as e:
        tieredkv.server.serve(flags)
    assert e.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_a_directory_that_can_not_be_used_is_said_and_done_without(
    smollm2: Path, tmp_path: Path
) -> None:
    """A typing error in a flag must not take the service down."""
    (tmp_path / "file").write_text("")
    with Server(smollm2, tmp_path / "file", tmp_path / "log") as s:
        first, n, _ = ask(s, max_tokens=2)
        assert ask(s, max_tokens=2) == (first, n, n - 1)
    log = (tmp_path / "log").read_text()
    assert str(tmp_path / "file") in log
    assert "memory only" in log


def test_a_model_that_can_not_be_loaded_ends_the_server(tmp_path: Path) -> None:
    """A process that stays up without a model looks alive to its supervisor."""
    process = subprocess.run(
        [
            *(sys.executable, "-m", "tieredkv", "serve", "--model", str(tmp_path / "absent")),
            *("--port", str(free_port()), "--prompt-cache-dir", "none"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert process.returncode == 1
    assert "absent" in process.stderr


def test_models_are_listed_without_a_hub_cache(smollm2: Path, tmp_path: Path) -> None:
    """Clients ask for the list first, and not everybody has ever downloaded a model."""
    env = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    with Server(smollm2, "none", tmp_path / "log", env=env) as s:
        assert [m.id for m in s.client.models.list()] == [str(smollm2)]


def test_memory_only_on_request(smollm2: Path, tmp_path: Path) -> None:
    """``none`` writes nothing anywhere."""
    with Server(smollm2, "none", tmp_path / "log") as s:
        first, n, _ = ask(s, max_tokens=2)
        assert ask(s, max_tokens=2) == (first, n, n - 1)
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


def test_a_port_in_use_is_said_and_ends_the_server(smollm2: Path, tmp_path: Path) -> None:
    """A thread left behind would keep the process alive without a socket."""
    with Server(smollm2, "none", tmp_path / "log") as s:
        args = tieredkv.server.parser().parse_args(
            ["--port", str(s.port), "--prompt-cache-dir", "none"]
        )
        assert tieredkv.server.run(args) == 1


@pytest.mark.parametrize("path", [{"seed": None}, {"seed": 7}], ids=["batched", "sequential"])
def test_both_caps_are_kept_on_both_paths(smollm2: Path, path: dict[str, int | None]) -> None:
    """Upstream drops the byte flag on one path, and its pool grows until Metal gives up."""
    cap = 2_000_000
    flags = ["--model", str(smollm2), "--prompt-cache-dir", "none"]
    flags += ["--prompt-cache-bytes", str(cap), "--prompt-cache-size", "2"]
    args = tieredkv.server.parser().parse_args(flags)
    cache = tieredkv.server.open_cache(args)
    provider = tieredkv.server.TieredModelProvider(args, cache)
    generator = tieredkv.server.TieredResponseGenerator(provider, cache)
    try:
        for i in range(5):
            generate(generator, f"{i} " + STORY[:100], **path)
            wait_for(lambda i=i: cache.stats().inserts > i)
            assert 0 < cache.nbytes <= cap
            assert 0 < len(cache) <= 2
        assert cache.stats().refused == {}
    finally:
        generator.stop_and_join()
        cache.close()


def generate(generator: tieredkv.server.TieredResponseGenerator, prompt: str, **kw: Any) -> str:
    """Run one request through a generator as the HTTP handler does."""
    up = tieredkv.server.upstream
    args = up.GenerationArguments(
        model=up.ModelDescription("default_model", "default_model", None),
        sampling=up.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1),
        logits=up.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
        stop_words=[],
        max_tokens=3,
        num_draft_tokens=3,
        logprobs=False,
        top_logprobs=-1,
        seed=kw["seed"],
        chat_template_kwargs=None,
    )
    _, responses = generator.generate(up.CompletionRequest("text", prompt, [], None, None), args)
    return "".join(r.text for r in responses)


@pytest.mark.parametrize(
    ("text", "n"),
    [("1000", 1000), ("1.5GB", 1_500_000_000), ("4GiB", 4 << 30), ("500m", 500_000_000), ("0", 0)],
)
def test_sizes_are_read_as_people_write_them(text: str, n: int) -> None:
    """A cap read wrongly is a cap not kept."""
    assert tieredkv.units.size(text) == n


@pytest.mark.parametrize("text", ["", "x", "-1", "1XB", "GB", "nan", "inf"])
def test_other_sizes_are_refused(text: str) -> None:
    """An error at start beats a cap of nonsense."""
    with pytest.raises(argparse.ArgumentTypeError):
        tieredkv.units.size(text)

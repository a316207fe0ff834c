"""Servers with directories of their own, and one place that they share."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from engines import S3, Proxy, Redis
from server import Local

import tieredkv.server

# Of which each character is a token or nearly one.
LONG = "".join(f"{i}: {i * 7919 % 1000}; " for i in range(100))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny")


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": LONG}, {"role": "user", "content": question}]


def settle(server: Local) -> None:
    assert server.cache.flush(30)
    sharing = server.cache._store.sharing
    assert sharing is not None
    assert sharing.uploader is not None
    assert sharing.uploader.flush(30)


@pytest.mark.parametrize("kind", ["s3", "redis"])
def test_a_prefix_that_one_server_computed_is_another_servers_hit(
    kind: str, request: pytest.FixtureRequest, model: Path, tmp_path: Path
) -> None:
    """A shelf of machines, one system prompt: computed once, and answered as without."""
    server: S3 | Redis = request.getfixturevalue(kind)
    flags = ("--prompt-cache-remote", server.url())
    with Local(model, tmp_path / "none") as alone:
        want = alone.chat(messages("And the last one?"))
        prefix = alone.chat(messages("A")).n_prompt
    assert prefix > 600
    with Local(model, tmp_path / "one", *flags) as one:
        one.chat(messages("What is the first?"))
        settle(one)
    with Local(model, tmp_path / "two", *flags) as two:
        reply = two.chat(messages("And the last one?"))
        stats = two.cache.stats()
    assert reply.text == want.text
    assert reply.n_cached >= 0.95 * prefix
    assert stats.hit_tokens_remote == reply.n_cached
    assert stats.remote is not None
    assert stats.remote.faults == {}


def test_a_server_whose_engine_hangs_answers_all_the_same(
    redis: Redis, model: Path, tmp_path: Path
) -> None:
    """The tier is there to make answers sooner: without it they must come as before."""
    with Proxy(redis.port) as proxy:
        proxy.hang = True
        flags = ("--prompt-cache-remote", redis.url(proxy.port))
        timeout = ("--prompt-cache-remote-timeout", "0.2s")
        with Local(model, tmp_path / "none") as alone:
            want = [alone.chat(messages(q)).text for q in "abcde"]
        with Local(model, tmp_path / "one", *flags, *timeout) as server:
            assert [server.chat(messages(q)).text for q in "abcde"] == want
            assert server.cache.stats().remote.faults["timeout"] >= 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--prompt-cache-remote", "ftp://host/x"), "no engine for ftp://"),
        (("--prompt-cache-remote", "redis://host/0"), "rediss://"),
        (
            ("--prompt-cache-remote", "redis://localhost/0", "--prompt-cache-remote-key", "absent"),
            "absent",
        ),
        (
            ("--prompt-cache-remote", "redis://localhost/0", "--prompt-cache-remote-timeout", "2h"),
            "3600",
        ),
    ],
)
def test_what_can_not_be_done_is_said_at_the_start(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that runs without what it was told to use is found out by its bill."""
    with pytest.raises(SystemExit) as ended:
        tieredkv.server.serve(["--model", "none", "--prompt-cache-dir", "none", *flags])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_key_that_is_too_short_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts behind a password of four letters are as good as open."""
    file = tmp_path / "key"
    file.write_text("abcd")
    flags = ("--prompt-cache-remote", "redis://localhost/0", "--prompt-cache-remote-key", str(file))
    with pytest.raises(SystemExit):
        tieredkv.server.serve(["--model", "none", "--prompt-cache-dir", "none", *flags])
    assert "openssl rand" in capsys.readouterr().err

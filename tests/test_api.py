"""The cache's HTTP API on real servers: what it does, whom it answers, and how it refuses."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import tiny
from server import Local

from tieredkv import StoreStats
from tieredkv.api import ROUTES

ROOT = Path(__file__).resolve().parent.parent
STORY = "Monday: the Aurora left with timber. Tuesday: fog, nobody moved. " * 6
PATHS = pytest.mark.parametrize("path", [{}, {"seed": 7}], ids=["batched", "sequential"])


@dataclass(frozen=True)
class Got:
    """A whole answer."""

    status: int
    headers: Any
    body: Any

    @property
    def code(self) -> str:
        """Of an error, which has OpenAI's form."""
        assert self.body["error"].keys() == {"message", "type", "param", "code"}
        return str(self.body["error"]["code"])


def call(
    server: Local, method: str, path: str, body: Any = None, host: str = "127.0.0.1", **headers: str
) -> Got:
    """Send any request; header names with _ for -."""
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection(host, server.port, timeout=60)) as connection:
        connection.request(method, path, raw, named)
        response = connection.getresponse()
        text = response.read()
        is_json = "json" in (response.headers["Content-Type"] or "")
        return Got(response.status, response.headers, json.loads(text) if is_json else text)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def stats(server: Local) -> dict[str, Any]:
    got = call(server, "GET", "/v1/cache/stats")
    assert got.status == 200
    return dict(got.body)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what happens just after an answer."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("api") / "model")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    with Local(model, tmp_path_factory.mktemp("cold")) as server:
        yield server


# ---- what a request is told of itself


@PATHS
def test_an_answer_tells_the_tier_that_its_tokens_came_from(
    model: Path, tmp_path: Path, path: dict[str, int]
) -> None:
    """Who pays for a disk wants to see what it brings, request by request."""
    body = chat(STORY, max_tokens=2, temperature=0, **path)
    with Local(model, tmp_path) as server:
        first = call(server, "POST", "/v1/chat/completions", body)
        n = first.body["usage"]["prompt_tokens"]
        assert first.headers["X-Tieredkv-Cache"] == f"hot=0, cold=0, computed={n}"
        assert server.cache.flush(30)
    with Local(model, tmp_path) as server:
        for hot, cold in ((0, n - 1), (n - 1, 0)):
            got = call(server, "POST", "/v1/chat/completions", body)
            assert got.body["usage"]["prompt_tokens_details"] == {
                "cached_tokens": n - 1,
                "cached_tokens_hot": hot,
                "cached_tokens_cold": cold,
            }
            assert got.headers["X-Tieredkv-Cache"] == f"hot={hot}, cold={cold}, computed=1"
        more = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = call(server, "POST", "/v1/chat/completions", body | more)
        assert b'"cached_tokens_hot": %d, "cached_tokens_cold": 0' % (n - 1) in streamed.body
        assert streamed.headers["X-Tieredkv-Cache"] is None
        wait_for(lambda: len(stats(server)["requests"]) == 3)
        last, _, promoted = stats(server)["requests"]
        assert (promoted["cold_tokens"], promoted["computed_tokens"]) == (n - 1, 1)
        assert promoted["promote_ms"] > 0
        assert last["promote_ms"] is None
        for request in (last, promoted):
            assert request["generated_tokens"] == 2
            assert 0 < request["prefill_ms"] <= request["first_token_ms"] <= request["total_ms"]


def test_a_client_that_leaves_before_its_answer_is_no_traceback(
    server: Local, capfd: pytest.CaptureFixture[str]
) -> None:
    """Pages are closed and scrapers time out all the time, and real faults would drown."""
    body = b'{"model": "nobody"}'
    head = (
        f"POST /v1/cache/prune HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        # Closed so, what is written to the other end fails at once.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Which the call has to wait for.
        with server.cache._lock:
            s.sendall(head.encode() + body)
            time.sleep(0.3)
            s.close()
        time.sleep(0.3)
    assert server.health() == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["X-Forwarded-For", "x-real-ip", "Forwarded", "Via"])
def test_what_a_proxy_forwards_is_not_taken_for_a_program_of_this_machine(
    server: Local, name: str
) -> None:
    """A proxy in front of the server is on its machine and may well ask for 127.0.0.1: all of the
    Internet could remove all prompts.
    """
    got = call(server, "GET", "/v1/cache/stats", **{name: "203.0.113.7"})
    assert (got.status, got.code) == (403, "forwarded")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "Sesame\n2026-01-01 tieredkv: request id=- status=200",}',
        b'["Sesame \x1b[2J"]',
        b'{"prompt": "Sesame \xff"}',
    ],
    ids=["no JSON", "no object", "no UTF-8"],
)
def test_a_broken_request_leaves_nothing_of_its_body_in_the_log(
    server: Local, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    """Logs are kept and shared by people who must not read prompts, and a client could write any
    line into them, or what a terminal obeys.
    """
    for path in ("/v1/completions", "/v1/chat/completions"):
        reply = server.post(body, path)
        assert reply.status == 400
        assert "esame" not in reply.body["error"]
    assert "esame" not in caplog.text
    assert server.health() == 200


def test_every_request_is_a_line_of_the_log_without_its_prompt(
    server: Local, caplog: pytest.LogCaptureFixture
) -> None:
    """Logs are kept and shared by people who must not read prompts."""
    with caplog.at_level(logging.INFO, "tieredkv"):
        server.chat("Sesame, open. " * 5)
        server.post({"prompt": "Sesame", "max_tokens": -1}, "/v1/completions")
        wait_for(lambda: len(caplog.records) >= 2)
    lines = [r.getMessage() for r in caplog.records if "request id=" in r.getMessage()]
    assert [re.search(r"status=(\d+)", line)[1] for line in lines] == ["200", "400"]
    for line in lines:
        assert re.fullmatch(r"tieredkv: request( [a-z_]+=\S+)+", line)
        assert "esame" not in line
    assert re.search(r"prompt=\d+ hot=\d+ cold=0 computed=\d+ generated=8 promote_ms=- ", lines[0])


def test_a_client_that_leaves_is_written_down_as_such(server: Local) -> None:
    """An operator would look for the answers that nobody waited for."""
    n = len(stats(server)["requests"])
    server.send(chat("How long is the pier?", max_tokens=4000)).close()
    wait_for(lambda: len(stats(server)["requests"]) > n)
    assert stats(server)["requests"][0]["status"] == 499


def test_stats_have_what_the_page_shows(server: Local) -> None:
    """The page, and what others have built, would show nothing."""
    server.chat(STORY)
    server.cache.flush(30)
    server.chat(STORY)
    wait_for(lambda: stats(server)["requests"] != [])
    # A text is made when the generation has a moment for it.
    wait_for(lambda: any(p["text"] for p in stats(server)["prefixes"]))
    now = stats(server)
    assert now.keys() == {
        *("time", "started", "version", "models", "hot", "cold", "queue", "entries", "hits"),
        *("misses", "prompt_tokens", "saved_seconds", "counters", "history", "requests"),
        *("prefixes", "faults"),
    }
    assert now["hot"].keys() == {"bytes", "cap_bytes", "blocks"}
    assert now["cold"].keys() == {"bytes", "cap_bytes", "blocks", "directory", "pinned_bytes"}
    assert now["counters"].keys() == {field.name for field in fields(StoreStats)}
    assert now["history"][-1].keys() == {
        *("time", "requests", "hot", "cold", "computed", "remote"),
    }
    assert now["requests"][0].keys() == {
        *("time", "id", "model", "status", "prompt_tokens", "hot_tokens", "cold_tokens"),
        *("computed_tokens", "generated_tokens", "promote_ms", "prefill_ms"),
        *("first_token_ms", "total_ms", "remote_tokens"),
    }
    prefix = next(p for p in now["prefixes"] if p["text"])
    assert prefix.keys() == {
        *("id", "model", "tokens", "bytes", "uses", "last_use", "pinned", "expires", "text"),
    }
    assert abs(prefix["last_use"] - now["time"]) < 60


def test_texts_of_salted_prompts_are_shown_to_nobody(model: Path, tmp_path: Path) -> None:
    """Tenants are kept apart from each other, and from whoever looks at the page."""
    with Local(model, tmp_path) as server:
        for _ in range(2):
            server.chat("The code of the safe is 1234. " * 20, cache_salt="mine")
            server.cache.flush(30)
        wait_for(lambda: stats(server)["prefixes"] != [])
        for _ in range(3):
            now = stats(server)
            assert now["prefixes"][0]["text"] is None
            assert "safe" not in json.dumps(now)
            time.sleep(0.15)


# ---- warm, explain, pin, prune


def test_a_warmed_prompt_hits_and_was_not_answered(server: Local) -> None:
    """Contexts that are computed over night must be there in the morning."""
    prompt = chat("What does the pilot's log say? " * 20)
    cold = call(server, "POST", "/v1/cache/warm", prompt | {"max_tokens": 100, "stream": True})
    [done] = cold.body["results"]
    assert done["generated_tokens"] == 1
    assert (
        done["hot_tokens"] + done["cold_tokens"] + done["computed_tokens"]
        == (done["prompt_tokens"])
    )
    [again] = call(server, "POST", "/v1/cache/warm", prompt).body["results"]
    assert again["hot_tokens"] == done["prompt_tokens"] - 1
    assert server.chat(prompt["messages"]).n_cached == done["prompt_tokens"] - 1


def test_many_are_warmed_at_once_and_one_that_fails_alone_fails(server: Local) -> None:
    """A night's work must not end with its first bad prompt, nor begin with a slip of the pen."""
    good, bad = {"prompt": "Once upon a pier " * 20}, {"prompt": "x", "model": "/nowhere/at/all"}
    got = call(server, "POST", "/v1/cache/warm", {"requests": [good, bad, good]})
    first, failed, last = got.body["results"]
    assert got.body["failed"] == 1
    assert failed["error"]["code"] == "model_not_found"
    assert first["computed_tokens"] > 100
    assert last["hot_tokens"] + last["cold_tokens"] == last["prompt_tokens"] - 1
    n = server.cache.stats().inserts
    slip = {"requests": [{"prompt": "Another pier " * 20}, {"prompt": "x", "cache_sallt": "s"}]}
    got = call(server, "POST", "/v1/cache/warm", slip)
    assert (got.status, got.code) == (400, "unknown_field")
    assert got.body["error"]["param"] == "requests[1].cache_sallt"
    assert server.cache.stats().inserts == n


def test_what_is_warmed_for_a_tenant_is_that_tenant_s(model: Path, tmp_path: Path) -> None:
    """Else warming would be a way round the salt, or warm nothing."""
    prompt = chat("Who owns the red boat? " * 20)
    with Local(model, tmp_path, "--cache-salt-from-api-key") as server:
        key = {"Authorization": "Bearer secret"}
        done = call(server, "POST", "/v1/cache/warm", prompt, **key).body["results"][0]
        assert server.chat(prompt["messages"]).n_cached == 0
        why = call(server, "POST", "/v1/cache/explain", prompt, **key).body
        assert (why["reason"], why["n_tokens"]) == ("hit", done["prompt_tokens"] - 1)
        other = call(server, "POST", "/v1/cache/explain", prompt, Authorization="Bearer x").body
        assert other["n_tokens"] == 0
        got = call(server, "POST", "/v1/cache/pin", prompt, Authorization="Bearer x")
        assert (got.status, got.code) == (404, "pin_absent")
        assert call(server, "POST", "/v1/cache/pin", prompt, **key).status == 200


@pytest.mark.parametrize(
    "body",
    [
        chat(STORY),
        chat(STORY, tools=[{"type": "function", "function": {"name": "tide"}}]),
        {"messages": [{"role": "system", "content": "Be brief."}, *chat(STORY)["messages"]]},
        {"prompt": STORY},
    ],
    ids=["chat", "tools", "system", "text"],
)
def test_a_prompt_is_explained_as_the_server_would_tokenize_it(
    server: Local, body: dict[str, Any]
) -> None:
    """Of another template's tokens every word would be wrong."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    usage = call(server, "POST", path, body | {"max_tokens": 1}).body["usage"]
    before = server.cache.stats()
    why = call(server, "POST", "/v1/cache/explain", body).body
    n = usage["prompt_tokens"]
    assert (why["reason"], why["n_prompt"], why["n_tokens"]) == ("hit", n, n - 1)
    assert server.cache.stats().hits == before.hits


def test_asking_for_another_model_waits_for_the_answers_under_way(
    model: Path, tmp_path: Path
) -> None:
    """A model that is loaded beside a batch would have that batch's state stored as its own."""
    other = tiny.save(tmp_path / "other", seed=3)
    long = chat("Tell me of the storm. " * 30, max_tokens=40, temperature=0)
    with Local(model, "none", "--prompt-cache-bytes", "0") as server:
        wanted = server.post(long).text
    with Local(model, tmp_path / "cold", "--prefill-checkpoint", "32") as server:
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(server.post(long)))
        asking.start()
        wait_for(lambda: server.generator.model_provider.model is not None)
        why = call(server, "POST", "/v1/cache/explain", long | {"model": str(other)})
        asking.join()
        assert why.status == 200
        assert why.body["n_tokens"] == 0
        assert answers[0].text == wanted
        assert server.post(long | {"model": str(other), "max_tokens": 1}).n_cached == 0
        again = server.post(long)
        assert (again.text, again.n_cached) == (wanted, again.n_prompt - 1)


def test_what_is_pinned_stays_when_everything_is_removed(model: Path, tmp_path: Path) -> None:
    """That is what a pin is for, and how everything is removed must be known."""
    kept, lost = chat("Keep the charts. " * 20), chat("Lose the bills. " * 20)
    with Local(model, tmp_path) as server:
        done = call(server, "POST", "/v1/cache/warm", kept | {"pin": True}).body["results"][0]
        assert done["pinned"]["tokens"] >= done["prompt_tokens"] - 1
        call(server, "POST", "/v1/cache/warm", lost)
        assert stats(server)["cold"]["pinned_bytes"] >= done["pinned"]["bytes"] > 0
        assert call(server, "DELETE", "/v1/cache").body["blocks"] > 0
        assert server.chat(lost["messages"]).n_cached < 20
        assert server.chat(kept["messages"]).n_cached == done["prompt_tokens"] - 1
        by_id = call(server, "POST", "/v1/cache/unpin", {"id": done["pinned"]["id"][:8]})
        assert by_id.body["id"] == done["pinned"]["id"]
        got = call(server, "POST", "/v1/cache/unpin", kept)
        assert (got.status, got.code) == (404, "pin_absent")
        assert call(server, "POST", "/v1/cache/pin", {"id": by_id.body["id"]}).status == 200
        assert call(server, "DELETE", "/v1/cache?pinned=true").status == 200
        now = stats(server)
        assert (now["hot"]["blocks"], now["cold"]["blocks"]) == (0, 0)


def test_a_warmed_prompt_expires_when_it_was_told_to(server: Local) -> None:
    """Contexts of a day would take the room of others for ever."""
    wanted = {"requests": [{"prompt": "The tide of today. " * 20}], "cache_ttl": "1h"}
    call(server, "POST", "/v1/cache/warm", wanted)
    server.cache.flush(30)
    server.post({"prompt": "The tide of today. " * 20, "cache_ttl": "2h"}, "/v1/completions")
    server.cache.flush(30)

    def expiries() -> list[float]:
        return [p["expires"] - time.time() for p in stats(server)["prefixes"] if p["expires"]]

    wait_for(lambda: expiries() != [])
    assert all(3000 < left <= 7200 for left in expiries())
    got = call(server, "POST", "/v1/cache/warm", wanted | {"cache_ttl": -5})
    assert got.body["results"][0]["error"]["code"] == "bad_request"


def test_prune_removes_what_meets_its_conditions(model: Path, tmp_path: Path) -> None:
    """More would be lost, or less would be gone than a tenant was promised."""
    prompt = chat("Who sailed on Friday? " * 20)
    with Local(model, tmp_path) as server:
        n = server.chat(prompt["messages"]).n_prompt
        server.chat(prompt["messages"], cache_salt="mine")
        server.cache.flush(30)
        rule = {"cache_salt": "mine", "model": str(model)}
        would = call(server, "POST", "/v1/cache/prune", rule | {"dry_run": True}).body
        assert would["blocks"] > 0
        assert would["dry_run"] is True
        assert server.chat(prompt["messages"], cache_salt="mine").n_cached == n - 1
        server.cache.flush(30)
        none = call(server, "POST", "/v1/cache/prune", rule | {"older_than": "1d"}).body
        assert none["blocks"] == 0
        gone = call(server, "POST", "/v1/cache/prune", rule).body
        assert gone["blocks"] >= would["blocks"]
        assert server.chat(prompt["messages"], cache_salt="mine").n_cached == 0
        assert server.chat(prompt["messages"]).n_cached == n - 1


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("warm", b"{", "bad_json"),
        ("warm", b"\xff", "bad_json"),
        ("warm", b"[" * 100_000, "bad_json"),
        ("warm", [], "bad_json"),
        ("warm", {}, "no_prompt"),
        ("warm", {"prompt": "x", **chat("x")}, "no_prompt"),
        ("warm", {"prompt": ["x"]}, "bad_request"),
        ("warm", {"messages": []}, "bad_request"),
        ("warm", {"messages": [{}]}, "bad_request"),
        ("warm", {"prompt": "x", "model": 5}, "bad_request"),
        ("warm", {"prompt": "x", "adapters": []}, "bad_request"),
        ("warm", {"prompt": "x", "pin": "yes"}, "bad_value"),
        ("warm", {"requests": []}, "bad_value"),
        ("warm", {"requests": [{"prompt": "x"}] * 1025}, "bad_value"),
        ("warm", {"requests": ["x"]}, "bad_value"),
        ("warm", {"requests": [{"prompt": "x"}], "prompt": "x"}, "unknown_field"),
        ("explain", {"prompt": "x", "mesages": []}, "unknown_field"),
        ("explain", {"prompt": "x", "cache_salt": ""}, "bad_request"),
        ("pin", {"id": 5}, "bad_value"),
        ("pin", {"id": "abc"}, "pin_id"),
        ("pin", {"id": "abcdef", "prompt": "x"}, "unknown_field"),
        ("prune", {}, "no_criteria"),
        ("prune", {"pinned": True}, "no_criteria"),
        ("prune", {"to": "much"}, "bad_value"),
        ("prune", {"to": -1}, "bad_value"),
        ("prune", b'{"to": NaN}', "bad_value"),
        ("prune", {"older_than": True}, "bad_value"),
        ("prune", {"older_than": [1]}, "bad_value"),
        ("prune", {"unsalted": True, "api_key": "x"}, "bad_value"),
        ("prune", {"model": "x" * 2000}, "bad_value"),
        ("prune", {"everything": True}, "unknown_field"),
    ],
)
def test_a_call_that_makes_no_sense_is_a_400_that_says_why(
    server: Local, path: str, body: Any, code: str
) -> None:
    """What is taken for something else removes prompts, or puts them where nobody finds them."""
    before = server.cache.stats()
    got = call(server, "POST", f"/v1/cache/{path}", body)
    assert (got.status, got.code) == (400, code)
    assert got.body["error"]["message"]
    assert server.cache.stats().inserts == before.inserts
    assert server.health() == 200


def test_methods_and_lengths_are_checked(server: Local) -> None:
    """A connection that is dropped without a word tells nobody what to do."""
    assert call(server, "GET", "/v1/cache/pin").code == "method_not_allowed"
    assert call(server, "POST", "/v1/cache/stats", {}).code == "method_not_allowed"
    assert call(server, "DELETE", "/v1/cache?all=1").code == "unknown_field"
    assert call(server, "GET", "/v1/cache/nothing").status == 404
    assert call(server, "DELETE", "/v1/models").status == 404
    huge = str(1 << 40)
    assert call(server, "POST", "/v1/cache/prune", Content_Length=huge).code == "too_large"
    assert call(server, "POST", "/v1/cache/prune", Content_Length="-5").code == "bad_length"
    with closing(socket.create_connection(("127.0.0.1", server.port))) as s:
        s.sendall(b"POST /v1/cache/prune HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 411 " in s.makefile("rb").readline()


# ---- who is answered


def paths() -> list[tuple[str, str]]:
    routes = [(method, path) for path, methods in ROUTES.items() for method in methods]
    return [*routes, ("GET", "/cache"), ("GET", "/cache/app.js")]


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Origin": "https://evil.example"}, "foreign_origin"),
        ({"Origin": "null"}, "foreign_origin"),
        # Another server on this machine is another site.
        ({"Origin": "http://127.0.0.1:1"}, "foreign_origin"),
        # A name of an attacker's that leads to 127.0.0.1.
        ({"Host": "evil.example:8080"}, "foreign_host"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, "foreign_host"),
        ({"Host": "localhost.evil.example"}, "foreign_host"),
        ({"Host": "127.0.0.1@evil.example"}, "foreign_host"),
        ({"Host": "["}, "foreign_host"),
        ({"Host": ""}, "foreign_host"),
        ({"Host": "evil.example@127.0.0.1"}, "foreign_host"),
        ({"Host": "127.0.0.1%evil.example"}, "foreign_host"),
        ({"Host": "localhost/evil.example"}, "foreign_host"),
    ],
)
def test_pages_of_other_sites_reach_no_part_of_the_api(
    server: Local, headers: dict[str, str], code: str
) -> None:
    """Any page that a user opens could read or remove all prompts."""
    assert server.cache.flush(30)
    before = server.cache.stats()
    for method, path in paths():
        got = call(server, method, path, {} if method == "POST" else None, **headers)
        assert (got.status, got.code) == (403, code), path
    assert server.cache.stats() == before


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST", "[::1]", "127.9.9.9"])
def test_the_server_s_own_page_is_answered(server: Local, host: str) -> None:
    """The page could do nothing."""
    host = f"{host}:{server.port}"
    got = call(server, "GET", "/v1/cache/stats", Host=host, Origin=f"http://{host.lower()}")
    assert got.status == 200


def test_no_answer_of_the_api_allows_other_sites_to_read_it(server: Local) -> None:
    """mlx-lm's own answers do, and a browser asks before a DELETE whether it may."""
    assert call(server, "GET", "/v1/models").headers["Access-Control-Allow-Origin"] == "*"
    for method, path in paths():
        for asked in (method, "OPTIONS"):
            got = call(server, asked, path, {} if asked == "POST" else None)
            assert not [name for name in got.headers if name.lower().startswith("access-control")]
            assert asked == method or got.status == 405


def own_address() -> str | None:
    """An address of this machine that others could reach it by."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as s:
        try:
            s.connect(("192.0.2.1", 9))
        except OSError:
            return None
        found = str(s.getsockname()[0])
        return None if found.startswith("127.") else found


def test_other_machines_are_answered_if_the_server_is_told_to(model: Path, tmp_path: Path) -> None:
    """A server for a whole office would show everybody's prompts to everybody."""
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but its loopback")
    with Local(model, tmp_path, "--host", "0.0.0.0") as server:
        for method, path in paths():
            body = {} if method == "POST" else None
            # Whatever it calls itself.
            got = call(server, method, path, body, address, Host="localhost")
            assert (got.status, got.code) == (403, "not_local"), path
        assert call(server, "GET", "/v1/models", None, address).status == 200
        assert stats(server)["hits"] == 0
    with Local(model, tmp_path, "--host", "0.0.0.0", "--cache-api", "anywhere") as server:
        got = call(server, "GET", "/v1/cache/stats", None, address, Host="kv.example")
        assert got.status == 200
        foreign = {"Host": "kv.example", "Origin": "https://elsewhere.example"}
        got = call(server, "POST", "/v1/cache/prune", {"to": 0}, address, **foreign)
        assert (got.status, got.code) == (403, "foreign_origin")


def test_the_api_can_be_turned_off(model: Path, tmp_path: Path) -> None:
    """Who doesn't use it need not have it."""
    with Local(model, tmp_path, "--cache-api", "off") as server:
        for method, path in paths():
            got = call(server, method, path, {} if method == "POST" else None)
            assert got.status == 404, path
        assert server.chat("Hello").status == 200


# ---- documents


def test_every_route_is_documented() -> None:
    """A route that nobody knows of is one that nobody uses."""
    page = (ROOT / "docs" / "api.md").read_text()
    for method, path in paths()[:-1]:
        assert f"`{method} {path}`" in page, path
    for example in re.findall(r"```json\n(.*?)```", page, flags=re.S):
        json.loads(example)

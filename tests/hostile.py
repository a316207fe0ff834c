"""Malformed requests, by the thousand: each must be answered, and none may harm the next.

``python -m tests.hostile --requests 10000`` sends them to a server of its own.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tiny  # noqa: E402 - found through the line above
from server import Endpoint, Server  # noqa: E402 - likewise

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

PLAIN = {"messages": [{"role": "user", "content": "Is all well?"}], "max_tokens": 4}


def nested(depth: int) -> Any:
    value: Any = "x"
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


# Of the wrong type for most fields, or at the edge of what a type can hold.
ANYTHING: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e308, -1e308, 5e-324),
    *(float("nan"), float("inf"), -float("inf"), 2**31, 2**63, 2**64, 2**70, -(2**70), 10**400),
    *("", "x", "1", "NaN", "\ud800", "\0", "../..", "é" * 50, "<think>", "<|im_end|>"),
    *([], {}, [None], [[]], [1, 2], ["x"], {"a": 1}, {"x": None}, [{}], nested(30), nested(400)),
]
_NUMBERS = [*ANYTHING[:21], 1e-40, 1e39, 100, 1e6, 0.9999, 10**30]
_TOKENS = [0, 1, 300, 383, 384, 10**6, -1, 2**31, 2**64, "x", "", "1.5", "0x1", "\uff11"]

# Fields of a request and what to put there besides ANYTHING.
FIELDS: dict[str, list[Any]] = {
    "model": ["no/such", "", "a/b/c", "default_model", "/", "/etc", "\0", "-" * 5000],
    "draft_model": ["no/such", "", "default_model", None, [], "/etc"],
    "adapters": ["no/such", "", "/etc", "default_model"],
    "num_draft_tokens": _NUMBERS,
    "max_tokens": [0, -1, 1, 2, 0.5, "5", None],
    "max_completion_tokens": [0, -1, 1, 0.5, "5", None],
    **dict.fromkeys(["temperature", "top_p", "min_p", "top_k", "seed"], _NUMBERS),
    **{name: [*_NUMBERS, 0.3, 0.7, 1.0] for name in ("xtc_probability", "xtc_threshold")},
    **dict.fromkeys(["repetition_penalty", "presence_penalty", "frequency_penalty"], _NUMBERS),
    **dict.fromkeys(
        ["repetition_context_size", "presence_context_size", "frequency_context_size"], _NUMBERS
    ),
    "logit_bias": [{str(t): b} for t in _TOKENS for b in (1, -100, None, "x", float("nan"))],
    "logprobs": [1, "true"],
    "top_logprobs": [0, 1, 11, 12, 400, -1, -2],
    "stream": [True, "yes", 1],
    "stream_options": [{"include_usage": x} for x in (None, 1, "x", [], True)],
    "stop": [
        *(["a"] * 1000, ["x" * 1_000_000], "y" * 1_000_000, ["\ud800"], ["", ""], ["a", 1]),
        ["<|im_end|>", "</think>"],
    ],
    "tools": [
        *([{"type": "function"}], [{"function": None}], [1], "x", [{"function": {"name": 5}}]),
        [{"type": "function", "function": {"name": "f", "parameters": nested(100)}}],
    ],
    "tool_choice": ["auto", {"x": 1}],
    "role_mapping": [{"user": 5}, {"stop": None}, "x"],
    "chat_template_kwargs": [
        {name: value}
        for name in ("tokenize", "chat_template", "padding", "max_length", "return_tensors")
        for value in (True, "{{ 1/0 }}", "max_length", 10**9, "np")
    ]
    + [
        *({"messages": []}, {"tools": 5}, {"add_generation_prompt": False}, {"": 1}),
        *({"enable_thinking": nested(5)}, {"continue_final_message": True}, {"return_dict": True}),
        *({"documents": 5}, {"self": 1}, {"conversation": []}, {"bos_token": 7}),
    ],
}

MESSAGES: list[Any] = [
    *({}, {"role": "user"}, {"content": "x"}, {"role": None, "content": "x"}, "x", None, 5),
    *({"role": "nobody", "content": "x"}, {"role": "tool", "content": "x"}),
    *({"role": ["user"], "content": "x"}, {"role": "user", "content": "\ud800"}),
    *({"role": "system", "content": ""}, {"role": "assistant", "content": None}),
    {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    *({"role": "assistant", "tool_calls": x} for x in (5, [5], "x", [{"function": 5}], {})),
    *({"role": "user", "content": x} for x in ANYTHING),
    *({"role": "user", "content": [x]} for x in ANYTHING),
    *({"role": "user", "content": [{"type": t, "text": "x"}]} for t in ("image", None, "file", 5)),
    *(
        {"role": "user", "content": [{"type": "image_url", "image_url": u}]}
        for u in ("data:,x", "data:image/png;base64,AA==", 5, {"url": None}, {"url": "file:///"})
    ),
]

# Not the JSON of an object, or not JSON at all.
RAW: list[bytes] = [
    *(b"", b"{", b"null", b"[]", b"5", b'"x"', b"\xff\xfe", b'{"messages": \xff}', b"{'a': 1}"),
    *(b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b'{"max_tokens": ' + b"9" * 5000 + b"}"),
    b'{"prompt": "x", "prompt": 5}',
    b'{"messages": ' + b"[" * 990 + b"]" * 990 + b"}",
]


def bodies(seed: int) -> Iterator[tuple[str, bytes]]:
    """Paths and bodies of requests, without an end and the same ones for a seed."""
    dice = random.Random(seed)
    while True:
        if dice.random() < 0.05:
            yield dice.choice([CHAT, TEXT]), dice.choice(RAW)
            continue
        path = CHAT if dice.random() < 0.8 else TEXT
        yield path, json.dumps(_body(dice, path)).encode()


def _body(dice: random.Random, path: str) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": dice.choice([1, 2, 3])}
    if dice.random() < 0.3:
        body["temperature"] = 0.7
    if dice.random() < 0.3:
        body["seed"] = 5
    if path == TEXT:
        body["prompt"] = dice.choice(ANYTHING) if dice.random() < 0.3 else "Once"
    elif dice.random() < 0.4:
        good = {"role": "user", "content": "Once"}
        body["messages"] = [dice.choice([good, *MESSAGES]) for _ in range(dice.randint(1, 3))]
    elif dice.random() < 0.1:
        body["messages"] = dice.choice(ANYTHING)
    else:
        body["messages"] = [{"role": "user", "content": "Once upon"}]
    for _ in range(dice.choice([0, 1, 1, 1, 2, 3])):
        name = dice.choice(list(FIELDS))
        # Of everything that passes as a number of tokens, only small ones: more take for ever.
        special = name in ("max_tokens", "max_completion_tokens") or dice.random() < 0.7
        body[name] = dice.choice(FIELDS[name] if special else ANYTHING)
    return body


@dataclass
class Outcome:
    """What became of the requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0


def answer(endpoint: Endpoint, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and all of the answer's body; 0 if the connection was dropped without one."""
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=60)
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, response.read()
    except (http.client.HTTPException, OSError) as e:
        return 0, repr(e).encode()
    finally:
        connection.close()


def _explained(status: int, text: bytes) -> bool:
    """Whether an error comes with a text for the client."""
    if status == 200:
        return True
    try:
        return bool(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return False


def _said(endpoint: Endpoint) -> str:
    status, text = answer(endpoint, CHAT, json.dumps(PLAIN).encode())
    return repr(json.loads(text)["choices"]) if status == 200 else f"{status} {text!r}"


def attack(endpoint: Endpoint, n_requests: int, seed: int = 0, n_threads: int = 4) -> Outcome:
    """Send malformed requests, several at a time; note those that are not answered as they
    should be: by 200, 400 or 404, the errors with a text. Now and then ask a plain question,
    whose answer must be the same each time. Ends early at a fault.
    """
    outcome, lock = Outcome(), threading.Lock()
    requests = bodies(seed)
    right = _said(endpoint)
    left = n_requests

    def work() -> None:
        nonlocal left
        while True:
            with lock:
                if left <= 0 or outcome.faults:
                    return
                left -= 1
                n, (path, body) = left, next(requests)
            started = time.monotonic()
            status, text = answer(endpoint, path, body)
            took = time.monotonic() - started
            fault = status not in (200, 400, 404) or not _explained(status, text)
            wrong = n % 25 == 0 and _said(endpoint) != right
            with lock:
                outcome.statuses[status] += 1
                outcome.slowest = max(outcome.slowest, took)
                if fault:
                    outcome.faults.append(f"{status} {text[:200]!r} for {path} {body[:500]!r}")
                if wrong:
                    outcome.faults.append(f"a plain question was answered wrong after {body!r}")

    threads = [threading.Thread(target=work) for _ in range(n_threads)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if endpoint.health() != 200:
        outcome.faults.append("the generation thread is dead")
    return outcome


def main() -> int:
    """Attack a server of its own. Returns 1 if it did not withstand."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny.save(folder / "model", "qwen3")
        with Server(model, folder / "cache", folder / "log") as server:
            started = time.monotonic()
            outcome = attack(server, arguments.requests, arguments.seed)
            took = time.monotonic() - started
            log = (folder / "log").read_text(errors="replace")
    rate = arguments.requests / took
    print(f"{arguments.requests} requests in {took:.0f} s, {rate:.0f} a second")
    print(f"slowest {outcome.slowest:.2f} s; answers by status: {dict(outcome.statuses)}")
    for fault in outcome.faults:
        print(fault)
    if outcome.faults:
        print("the server's log ends with:", log[-5000:], sep="\n")
    return int(bool(outcome.faults))


if __name__ == "__main__":
    sys.exit(main())

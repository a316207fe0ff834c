"""Requests and answers over HTTP: mlx-lm's endpoints, in front of which all is checked."""

from __future__ import annotations

import io
import json
import logging
import math
import socket
from argparse import ArgumentTypeError
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_lm import server as upstream

from tieredkv import api
from tieredkv.calls import Answer, Call, Misuse, refusal
from tieredkv.core import ColdTierUnavailable
from tieredkv.journal import Course, RequestReport
from tieredkv.keys import tenant
from tieredkv.prefill import Cancelled
from tieredkv.units import duration

_LOG = logging.getLogger("tieredkv")

# An automaton of some hundred bytes a character is kept for each set of stop words.
_STOP_WORDS = 64
_STOP_CHARACTERS = 4096

# All of them are drafted before anything can stop the request.
_DRAFT_TOKENS = 64

# Of mlx's indices.
_MOST_TOKENS = (1 << 31) - 1

# A request with images is some megabytes.
_BODY_BYTES = 256 << 20

_SALT_CHARACTERS = 1024

# Paths of requests that are written down.
_COMPLETIONS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")
_CLIENT_GONE = 499

# What `apply_chat_template` takes besides the template's own variables. Clients could have the
# server run a template of theirs, or pad a prompt to any length.
_NOT_FOR_CLIENTS = frozenset(
    (
        *("conversation", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)

_FLOATS = (
    *("temperature", "top_p", "min_p", "xtc_probability", "xtc_threshold"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_SIZES = ("repetition_context_size", "presence_context_size", "frequency_context_size")
_INTEGERS = (*_SIZES, "max_tokens", "top_k", "num_draft_tokens", "top_logprobs", "seed")


class ModelUnavailable(Exception):
    """A model, adapter or draft model can't be loaded."""


class GenerationEnded(RuntimeError):
    """The generation thread is no more."""


class ClientGone(ConnectionError):
    """The client closed its connection before its answer was complete."""


class _Client:
    """The other end of a connection, and the generator as it sees it."""

    def __init__(self, generator: Any, connection: socket.socket) -> None:
        self._generator = generator
        self._connection = connection
        self.failure: Exception | None = None
        # What its prompts are kept apart by.
        self.cache_salt = b""
        # After how many seconds they expire; None for what the server is told.
        self.cache_ttl: float | None = None
        self.course = Course()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def is_gone(self) -> bool:
        """Whether it has closed its side. What it sends after its request is dropped."""
        try:
            return not self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def generate(self, request: Any, args: Any, progress_callback: Any = None) -> Any:
        """The generator's, noting why it could not."""
        request.cache_salt = self.cache_salt
        request.cache_ttl = self.cache_ttl
        try:
            return self._generator.generate(
                request, args, progress_callback, self.is_gone, self.course
            )
        except Exception as e:
            self.failure = e
            raise

    def identify(self, request: Any, args: Any) -> tuple[Hashable, Sequence[int]]:
        """The generator's, for this client."""
        request.cache_salt = self.cache_salt
        found: tuple[Hashable, Sequence[int]] = self._generator.identify(
            request, args, self.is_gone
        )
        return found


# What a request of the wrong shape ends in, wherever it is noticed.
_MISUSE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError),
    RecursionError,
)


def _status(failure: Exception) -> int:
    if isinstance(failure, ClientGone):
        return _CLIENT_GONE  # as others log it: nobody reads it
    if isinstance(failure, ModelUnavailable):
        return 404
    if isinstance(failure, GenerationEnded | Cancelled | ColdTierUnavailable):
        return 503
    return 400 if isinstance(failure, _MISUSE) else 500


@contextmanager
def _as_misuse() -> Iterator[None]:
    """Failures that are the client's as the API has them."""
    try:
        yield
    except ClientGone:
        raise
    except Exception as e:
        status = _status(e)
        if status >= 500:
            raise
        code = "model_not_found" if status == 404 else "bad_request"
        raise Misuse(status, code, (str(e) or type(e).__name__)[:1000]) from e


class TieredAPIHandler(upstream.APIHandler):
    """Upstream's endpoints. Every request gets an answer, one that can't be served a 400.

    A request whose client leaves is stopped, whether it streams or not.
    """

    # Upstream sets them, the generator at first and the others from the request.
    response_generator: Any
    body: Any
    rfile: Any
    stream_options: dict[str, bool] | None

    request_id = "-"
    requested_model = ""
    stream = False

    _has_answered = False
    _status_sent = 0

    def setup(self) -> None:
        super().setup()
        self.response_generator = _Client(self.response_generator, self.connection)

    def handle(self) -> None:
        """Upstream's. A client that leaves before its answer is no fault that needs a traceback."""
        try:
            super().handle()
        except ConnectionError as e:
            _LOG.info("tieredkv: a client left: %s", e)

    def send_response(self, code: int, message: str | None = None) -> None:
        self._status_sent = code
        super().send_response(code, message)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Upstream's, without what pages and scrapers ask every few seconds."""
        if code != 200 or self.command != "GET" or not api.owns(self.path):
            super().log_request(code, size)

    def end_headers(self) -> None:
        fetch = self.response_generator.course.fetch
        if self._status_sent == 200 and not self.stream and fetch is not None:
            # By now all is computed.
            computed = fetch.n_prompt - fetch.n_reused
            remote = f", remote={fetch.n_remote}" if fetch.n_remote else ""
            text = f"hot={fetch.n_hot}, cold={fetch.n_cold}{remote}, computed={computed}"
            self.send_header("X-Tieredkv-Cache", text)
        self._has_answered = True
        super().end_headers()

    def _set_completion_headers(self, status_code: int = 200) -> None:
        failure = self.response_generator.failure
        if status_code == 404 and failure is not None:
            # Upstream says so of all that can't be generated.
            status_code = _status(failure)
        super()._set_completion_headers(status_code)

    def do_POST(self) -> None:  # noqa: N802 - the base class looks for this name
        """Upstream's, or the API's. Exceptions would drop the connection without a word."""
        if api.owns(self.path):
            self._answer_call()
            return
        try:
            if self._has_right_length():
                with self._looked_at():
                    super().do_POST()
        except ConnectionError as e:
            self._status_sent = _CLIENT_GONE
            _LOG.info("tieredkv: a client left: %s", e)
        except Exception as e:  # noqa: BLE001 - the boundary: the client gets its text
            self._fail(e)
            self._status_sent = _status(e)
        finally:
            if self.path in _COMPLETIONS:
                self._write_down(self._status_sent)

    def do_GET(self) -> None:  # noqa: N802
        """Upstream's, or the API's."""
        if api.owns(self.path):
            self._answer_call()
        else:
            super().do_GET()

    def do_DELETE(self) -> None:  # noqa: N802
        """The API's."""
        if api.owns(self.path):
            self._answer_call()
        else:
            self._refuse(404, "Not Found")

    def do_OPTIONS(self) -> None:  # noqa: N802
        """Upstream's, which allows pages of other sites everything, and nothing for the API."""
        if api.owns(self.path):
            self._answer_call()
        else:
            super().do_OPTIONS()

    # ---- the cache's own API

    def _answer_call(self) -> None:
        call = Call(
            self.command, self.path, self.headers, self.client_address[0], self._read_body, self
        )
        try:
            answer = api.answer(call, self.response_generator)
        except ConnectionError:
            raise
        except Exception as e:  # noqa: BLE001 - the boundary: the client gets its text
            status = _status(e)
            _LOG.warning("tieredkv: a call failed: %.300r", e, exc_info=status == 500)
            self.response_generator.journal.note_fault("call", str(e) or type(e).__name__)
            answer = refusal(status, "failed", (str(e) or type(e).__name__)[:1000])
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    def _read_body(self) -> bytes:
        text = self.headers.get("Content-Length")
        if text is None:
            raise Misuse(411, "length_required", "send a Content-Length header")
        if not text.isdecimal():
            raise Misuse(400, "bad_length", "the Content-Length header must be a number")
        if len(text) > 18 or int(text) > _BODY_BYTES:
            raise Misuse(413, "too_large", f"a body may have at most {_BODY_BYTES} bytes")
        return bytes(self.rfile.read(int(text)))

    # ---- prompts in the API's bodies, see `calls.Prompts`

    def identify(self, body: dict[str, Any]) -> tuple[Hashable, Sequence[int]]:
        """See `calls.Prompts`."""
        with _as_misuse():
            found: tuple[Hashable, Sequence[int]] = self.response_generator.identify(
                *self._completion_of(body)
            )
            return found

    def compute(self, body: dict[str, Any]) -> RequestReport:
        """See `calls.Prompts`."""
        client = self.response_generator
        client.course, self.request_id = Course(), "-"
        status = 500
        try:
            with _as_misuse():
                _, responses = client.generate(*self._completion_of(body))
                for _ in responses:
                    pass
            status = 200
        except Misuse as e:
            status = e.status
            raise
        except ConnectionError:
            status = _CLIENT_GONE
            raise
        finally:
            report = self._write_down(status)
            # The answer to the call is none to a prompt.
            client.course = Course()
        return report

    def _completion_of(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """A body as upstream takes it to its generator, for an answer of one token.

        Raises:
            ValueError: something of it can't be served.
        """
        self.body = body
        self.requested_model = body.get("model", "default_model")
        draft, adapter = body.get("draft_model", "default_model"), body.get("adapters")
        if not isinstance(self.requested_model, str):
            raise ValueError("model must be a string")
        if not (draft is None or isinstance(draft, str)):
            raise ValueError("draft_model must be a string")
        if not (adapter is None or isinstance(adapter, str)):
            raise ValueError("adapters must be a string")
        self._check_own_fields()
        is_chat = "messages" in body
        request = self.handle_chat_completions() if is_chat else self.handle_text_completions()
        return request, upstream.GenerationArguments(
            model=upstream.ModelDescription(self.requested_model, draft, adapter),
            sampling=upstream.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1),
            logits=upstream.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
            stop_words=[],
            max_tokens=1,
            num_draft_tokens=self.response_generator.cli_args.num_draft_tokens,
            logprobs=False,
            top_logprobs=-1,
            seed=None,
            chat_template_kwargs=body.get("chat_template_kwargs"),
        )

    # ---- what becomes of a request

    def _write_down(self, status: int) -> RequestReport:
        """Tell the journal and the log of a request that has ended."""
        # What isn't a name was refused.
        model = str(self.requested_model)
        if model == "default_model":
            model = self.response_generator.cli_args.model or model
        course = self.response_generator.course
        report: RequestReport = course.report(self.request_id, model, status)
        self.response_generator.journal.add(report)
        _LOG.info("tieredkv: request %s", report.log_line())
        return report

    def generate_response(self, *args: Any, **kwargs: Any) -> Any:
        """Upstream's, with the tiers that tokens came from."""
        return self._with_tiers(super().generate_response(*args, **kwargs))

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> Any:
        """Upstream's, with the tiers that tokens came from."""
        return self._with_tiers(super().completion_usage_response(*args, **kwargs))

    def _with_tiers(self, response: Any) -> Any:
        details = response.get("usage", {}).get("prompt_tokens_details")
        fetch = self.response_generator.course.fetch
        if details is not None and fetch is not None:
            details |= {"cached_tokens_hot": fetch.n_hot, "cached_tokens_cold": fetch.n_cold}
            if fetch.n_remote:
                details["cached_tokens_remote"] = fetch.n_remote
        return response

    def _has_right_length(self) -> bool:
        text = self.headers.get("Content-Length") or ""
        if text.startswith("-"):
            self._refuse(400, "Invalid Content-Length header")
            return False
        if text.isdecimal() and (len(text) > 18 or int(text) > _BODY_BYTES):
            self._refuse(413, f"Requests may have at most {_BODY_BYTES} bytes")
            return False
        return True

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        """Have a body read again that was found to be a JSON object, if there is one: upstream
        writes all of any other one to the log, line breaks and secrets included.

        Raises:
            ValueError, RecursionError: it is none.
        """
        length = self.headers.get("Content-Length") or ""
        if self.path not in _COMPLETIONS or not length.isdecimal():
            yield
            return
        connection, raw = self.rfile, self.rfile.read(int(length))
        try:
            is_object = isinstance(json.loads(raw.decode()), dict)
        except UnicodeDecodeError as e:
            raise ValueError(f"the body is no UTF-8 text: byte {e.start}") from None
        except json.JSONDecodeError as e:
            raise ValueError(f"Invalid JSON in request body: {e}") from None
        if not is_object:
            raise ValueError("Request should be a JSON dictionary")
        self.rfile = io.BytesIO(raw)
        try:
            yield
        finally:
            self.rfile = connection

    def _fail(self, failure: Exception) -> None:
        status = _status(failure)
        _LOG.warning("tieredkv: a request failed: %.300r", failure, exc_info=status == 500)
        text = (str(failure) or type(failure).__name__)[:1000]
        if status >= 500:
            self.response_generator.journal.note_fault("request", text)
        if not self._has_answered:
            self._headers_buffer: list[bytes] = []
            self._refuse(status, text)
        elif self.stream:
            self.wfile.write(f"data: {json.dumps({'error': text})}\n\n".encode())

    def _refuse(self, status: int, text: str) -> None:
        super()._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps({"error": text}).encode())

    def validate_model_parameters(self) -> None:
        """Upstream's checks, and those whose lack ends its generation thread or the process.

        Raises:
            ValueError: a parameter is out of range; the client gets its text.
        """
        super().validate_model_parameters()
        self._validate("requested_draft_model", str, optional=True)
        self._validate("num_draft_tokens", int, max_val=_DRAFT_TOKENS)
        self._validate("seed", int, min_val=0, max_val=(1 << 64) - 1, optional=True)
        for name in (*_INTEGERS, *_FLOATS):
            # mlx takes them for indices of another kind.
            if isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a number")
        for name in _FLOATS:
            setattr(self, name, _finite(name, getattr(self, name)))
        for name in _SIZES:
            setattr(self, name, min(getattr(self, name), _MOST_TOKENS))
        for token, bias in (self.logit_bias or {}).items():
            _finite(f"logit_bias of {token}", bias)
        self._validate("xtc_threshold", float, max_val=0.5)
        self._check_own_fields()
        if self.stream_options is not None:
            self.stream_options = {"include_usage": False, **self.stream_options}

    def _check_own_fields(self) -> None:
        """Check what upstream takes as it is, and tell the client what is ours.

        Raises:
            ValueError: the client gets its text.
        """
        _check_body(self.body)
        self.response_generator.cache_salt = self._cache_salt()
        self.response_generator.cache_ttl = _ttl(self.body.get("cache_ttl"))

    def _cache_salt(self) -> bytes:
        """What keeps this request's prompts apart from others': its API key, if the server is
        told to look at it, and its own salt.
        """
        looks = self.response_generator.cli_args.cache_salt_from_api_key
        given = self.headers.get("Authorization", "") if looks else ""
        return tenant(given.removeprefix("Bearer ").strip(), self.body.get("cache_salt") or "")

    def handle_text_completions(self) -> Any:
        """Upstream's, for one prompt that isn't empty."""
        prompt = self.body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("prompt must be text, and not empty")
        return super().handle_text_completions()

    def handle_chat_completions(self) -> Any:
        """Upstream's, for messages that aren't empty."""
        messages = self.body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list, and not empty")
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise ValueError("each of messages must be an object with a role")
        return super().handle_chat_completions()


def _finite(name: str, value: float) -> float:
    """A number as a float.

    Raises:
        ValueError: it is infinite, not a number, or too large.
    """
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite")
    return number


def _ttl(value: Any) -> float | None:
    """Seconds that a request says its prompt is to be kept for after its last use.

    Raises:
        ValueError: it is neither a positive number of seconds nor text such as "30m".
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return duration(value)
        except ArgumentTypeError as e:
            raise ValueError(f"cache_ttl: {e}") from e
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError('cache_ttl must be a number of seconds above 0, or text such as "30m"')
    return _finite("cache_ttl", value)


def _is_text(text: str) -> bool:
    """Whether it can be written as UTF-8, as lone surrogates can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_body(body: dict[str, Any]) -> None:
    """Check the shape of what upstream takes from a request's body as it is.

    Raises:
        ValueError: the client gets its text.
    """
    stop = body.get("stop") or []
    words = stop if isinstance(stop, list) else [stop]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("stop must be a string or a list of strings")
    if len(words) > _STOP_WORDS or sum(map(len, words)) > _STOP_CHARACTERS:
        raise ValueError(
            f"stop must be at most {_STOP_WORDS} strings of {_STOP_CHARACTERS} characters in all"
        )
    options = body.get("stream_options")
    if options is not None and not (
        isinstance(options, dict) and isinstance(options.get("include_usage", False), bool)
    ):
        raise ValueError("stream_options must be an object with a boolean include_usage")
    tools = body.get("tools")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ValueError("tools must be a list of objects")
    salt = body.get("cache_salt")
    if salt is not None and not (
        isinstance(salt, str) and 0 < len(salt) <= _SALT_CHARACTERS and _is_text(salt)
    ):
        raise ValueError(f"cache_salt must be a string of 1 to {_SALT_CHARACTERS} characters")
    variables = body.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        raise ValueError("chat_template_kwargs must be an object")
    if taken := sorted(_NOT_FOR_CLIENTS & set(variables or ())):
        raise ValueError(f"chat_template_kwargs must not have {', '.join(taken)}")

"""What clients send that no gateway may take: each with the status and the words that it is refused with."""

import gzip
import json
from dataclasses import dataclass
from typing import Any

from tests.support.raw_http import post_bytes

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODEL = "tiny"
CONTEXT_TOKENS = 2048
BODY_BYTES_MAX = 64 << 20
DEEP = 100_000
HUGE = 10**400
LONG_NAME = 1_000_000
HEADER_LINE_BYTES = 20_000
GZIP_BOMB_BYTES = BODY_BYTES_MAX + (1 << 20)


@dataclass(frozen=True, slots=True)
class BadRequest:
    """`data` goes out as it is, then the client waits for the answer, or goes where `status` is None.
    `named` is in the error's message."""

    name: str
    data: bytes
    status: int | None
    named: str = ""


def bad_requests() -> tuple[BadRequest, ...]:
    return (*_fields(), *_bodies(), *_paths(), *_malformed(), *_unfinished())


def _text(**parameters: Any) -> bytes:
    return post_bytes(TEXT, {"model": MODEL, "prompt": "hello", "max_tokens": 2, **parameters})


def _chat(**parameters: Any) -> bytes:
    messages = [{"role": "user", "content": "hello"}]
    return post_bytes(CHAT, {"model": MODEL, "messages": messages, "max_tokens": 2, **parameters})


def _json(text: str) -> bytes:
    return post_bytes(TEXT, text.encode())


def _fields() -> tuple[BadRequest, ...]:
    """JSON as it should be, with parameters that are not."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    return (
        BadRequest("no model", post_bytes(TEXT, {"prompt": "hello"}), 400, "model"),
        BadRequest("model is a number", _text(model=7), 400, "model"),
        BadRequest("unknown model", _text(model="gpt-5"), 404, "gpt-5"),
        BadRequest("prompt is a number", _text(prompt=7), 400, "prompt"),
        BadRequest("prompt is an object", _text(prompt={"a": 1}), 400, "prompt"),
        BadRequest("empty prompt", _text(prompt=[]), 400, "prompt"),
        BadRequest("prompt mixes types", _text(prompt=[1, "a"]), 400, "prompt"),
        BadRequest("token id is a float", _text(prompt=[1.5]), 400, "prompt"),
        BadRequest("token id is negative", _text(prompt=[-1]), 400, "prompt"),
        BadRequest("token id is huge", _text(prompt=[HUGE]), 400, "prompt"),
        BadRequest("token id is no token", _text(prompt=[1 << 31]), 400, "511"),
        BadRequest("prompts too deep", _text(prompt=[[[1]]]), 400, "prompt"),
        BadRequest("prompt fills the context", _text(prompt=[5] * CONTEXT_TOKENS), 400, "2048"),
        BadRequest("max_tokens is huge", _text(max_tokens=HUGE), 400, "max_tokens"),
        BadRequest("max_tokens is a float", _text(max_tokens=1.5), 400, "max_tokens"),
        BadRequest("max_tokens is true", _text(max_tokens=True), 400, "max_tokens"),
        BadRequest("temperature is huge", _text(temperature=1e308), 400, "temperature"),
        BadRequest("temperature is text", _text(temperature="hot"), 400, "temperature"),
        BadRequest("top_p is 0", _text(top_p=0), 400, "top_p"),
        BadRequest("n is huge", _text(n=1 << 62), 400, "n"),
        BadRequest("seed is huge", _text(seed=1 << 64), 400, "seed"),
        BadRequest("stop is empty", _text(stop=[""]), 400, "stop"),
        BadRequest("stop is too long", _text(stop="x" * 5000), 400, "stop"),
        BadRequest("too many stops", _text(stop=[str(i) for i in range(99)]), 400, "stop"),
        BadRequest("logit_bias is a list", _text(logit_bias=[1]), 400, "logit_bias"),
        BadRequest("logit_bias of a word", _text(logit_bias={"cat": 1}), 400, "logit_bias"),
        BadRequest("logit_bias of ten thousand", _text(logit_bias={str(i): 1 for i in range(10_000)}), 400),
        BadRequest("unknown parameter", _text(tempperature=1), 400, "tempperature"),
        BadRequest("unsupported parameter", _text(suffix="end"), 400, "suffix"),
        BadRequest("suffix of a chat", _chat(suffix="end"), 400, "suffix"),
        BadRequest(
            "both lengths", _chat(max_tokens=3, max_completion_tokens=4), 400, "max_completion_tokens"
        ),
        BadRequest("no messages", _chat(messages=[]), 400, "messages"),
        BadRequest("unknown role", _chat(messages=[{"role": "king", "content": "x"}]), 400, "role"),
        BadRequest("no content", _chat(messages=[{"role": "user"}]), 400, "content"),
        BadRequest(
            "an image",
            _chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            400,
            "messages[0].content",
        ),
        BadRequest("top_logprobs alone", _chat(top_logprobs=3), 400, "logprobs"),
        BadRequest("tool_choice without tools", _chat(tool_choice="required"), 400, "tool"),
        BadRequest(
            "tool's schema is a list",
            _chat(tools=[{"type": "function", "function": {"name": "f", "parameters": [1]}}]),
            400,
            "tools",
        ),
        BadRequest("two tools of a name", _chat(tools=[tool, tool]), 400, "tools"),
        BadRequest(
            "tool_choice of a stranger", _chat(tools=[tool], tool_choice=_named("g")), 400, "tool_choice"
        ),
        BadRequest("schema of no type", _chat(response_format=schema), 400, "response_format"),
        BadRequest("regex that is none", _text(guided_regex="(a"), 400, "guided_regex"),
        BadRequest("grammar that is none", _text(guided_grammar="start: nowhere"), 400, "guided_grammar"),
        BadRequest("two forms", _text(guided_regex="a", guided_choice=["b"]), 400, "guided_choice"),
        BadRequest("stream_options unstreamed", _text(stream_options={"include_usage": True}), 400, "stream"),
        BadRequest("priority is a word", _text(priority="high"), 400, "priority"),
    )


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _bodies() -> tuple[BadRequest, ...]:
    """What is no JSON object, or too much of one."""
    deep = '{"model": "tiny", "prompt": ' + "[" * DEEP + "]" * DEEP + "}"
    objects = '{"model": "tiny", "prompt": "a", "logit_bias": ' + '{"a":' * DEEP + "1" + "}" * DEEP + "}"
    bomb = gzip.compress(b" " * GZIP_BOMB_BYTES)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: {BODY_BYTES_MAX + 1}\r\n\r\n"
    return (
        BadRequest("no body", post_bytes(TEXT, b""), 400, "JSON"),
        BadRequest("a list", _json("[]"), 400, "object"),
        BadRequest("a string", _json('"hello"'), 400, "object"),
        BadRequest("half an object", _json('{"model": '), 400, "JSON"),
        BadRequest("two objects", _json("{}{}"), 400, "JSON"),
        BadRequest("not a number", _json('{"model": "tiny", "prompt": "a", "top_p": NaN}'), 400, "JSON"),
        BadRequest(
            "a text that is no UTF-8", post_bytes(TEXT, b'{"model": "tiny", "prompt": "\xff\xfe"}'), 400
        ),
        BadRequest("a long name", _json('{"' + "x" * LONG_NAME + '": 1}'), 400, "unknown parameter"),
        BadRequest("half a surrogate", _json('{"model": "tiny", "prompt": "\\ud800"}'), 400),
        BadRequest("deep lists", _json(deep), 400, "JSON"),
        BadRequest("deep objects", _json(objects), 400, "JSON"),
        BadRequest("a longer body than may be", head.encode(), 413, str(BODY_BYTES_MAX)),
        BadRequest(
            "a small body that unpacks to more", post_bytes(TEXT, bomb, "Content-Encoding: gzip"), 413
        ),
        BadRequest("no gzip", post_bytes(TEXT, b"plain", "Content-Encoding: gzip"), 400),
    )


def _paths() -> tuple[BadRequest, ...]:
    return (
        BadRequest("nothing there", b"GET /v2/models HTTP/1.1\r\nHost: a\r\n\r\n", 404, "/v2/models"),
        BadRequest("wrong method", b"GET /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n", 405, "POST"),
        BadRequest("a model that is none", b"GET /v1/models/gpt-5 HTTP/1.1\r\nHost: a\r\n\r\n", 404, "gpt-5"),
        BadRequest("up and out", b"GET /v1/../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    )


def _malformed() -> tuple[BadRequest, ...]:
    """What is no HTTP."""
    line = b"x" * HEADER_LINE_BYTES
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    smuggled = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    chunked = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return (
        BadRequest("no HTTP at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03hello\r\n\r\n", 400),
        BadRequest("a version that is none", b"GET /v1/models HTTP/9.x\r\nHost: a\r\n\r\n", 400),
        BadRequest("a header without colon", b"GET /v1/models HTTP/1.1\r\nHost a\r\n\r\n", 400),
        BadRequest("a zero in a header", b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n", 400),
        BadRequest("a long header", b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: " + line + b"\r\n\r\n", 431),
        BadRequest("a long path", b"GET /" + line + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
        BadRequest(
            "a length that is none",
            f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n".encode() + body,
            400,
        ),
        BadRequest("two lengths", f"POST {TEXT} HTTP/1.1\r\nHost: a\r\n".encode() + smuggled, 400),
        BadRequest("a chunk of no size", chunked + b"zz\r\n{}\r\n0\r\n\r\n", 400),
        BadRequest("a chunk of a huge size", chunked + b"f" * 40 + b"\r\n{}\r\n", 400),
    )


def _unfinished() -> tuple[BadRequest, ...]:
    """Clients that go in the middle of it."""
    whole = _text()
    chunked = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return (
        BadRequest("nothing", b"", None),
        BadRequest("half a head", whole[:30], None),
        BadRequest("half a body", whole[:-5], None),
        BadRequest("half a chunk", chunked + b'20\r\n{"model": ', None),
        BadRequest("chunks without end", chunked + b'9\r\n{"model":\r\n', None),
    )

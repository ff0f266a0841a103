"""What is wrong with a body is said in words that are true, with a code that clients know."""

import json

import pytest

from gateway.api.api_errors import ApiError
from gateway.api.request_body import decode_chat, decode_completion

pytestmark = pytest.mark.unit


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_chat(body)
    return caught.value


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("half", [r"\ud800", r"\uDFFFx", r"\ud83d\u0041", r"\udc00\ud800"])
def test_half_a_character_is_called_that(half: str) -> None:
    error = refused(b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % half.encode())
    assert "half of a character" in error.message
    with pytest.raises(ApiError, match="half of a character"):
        decode_completion(b'{"model": "m", "prompt": ["%s"]}' % half.encode())


def test_whole_characters_are_no_halves() -> None:
    body = rb'{"model": "m", "messages": [{"role": "user", "content": "\ud83d\ude00"}]}'
    assert decode_chat(body).messages[0].content == "\N{GRINNING FACE}"
    assert "half" not in refused(body[:-2]).message


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"image_url": {"url": "x"}, "type": "image_url"},
        {"type": "input_audio"},
    ],
)
def test_other_parts_than_text_are_not_supported(part: dict[str, object]) -> None:
    error = refused(json.dumps({"model": "m", "messages": [user("a"), user([part])]}).encode())
    assert (error.param, error.code) == ("messages[1].content[0]", "unsupported_parameter")


@pytest.mark.parametrize(
    ("parameters", "param", "code"),
    [
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"messages": [user([{"type": "text", "text": "a", "b": 1}])]}, None, "unknown_parameter"),
        ({"stop": 7}, "stop", "invalid_type"),
    ],
)
def test_what_is_no_value_is_another_code_than_what_is_no_type(
    parameters: dict[str, object], param: str | None, code: str
) -> None:
    error = refused(json.dumps({"model": "m", "messages": [user("a")]} | parameters).encode())
    assert error.code == code
    assert param in (None, error.param)

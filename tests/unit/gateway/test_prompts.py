"""The prompts of a text completion, in every form that they may have."""

import json

import pytest

from gateway.api.api_errors import ApiError
from gateway.api.model_limits import ModelLimits
from gateway.api.parameter_limits import CHOICES_MAX, PROMPTS_MAX
from gateway.api.prompts import prompts_of, tokens_of
from gateway.api.request_body import decode_completion, decode_detokenize

pytestmark = pytest.mark.unit

LIMITS = ModelLimits(name="tiny", context_tokens_max=100, vocabulary_tokens=50, end_token_ids=(2, 3))


def prompts(prompt: object, **parameters: object) -> tuple[str | list[int], ...]:
    body = json.dumps({"model": "tiny", "prompt": prompt} | parameters).encode()
    return prompts_of(decode_completion(body), LIMITS)


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        ([], "prompt", None),
        ([[]], "prompt[0]", None),
        ([[1], []], "prompt[1]", None),
        ([[1], [50]], "prompt[1][0]", None),
        ([[1], "a"], "prompt[1]", "invalid_type"),
        ([["a"]], "prompt[0][0]", "invalid_type"),
        (["a", 1], "prompt[1]", "invalid_type"),
        (["a"] * (PROMPTS_MAX + 1), "prompt", None),
        ([[1]] * (PROMPTS_MAX + 1), "prompt", None),
        ([[1], [7] * 100], "prompt[1]", "context_length_exceeded"),
        (7, "prompt", "invalid_type"),
        ([50], "prompt[0]", None),
        ([1, 2, -1], "prompt[2]", None),
        ([1, "a"], "prompt[1]", "invalid_type"),
        ({}, "prompt", "invalid_type"),
        (None, "prompt", "invalid_type"),
        ([7] * 100, "prompt", "context_length_exceeded"),
        ([10**30] * 100, "prompt", "context_length_exceeded"),
    ],
)
def test_bad_prompts_are_refused(prompt: object, param: str, code: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        prompts(prompt)
    assert (caught.value.kind.status, caught.value.param, caught.value.code) == (400, param, code)


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ("a",)),
        ("[1]", ("[1]",)),
        ([1, 2], ([1, 2],)),
        (["a", 'b"\\', ""], ("a", 'b"\\', "")),
        ([[1], [2, 3]], ([1], [2, 3])),
        (["\\"] * PROMPTS_MAX, ("\\",) * PROMPTS_MAX),
        (['"'] * PROMPTS_MAX, ('"',) * PROMPTS_MAX),
        ([[1]] * PROMPTS_MAX, ([1],) * PROMPTS_MAX),
    ],
)
def test_prompts_come_in_every_form(prompt: object, read: tuple[object, ...]) -> None:
    assert prompts(prompt) == read
    spaced = json.dumps(prompt, indent=1).encode()
    request = decode_completion(b'{"model": "tiny", "prompt":\r\n\t ' + spaced + b" }")
    assert prompts_of(request, LIMITS) == read


def test_answers_of_a_request_are_bounded() -> None:
    assert len(prompts(["a"] * 8, n=CHOICES_MAX)) * CHOICES_MAX == PROMPTS_MAX
    with pytest.raises(ApiError) as caught:
        prompts(["a"] * 9, n=CHOICES_MAX)
    assert (caught.value.param, "1152 answers, at most 1024" in caught.value.message) == ("n", True)


@pytest.mark.parametrize("prompt", [b'"\xff"', b'["a", "\xff"]', b'["' + b"\\ud800" + b'"]'])
def test_a_prompt_that_is_no_utf8_is_400(prompt: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        prompts_of(decode_completion(b'{"model": "tiny", "prompt": ' + prompt + b"}"), LIMITS)
    assert (caught.value.kind.status, caught.value.code) == (400, "invalid_json")


def test_tokens_to_be_told_as_text_are_in_the_vocabulary_and_no_more_than_the_context() -> None:
    def tokens(value: object) -> list[int]:
        body = json.dumps({"model": "tiny", "tokens": value}).encode()
        return tokens_of(decode_detokenize(body), LIMITS)

    assert tokens([]) == []
    assert tokens([7] * 100) == [7] * 100
    for bad, param in (([7, 50], "tokens[1]"), ([7] * 101, "tokens"), ("a", "tokens"), ([[1]], "tokens[0]")):
        with pytest.raises(ApiError) as caught:
            tokens(bad)
        assert (caught.value.kind.status, caught.value.param) == (400, param)

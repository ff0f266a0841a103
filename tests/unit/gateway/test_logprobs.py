"""How tokens are named in logprobs."""

import pytest
from tests.unit.gateway.model_files import byte_level_tokenizer

from gateway.logprobs import TokenNames, chat_logprobs, completion_logprobs
from gateway.text.detokenizer import TokenBytes
from gateway.text.token_log import LoggedToken
from policy.core import TokenLogprobs

pytestmark = pytest.mark.unit

NAMES = TokenNames(TokenBytes(byte_level_tokenizer(), keep_special=True))
UNKNOWN = 10_000


def ids(text: str) -> list[int]:
    return byte_level_tokenizer().encode(text, add_special_tokens=False).ids


def test_every_token_has_a_name_of_its_own() -> None:
    (end,) = ids("<|im_end|>")
    assert NAMES.chat(end) == NAMES.completion(end) == "<|im_end|>"
    broken = byte_level_tokenizer().token_to_id("ģ")  # the byte 0x81, which begins no character
    assert NAMES.chat(broken) == "\\x81"
    assert NAMES.completion(broken) == "bytes:\\x81"
    assert NAMES.chat(UNKNOWN) == NAMES.completion(UNKNOWN) == f"token_id:{UNKNOWN}"
    assert NAMES.bytes_of(UNKNOWN) == b""
    names = [NAMES.chat(token_id) for token_id in range(byte_level_tokenizer().get_vocab_size())]
    assert len(set(names)) == len(names)


def test_the_two_forms_of_an_entry() -> None:
    a, b = ids("a"), ids("b")
    logged = [
        LoggedToken(a[0], TokenLogprobs(-0.5, ((b[0], -0.25), (UNKNOWN, -3.0))), 4),
        LoggedToken(b[0], None, 5),
    ]
    first, second = chat_logprobs(logged, NAMES).content
    assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97])
    assert [(top.token, top.logprob, top.bytes) for top in first.top_logprobs] == [
        ("b", -0.25, [98]),
        (f"token_id:{UNKNOWN}", -3.0, []),
    ]
    assert (second.token, second.logprob, second.top_logprobs) == ("b", None, [])
    told = completion_logprobs(logged, NAMES)
    assert told.tokens == ["a", "b"]
    assert told.token_logprobs == [-0.5, None]
    assert told.text_offset == [4, 5]
    assert told.top_logprobs == [{"b": -0.25, f"token_id:{UNKNOWN}": -3.0, "a": -0.5}, None]

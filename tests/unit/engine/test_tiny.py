"""The tiny model: small, deterministic, not flat, with a tokenizer that works."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.models import tiny_folder
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine.errors import ModelFolderError
from engine.tiny import make_tiny_model

pytestmark = pytest.mark.unit


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_tiny_model(tmp_path / name, seed=seed)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert {name for name in a if a[name] != c[name]} == {"model.safetensors"}
    assert sum(map(len, a.values())) < 2_000_000


@given(text=st.text(max_size=60))
def test_any_text_survives_its_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_folder() / "tokenizer.json"))
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


def test_every_token_id_can_be_decoded() -> None:
    tokenizer = Tokenizer.from_file(str(tiny_folder() / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    assert all(tokenizer.id_to_token(token_id) for token_id in range(512))


def test_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    token_ids = tokenizer(text).input_ids
    assert (token_ids[0], token_ids.count(1), token_ids.count(2)) == (1, 3, 2)
    assert tokenizer.eos_token_id == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 258}, r"vocab_size must be 259\.\.935"),
        ({"vocab_size": 936}, "vocab_size"),
        ({"hidden_size": 68}, "hidden_size 68"),
        ({"kv_heads": 3}, "kv_heads 3"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path: Path, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ModelFolderError, match=message):
        make_tiny_model(tmp_path / "tiny", **sizes)
    assert not (tmp_path / "tiny").exists()

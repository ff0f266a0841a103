"""Tokenizers out of GGUF files give the tokens of the tokenizers they were made from."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tests.support.gguf_files import GGUFContents
from tokenizers import Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from engine.errors import ModelFolderError
from engine.gguf_import import import_gguf
from engine.tiny import make_tiny_model

pytestmark = pytest.mark.unit

VOCAB_SIZE = 512
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As the model's authors published it."""
CORPUS = "the cat sat on the mat; the dog, the log and the frog sang: là-bas naïve façade  ...  end\n" * 2
SPACE = "▁"

Merges = Sequence[tuple[str, str]]
texts = st.text(
    st.one_of(
        st.sampled_from("abcdefst' \n\r\t,.!?0123456789éè́ü中文’–\u00a0"),
        st.characters(max_codepoint=0xFFFF, exclude_categories=("Cs", "Cn", "Co")),
    ),
    max_size=40,
)
"""Of characters that every version of Unicode has: what a letter is differs between libraries."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    make_tiny_model(folder, vocab_size=VOCAB_SIZE, layers=1)
    return folder


def imported(source: Path, folder: Path, **fields: object) -> Tokenizer:
    """The tokenizer of a file with these fields of tokenizer.ggml; None removes one."""
    contents = GGUFContents(source)
    for name, value in fields.items():
        contents.fields[f"tokenizer.ggml.{name}"] = value
        if value is None:
            del contents.fields[f"tokenizer.ggml.{name}"]
    folder.mkdir(exist_ok=True)
    import_gguf(contents.write(folder / "model.gguf"), folder / "imported", lambda _: None)
    return Tokenizer.from_file(str(folder / "imported" / "tokenizer.json"))


def learn_merges(words: Sequence[Sequence[str]], count: int) -> Merges:
    """Byte-pair encoding's own training: the most frequent neighbours become one, again and again."""
    merges: list[tuple[str, str]] = []
    split = [list(word) for word in words]
    while len(merges) < count:
        neighbours = Counter(pair for word in split for pair in pairwise(word))
        if not neighbours:
            break
        best = max(neighbours, key=lambda pair: (neighbours[pair], pair))
        merges.append(best)
        split = [joined(word, best) for word in split]
    return merges


def joined(symbols: Sequence[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


@pytest.fixture(scope="module")
def byte_pairs(source: Path) -> tuple[list[str], Merges]:
    """Tokens and merges over GPT-2's bytes, learnt from a text."""
    tiny = Tokenizer.from_file(str(source / "tokenizer.json"))
    base = [tiny.id_to_token(token_id) for token_id in range(259)]
    words = [[tiny.id_to_token(i) for i in tiny.encode(word).ids] for word in CORPUS.split(" ")]
    merges = learn_merges([[symbol for token in word for symbol in token] for word in words], 100)
    tokens = list(dict.fromkeys([*base, *(first + second for first, second in merges)]))
    return [*tokens, *(f"[PAD{index}]" for index in range(len(tokens), VOCAB_SIZE))], merges


def byte_pair_fields(byte_pairs: tuple[list[str], Merges]) -> dict[str, object]:
    tokens, merges = byte_pairs
    types = [3 if index < 3 else 5 if token.startswith("[PAD") else 1 for index, token in enumerate(tokens)]
    return {"tokens": tokens, "token_type": types, "merges": [" ".join(merge) for merge in merges]}


def test_a_tokenizer_that_begins_with_bos_and_keeps_digits(source: Path, tmp_path: Path) -> None:
    types = [3] * 3 + [1] * (VOCAB_SIZE - 4) + [4]
    tokenizer = imported(source, tmp_path, pre="gpt-2", add_bos_token=True, token_type=types)
    assert tokenizer.encode("ab").ids[0] == 1
    assert tokenizer.encode("ab", add_special_tokens=False).ids[0] != 1
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str("in 1984")
    assert [piece for piece, _ in pieces] == ["in", "Ġ1984"]
    assert 511 in tokenizer.encode(f"12{tokenizer.id_to_token(511)}3").ids


@pytest.fixture(scope="module")
def qwen2(
    source: Path, byte_pairs: tuple[list[str], Merges], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Qwen2Tokenizer]:
    folder = tmp_path_factory.mktemp("qwen2")
    found = imported(source, folder, pre="qwen2", **byte_pair_fields(byte_pairs))
    tokens, merges = byte_pairs
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return found, Qwen2Tokenizer(vocab=vocabulary, merges=list(merges))


@given(text=texts)
def test_qwen2_gives_the_tokens_of_transformers(qwen2: tuple[Tokenizer, Qwen2Tokenizer], text: str) -> None:
    found, reference = qwen2
    assert found.encode(text, add_special_tokens=False).ids == reference.encode(
        text, add_special_tokens=False
    )


@pytest.fixture(scope="module")
def llama3(
    source: Path, byte_pairs: tuple[list[str], Merges], tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("llama3")
    fields = byte_pair_fields(byte_pairs)
    return imported(source, folder, pre="llama-bpe", add_bos_token=None, **fields)


@given(text=texts)
def test_llama_3_cuts_as_its_pattern_says(llama3: Tokenizer, text: str) -> None:
    pieces = llama3.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == regex.findall(LLAMA3_PATTERN, text)
    token_ids = llama3.encode(text, add_special_tokens=False).ids
    assert llama3.decode(token_ids, skip_special_tokens=False) == text


def test_llama_3_begins_with_bos_and_takes_whole_words(
    source: Path, byte_pairs: tuple[list[str], Merges], llama3: Tokenizer, tmp_path: Path
) -> None:
    assert llama3.encode("cat").ids[0] == 1
    tokens, merges = byte_pairs
    whole = [*tokens[:-1], "qqq"]  # a token that no merge makes
    fields = byte_pair_fields((whole, merges))
    for pre, expected in (("llama-bpe", [511]), ("qwen2", [tokens.index("q")] * 3)):
        tokenizer = imported(source, tmp_path / pre, pre=pre, **fields)
        assert tokenizer.encode("qqq", add_special_tokens=False).ids == expected


@pytest.fixture(scope="module")
def pieces() -> dict[str, float]:
    """SentencePiece's pieces and scores, learnt from a text; two of its characters are left to bytes."""
    words = [list(SPACE + word) for word in CORPUS.split(" ")]
    merges = learn_merges(words, 120)
    characters = sorted({symbol for word in words for symbol in word if symbol not in "ï中"})
    merged = [first + second for first, second in merges if not set(first + second) & set("ï中")]
    scores = {piece: float(-rank) for rank, piece in enumerate(dict.fromkeys(merged))}
    return {
        **scores,
        **{character: float(-len(scores)) for character in characters if character not in scores},
    }


def sentence_piece_fields(pieces: dict[str, float]) -> dict[str, object]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    fillers = VOCAB_SIZE - len(tokens)
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [*tokens, *(f"[PAD{index}]" for index in range(fillers))],
        "scores": [0.0] * 259 + list(pieces.values()) + [-1000.0] * fillers,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [5] * fillers,
        "add_bos_token": None,
        "merges": None,
    }


@pytest.fixture(scope="module")
def sentence_piece(
    source: Path, pieces: dict[str, float], tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return imported(source, tmp_path_factory.mktemp("spm"), **sentence_piece_fields(pieces))


def best_first(text: str, pieces: dict[str, float]) -> list[str]:
    """SentencePiece by its definition: join the neighbours whose union scores best, the leftmost first."""
    symbols = list((SPACE + text).replace(" ", SPACE)) if text else []
    while True:
        unions = [(pieces[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in pieces]
        if not unions:
            break
        at = -max(unions)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        spelled
        for symbol in symbols
        for spelled in ([symbol] if symbol in pieces else [f"<0x{byte:02X}>" for byte in symbol.encode()])
    ]


@given(text=st.one_of(texts, st.text("theca dognsfrlàï é,.;:\n", max_size=60)))
def test_sentence_piece_joins_the_best_first(
    sentence_piece: Tokenizer, pieces: dict[str, float], text: str
) -> None:
    found = sentence_piece.encode(text, add_special_tokens=False)
    assert found.tokens == best_first(text, pieces)
    assert sentence_piece.decode(found.ids) == text.replace(SPACE, " ")


def test_sentence_piece_special_tokens(sentence_piece: Tokenizer) -> None:
    assert sentence_piece.encode("the cat").ids[0] == 1
    assert sentence_piece.encode("a</s>b", add_special_tokens=False).tokens == [
        "▁a",
        "</s>",
        *best_first("b", {"▁": 0.0, "b": 0.0}),
    ]
    assert sentence_piece.decode([1, *sentence_piece.encode("the cat").ids]) == "the cat"


def test_sentence_piece_without_a_space_before(
    source: Path, pieces: dict[str, float], tmp_path: Path
) -> None:
    fields = sentence_piece_fields(pieces)
    tokenizer = imported(source, tmp_path, **fields, add_space_prefix=False)
    assert tokenizer.encode("cat", add_special_tokens=False).tokens[0] != SPACE + "cat"
    assert tokenizer.decode(tokenizer.encode(" cat").ids) == " cat"


def fewer_bytes(fields: dict[str, object]) -> None:
    types = fields["token_type"]
    assert isinstance(types, list)
    types[3 + 0x41] = 1


def user_defined_with_space(fields: dict[str, object]) -> None:
    tokens, types = fields["tokens"], fields["token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    tokens[-1], types[-1] = "▁▁", 4


def setting(name: str, value: object) -> Callable[[dict[str, object]], None]:
    def change(fields: dict[str, object]) -> None:
        fields[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fewer_bytes, "token_type: no byte token for 0x41"),
        (user_defined_with_space, "token_type: user-defined '▁▁' with a space is not supported"),
        (setting("scores", [0.0]), "scores: has 1 entries for 512 tokens"),
        (setting("scores", None), r"tokenizer\.ggml\.scores: is missing"),
        (setting("scores", "x"), "scores: must be a list of numbers"),
        (setting("unknown_token_id", None), "unknown_token_id: is missing"),
        (setting("remove_extra_whitespaces", True), "remove_extra_whitespaces: True is not supported"),
        (setting("precompiled_charsmap", [1, 2]), "precompiled_charsmap: is not supported"),
        (setting("add_eos_token", True), "add_eos_token: True is not supported"),
    ],
)
def test_sentence_piece_that_is_not_exactly_known(
    source: Path,
    pieces: dict[str, float],
    tmp_path: Path,
    change: Callable[[dict[str, object]], None],
    message: str,
) -> None:
    fields = sentence_piece_fields(pieces)
    change(fields)
    with pytest.raises(ModelFolderError, match=message):
        imported(source, tmp_path, **fields)


def test_the_end_of_a_turn_ends_an_answer_too(source: Path, tmp_path: Path) -> None:
    imported(source, tmp_path, eot_token_id=0, eom_token_id=2)
    generation = json.loads((tmp_path / "imported" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]

"""From token ids to text as they come: characters whole, nothing said twice.

`TokenBytes` knows what bytes a token stands for, `Detokenizer` turns a growing answer's bytes into
characters. Knows no request. The answer's text is what decoding prompt + answer adds to decoding the
prompt, so a first word keeps its space.
"""

import codecs
import copy
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping

from tokenizers import Tokenizer

from cluster.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token of a vocabulary. Ids without a token have none, and special tokens have none
    unless they are kept.

    Knows the decoders of byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2) and of SentencePiece with or
    without byte fallback (Llama 2, Mistral); raises ConfigError for any other.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._kept = self._special if keep_special else frozenset[int]()
        self._piece_bytes = _piece_decoder(json.loads(tokenizer.to_str()).get("decoder"))
        self._known: dict[int, bytes] = {}

    def keeping(self, special_tokens: Collection[str]) -> "TokenBytes":
        """The same vocabulary, with these special tokens kept."""
        other = copy.copy(self)
        other._kept = self._kept | {
            token_id for token_id in self._special if self._tokenizer.id_to_token(token_id) in special_tokens
        }
        other._known = {}
        return other

    def of(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is not None:
            return known
        piece = None if token_id < 0 else self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        # Only tokens of the vocabulary are remembered: that bounds the table.
        if token_id not in self._special:
            self._known[token_id] = self._piece_bytes(piece)
        else:
            self._known[token_id] = piece.encode() if token_id in self._kept else b""
        return self._known[token_id]


class Detokenizer:
    """The text of one answer, token by token. The texts of all calls joined are the whole text; bytes
    that are no UTF-8 become U+FFFD as soon as that is certain, and not before."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = b""

    @property
    def begun(self) -> bytes:
        """The bytes of a character that is not whole yet."""
        return self._begun

    def feed(self, token_ids: Iterable[int]) -> str:
        """The characters that these next tokens complete."""
        spelled = b"".join(map(self._token_bytes.of, token_ids))
        if not self._begun:
            try:
                # Mostly whole characters, for which no state has to be kept.
                return spelled.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(spelled)
        self._begun = self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """What is left of a character that never became whole."""
        return self._decoder.decode(b"", final=True)


def whole_text(token_bytes: TokenBytes, token_ids: Iterable[int]) -> str:
    """Of tokens that are all there."""
    return b"".join(map(token_bytes.of, token_ids)).decode("utf-8", "replace")


def _piece_decoder(decoder: Mapping[str, object] | None) -> Callable[[str], bytes]:
    """How a vocabulary entry is spelled in bytes, by the decoder that tokenizer.json names."""
    steps = _steps(decoder)
    kinds = {str(step.get("type")) for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return _byte_level_bytes
    if kinds and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        replacements = tuple(_replacement(step) for step in steps if step["type"] in ("Metaspace", "Replace"))
        return _SentencePieceBytes(replacements, byte_fallback="ByteFallback" in kinds)
    raise ConfigError(f"tokenizer.json: decoder {sorted(kinds) or None} is not supported")


def _steps(decoder: Mapping[str, object] | None) -> list[Mapping[str, object]]:
    if decoder is None:
        return []
    inner = decoder.get("decoders")
    if decoder.get("type") == "Sequence" and isinstance(inner, list):
        return [step for each in inner for step in _steps(each)]
    return [decoder]


def _replacement(step: Mapping[str, object]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return str(step.get("replacement", "▁")), " "
    pattern = step.get("pattern")
    if not isinstance(pattern, dict) or "String" not in pattern:
        raise ConfigError("tokenizer.json: a decoder that replaces by regular expression is not supported")
    return str(pattern["String"]), str(step.get("content", ""))


class _SentencePieceBytes:
    def __init__(self, replacements: Iterable[tuple[str, str]], byte_fallback: bool) -> None:
        self._replacements = tuple(replacements)
        self._byte_fallback = byte_fallback

    def __call__(self, piece: str) -> bytes:
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for U+0100 and on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + position): byte for position, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    """An added token may have characters that are no bytes' names: then it stands for itself."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()

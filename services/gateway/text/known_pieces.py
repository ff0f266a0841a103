"""Token ids of text that came before: what prompts have alike is tokenised once.

A text is cut at places where every tokenizer of the kinds known here ends a word whatever comes before and
after, so the tokens of the pieces, one after the other, are the tokens of the whole. Prompts with a common
beginning (system prompts, conversations, documents) have all its pieces in common. Knows no message.
"""

import json
import re
import threading
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

from kvhash import Namespace

PIECE_CHARS_MIN = 128
"""Of a piece that is kept; what is left behind the last one is at least as long, and is not kept."""
PIECES_MAX = 32_768
"""Kept, those used last; about 600 bytes each."""
PIECE_CHARS_MAX = 1024
"""A longer one, where no place to cut comes, is not kept."""

_CUT = re.compile(r"[!-~](?= [A-Za-z])")
"""Before a word: whatever comes before the space ends there, and the space begins the word."""
_SPLIT_PATTERNS = frozenset(
    {
        # Llama 3, then Qwen 2 and 3: both end a word where its letters end, and put a space before the next.
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)

Json = dict[str, object]


class KnownPieces:
    """May be used from several threads. Namespaces share no piece: how long a text takes tells nobody what
    others have sent."""

    def __init__(self, tokenizer: Tokenizer, pieces_max: int = PIECES_MAX) -> None:
        """`tokenizer` must be one that `ends_words` says yes to."""
        self._tokenizer = tokenizer
        self._pieces_max = pieces_max
        self._known: dict[tuple[Namespace, str], bytes] = {}
        """Those used longest ago first."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def unknown_chars(self, text: str, space: Namespace) -> int:
        """How many characters of `text` would have to be tokenised. O(length)."""
        return sum(len(piece) for piece in pieces(text) if (space, piece) not in self._known)

    def encode(self, text: str, space: Namespace) -> bytes:
        """Packed token ids of `text`, with no special tokens but those it spells."""
        return b"".join(self._ids(piece, space) for piece in pieces(text))

    def _ids(self, piece: str, space: Namespace) -> bytes:
        key = (space, piece)
        with self._lock:
            known = self._known.pop(key, None)
            if known is not None:
                self._known[key] = known
                return known
        (encoding,) = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)
        packed = np.asarray(encoding.ids, dtype="<i4").tobytes()
        if PIECE_CHARS_MIN <= len(piece) <= PIECE_CHARS_MAX:
            with self._lock:
                self._known[key] = packed
                if len(self._known) > self._pieces_max:
                    del self._known[next(iter(self._known))]
        return packed


def pieces(text: str) -> Iterator[str]:
    """`text` in pieces. Where two texts begin alike their pieces do, but for those at the end of what is
    alike."""
    begin = 0
    while len(text) - begin >= 2 * PIECE_CHARS_MIN:
        found = _CUT.search(text, begin + PIECE_CHARS_MIN - 1)
        if found is None:
            break
        yield text[begin : found.end()]
        begin = found.end()
    yield text[begin:]


def ends_words(tokenizer: Tokenizer) -> bool:
    """Whether it is of a kind that makes the same tokens of a text cut between words as of the whole."""
    described: Json = json.loads(tokenizer.to_str())
    model = _object(described.get("model"))
    added = described.get("added_tokens")
    return (
        described.get("normalizer") is None
        and model.get("type") == "BPE"
        and not model.get("dropout")
        and isinstance(added, list)
        and all(map(_leaves_spaces, added))
        and _splits_at_words(_object(described.get("pre_tokenizer")))
    )


def _splits_at_words(pre_tokenizer: Json) -> bool:
    steps = pre_tokenizer.get("pretokenizers") if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    if not isinstance(steps, list):
        return False
    kinds = [_object(step) for step in steps]
    # Whatever comes behind the one that splits sees single words, and no space as it was.
    first = next((step for step in kinds if step.get("type") != "Digits"), {})
    return all(map(_known_step, kinds)) and _splits_words(first)


def _known_step(step: Json) -> bool:
    match step.get("type"):
        case "ByteLevel":
            return step.get("add_prefix_space") is False
        case "Digits":
            return True
        case "Split":
            return _splits_words(step)
        case _:
            return False


def _splits_words(step: Json) -> bool:
    if step.get("type") == "ByteLevel":
        return step.get("use_regex") is True
    pattern = _object(step.get("pattern")).get("Regex")
    return pattern in _SPLIT_PATTERNS and step.get("behavior") == "Isolated" and step.get("invert") is False


def _leaves_spaces(added_token: object) -> bool:
    """No cut can be within such a token, nor next to it."""
    token = _object(added_token)
    content = token.get("content")
    takes_more = token.get("lstrip") or token.get("rstrip") or token.get("single_word")
    return isinstance(content, str) and " " not in content and not takes_more


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}

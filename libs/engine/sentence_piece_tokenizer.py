"""SentencePiece BPE tokenizers (Llama 2, Mistral) put together from pieces and scores.

SentencePiece merges the neighbours whose union has the highest score, the leftmost first; the library
merges by rank. Ranks in the order of scores give the same tokens. What no piece spells becomes bytes.
"""

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Strip
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer, Prepend
from tokenizers.normalizers import Replace as ReplaceText
from tokenizers.normalizers import Sequence as Normalizers

from engine.tokenizer_file import SpecialTokens, Vocabulary, add_tokens

SPACE = "▁"
"""How SentencePiece spells a space within a piece."""


def sentence_piece_tokenizer(
    vocabulary: Vocabulary,
    scores: Sequence[float],
    normal_token_ids: Sequence[int],
    special: SpecialTokens,
    *,
    add_space_prefix: bool,
) -> Tokenizer:
    """`normal_token_ids` are the pieces that text is merged into; `special.unknown` is needed."""
    assert special.unknown is not None
    by_token = {token: index for index, token in enumerate(vocabulary.tokens)}
    pieces = {vocabulary.tokens[token_id]: scores[token_id] for token_id in normal_token_ids}
    tokenizer = Tokenizer(
        BPE(
            vocab=by_token,
            merges=list(_merges(pieces)),
            unk_token=vocabulary.tokens[special.unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spell_spaces: list[Normalizer] = [ReplaceText(" ", SPACE)]
    tokenizer.normalizer = Normalizers([Prepend(SPACE), *spell_spaces] if add_space_prefix else spell_spaces)
    decoders = [Replace(SPACE, " "), ByteFallback(), Fuse()]
    tokenizer.decoder = Decoders([*decoders, Strip(" ", 1, 0)] if add_space_prefix else decoders)
    add_tokens(tokenizer, vocabulary, special)
    return tokenizer


def _merges(pieces: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Every way to put a piece together from two, the pieces with the highest scores first."""
    for piece, _ in sorted(pieces.items(), key=lambda scored: -scored[1]):
        for cut in range(1, len(piece)):
            if piece[:cut] in pieces and piece[cut:] in pieces:
                yield piece[:cut], piece[cut:]

"""The state of an answer that is held to a form: which tokens may come next, which must.

Owns what follows from a compiled structure and an answer's tokens; whoever moves or recomputes an answer
replays them. Knows neither logits nor requests; how a structure is compiled is `structures.compiler`'s.
"""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from structures.errors import StructureError
from structures.explanation import shortened
from structures.masks import MASK_WORD_BITS, TokenMask, mask_words
from structures.vocabulary import MaskVocabulary

FORCED_TOKENS_MAX = 256
"""Forced tokens told at once."""
ANSWERS_PER_LEXER_MAX = 256
"""Answers to one compiled structure share its lexer, which grows with what it has seen, up to a limit."""
NOTHING_FITS = "NoExtensionBias"
"""All that llguidance says where no token can come next."""


class Matcher:
    """The state of one answer. Calls must not overlap, but may come from different threads."""

    __slots__ = ("_alone", "_ended", "_failure", "_parser", "_structure", "_vocabulary")

    def __init__(self, structure: "CompiledStructure", parser: LLMatcher, vocabulary: MaskVocabulary) -> None:
        self._structure = structure
        self._parser = parser
        self._vocabulary = vocabulary
        self._ended = False
        self._failure: str | None = None
        self._alone = True

    @property
    def ended(self) -> bool:
        """An end token was accepted: the answer is complete, nothing follows."""
        return self._ended

    @property
    def complete(self) -> bool:
        """The text so far has the form: an end token is allowed, perhaps among others."""
        return not self._ended and self._failure is None and self._parser.is_accepting()

    @property
    def failure(self) -> str | None:
        """Why the answer cannot go on: it met a limit of llguidance, or no token fits."""
        return self._failure

    @property
    def failed_alone(self) -> bool:
        """Whether the failure is this answer's own. Else others had their part in the limit that was met:
        compiled anew and replayed it may go on."""
        return self._alone

    def allowed(self) -> TokenMask:
        """The tokens that may come next: at least one, an end token exactly when `complete`.

        It takes microseconds, at most some ten milliseconds. After a failure, see `failure`, there is none:
        a batch goes on without this answer. Not to be called after the end.
        """
        assert not self._ended, "nothing follows the end"
        mask = np.zeros((1, mask_words(self._vocabulary.parser_tokens)), np.int32)
        if self._failure is None:
            fill_next_token_bitmask(self._parser, mask)
            self._note_failure()
        mask = _cut(mask[0], self._vocabulary.model_tokens)
        if self._failure is None and not mask.any():
            self._fail("no token of the model fits")
        if self._failure is not None:
            mask[:] = 0
        return mask

    def restarted(self) -> "Matcher":
        """The state of another answer to the same structure, without a token."""
        return self._structure.matcher()

    def accept(self, token_id: int) -> None:
        """Go on by one token. Raises StructureError where it is not allowed."""
        if self._ended or self._failure is not None:
            raise StructureError(f"token {token_id} follows {self._failure or 'the end'}")
        if not self._parser.consume_token(token_id):
            self._note_failure()
            raise StructureError(f"token {token_id} is not allowed here: {self._failure}")
        # A grammar may name an end token as a part of it, and go on.
        self._ended = token_id in self._vocabulary.end_token_ids and self._parser.is_stopped()

    def replay(self, token_ids: Sequence[int]) -> None:
        """`accept` one after the other. Raises StructureError naming the first that is not allowed."""
        for index, token_id in enumerate(token_ids):
            try:
                self.accept(token_id)
            except StructureError as error:
                raise StructureError(f"output token {index}: {error}") from error

    def forced(self) -> tuple[int, ...]:
        """The tokens that come next whatever the model says, at most FORCED_TOKENS_MAX: each is all that
        `allowed` would give in its turn. Where only the end is left, an end token."""
        if self._ended or self._failure is not None:
            return ()
        token_ids = self._parser.compute_ff_tokens()[:FORCED_TOKENS_MAX]
        self._note_failure()
        if self._failure is not None:
            return ()
        if not token_ids and self._parser.is_stopped():
            return self._vocabulary.end_token_ids[:1]
        unknown = (i for i, token_id in enumerate(token_ids) if token_id >= self._vocabulary.model_tokens)
        return tuple(token_ids[: next(unknown, len(token_ids))])

    def _note_failure(self) -> None:
        if self._parser.is_error():
            self._fail(_explained(self._parser))

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            self._alone = self._structure.wear_out()


class CompiledStructure:
    """What a StructureSpec says of the tokens of one model, shared by many answers that are held to it."""

    __slots__ = ("_answers", "_failed", "_start", "_vocabulary")

    def __init__(self, start: LLMatcher, vocabulary: MaskVocabulary) -> None:
        """`start` is never moved on. Raises StructureError where nothing can be generated."""
        self._start = start
        self._vocabulary = vocabulary
        self._answers = 0
        self._failed = False
        if start.is_error():
            raise StructureError(_explained(start))
        first = self.matcher()
        first.replay(first.forced())
        if not first.ended:
            first.allowed()
            if first.failure is not None:
                raise StructureError(first.failure)
        self._answers = 0

    @property
    def worn_out(self) -> bool:
        """Better compiled anew: it served its number of answers, or one met a limit."""
        return self._failed or self._answers >= ANSWERS_PER_LEXER_MAX

    def wear_out(self) -> bool:
        """One of its answers failed. Whether it was the only one."""
        self._failed = True
        return self._answers <= 1

    def matcher(self) -> Matcher:
        """The state of an answer that has no tokens yet."""
        self._answers += 1
        return Matcher(self, self._start.deep_copy(), self._vocabulary)


def _explained(parser: LLMatcher) -> str:
    error = shortened(parser.get_error())
    return "no text has this form" if error == NOTHING_FITS else error


def _cut(mask: TokenMask, tokens: int) -> TokenMask:
    mask = mask[: mask_words(tokens)]
    if tokens % MASK_WORD_BITS:
        mask.view(np.uint32)[-1] &= np.uint32((1 << tokens % MASK_WORD_BITS) - 1)
    return mask

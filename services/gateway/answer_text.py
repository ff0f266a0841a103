"""The text of one answer: tokens in, characters out, ended by a stop token or a stop string.

Puts `gateway.detokenizer` and `gateway.stop_matcher` together; knows no message and no connection.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.detokenizer import Detokenizer, TokenBytes
from gateway.stop_matcher import StopMatcher


@dataclass(frozen=True, slots=True)
class TextDelta:
    """`stopped_after`: a stop string ended the answer with that many tokens."""

    text: str
    stopped_after: int | None = None


class AnswerText:
    """Stop tokens add no text. Stop strings are looked for behind the first `output_tokens_min` tokens."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Iterable[int] = (),
        output_tokens_min: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._matcher = StopMatcher(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._output_tokens_min = output_tokens_min
        self._output_tokens = 0

    def feed(self, token_ids: Iterable[int]) -> TextDelta:
        """The text that these next tokens make certain; nothing is to be fed after a stop."""
        pieces = []
        for token_id in token_ids:
            self._output_tokens += 1
            if token_id in self._stop_token_ids:
                continue
            text = self._detokenizer.feed(token_id)
            if self._output_tokens <= self._output_tokens_min:
                pieces.append(text)
                continue
            found = self._matcher.feed(text)
            pieces.append(found.text)
            if found.matched is not None:
                return TextDelta("".join(pieces), self._output_tokens)
        return TextDelta("".join(pieces))

    def finish(self) -> str:
        """What was held back, once it is sure that no token follows."""
        found = self._matcher.feed(self._detokenizer.finish())
        return found.text if found.matched is not None else found.text + self._matcher.finish()

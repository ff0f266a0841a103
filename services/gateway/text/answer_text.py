"""The text of one answer: tokens in, characters out, ended by a stop token or a stop string.

Puts `gateway.text.detokenizer`, `gateway.text.stop_matcher` and `gateway.text.token_log` together; knows no
message and no connection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.text.detokenizer import Detokenizer, TokenBytes
from gateway.text.stop_matcher import StopMatcher, StopStrings
from gateway.text.token_log import LoggedToken, TokenLog
from policy.core import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens become an answer's text, the same for all answers to one request.

    Stop tokens add no text. Stop strings are looked for behind the first `output_tokens_min` tokens.
    `log_tokens`: with the text come the tokens it is made of.
    """

    token_bytes: TokenBytes
    stops: StopStrings
    stop_token_ids: frozenset[int] = frozenset()
    output_tokens_min: int = 0
    log_tokens: bool = False


class TextDelta(NamedTuple):
    """The next text, and the tokens that it completes where they are logged. `stopped_after`: a stop string
    ended the answer with that many tokens."""

    text: str
    logged: tuple[LoggedToken, ...] = ()
    stopped_after: int | None = None


class AnswerText:
    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._detokenizer = Detokenizer(rules.token_bytes)
        self._matcher = StopMatcher(rules.stops) if rules.stops.strings else None
        self._log = TokenLog() if rules.log_tokens else None
        self._output_tokens = 0

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] = ()) -> TextDelta:
        """The text that these next tokens make certain; nothing is to be fed after a stop. `logprobs` has an
        entry for each token, or none at all."""
        if self._matcher is None and self._log is None:
            stop_token_ids = self._rules.stop_token_ids
            text = [token_id for token_id in token_ids if token_id not in stop_token_ids]
            return TextDelta(self._detokenizer.feed(text))
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            self._output_tokens += 1
            if token_id in self._rules.stop_token_ids:
                continue
            text_of_token = self._decode(token_id, logprobs[index] if logprobs else None)
            if self._matcher is None or self._output_tokens <= self._rules.output_tokens_min:
                pieces.append(text_of_token)
                continue
            found = self._matcher.feed(text_of_token)
            pieces.append(found.text)
            if found.matched is not None:
                return self._delta("".join(pieces), ended=True, stopped_after=self._output_tokens)
        return self._delta("".join(pieces))

    def finish(self) -> TextDelta:
        """What was held back, once it is sure that no token follows."""
        rest = self._detokenizer.finish()
        if self._matcher is not None:
            found = self._matcher.feed(rest)
            rest = found.text if found.matched is not None else found.text + self._matcher.finish()
        return self._delta(rest, ended=True)

    def _decode(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        detokenizer = self._detokenizer
        if self._log is None:
            return detokenizer.feed((token_id,))
        begun_before = detokenizer.begun
        text = detokenizer.feed((token_id,))
        self._log.add(
            token_id,
            logprobs,
            self._rules.token_bytes.of(token_id),
            begun_before=begun_before,
            text=text,
            begun_after=detokenizer.begun,
        )
        return text

    def _delta(self, text: str, *, ended: bool = False, stopped_after: int | None = None) -> TextDelta:
        if self._log is None:
            return TextDelta(text, (), stopped_after)
        logged = self._log.sent(len(text))
        return TextDelta(text, logged + self._log.finish() if ended else logged, stopped_after)

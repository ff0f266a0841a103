"""Stop strings in a text that comes in pieces. Knows nothing but text.

An answer ends with the first character that completes a stop string; of those that end there the
longest counts. How the text was cut into pieces changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matched:
    """`text` is sure to belong to the answer; after `matched` nothing does."""

    text: str
    matched: str | None


class StopMatcher:
    """Holds back what may be the beginning of a stop string, and no character more."""

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings` must not contain the empty string."""
        # The longest first: it counts where several end at the same character.
        self._strings = tuple(sorted(strings, key=len, reverse=True))
        self._borders = tuple(_borders(string) for string in self._strings)
        self._matched_chars = [0] * len(self._strings)
        self._held = ""

    def feed(self, text: str) -> Matched:
        """What may be emitted now. After a match there is nothing more to feed."""
        if not self._strings:
            return Matched(text, None)
        for position, character in enumerate(text):
            for index, string in enumerate(self._strings):
                if self._advance(index, character) == len(string):
                    seen = self._held + text[: position + 1]
                    return Matched(seen[: len(seen) - len(string)], string)
        seen = self._held + text
        sure_chars = len(seen) - max(self._matched_chars)
        self._held = seen[sure_chars:]
        return Matched(seen[:sure_chars], None)

    def finish(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        self._matched_chars = [0] * len(self._strings)
        return held

    def _advance(self, index: int, character: str) -> int:
        """Knuth-Morris-Pratt: how much of string `index` the text now ends with."""
        string, borders, chars = self._strings[index], self._borders[index], self._matched_chars[index]
        while chars and string[chars] != character:
            chars = borders[chars - 1]
        if string[chars] == character:
            chars += 1
        self._matched_chars[index] = chars
        return chars


def _borders(string: str) -> tuple[int, ...]:
    """For each prefix, the length of the longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for position in range(1, len(string)):
        while length and string[position] != string[length]:
            length = borders[length - 1]
        if string[position] == string[length]:
            length += 1
        borders[position] = length
    return tuple(borders)

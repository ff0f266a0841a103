"""Stop strings in a text that comes in pieces. Knows nothing but text.

An answer ends with the first character that completes a stop string; of those that end there the
longest counts. How the text was cut into pieces changes nothing.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Matched(NamedTuple):
    """`text` is sure to belong to the answer; after `matched` nothing does."""

    text: str
    matched: str | None


class StopStrings:
    """Stop strings made ready once, for any number of texts."""

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings` must not contain the empty string."""
        # The longest first: it counts where several end at the same character.
        self.strings = tuple(sorted(set(strings), key=len, reverse=True))
        self.borders = tuple(_borders(string) for string in self.strings)
        beginnings = "".join(sorted({string[0] for string in self.strings}))
        self.beginning = re.compile(f"[{re.escape(beginnings)}]") if beginnings else None
        """Finds where a stop string may begin; None where there are none."""


class StopMatcher:
    """Holds back what may be the beginning of a stop string, and no character more."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._matched_chars = [0] * len(stops.strings)
        self._held = ""

    def feed(self, text: str) -> Matched:
        """What may be emitted now. After a match there is nothing more to feed."""
        beginning = self._stops.beginning
        if beginning is None:
            return Matched(text, None)
        position, held_chars = 0, len(self._held)
        while position < len(text):
            if not held_chars:
                # Nothing has begun: all up to the next possible beginning is passed over at once.
                found = beginning.search(text, position)
                if found is None:
                    break
                position = found.start()
            held_chars, matched = self._advance(text[position])
            position += 1
            if matched is not None:
                seen = self._held + text[:position]
                return Matched(seen[: len(seen) - len(matched)], matched)
        seen = self._held + text
        sure_chars = len(seen) - held_chars
        self._held = seen[sure_chars:]
        return Matched(seen[:sure_chars], None)

    def finish(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        self._matched_chars = [0] * len(self._stops.strings)
        return held

    def _advance(self, character: str) -> tuple[int, str | None]:
        """Knuth-Morris-Pratt for all strings at once: how many characters at the text's end may begin one
        of them now, and the one that is complete."""
        held_chars = 0
        matched_chars = self._matched_chars
        for index, string in enumerate(self._stops.strings):
            chars = matched_chars[index]
            if chars and string[chars] != character:
                borders = self._stops.borders[index]
                while chars and string[chars] != character:
                    chars = borders[chars - 1]
            if string[chars] == character:
                chars += 1
                if chars == len(string):
                    return 0, string
                if chars > held_chars:
                    held_chars = chars
            matched_chars[index] = chars
        return held_chars, None


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

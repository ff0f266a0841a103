"""Calls in an answer's text as it comes: what is said, what is called, with which arguments.

Formats differ in what stands around the calls, which a `CallLayout` says; the calls themselves are
`gateway.text.call_scanner`'s. Rules that hold for all:
- What may be the beginning of a call is held back, and comes out whole as words where it is none.
- A call that has begun stays one, also where the answer ends within it: then it was cut, whatever ended it.
- White space next to a call belongs to its form.
"""

from collections.abc import Callable, Collection
from enum import Enum, auto

from gateway.text.call_layouts import CallLayout
from gateway.text.call_scanner import BLANK, CallScanner, HeadedCallScanner, Outcome
from gateway.text.tool_calls import TOOL_CALLS_REASON, CallArguments, CallBegun, Spoken, ToolPiece
from policy.core import FinishReason

HELD_BLANKS_MAX = 64
"""White space that is held back because a call may follow."""


class _State(Enum):
    START = auto()
    """Nothing but white space came, and calls may begin without a marker."""
    WORDS = auto()
    OPENING = auto()
    """Within a group, before a call's object."""
    CALL = auto()
    BETWEEN = auto()
    """Within a group, behind a call's object."""
    COMPLETE = auto()


class CallParser:
    """A `ToolParser` for one layout."""

    def __init__(
        self,
        layout: CallLayout,
        names: Collection[str],
        *,
        parallel: bool = True,
        new_id: Callable[[], str],
    ) -> None:
        """`names`: of the tools; what calls another is no call. Not `parallel`: what follows the first
        call is dropped."""
        self._layout = layout
        self._names = names
        self._parallel = parallel
        self._new_id = new_id
        self._state = _State.START if layout.bare else _State.WORDS
        self._calls = 0
        self._cut = False
        """The answer ended within the arguments of a call."""
        self._held = ""
        """In START and WORDS: what may belong to a call that follows."""
        self._form: list[str] = []
        """Of a group, since its begin or its last call: said after all, where no call comes of it."""
        self._opened = False
        """The group's `opening` came."""
        self._listing = False
        """The group has a call already."""
        self._scanner: CallScanner | HeadedCallScanner = CallScanner(names)
        self._behind_call = False
        """Nothing but white space was said since the last call."""
        self._pieces: list[ToolPiece] = []

    @property
    def called(self) -> bool:
        return self._calls > 0

    @property
    def complete(self) -> bool:
        return self._state is _State.COMPLETE

    def finish_reason(self, reason: FinishReason) -> str:
        if reason is not FinishReason.STOP or not self.called:
            return reason
        return FinishReason.LENGTH if self._cut else TOOL_CALLS_REASON

    def feed(self, text: str) -> tuple[ToolPiece, ...]:
        while text:
            match self._state:
                case _State.START:
                    text = self._feed_start(text)
                case _State.WORDS:
                    text = self._feed_words(text)
                case _State.OPENING:
                    text = self._feed_opening(text)
                case _State.CALL:
                    text = self._feed_call(text)
                case _State.BETWEEN:
                    text = self._feed_between(text)
                case _State.COMPLETE:
                    text = ""
        return self._taken()

    def finish(self) -> tuple[ToolPiece, ...]:
        self._cut = self._state is _State.CALL and self._scanner.within_arguments
        match self._state:
            case _ if self._layout.calls_only:
                pass
            case _State.START | _State.WORDS:
                if not (self._behind_call and not self._held.strip(BLANK)):
                    self._say(self._held)
            case _State.OPENING if not self._listing:
                self._say("".join(self._form))
            case _State.CALL if self._scanner.name is None:
                self._say("".join(self._form))
        self._state = _State.COMPLETE
        return self._taken()

    def _feed_start(self, text: str) -> str:
        """The rest of the text, as from all of these."""
        text = self._held + text
        behind = text.lstrip(BLANK)
        blanks = len(text) - len(behind)
        self._held = ""
        if not behind and blanks <= HELD_BLANKS_MAX:
            self._held = text
            return ""
        if behind and blanks <= HELD_BLANKS_MAX and behind[0] == (self._layout.opening or "{"):
            self._open(text[:blanks])
            return behind
        self._state = _State.WORDS
        return text

    def _feed_words(self, text: str) -> str:
        text, marker = self._held + text, self._layout.marker
        self._held = ""
        at = text.find(marker) if marker else -1
        if at < 0:
            words_end = _before_blanks(text, len(text) - _begun_chars(text, marker))
            self._say(text[:words_end])
            self._held = text[words_end:]
            return ""
        words_end = _before_blanks(text, at)
        self._say(text[:words_end])
        form_end = at + len(marker)
        self._open(text[words_end:form_end])
        return text[form_end:]

    def _open(self, form: str) -> None:
        self._state = _State.OPENING
        if self._layout.named:
            self._scanner = HeadedCallScanner(self._names)
            self._state = _State.CALL
        self._form = [form]
        self._opened = not self._layout.opening
        self._listing = False

    def _feed_opening(self, text: str) -> str:
        for position, character in enumerate(text):
            if character in BLANK:
                continue
            if not self._opened and character == self._layout.opening:
                self._opened = True
            elif self._opened and character == "{":
                self._form.append(text[: position + 1])
                self._scanner = CallScanner(self._names)
                self._state = _State.CALL
                return text[position + 1 :]
            else:
                return self._no_call(text, position)
        self._form.append(text)
        return ""

    def _feed_call(self, text: str) -> str:
        scanner = self._scanner
        begun = scanner.name is not None
        end = scanner.feed(text)
        if scanner.outcome is Outcome.NOT_A_CALL:
            return self._no_call(text, end)
        if scanner.name is None:
            self._form.append(text)
            return ""
        if not begun:
            self._pieces.append(CallBegun(self._calls, self._new_id(), scanner.name))
            self._calls += 1
            self._form.clear()
        arguments = scanner.take_arguments()
        if arguments:
            self._pieces.append(CallArguments(self._calls - 1, arguments))
        if scanner.outcome is Outcome.ENDED:
            self._state = _State.BETWEEN if self._parallel else _State.COMPLETE
            self._listing = self._behind_call = True
        return text[end:]

    def _feed_between(self, text: str) -> str:
        text = "".join(self._form) + text
        self._form.clear()
        layout = self._layout
        behind = text.lstrip(BLANK)
        blanks = len(text) - len(behind)
        if blanks > HELD_BLANKS_MAX:
            pass  # whatever follows does not belong to the group
        elif layout.separator and behind.startswith((layout.separator, "{")):
            separator_chars = len(layout.separator) if behind[0] == layout.separator else 0
            self._form = [text[: blanks + separator_chars]]
            self._state = _State.OPENING
            return behind[separator_chars:]
        elif layout.closing and behind.startswith(layout.closing):
            self._state = _State.WORDS
            return behind[len(layout.closing) :]
        elif layout.closing.startswith(behind):  # also where nothing but white space came
            self._form = [text]
            return ""
        self._state = _State.WORDS
        return text

    def _no_call(self, text: str, end: int) -> str:
        """What looked like a call until `end` is said."""
        self._say("".join(self._form) + text[:end])
        self._form.clear()
        self._state = _State.WORDS
        return text[end:]

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(Spoken(text))
            self._behind_call = self._behind_call and not text.strip(BLANK)

    def _taken(self) -> tuple[ToolPiece, ...]:
        taken, self._pieces = tuple(self._pieces), []
        return taken


def _before_blanks(text: str, end: int) -> int:
    """Where the white space begins that `text` has before `end`, as far as it is held back."""
    words_end = len(text[:end].rstrip(BLANK))
    return max(words_end, end - HELD_BLANKS_MAX)


def _begun_chars(text: str, marker: str) -> int:
    """How many characters at the end of `text` are the beginning of `marker`."""
    begin = max(0, len(text) - len(marker) + 1)
    while marker and (begin := text.find(marker[0], begin)) >= 0:
        if marker.startswith(text[begin:]):
            return len(text) - begin
        begin += 1
    return 0

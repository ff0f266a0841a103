"""One call, read as it comes: a JSON object, `{"name": …, "arguments": {…}}`, or `name[ARGS]{…}`.

Says as early as it is certain that this is a call of a known function, gives the arguments on character by
character, and says where the call ends or stops to be one. Linear in the text, and no nesting makes it
recurse. Knows nothing of what stands around a call.
"""

import json
import re
import string
from collections.abc import Collection
from enum import Enum, auto

BLANK = " \t\n\r"
KEY_CHARS_MAX = 16
NAME_CHARS_MAX = 64
_NAME_KEY = "name"
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"id", "type"})
"""What some models add; passed over."""
_OUTSIDE_STRINGS = frozenset('0123456789+-.eEtrufalsn,:"{}[]' + BLANK)
"""Characters that JSON has outside of strings."""
HEAD_CHARS_MAX = 256
_HEAD = re.compile(r"(?P<name>[a-zA-Z0-9_-]+)(?:\[CALL_ID\][a-zA-Z0-9]+)?(?:\[ARGS\])?")
"""What stands before arguments that are an object of their own."""
_HEAD_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-[]")


class Outcome(Enum):
    MORE = auto()
    ENDED = auto()
    NOT_A_CALL = auto()


class _Phase(Enum):
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()


class _Value:
    """Where one JSON value ends. What is wrong inside of it goes unseen, but for characters that cannot
    stand there."""

    def __init__(self) -> None:
        self.ended = False
        self.broken = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, start: int, stop: int) -> int:
        """The position behind what belongs to the value: `stop`, unless the value ended before."""
        for position in range(start, stop):
            character = text[position]
            if self._in_string:
                if self._string_goes_on(character):
                    continue
            elif character not in _OUTSIDE_STRINGS:
                self.broken = True
                return position
            elif character == '"':
                self._in_string = True
                continue
            elif character in "{[":
                self._depth += 1
                continue
            elif self._depth == 0:
                if character in BLANK or character in ",}]":  # behind a number or a word
                    self.ended = True
                    return position
                continue
            elif character in "}]":
                self._depth -= 1
            else:
                continue
            if self._depth == 0:
                self.ended = True
                return position + 1
        return stop

    def _string_goes_on(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return False
        return True


class CallScanner:
    """Begins behind the object's brace. `name` is there as soon as it is certain that this is a call; from
    then on it remains one: its arguments are what the model wrote, up to where the object ends, or where
    a character stands that JSON cannot have there."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: functions that can be called."""
        self.outcome = Outcome.MORE
        self.name: str | None = None
        self._names = names
        self._phase = _Phase.FIRST_KEY
        self._key = ""
        self._value: _Value | None = None
        self._collected: list[str] = []
        self._read_name: str | None = None
        self._read_arguments: str | None = None
        self._streaming = False
        self._arguments: list[str] = []

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the object: all of them, unless that was its end."""
        position = 0
        while position < len(text) and self.outcome is Outcome.MORE:
            if self._value is not None:
                position = self._feed_value(self._value, text, position)
            elif text[position] in BLANK:
                position += 1
            else:
                position = self._punctuation(text[position], position)
        return position

    @property
    def within_arguments(self) -> bool:
        """Some of a call's arguments came, and more must follow."""
        return self._streaming

    def take_arguments(self) -> str:
        """What of the arguments came since the last time; nothing before there is a `name`."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def _punctuation(self, character: str, position: int) -> int:
        """What stands between keys and values. The position to go on from."""
        match self._phase, character:
            case (_Phase.FIRST_KEY | _Phase.KEY, '"'):
                self._value = _Value()
                return position
            case (_Phase.FIRST_KEY | _Phase.NEXT, "}"):
                return position + 1 if self._end() else position
            case (_Phase.COLON, ":"):
                self._phase = _Phase.VALUE
                return position + 1
            case (_Phase.NEXT, ","):
                self._phase = _Phase.KEY
                return position + 1
            case (_Phase.VALUE, _) if character not in ",:}]":
                self._value = _Value()
                if self.name is None and self._key in _ARGUMENT_KEYS and character == "{":
                    self.name = self._read_name
                    self._streaming = self.name is not None
                return position
        self._wrong()
        return position

    def _feed_value(self, value: _Value, text: str, position: int) -> int:
        stop = len(text) if (room := self._room_chars()) is None else min(len(text), position + room)
        end = value.feed(text, position, stop)
        (self._arguments if self._streaming else self._collected).append(text[position:end])
        if value.broken:
            self._wrong()
        elif value.ended:
            self._value = None
            written = "".join(self._collected)
            self._collected.clear()
            self._value_read(written)
        elif self._room_chars() == 0:
            self._wrong()
        return end

    def _room_chars(self) -> int | None:
        """How much longer a key or a name may become: what is longer is none that counts."""
        if self._phase is not _Phase.VALUE:
            chars_max = KEY_CHARS_MAX
        elif self._key == _NAME_KEY and self.name is None:
            chars_max = NAME_CHARS_MAX
        else:
            return None
        return chars_max + len('""') - sum(map(len, self._collected))

    def _value_read(self, written: str) -> None:
        if self._phase is not _Phase.VALUE:
            self._key_read(written)
            return
        self._phase = _Phase.NEXT
        if self._streaming:
            self._streaming = False
        elif self.name is not None:
            pass  # what follows the arguments changes nothing
        elif self._key == _NAME_KEY:
            name = _string(written)
            self._read_name = name if name in self._names else None
            self._both_read(self._read_name, self._read_arguments, at_fault=self._read_name is None)
        elif self._key in _ARGUMENT_KEYS:
            self._read_arguments = _arguments(written)
            self._both_read(self._read_name, self._read_arguments, at_fault=self._read_arguments is None)

    def _both_read(self, name: str | None, arguments: str | None, *, at_fault: bool) -> None:
        if at_fault:
            self._wrong()
        elif name is not None and arguments is not None:
            self._begin(name, arguments)

    def _key_read(self, written: str) -> None:
        key = _string(written)
        self._phase = _Phase.COLON
        self._key = key or ""
        read_before = {
            _NAME_KEY: self._read_name is not None,
            **dict.fromkeys(_ARGUMENT_KEYS, self._read_arguments is not None),
            **dict.fromkeys(_OTHER_KEYS, False),
        }
        if self.name is None and read_before.get(self._key, True):
            self._wrong()

    def _end(self) -> bool:
        """The object's last brace. A call without arguments has empty ones."""
        if self.name is None and self._read_name is not None:
            self._begin(self._read_name, "{}")
        self.outcome = Outcome.NOT_A_CALL if self.name is None else Outcome.ENDED
        return self.outcome is Outcome.ENDED

    def _begin(self, name: str, arguments: str) -> None:
        self.name = name
        self._arguments.append(arguments)

    def _wrong(self) -> None:
        self.outcome = Outcome.NOT_A_CALL if self.name is None else Outcome.ENDED


class HeadedCallScanner:
    """As CallScanner, of a call that is its name, perhaps an id, a mark, and the object of its arguments.
    Begins with the name."""

    def __init__(self, names: Collection[str]) -> None:
        self.outcome = Outcome.MORE
        self.name: str | None = None
        self._names = names
        self._head = ""
        self._value = _Value()
        self._arguments: list[str] = []

    def feed(self, text: str) -> int:
        position = 0 if self.name is not None else self._feed_head(text)
        if self.name is None:
            return position
        end = self._value.feed(text, position, len(text))
        self._arguments.append(text[position:end])
        if self._value.ended or self._value.broken:
            self.outcome = Outcome.ENDED
        return end

    @property
    def within_arguments(self) -> bool:
        return self.name is not None and self.outcome is Outcome.MORE

    def take_arguments(self) -> str:
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def _feed_head(self, text: str) -> int:
        for position, character in enumerate(text):
            if character == "{":
                head = _HEAD.fullmatch(self._head)
                self.name = head["name"] if head is not None and head["name"] in self._names else None
                self.outcome = Outcome.NOT_A_CALL if self.name is None else Outcome.MORE
                return position
            if character not in _HEAD_CHARACTERS or len(self._head) == HEAD_CHARS_MAX:
                self.outcome = Outcome.NOT_A_CALL
                return position
            self._head += character
        return len(text)


def _string(written: str) -> str | None:
    value = _json(written)
    return value if isinstance(value, str) else None


def _arguments(written: str) -> str | None:
    """An object as it is written, also where a string holds it; none for null."""
    if written.startswith("{"):
        return written
    value = _json(written)
    if value is None and written == "null":
        return "{}"
    return value if isinstance(value, str) and isinstance(_json(value), dict) else None


def _json(written: str) -> object:
    try:
        return json.loads(written, strict=False)
    except (ValueError, RecursionError):
        return None

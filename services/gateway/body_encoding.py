"""Compressed request bodies, undone in small pieces: what they grow to is known before there is too much.

Pure, but for the state that zlib keeps. aiohttp's own decoding is off: it passes a body that was cut short,
and goes on inflating what was refused.
"""

import zlib
from collections.abc import Iterator

PIECE_BYTES_MAX = 256 * 1024
"""What one step may grow to: a few hundred microseconds of the event loop."""
HEAD_BYTES = 2
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_WINDOWS = {"gzip": _GZIP_WINDOW, "x-gzip": _GZIP_WINDOW, "deflate": zlib.MAX_WBITS}
SUPPORTED = "gzip or deflate"


class EncodingError(ValueError):
    """A body that is not what its Content-Encoding says, or an encoding that is not known."""


class Inflater:
    """Of one body. `encoding` is the header's value; "" and `identity` leave it as it is."""

    def __init__(self, encoding: str) -> None:
        """Raises EncodingError."""
        self._encoding = encoding.strip().lower()
        self._window: int | None = None
        if self._encoding not in ("", "identity"):
            if self._encoding not in _WINDOWS:
                raise EncodingError(f"Content-Encoding is {encoding[:64]!r}, must be {SUPPORTED} or none")
            self._window = _WINDOWS[self._encoding]
        self._zlib = None if self._window is None else zlib.decompressobj(self._window)
        self._began = False
        self._head = b""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """What the next bytes of the body hold, each piece at most PIECE_BYTES_MAX. Raises EncodingError."""
        if self._zlib is None:
            yield data
            return
        rest, self._head = self._head + data, b""
        if not self._began and len(rest) < HEAD_BYTES:
            # Which kind of deflate it is can only be seen by its first two bytes.
            self._head = rest
            return
        while rest:
            if self._zlib.eof:
                self._next_member()
            piece, rest = self._step(rest)
            if piece:
                yield piece

    def finish(self) -> None:
        """Raises EncodingError where the body ended in the middle."""
        if self._zlib is not None and (self._head or self._began) and not self._zlib.eof:
            raise EncodingError(f"the body's {self._encoding} data ends in the middle")

    def _step(self, data: bytes) -> tuple[bytes, bytes]:
        """One piece, and what of `data` is to be fed again."""
        assert self._zlib is not None
        try:
            piece = self._zlib.decompress(data, PIECE_BYTES_MAX)
        except zlib.error as error:
            if self._began or self._encoding != "deflate":
                raise EncodingError(f"the body is not {self._encoding} data") from error
            # Some send the bare stream where the standard wants zlib's header.
            self._zlib, self._began = zlib.decompressobj(-zlib.MAX_WBITS), True
            return b"", data
        self._began = True
        return piece, self._zlib.unused_data if self._zlib.eof else self._zlib.unconsumed_tail

    def _next_member(self) -> None:
        """gzip may be several, one after the other."""
        if self._window != _GZIP_WINDOW:
            raise EncodingError(f"the body goes on after its {self._encoding} data")
        self._zlib = zlib.decompressobj(_GZIP_WINDOW)

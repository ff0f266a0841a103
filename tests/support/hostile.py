"""What hostile peers say, whatever the transport: garbage that comes near to what is spoken."""

import struct

from hypothesis import strategies as st

from kvtransfer.stream import handshake

_MAGIC_AND_VERSION = handshake.pack(handshake.Step.HELLO, b"")[:5]


def handshake_like() -> st.SearchStrategy[bytes]:
    """Bytes before a handshake; some begin as one does."""
    return st.one_of(
        st.binary(max_size=2000), st.binary(max_size=600).map(lambda rest: _MAGIC_AND_VERSION + rest)
    )


def frame_like(kind_max: int) -> st.SearchStrategy[bytes]:
    """A plausible header, and a body of a length that may not fit it."""
    return st.builds(
        lambda kind, length, request, body: struct.pack("<B3xIQ", kind, length, request) + body,
        st.integers(0, kind_max),
        st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1)),
        st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)),
        st.binary(max_size=300),
    )

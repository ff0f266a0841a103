"""The bounds of an endpoint. What both ends must agree on is a constant, the rest a field of `Limits`."""

from dataclasses import asdict, dataclass

RANGES_MAX = 65_536
"""Ranges in one call, after neighbours are joined. Part of the protocol: it bounds a request frame."""

REGION_BYTES_MAX = 1 << 44
"""Size of one region. RANGES_MAX times this fits in an int64, so lengths are summed without overflow."""

NAME_BYTES_MAX = 255
TOKEN_BYTES_MAX = 128
TAG_BYTES_MAX = 256
"""What travels with a write and is handed over after its bytes."""
DESCRIPTOR_CHARS_MAX = 4096
SECRET_BYTES_MIN = 16

CHUNK_BYTES_MAX = 4 << 20
"""Payload of one data frame. A receiver accepts this much; a sender makes them `turn_bytes` at most."""

IOVECS_MAX = 1024
"""IOV_MAX of Linux: buffers of one system call."""

STREAMS_MAX = 16
"""Streams of one link that an owner accepts."""

PIECE_BYTES_MIN = 4096
"""Of the pieces in which an owner may want calls on the memory of its device."""

_PENDING_PER_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one endpoint; all are > 0.

    turn_bytes              bytes moved for one connection before the event loop gets its turn
    transfers_in_flight_max calls of one peer that are on the wire at once
    bytes_in_flight_max     their bytes together; a larger call goes alone
    transfers_waiting_max   calls of one peer that wait for room; more fail with BusyError
    transfers_served_max    requests of one connection that are served at once
    connections_max         accepted and authenticated connections; a link over tcp has `tcp_streams` of them
    handshakes_max          accepted connections that are not authenticated yet
    handshake_s_max         time for a handshake
    stall_s_max             a call that times out on a connection silent for this long closes it
    grants_max              grants that are not revoked
    regions_max             registered regions
    peers_max               peers connected to; beyond it the one unused for longest is closed
    tcp_streams             connections of a link over tcp; it lives with fewer if the owner has no more room
    tcp_part_bytes_min      a call of at least twice this is cut into parts for several streams
    bounce_bytes            host memory through which calls move that of devices, made when first needed; as
                            much again for what peers move of granted memory of devices
    bounce_slot_bytes       piece of a call that goes through it at once
    bounce_waiting_max      requests of peers that wait for a slot of it; more fail with BusyError
    retry_s_min, _max       from one try of a transport that failed to the next, while a worse one carries
                            the calls: the first wait, and what the growing waits end at
    dial_backoff_s_min, _max  the same where no other transport is left
    """

    turn_bytes: int = 1 << 20
    transfers_in_flight_max: int = 64
    bytes_in_flight_max: int = 1 << 30
    transfers_waiting_max: int = 4096
    transfers_served_max: int = 512
    connections_max: int = 2048
    handshakes_max: int = 64
    handshake_s_max: float = 5.0
    stall_s_max: float = 5.0
    grants_max: int = 65_536
    regions_max: int = 1024
    peers_max: int = 1024
    tcp_streams: int = 2
    tcp_part_bytes_min: int = 2 << 20
    bounce_bytes: int = 64 << 20
    bounce_slot_bytes: int = 4 << 20
    bounce_waiting_max: int = 4096
    retry_s_min: float = 0.5
    retry_s_max: float = 60.0
    dial_backoff_s_min: float = 0.02
    dial_backoff_s_max: float = 5.0

    @property
    def requests_pending_max(self) -> int:
        """Requests of one link that the owner did not answer. More than may be in flight are abandoned ones:
        so many of those mean that the peer stalls."""
        return _PENDING_PER_IN_FLIGHT * self.transfers_in_flight_max

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"limit {name} must be > 0, not {value}")
        if self.bounce_slot_bytes > self.bounce_bytes:
            raise ValueError(f"limit bounce_slot_bytes must be at most bounce_bytes, {self.bounce_bytes}")
        if self.bounce_slot_bytes < PIECE_BYTES_MIN:
            raise ValueError(f"limit bounce_slot_bytes must be at least {PIECE_BYTES_MIN}")
        if self.retry_s_min > self.retry_s_max:
            raise ValueError(f"limit retry_s_min must be at most retry_s_max, {self.retry_s_max}")
        if self.dial_backoff_s_min > self.dial_backoff_s_max:
            raise ValueError(
                f"limit dial_backoff_s_min must be at most dial_backoff_s_max, {self.dial_backoff_s_max}"
            )
        if self.tcp_streams > STREAMS_MAX:
            raise ValueError(f"limit tcp_streams must be at most {STREAMS_MAX}, not {self.tcp_streams}")
        if self.turn_bytes > CHUNK_BYTES_MAX:
            raise ValueError(f"limit turn_bytes must be at most {CHUNK_BYTES_MAX}, not {self.turn_bytes}")

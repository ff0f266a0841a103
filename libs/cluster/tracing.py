"""W3C trace context: the `traceparent` header that goes with a request through every process."""

import re
import secrets
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span's place in a trace. `trace_id` 32 and `span_id` 16 lower-case hex digits."""

    trace_id: str
    span_id: str
    sampled: bool

    @classmethod
    def new(cls) -> "TraceContext":
        return cls(secrets.token_hex(16), secrets.token_hex(8), True)

    @classmethod
    def parse(cls, traceparent: str) -> "TraceContext | None":
        """None where the header is malformed: a client's bad header never fails its request."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None or match[1] == "0" * 32 or match[2] == "0" * 16:
            return None
        return cls(match[1], match[2], bool(int(match[3], 16) & 1))

    def child(self) -> "TraceContext":
        return TraceContext(self.trace_id, secrets.token_hex(8), self.sampled)

    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

"""What goes with a client's request through every process: W3C's `traceparent`, and the client's own id of
it, where it gave one, for logs alone.
"""

import random
import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
CLIENT_REQUEST_ID_CHARS_MAX = 128


def random_hex(digits: int) -> str:
    """An id that is never met twice, and no secret: each of these asks the kernel for nothing."""
    return f"{random.getrandbits(4 * digits):0{digits}x}"


def is_client_request_id(text: str) -> bool:
    """What is safe to log and to put into a header: printable ASCII of a bounded length."""
    return 0 < len(text) <= CLIENT_REQUEST_ID_CHARS_MAX and text.isascii() and text.isprintable()


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span's place in a trace. `trace_id` 32 and `span_id` 16 lower-case hex digits. `client_request_id`
    is empty where the client gave none; it never enters a subject."""

    trace_id: str
    span_id: str
    sampled: bool
    client_request_id: str = ""

    @classmethod
    def new(cls, client_request_id: str = "") -> "TraceContext":
        return cls(random_hex(32), random_hex(16), True, client_request_id)

    @classmethod
    def parse(cls, traceparent: str, client_request_id: str = "") -> "TraceContext | None":
        """None where the header is malformed: a client's bad header never fails its request."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None or match[1] == "0" * 32 or match[2] == "0" * 16:
            return None
        known = client_request_id if is_client_request_id(client_request_id) else ""
        return cls(match[1], match[2], bool(int(match[3], 16) & 1), known)

    def child(self, client_request_id: str | None = None) -> "TraceContext":
        """Within the same trace; `client_request_id` where it is another one than the parent's."""
        client = self.client_request_id if client_request_id is None else client_request_id
        return TraceContext(self.trace_id, random_hex(16), self.sampled, client)

    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def log_fields(self) -> dict[str, str]:
        """What a log line about the request is found by."""
        fields = {"trace_id": self.trace_id}
        return fields | {"client_request_id": self.client_request_id} if self.client_request_id else fields


def log_fields(trace: TraceContext | None) -> dict[str, str]:
    """The same of a message that may belong to no request."""
    return {} if trace is None else trace.log_fields()

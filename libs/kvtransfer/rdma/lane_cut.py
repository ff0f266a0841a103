"""How the bytes of a call are cut into parts and dealt to the lanes of a link. Pure.

Part of the protocol: both ends compute it from the payload and the number of lanes, so that an owner knows
which bytes an arriving immediate stands for. Part k goes over lane k modulo `lanes`; lane 0 joins the
devices that are nearest, and a small call uses it alone.
"""

from dataclasses import dataclass

STRIPE_BYTES_MIN = 256 << 10
"""A lane gets at least this much, or is not used: below it a second lane costs more than it brings."""
PART_BYTES_MAX = 4 << 20
"""Each part ends with an immediate: so often the owner learns how far a write has come."""


@dataclass(frozen=True, slots=True)
class LaneCut:
    """`payload_bytes` in parts of `part_bytes` (the last may be shorter) over `lanes` lanes."""

    payload_bytes: int
    part_bytes: int
    lanes: int

    @property
    def parts(self) -> int:
        return -(-self.payload_bytes // self.part_bytes) if self.payload_bytes else 0

    def parts_of(self, lane: int) -> range:
        return range(lane, self.parts, self.lanes)

    def stretch(self, part: int) -> tuple[int, int]:
        """Start and length in bytes of the call's order."""
        start = part * self.part_bytes
        return start, min(self.part_bytes, self.payload_bytes - start)


def lane_cut(payload_bytes: int, lanes: int) -> LaneCut:
    """For a call of `payload_bytes` over a link of `lanes` lanes."""
    used = max(1, min(lanes, payload_bytes // STRIPE_BYTES_MIN))
    part_bytes = min(PART_BYTES_MAX, max(1, -(-payload_bytes // used)))
    return LaneCut(payload_bytes, part_bytes, used)

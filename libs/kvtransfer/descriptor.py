"""The text by which an endpoint is found: its name and how to reach each of its transports."""

from dataclasses import dataclass

import msgspec

from kvtransfer.errors import DescriptorError
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import DESCRIPTOR_CHARS_MAX, NAME_BYTES_MAX
from kvtransfer.transport import Address

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Descriptor:
    """`transports` in the order of the endpoint's preference."""

    name: str
    transports: tuple[dict[str, str | int], ...]
    v: int = _VERSION

    def address(self, kind: TransportKind) -> Address | None:
        """None if the endpoint does not offer this transport."""
        return next((address for address in self.transports if address.get("kind") == kind), None)


def encode(descriptor: Descriptor) -> str:
    return msgspec.json.encode(descriptor).decode()


def decode(text: str) -> Descriptor:
    """Raises DescriptorError for malformed text or another version."""
    if len(text) > DESCRIPTOR_CHARS_MAX:
        raise DescriptorError(f"descriptor has {len(text)} characters, at most {DESCRIPTOR_CHARS_MAX}")
    try:
        descriptor = msgspec.json.decode(text, type=Descriptor)
    except msgspec.MsgspecError as error:
        raise DescriptorError(f"descriptor: {error}") from error
    if descriptor.v != _VERSION:
        raise DescriptorError(f"descriptor is of version {descriptor.v}, we read {_VERSION}")
    if not 0 < len(descriptor.name.encode()) <= NAME_BYTES_MAX:
        raise DescriptorError(f"descriptor: name must have 1 to {NAME_BYTES_MAX} bytes")
    return descriptor

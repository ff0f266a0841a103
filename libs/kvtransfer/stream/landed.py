"""The end of a write at its owner, whatever carried its bytes: first the digest, then the tag, then DONE."""

from typing import Protocol, TypeVar

from kvtransfer.errors import ArrivalError
from kvtransfer.grants import REVOKED, Grant
from kvtransfer.memory import Ranges
from kvtransfer.stream.frames import ErrorCode, TransferRequest
from kvtransfer.verification import GrantedDigests


class ServedWrite(Protocol):
    """A write under its grant, as an owner keeps it until it is answered."""

    @property
    def wanted(self) -> TransferRequest: ...

    @property
    def grant(self) -> Grant: ...

    @property
    def ranges(self) -> Ranges: ...


ServedT = TypeVar("ServedT", bound=ServedWrite)
OwnedT = TypeVar("OwnedT", bound=ServedWrite, contravariant=True)


class WriteOwner(Protocol[OwnedT]):
    """Who answers it, once."""

    def stands(self, served: OwnedT) -> bool:
        """Whether it still waits for its answer. Where it does not, the owner has seen to it."""

    def refuse_write(self, served: OwnedT, code: ErrorCode, text: str, landed_bytes: int) -> None:
        """Answer ERROR."""

    def write_is_done(self, served: OwnedT) -> None:
        """Answer DONE, and count it."""


def all_landed(owner: WriteOwner[ServedT], digests: GrantedDigests, served: ServedT) -> None:
    """All bytes of the write are in its memory: check and conclude it, now or once its digest is made."""
    sent = served.wanted.digest
    if not sent:
        conclude_write(owner, served)
        return

    def compare(found: bytes) -> None:
        # Of a revoked grant the digest was cut short, and says nothing.
        if found == sent or served.grant.revoked:
            conclude_write(owner, served)
        elif owner.stands(served):
            owner.refuse_write(served, ErrorCode.CHECKSUM, "what arrived is not what was sent", 0)

    digests.start(served.grant, served.ranges, compare)


def conclude_write(owner: WriteOwner[ServedT], served: ServedT) -> None:
    """Its bytes are right, if it has a digest: hand its tag over and answer it."""
    if not owner.stands(served):
        return
    wanted, grant = served.wanted, served.grant
    if grant.revoked:
        owner.refuse_write(served, ErrorCode.GRANT, REVOKED, wanted.payload_bytes)
        return
    if wanted.tag:
        try:
            grant.arrived(wanted.tag, wanted.earlier_bytes + wanted.payload_bytes)
        except ArrivalError as error:
            owner.refuse_write(served, ErrorCode.ARRIVAL, str(error), wanted.payload_bytes)
            return
        if not owner.stands(served):
            return  # the callback revoked the grant or closed the endpoint
    owner.write_is_done(served)

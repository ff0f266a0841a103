"""Frames that only tcp has. A WRITE to memory of a device waits for this before its DATA:

GO      owner → caller   a slot of host memory waits for the payload
"""

from kvtransfer.stream.frames import OWN_KINDS_FROM, pack_header

GO = OWN_KINDS_FROM


def pack_go(request: int) -> bytes:
    return pack_header(GO, 0, request)

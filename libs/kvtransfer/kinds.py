"""The names of the transports, as they stand in descriptors and statistics."""

from enum import StrEnum


class TransportKind(StrEnum):
    RDMA = "rdma"
    SHM = "shm"
    TCP = "tcp"

"""libibverbs through pyverbs, thin and typed: devices, registrations, queue pairs.

Every failure of a verb is an OSError. Nothing here knows of loops, peers or grants.

pyverbs holds the interpreter lock in all of its calls, so a thread would not free the event loop while one
runs: callers keep each call small instead. Written for pyverbs 44 (Debian 12), in which a completion channel
hides its descriptor, and work requests and their scatter entries are not freed by themselves.
"""

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtransfer.rdma.bindings import (
    CQ,
    GID,
    MR,
    PD,
    QP,
    SGE,
    AHAttr,
    CompChannel,
    Context,
    DmaBufMR,
    GlobalRoute,
    PyverbsError,
    QPAttr,
    QPCap,
    QPInitAttr,
    RecvWR,
    cqe_status_to_str,
    enums,
    get_device_list,
)
from kvtransfer.rdma.ports import MTU_BYTES, Gid, GidKind

_GIDS_MAX = 1024
_PORT = 1
"""Devices with two ports show up as two devices nowadays."""
_SCRATCH_BYTES = 8
_ACK_TIMEOUT_EXPONENT = 17
"""4.096 µs × 2^17 = 0.54 s until an unacknowledged packet is sent again."""
_RETRIES_MAX = 6
"""With the time above: a path is given up after some four seconds. Not 7: Soft-RoCE takes that for no end."""
_RNR_RETRIES = 7
"""7 means without end: an owner that is slow to post receives slows its callers, it does not fail them."""
_RNR_TIMER = 12
"""0.64 ms between those."""
_HOP_LIMIT = 64
_ACCESS = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ
_CHANNEL_LOCK = threading.Lock()
"""Finding a new channel's descriptor compares /proc/self/fd before and after; one at a time."""


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except PyverbsError as error:
        code = error.error_code if hasattr(error, "error_code") else -1
        raise OSError(code if code > 0 else errno.EIO, str(error)) from error


def device_names() -> list[str]:
    """The verbs devices of this machine; empty too where the kernel has no RDMA at all."""
    try:
        return sorted(device.name.decode() for device in get_device_list())
    except PyverbsError:
        return []


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    reads_served_max: int
    reads_made_max: int


@dataclass(frozen=True, slots=True)
class PortState:
    active: bool
    lid: int
    mtu_bytes: int
    gids: tuple[Gid, ...]


class Registration:
    """Memory that a device may reach, until `close`."""

    def __init__(self, memory_region: Any) -> None:
        self._memory_region = memory_region
        self.local_key: int = memory_region.lkey
        self.remote_key: int = memory_region.rkey

    def close(self) -> None:
        with _as_os_error():
            self._memory_region.close()


class Device:
    """An opened device with its protection domain; what is made of it closes before it."""

    def __init__(self, name: str) -> None:
        self.name = name
        with _as_os_error():
            self.context = Context(name=name)
            attributes = self.context.query_device()
            self.domain = PD(self.context)
            # pyverbs wants a scatter entry in each receive; an immediate brings no bytes for it.
            self.scratch = MR(self.domain, _SCRATCH_BYTES, enums.IBV_ACCESS_LOCAL_WRITE)
        self.limits = DeviceLimits(
            reads_served_max=attributes.max_qp_rd_atom,
            reads_made_max=attributes.max_qp_init_rd_atom,
        )

    def port_state(self) -> PortState:
        with _as_os_error():
            port = self.context.query_port(_PORT)
            table = self.context.query_gid_table(_GIDS_MAX)
        gids = tuple(
            Gid(entry.gid_index, entry.gid_str().lower(), GidKind(entry.gid_type))
            for entry in table
            if entry.port_num == _PORT
        )
        return PortState(
            active=port.state == enums.IBV_PORT_ACTIVE,
            lid=port.lid,
            mtu_bytes=MTU_BYTES[port.active_mtu - 1],
            gids=gids,
        )

    def register(self, address: int, length: int) -> Registration:
        """Pins the pages; OSError if the kernel refuses (RLIMIT_MEMLOCK, memory that is no memory)."""
        with _as_os_error():
            return Registration(MR(self.domain, length, _ACCESS, address))

    def register_dma_buf(self, descriptor: int, offset: int, length: int) -> Registration:
        """Memory of another device; work requests name it by its offset in the buffer."""
        with _as_os_error():
            return Registration(DmaBufMR(self.domain, length, _ACCESS, descriptor, offset))

    def close(self) -> None:
        with _as_os_error():
            self.scratch.close()
            self.domain.close()
            self.context.close()


class Completion(NamedTuple):
    """`number` is that of the work request, 0 for a receive; `failure` is empty on success."""

    number: int
    immediate: int
    failure: str


@dataclass(frozen=True, slots=True)
class Path:
    """How a queue pair finds its other end, and whether that may write and read memory here."""

    gid_index: int
    gid: str
    lid: int
    number: int
    mtu_bytes: int
    first_packet_sent: int
    first_packet_received: int
    reads_made_max: int
    reads_served_max: int
    serves: bool


class QueuePair:
    """A reliable-connected queue pair with a completion queue and a completion channel of its own."""

    def __init__(self, device: Device, sends_max: int, receives_max: int) -> None:
        with _as_os_error():
            self._channel, self.event_descriptor = _made_channel(device.context)
        try:
            os.set_blocking(self.event_descriptor, False)
            with _as_os_error():
                self._make(device, sends_max, receives_max)
        except BaseException:
            self._channel.close()  # with all that was made on it
            raise
        self.number: int = self._pair.qp_num
        self.events = 0
        self._closed = False

    def _make(self, device: Device, sends_max: int, receives_max: int) -> None:
        self._queue = CQ(device.context, sends_max + receives_max, None, self._channel, 0)
        capacity = QPCap(max_send_wr=sends_max, max_recv_wr=receives_max, max_send_sge=1, max_recv_sge=1)
        attributes = QPInitAttr(
            qp_type=enums.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=capacity, sq_sig_all=0
        )
        self._pair = QP(device.domain, attributes)
        scratch = device.scratch
        self._scatter = SGE(scratch.buf, _SCRATCH_BYTES, scratch.lkey)
        self._receive = RecvWR(wr_id=0, num_sge=1, sg=[self._scatter])

    def connect(self, path: Path) -> None:
        """Ready to receive, then ready to send."""
        access = enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ if path.serves else 0
        with _as_os_error():
            attributes = QPAttr(port_num=_PORT)
            attributes.qp_access_flags = access
            self._pair.to_init(attributes)
            attributes = QPAttr(port_num=_PORT)
            attributes.path_mtu = MTU_BYTES.index(path.mtu_bytes) + 1
            attributes.dest_qp_num = path.number
            attributes.rq_psn = path.first_packet_received
            attributes.max_dest_rd_atomic = path.reads_served_max
            attributes.min_rnr_timer = _RNR_TIMER
            route = GlobalRoute(dgid=GID(path.gid), sgid_index=path.gid_index, hop_limit=_HOP_LIMIT)
            attributes.ah_attr = AHAttr(port_num=_PORT, is_global=1, gr=route, dlid=path.lid)
            self._pair.to_rtr(attributes)
            attributes.sq_psn = path.first_packet_sent
            attributes.timeout = _ACK_TIMEOUT_EXPONENT
            attributes.retry_cnt = _RETRIES_MAX
            attributes.rnr_retry = _RNR_RETRIES
            attributes.max_rd_atomic = path.reads_made_max
            self._pair.to_rts(attributes)

    def arm(self) -> None:
        """The next completion makes an event. One that is there already makes none: poll after this."""
        with _as_os_error():
            self._queue.req_notify()

    def poll(self, completions_max: int) -> list[Completion]:
        with _as_os_error():
            _, found = self._queue.poll(completions_max)
        return [
            Completion(
                one.wr_id,
                socket.ntohl(one.imm_data),
                "" if one.status == enums.IBV_WC_SUCCESS else str(cqe_status_to_str(one.status)),
            )
            for one in found
        ]

    def take_event(self) -> bool:
        """Take an event off the channel; False if it has none (any more)."""
        try:
            with _as_os_error():
                self._channel.get_cq_event(self._queue)
                self._queue.ack_events(1)
        except BlockingIOError:
            return False
        self.events += 1
        return True

    def post_receives(self, count: int) -> None:
        with _as_os_error():
            for _ in range(count):
                self._pair.post_recv(self._receive)

    def post(self, first_request: Any) -> None:
        """Hand a chain of a SendRing over; the requests may be reused when it returns."""
        with _as_os_error():
            self._pair.post_send(first_request)

    def stop(self) -> None:
        """Into the error state: what is outstanding completes as flushed."""
        attributes = QPAttr(qp_state=enums.IBV_QPS_ERR)
        with _as_os_error():
            self._pair.modify(attributes, enums.IBV_QP_STATE)

    def close(self) -> None:
        """After it returns the device touches no memory of this machine for it. Again is harmless."""
        if self._closed:
            return
        self._closed = True
        with _as_os_error():
            self._pair.close()
            self._queue.close()
            self._channel.close()
        self._receive.close()
        self._scatter.close()


def _made_channel(context: Any) -> tuple[Any, int]:
    with _CHANNEL_LOCK:
        before = _event_descriptors()
        channel = CompChannel(context)
        found = _event_descriptors() - before
    if len(found) != 1:
        channel.close()
        raise OSError(errno.EIO, f"a completion channel shows as descriptors {sorted(found)}")
    return channel, found.pop()


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:  # the descriptor of the listing itself, or one that was closed meanwhile
            continue
    return found

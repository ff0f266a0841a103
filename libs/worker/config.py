"""Settings of prefill, decode and coupled workers."""

from dataclasses import dataclass, field

from cluster.service import ServiceConfig
from engine.backend import Backend
from engine.layout import DTYPE_BYTES
from engine.native.packing import WeightDtype
from policy.evict import EvictionOrder
from protocol.reservation import RESERVATION_TTL_S

RESERVATION_TTL_S_MIN = 2.0
"""Three renewals must fit, and renewals are looked at each half second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    model_folder: str = field(default="", metadata={"help": "folder with config.json and safetensors"})
    model_name: str = field(default="", metadata={"help": "name clients use; empty: the folder's name"})
    dtype: str = field(
        default="float32", metadata={"help": "dtype of weights and KV", "choices": tuple(DTYPE_BYTES)}
    )
    backend: str = field(
        default=Backend.AUTO,
        metadata={"help": "what computes: auto picks once, at start", "choices": tuple(Backend)},
    )
    weight_dtype: str = field(
        default="",
        metadata={
            "help": "int8 rounds the matrices of a CPU engine; empty: dtype",
            "choices": ("", WeightDtype.INT8),
        },
    )
    own_cache: bool = field(
        default=False, metadata={"help": "compute beside the arena even on a CPU, as on a GPU; for tests"}
    )
    kernels_folder: str = field(
        default="~/.cache/moonpool/kernels", metadata={"help": "keeps what was compiled for this machine"}
    )
    threads: int = field(default=1, metadata={"help": "threads of the engine", "min": 1, "max": 1024})
    pool_bytes: int = field(
        default=2 * 1024**3,
        metadata={"help": "bytes of KV blocks in DRAM, at least 16 blocks", "min": 1024 * 1024},
    )
    device_bytes: int = field(
        default=0,
        metadata={
            "help": "of pool_bytes, what lies on the device as well and is computed on, the rest keeps "
            "blocks for later; only where the engine has a cache of its own, as on a GPU. 0: all",
            "min": 0,
        },
    )
    ssd_bytes: int = field(
        default=0,
        metadata={"help": "bytes of files for KV blocks that pool_bytes has no room for; 0: none", "min": 0},
    )
    ssd_folder: str = field(
        default="",
        metadata={
            "help": "where those files are, in a folder of the instance's name: a restart under the same "
            "name finds its blocks again"
        },
    )
    eviction: str = field(
        default=EvictionOrder.LRU,
        metadata={"help": "which cached block goes first", "choices": tuple(EvictionOrder)},
    )
    sink_ahead_share: float = field(
        default=0.25,
        metadata={
            "help": "of the blocks computed on, the share that is copied down before it has to go",
            "min": 0.0,
            "max": 1.0,
        },
    )
    pool_huge_pages: bool = field(
        default=False,
        metadata={"help": "take all of pool_bytes at the start, in huge pages (Linux 6.1): faster copies"},
    )
    swap_bytes: int = field(
        default=0,
        metadata={
            "help": "host memory for KV of preempted requests, used where that is cheaper than computing it "
            "again; 0: none",
            "min": 0,
        },
    )
    step_tokens_max: int = field(
        default=512, metadata={"help": "tokens computed in one step", "min": 16, "max": 65536}
    )
    batch_requests_max: int = field(
        default=64, metadata={"help": "requests decoded in one step", "min": 1, "max": 4096}
    )
    queue_requests_max: int = field(
        default=256, metadata={"help": "accepted requests waiting for prefill", "min": 1, "max": 65536}
    )
    prefill_requests_max: int = field(
        default=4,
        metadata={"help": "requests computed or handed over at once", "min": 1, "max": 256},
    )
    reservation_ttl_s: float = field(
        default=10.0,
        metadata={
            "help": "a reservation's life without renewal",
            "min": RESERVATION_TTL_S_MIN,
            "max": RESERVATION_TTL_S,
        },
    )
    transfer_fixed_s: float = field(
        default=0.001, metadata={"help": "assumed cost of a transfer, whatever its size", "min": 0.0}
    )
    transfer_bytes_per_s: float = field(
        default=1e9, metadata={"help": "assumed bandwidth between instances", "min": 1e3}
    )
    transfer_transports: tuple[str, ...] = field(
        default=("shm", "rdma", "tcp"),
        metadata={"help": "what moves KV between instances, best first: of shm, rdma and tcp what both have"},
    )
    shm_folder: str = field(
        default="",
        metadata={"help": "folder of the sockets of shm; empty: abstract names, within a network namespace"},
    )
    rdma_devices: tuple[str, ...] = field(
        default=(), metadata={"help": "verbs devices for rdma, best first; empty: all with an active port"}
    )
    checksums: bool = field(default=True, metadata={"help": "checksum KV at both ends of a handover"})

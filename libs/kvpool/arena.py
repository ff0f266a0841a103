"""The memory of all blocks of one tier: one contiguous range, block after block.

Knows how many blocks there are and how large one is, not what is in them.
"""

from typing import Self

from kvtransfer.shared_buffer import SharedBuffer, SharedBufferError

BLOCKS_MAX = 2**31 - 1
"""Block ids travel as int32."""


class ArenaError(Exception):
    """The arena cannot be made; the message names what was asked for and the limit."""


class Arena:
    """`blocks` blocks of `block_bytes` bytes each, zeroed, page-aligned, shared with forked processes.

    Other processes of the host that kvtransfer gives it to map it read-only. Pages take memory only
    once they are touched. Block i is the bytes from i * block_bytes on.
    """

    def __init__(self, memory: SharedBuffer, blocks: int, block_bytes: int) -> None:
        """Use `create`."""
        self._memory = memory
        self._buffer = memoryview(memory)
        self.blocks = blocks
        self.block_bytes = block_bytes

    @classmethod
    def create(cls, blocks: int, block_bytes: int) -> Self:
        """ArenaError where the numbers make no arena or the system does not give the address range."""
        if not 1 <= blocks <= BLOCKS_MAX:
            raise ArenaError(f"blocks: {blocks}, from 1 to {BLOCKS_MAX}")
        if block_bytes < 1:
            raise ArenaError(f"block_bytes: {block_bytes}, at least 1")
        try:
            memory = SharedBuffer.create(blocks * block_bytes)
        except SharedBufferError as error:
            raise ArenaError(f"{blocks} blocks of {block_bytes} bytes: {error}") from error
        return cls(memory, blocks, block_bytes)

    @property
    def buffer(self) -> memoryview:
        """The whole arena as writable bytes; ValueError after `close`."""
        return self._buffer[:]

    def block(self, block_id: int) -> memoryview:
        """The writable bytes of one block; ValueError after `close`, IndexError where there is none."""
        if not 0 <= block_id < self.blocks:
            raise IndexError(f"block_id: {block_id}, the arena has {self.blocks} blocks")
        start = block_id * self.block_bytes
        return self._buffer[start : start + self.block_bytes]

    def take_memory(self) -> bool:
        """Take the memory of all blocks now, in huge pages; see `SharedBuffer.take_memory`."""
        return self._memory.take_memory()

    def close(self) -> None:
        """Give the memory back: at once, or when the last view of it is gone. Closing twice is nothing."""
        self._buffer.release()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

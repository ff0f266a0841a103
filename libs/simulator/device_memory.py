"""Blocks of device memory: what prefills, reservations and decodes hold of one instance."""

from policy.load_sums import reserved_blocks


class DeviceMemory:
    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.blocks = blocks
        self.free = blocks
        self._block_tokens = block_tokens

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold so many tokens, the last one perhaps in part."""
        return -(-tokens // self._block_tokens)

    def reserved_blocks(self, prompt_tokens: int) -> int:
        """What decode sets aside for a request."""
        return reserved_blocks(prompt_tokens, self._block_tokens)

    def take(self, blocks: int) -> None:
        """There must be so many."""
        assert 0 <= blocks <= self.free, f"{blocks} blocks taken of {self.free}"
        self.free -= blocks

    def give(self, blocks: int) -> None:
        self.free += blocks
        assert self.free <= self.blocks, f"{self.free} blocks free of {self.blocks}"

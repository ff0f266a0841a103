"""Blocks of device memory: what prefills, reservations and decodes hold of one instance."""


class DeviceMemory:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free = blocks

    def take(self, blocks: int) -> None:
        """There must be so many."""
        assert 0 <= blocks <= self.free, f"{blocks} blocks taken of {self.free}"
        self.free -= blocks

    def give(self, blocks: int) -> None:
        self.free += blocks
        assert self.free <= self.blocks, f"{self.free} blocks free of {self.blocks}"

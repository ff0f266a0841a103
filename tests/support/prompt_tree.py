"""The tree of all prompts over the tokens 0, 1, 2, one token a block, with hashes that tell their path."""

from kvhash import BlockHash

Path = tuple[int, ...]


def node_hash(path: Path) -> BlockHash:
    return BlockHash(bytes(path).ljust(15, b"\xff") + bytes([len(path)]))


def path_of(block_hash: BlockHash) -> Path:
    return tuple(block_hash[: block_hash[15]])


def chain(path: Path) -> list[BlockHash]:
    return [node_hash(path[: depth + 1]) for depth in range(len(path))]


def parent_of(path: Path) -> BlockHash | None:
    return node_hash(path[:-1]) if len(path) > 1 else None

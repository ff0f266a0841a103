"""Directories for `moonpool bench match`: a prompt that instances hold in one of several shapes, among
chains that nobody asks for. Hashes are random bytes: nothing here depends on what they stand for."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhash import HASH_BYTES
from kvindex.core import BlockAction, BlockEvent, InstanceId, Tier
from kvindex.directory import Directory

ALL, STAGGERED, ONE = "all_match", "staggered", "one_full_match"
TIERED, FRESH = "staggered_two_tiers", "staggered_fresh"
SHAPES = (ALL, STAGGERED, ONE, TIERED, FRESH)


@dataclass(frozen=True, slots=True)
class Size:
    """`instances` that hold `blocks` altogether; prompts and chains are of `prompt_blocks`."""

    instances: int
    blocks: int
    prompt_blocks: int

    @property
    def names(self) -> tuple[InstanceId, ...]:
        return tuple(InstanceId(f"decode-{number}") for number in range(self.instances))


@dataclass(slots=True)
class Prompt:
    """A prompt's packed hashes, and how many blocks of it each instance holds."""

    packed: bytes
    depths: dict[InstanceId, int]


@dataclass(slots=True)
class Filled:
    """What is to be applied, in order, to have a directory of one shape."""

    prompts: list[Prompt] = field(default_factory=list)
    events: list[tuple[InstanceId, BlockEvent]] = field(default_factory=list)


def filled(shape: str, size: Size, seed: int) -> Filled:
    """One prompt in `shape`, and other chains until `size.blocks` are held.

    TIERED is staggered, and of what an instance holds the second half lies on its SSD. FRESH has as many
    prompts as fit and nothing else, each staggered in an order of its own.
    """
    rng = random.Random(seed)
    result = Filled()
    if shape == FRESH:
        held = 0
        while held < size.blocks:
            depths = dict(zip(rng.sample(size.names, size.instances), _staggered(size), strict=True))
            _add_prompt(result, rng, size, depths)
            held += sum(depths.values())
        return result
    by_shape = {
        ALL: [size.prompt_blocks] * size.instances,
        STAGGERED: _staggered(size),
        TIERED: _staggered(size),
        ONE: [size.prompt_blocks] + [1] * (size.instances - 1),
    }
    depths = dict(zip(size.names, by_shape[shape], strict=True))
    _add_prompt(result, rng, size, depths)
    if shape == TIERED:
        prompt = result.prompts[0]
        result.events += [(instance, _sunk(prompt.packed, blocks)) for instance, blocks in depths.items()]
    add_chains(result, rng, size, size.blocks - sum(depths.values()))
    return result


def add_chains(result: Filled, rng: random.Random, size: Size, blocks: int) -> None:
    """Chains that one instance alone holds, from one instance to the next."""
    for number in range(-(-blocks // size.prompt_blocks)):
        chain = rng.randbytes(HASH_BYTES * size.prompt_blocks)
        result.events.append((size.names[number % size.instances], stored(chain)))


def apply_all(directory: Directory, events: Sequence[tuple[InstanceId, BlockEvent]]) -> None:
    for instance, event in events:
        directory.apply(instance, event)


def stored(packed: bytes, parent: bytes = b"") -> BlockEvent:
    return BlockEvent(BlockAction.STORED, packed, Tier.DRAM, parent)


def _sunk(packed: bytes, blocks: int) -> BlockEvent:
    """The second half of the first `blocks`."""
    half = packed[HASH_BYTES * (blocks // 2) : HASH_BYTES * blocks]
    return BlockEvent(BlockAction.MOVED, half, Tier.SSD)


def _staggered(size: Size) -> list[int]:
    return [max(1, size.prompt_blocks * number // size.instances) for number in range(1, size.instances + 1)]


def _add_prompt(result: Filled, rng: random.Random, size: Size, depths: dict[InstanceId, int]) -> None:
    packed = rng.randbytes(HASH_BYTES * size.prompt_blocks)
    result.prompts.append(Prompt(packed, depths))
    result.events += [
        (instance, stored(packed[: HASH_BYTES * blocks])) for instance, blocks in depths.items()
    ]

"""What no instance of the model could ever hold, refused before a placement is asked for.

Owns what a request needs of an instance's blocks: prompt and longest answer together, the last block not
full, as workers count it (`worker.intake`), and at the beginning the prompt and a block for each answer, as
decode reserves it and conductors ask for it (`policy.place`). Knows only the largest instances that are
registered: where one of several fits, it is for the conductor to find it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cluster.messages import InstanceRecord
from cluster.registry import Registry, RegistryEvent
from gateway.api.api_errors import invalid
from gateway.api.model_limits import CONTEXT_EXCEEDED, ModelLimits, answer_too_long, prompt_too_long
from gateway.api.validate import Generation
from kvhash import BLOCK_TOKENS
from policy.core import Role
from policy.load_sums import reserved_blocks


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of the largest prefill and the largest decode, the smaller one: all its blocks."""

    blocks: int

    @property
    def tokens_max(self) -> int:
        """Of a prompt with its answer."""
        return self.blocks * BLOCK_TOKENS - 1

    @property
    def prompt_tokens_max(self) -> int:
        return (self.blocks - 1) * BLOCK_TOKENS


class KnownCapacity:
    """Of the instances in the registry that serve the model of `fingerprint`, as of now."""

    def __init__(self, registry: Registry, fingerprint: str) -> None:
        self._registry = registry
        self._fingerprint = fingerprint
        self._capacity: Capacity | None = None
        registry.on_change(self._changed)
        self._look()

    def __call__(self) -> Capacity | None:
        """None where a prefill or a decode is missing: then it is not known."""
        return self._capacity

    def _changed(self, _event: RegistryEvent) -> None:
        self._look()

    def _look(self) -> None:
        self._capacity = capacity_of(self._registry.instances.values(), self._fingerprint)


def capacity_of(instances: Iterable[InstanceRecord], fingerprint: str) -> Capacity | None:
    """None where no prefill or no decode serves the model."""
    blocks = {Role.PREFILL: 0, Role.DECODE: 0}
    for instance in instances:
        if instance.model is None or instance.model.fingerprint != fingerprint:
            continue
        for role in blocks.keys() & set(instance.roles):
            blocks[role] = max(blocks[role], instance.blocks)
    least = min(blocks.values())
    return Capacity(least) if least else None


def limits_within(
    capacity: Capacity | None, limits: ModelLimits, generation: Generation, prompt_tokens: int
) -> ModelLimits:
    """The model's limits, within what instances hold: what an answer's length that the client did not give
    is cut to. Raises ApiError `context_length_exceeded` for what none can hold."""
    if capacity is None:
        return limits
    _check_prompt(capacity, generation, prompt_tokens)
    if capacity.tokens_max >= limits.context_tokens_max:
        return limits
    asked_tokens = generation.output_tokens_max
    if asked_tokens is not None and prompt_tokens + asked_tokens > capacity.tokens_max:
        room = f"the {capacity.tokens_max} tokens that the largest instance of this cluster holds"
        raise answer_too_long(generation.output_tokens_param, asked_tokens, prompt_tokens, room)
    return replace(limits, context_tokens_max=capacity.tokens_max)


def _check_prompt(capacity: Capacity, generation: Generation, prompt_tokens: int) -> None:
    """With a block for each answer."""
    room_blocks = capacity.blocks - reserved_blocks(prompt_tokens, BLOCK_TOKENS, samples=0)
    if room_blocks < 1:
        raise prompt_too_long(
            generation.prompt_param,
            f"it has {prompt_tokens} tokens, must have at most the {capacity.prompt_tokens_max} that the "
            "largest instance of this cluster holds",
        )
    if generation.answers > room_blocks:
        message = (
            f"n is {generation.answers}, must be at most {room_blocks} for a prompt of {prompt_tokens} "
            f"tokens: the largest instance of this cluster has {capacity.blocks} blocks of {BLOCK_TOKENS} "
            "tokens"
        )
        raise invalid("n", message, CONTEXT_EXCEEDED)

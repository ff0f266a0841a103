"""The orders of one HTTP request: an answer each, `n` of them to each prompt. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.answers.placing import Order
from policy.core import RequestId

SEED_BITS = 63
"""As samplers take seeds."""
_SEED_BYTES = 8


@dataclass(frozen=True, slots=True)
class ChoiceOrder:
    """The answer that is number `index` of all that the request gets. `leader` is the first answer to the
    same prompt: its own number, or that of another one, whose first token is waited for as it leaves the
    prompt in the pool."""

    index: int
    leader: int
    order: Order

    @property
    def leads(self) -> bool:
        return self.index == self.leader


def choices_of(leaders: Sequence[Order], answers: int) -> tuple[ChoiceOrder, ...]:
    """`answers` to each prompt, whose first one `leaders` has; numbered as OpenAI does, prompt by prompt.

    The cluster is asked once, with the leader, whether it has room for all answers to a prompt.
    """
    return tuple(
        ChoiceOrder(place * answers + number, place * answers, _order(leader, number, answers))
        for place, leader in enumerate(leaders)
        for number in range(answers)
    )


def _order(leader: Order, number: int, answers: int) -> Order:
    if number == 0:
        return replace(leader, answers=answers) if answers > 1 else leader
    return replace(
        leader,
        request_id=RequestId(f"{leader.request_id}-{number}"),
        sampling=replace(leader.sampling, seed=seed_of(leader.sampling.seed, number)),
    )


def seed_of(seed: int, number: int) -> int:
    """Of answer `number` to one prompt: the request's own for the first, so that it is the same whatever `n`
    is; for the others the first 63 bits of BLAKE2b over both, as little-endian integers of 64 bits."""
    if number == 0:
        return seed
    both = seed.to_bytes(_SEED_BYTES, "little") + number.to_bytes(_SEED_BYTES, "little")
    digest = hashlib.blake2b(both, digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "little") & ((1 << SEED_BITS) - 1)

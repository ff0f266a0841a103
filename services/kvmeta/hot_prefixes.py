"""What kvmetas tell each other of hot prefixes, as messages; the counting is `policy.heat`'s."""

from collections.abc import Iterable

from cluster.errors import ProtocolError
from cluster.messages import MATCH_BLOCKS_MAX, PrefixHeat, PrefixHeats
from kvhash import HASH_BYTES
from policy.heat import HEATS_MAX, Asked

REQUESTS_MAX = 1_000_000
"""Believed of one sender about one prefix."""


def told(prefixes: Iterable[Asked]) -> PrefixHeats:
    return PrefixHeats(tuple(PrefixHeat(asked.block_hashes, asked.requests) for asked in prefixes))


def heard(heats: PrefixHeats) -> tuple[Asked, ...]:
    """ProtocolError where one of them makes no sense."""
    if len(heats.prefixes) > HEATS_MAX:
        raise ProtocolError(f"prefixes: {len(heats.prefixes)}, must be at most {HEATS_MAX}")
    for heat in heats.prefixes:
        _check(heat)
    return tuple(Asked(heat.block_hashes, heat.requests) for heat in heats.prefixes)


def _check(heat: PrefixHeat) -> None:
    blocks, rest = divmod(len(heat.block_hashes), HASH_BYTES)
    if rest or not 1 <= blocks <= MATCH_BLOCKS_MAX:
        raise ProtocolError(
            f"block_hashes: {len(heat.block_hashes)} bytes, must be {HASH_BYTES} for each of 1 to "
            f"{MATCH_BLOCKS_MAX} blocks"
        )
    if not 1 <= heat.requests <= REQUESTS_MAX:
        raise ProtocolError(f"requests: {heat.requests}, must be 1 to {REQUESTS_MAX}")

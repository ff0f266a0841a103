"""How long answers will be, from how long those of their kind were.

Kinds, narrowest first: a tenant's prompts that begin alike (a prompt family), a tenant's, everybody's. The
narrowest that has shown enough says it. Frozen: each fold gives the next one. Owns lengths only; who ended
when is the load snapshots'.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from policy.core import EndedRequest

GROUPS_MAX = 1024
"""Kinds remembered; of more the one that ended a request longest ago is forgotten."""
LENGTHS_PER_GROUP_MAX = 64
"""Latest lengths remembered of a kind: what changed is seen after so many requests."""
LENGTHS_NEEDED = 8
"""A kind with fewer says nothing yet."""
LENGTH_QUANTILE = 0.75
"""Of the lengths of a kind, what is expected of the next: rather too much load than too little."""
UNSEEN_FRACTION = 0.5
"""Of its limit, expected of an answer as long as nothing has been seen."""
OVERRUN_FRACTION = 0.5
"""Of what it already has, expected still to come of an answer that got longer than was expected."""

Group = tuple[str, bytes]
EVERYBODY: Group = ("*", b"*")
"""No family's name: a hash is 16 bytes or none."""


@dataclass(frozen=True, slots=True)
class OutputLengths:
    """The latest lengths by kind, oldest first; kinds in the order of their latest end."""

    by_group: Mapping[Group, tuple[int, ...]] = field(default_factory=dict)


def with_ended(lengths: OutputLengths, ended: tuple[EndedRequest, ...]) -> OutputLengths:
    """Without answers that did not come to their end: those say nothing of the next."""
    told = [request for request in ended if request.output_tokens is not None]
    if not told:
        return lengths
    by_group = dict(lengths.by_group)
    for request in told:
        assert request.output_tokens is not None
        for group in _groups(request.tenant, request.family):
            shown = (*by_group.pop(group, ()), request.output_tokens)
            by_group[group] = shown[-LENGTHS_PER_GROUP_MAX:]
    while len(by_group) > GROUPS_MAX:
        del by_group[next(iter(by_group))]
    return OutputLengths(by_group)


def expected_tokens(lengths: OutputLengths, tenant: str, family: bytes, output_tokens_max: int) -> int:
    """Tokens of an answer that is about to begin, at least 1."""
    for group in _groups(tenant, family):
        shown = lengths.by_group.get(group, ())
        if len(shown) >= LENGTHS_NEEDED:
            expected = sorted(shown)[int(LENGTH_QUANTILE * (len(shown) - 1))]
            return max(1, min(expected, output_tokens_max))
    return max(1, round(UNSEEN_FRACTION * output_tokens_max))


def tokens_left(expected: int | None, output_tokens: int, output_tokens_max: int) -> int:
    """Tokens still to come of an answer that has `output_tokens`, by what was expected of it at first."""
    if expected is None:
        expected = round(UNSEEN_FRACTION * output_tokens_max)
    left = expected - output_tokens
    if left <= 0:
        left = round(OVERRUN_FRACTION * output_tokens)
    return max(0, min(max(1, left), output_tokens_max - output_tokens))


def _groups(tenant: str, family: bytes) -> tuple[Group, ...]:
    """Narrowest first."""
    if family:
        return ((tenant, family), (tenant, b""), EVERYBODY)
    return ((tenant, b""), EVERYBODY)

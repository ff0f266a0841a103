"""The order of an answer's tokens: nothing twice, nothing missing, nothing from a stale attempt."""

from dataclasses import dataclass

from cluster.messages import TOKEN_ID_BYTES


@dataclass(frozen=True, slots=True)
class Fresh:
    """The part of an entry that was not seen yet; `next_index` is where the answer stands after it."""

    token_ids: bytes
    first_index: int
    next_index: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """Everything in the entry was seen before."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Tokens before the entry are missing: ask for them from `from_index`."""

    from_index: int


def arrange(next_index: int, output_index: int, token_ids: bytes) -> Fresh | Repeat | Gap:
    """What of `token_ids` (packed int32, the first being number `output_index` of the answer) is new
    to someone who has all tokens before `next_index`."""
    if output_index > next_index:
        return Gap(next_index)
    end_index = output_index + len(token_ids) // TOKEN_ID_BYTES
    if end_index <= next_index:
        return Repeat()
    seen_bytes = (next_index - output_index) * TOKEN_ID_BYTES
    return Fresh(token_ids[seen_bytes:], next_index, end_index)

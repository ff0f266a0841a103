"""Facts of many instances as columns: one array for each fact, one row for each instance.

numpy then looks at a thousand instances in the time in which Python looks at ten. Counts are floats too: they
are exact far beyond any that occurs. Knows nothing of what the columns are for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvindex.core import InstanceId

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.intp]
Bools: TypeAlias = NDArray[np.bool_]


class HolderColumns(NamedTuple):
    """Of whoever may hold a cached prefix. Costs are named as CostCoefficients names them."""

    heard_at_s: Floats
    told_free_at_s: Floats
    """When what its snapshot lists is prefilled, by the conductor's clock."""
    transfer_fixed_s: Floats
    transfer_bytes_per_s: Floats


class PrefillColumns(NamedTuple):
    """Of prefill instances: how to reach them, their work, their cost."""

    heard_at_s: Floats
    blocks: Floats
    block_bytes: Floats
    requests: Floats
    free_at_s: Floats
    """When all work is done, by the conductor's clock; -inf without any."""
    prefill_fixed_s: Floats
    prefill_per_token_s: Floats
    prefill_per_token_pair_s: Floats
    ssd_fixed_s: Floats
    ssd_bytes_per_s: Floats
    first_token_fixed_s: Floats


class DecodeColumns(NamedTuple):
    """Of decode instances, with all that is on its way there."""

    heard_at_s: Floats
    blocks: Floats
    block_bytes: Floats
    free_blocks: Floats
    """That a reservation could take now."""
    pending_blocks: Floats
    """That requests on their way will take."""
    sequences: Floats
    kv_tokens: Floats
    step_fixed_s: Floats
    step_per_request_s: Floats
    step_per_kv_token_s: Floats


ColumnsT = TypeVar("ColumnsT", HolderColumns, PrefillColumns, DecodeColumns)
RoleColumnsT = TypeVar("RoleColumnsT", PrefillColumns, DecodeColumns)


@dataclass(frozen=True, slots=True)
class Table(Generic[ColumnsT]):
    """Some instances, in the order of their names."""

    names: Sequence[InstanceId]
    rows: Ints
    """Of each among all instances of the board."""
    columns: ColumnsT

    def take(self, places: Ints) -> "Table[ColumnsT]":
        return Table(
            [self.names[place] for place in places.tolist()],
            self.rows[places],
            type(self.columns)(*(column[places] for column in self.columns)),
        )

    def place_of(self, row: int) -> int | None:
        """Where the instance of that row of the board stands here."""
        found = np.flatnonzero(self.rows == row)
        return int(found[0]) if len(found) else None

    def write(self, place: int, values: Sequence[float]) -> None:
        """Only a board does: everybody else sees columns that stay."""
        for column, value in zip(self.columns, values, strict=True):
            column[place] = value


def empty(columns: type[ColumnsT], names: Sequence[InstanceId], rows: Sequence[int]) -> Table[ColumnsT]:
    """All zero, to be written."""
    return Table(names, np.array(rows, np.intp), columns._make(_zeros(len(columns._fields), len(names))))


def _zeros(columns: int, rows: int) -> Iterator[Floats]:
    return (np.zeros(rows) for _ in range(columns))

"""Which instances stand in which table: those of one model and fingerprint that take requests, by role."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvindex.core import InstanceId
from policy.columns import Bools, DecodeColumns, PrefillColumns, RoleColumnsT, Table, empty
from policy.core import Role
from policy.load_sums import DecodeLoad

if TYPE_CHECKING:
    from policy.view import InstanceView


@dataclass(frozen=True, slots=True)
class Fleet:
    """Instances of one model and fingerprint that take requests, by what they do."""

    block_tokens: int
    """Of all of them: instances of one fingerprint have blocks of one size."""
    coupled: int
    """How many both prefill and decode."""
    prefills: Table[PrefillColumns]
    decodes: Table[DecodeColumns]

    @property
    def mixed(self) -> bool:
        """Some of the prefills decode too, and some do not."""
        return 0 < self.coupled < len(self.prefills.names)


def fleets_of(
    serving: Sequence[InstanceView], row_of: Mapping[InstanceId, int]
) -> dict[tuple[str, str], Fleet]:
    members: dict[tuple[str, str], list[InstanceView]] = defaultdict(list)
    for instance in serving:
        members[instance.model, instance.fingerprint].append(instance)
    return {
        kind: Fleet(
            found[0].block_tokens,
            sum(Role.PREFILL in one.roles and Role.DECODE in one.roles for one in found),
            _table(PrefillColumns, found, Role.PREFILL, row_of),
            _table(DecodeColumns, found, Role.DECODE, row_of),
        )
        for kind, found in members.items()
    }


def _table(
    columns: type[RoleColumnsT],
    instances: Sequence[InstanceView],
    role: Role,
    row_of: Mapping[InstanceId, int],
) -> Table[RoleColumnsT]:
    names = [instance.instance for instance in instances if role in instance.roles]
    return empty(columns, names, [row_of[name] for name in names])


def readable_rows(serving: Sequence[InstanceView], row_of: Mapping[InstanceId, int]) -> dict[str, Bools]:
    found: dict[str, Bools] = {}
    for instance in serving:
        rows = found.setdefault(instance.fingerprint, np.zeros(len(row_of), np.bool_))
        rows[row_of[instance.instance]] = True
    return found


def places_of(tables: Iterable[Table[RoleColumnsT]]) -> dict[InstanceId, tuple[Table[RoleColumnsT], int]]:
    return {name: (table, place) for table in tables for place, name in enumerate(table.names)}


def prefill_values(prefill: InstanceView, requests: int, free_at_s: float) -> tuple[float, ...]:
    """In the order of PrefillColumns."""
    cost = prefill.sums.cost
    return (
        prefill.heard_at_s,
        prefill.blocks,
        prefill.block_bytes,
        requests,
        free_at_s,
        cost.prefill_fixed_s,
        cost.prefill_per_token_s,
        cost.prefill_per_token_pair_s,
        cost.ssd_fixed_s,
        cost.ssd_bytes_per_s,
        cost.first_token_fixed_s,
    )


def decode_values(decode: InstanceView, load: DecodeLoad) -> tuple[float, ...]:
    """In the order of DecodeColumns."""
    cost = decode.sums.cost
    return (
        decode.heard_at_s,
        decode.blocks,
        decode.block_bytes,
        decode.free_blocks,
        load.blocks_pending,
        load.sequences,
        load.kv_tokens,
        cost.step_fixed_s,
        cost.step_per_request_s,
        cost.step_per_kv_token_s,
    )


def place_of(instance: InstanceView) -> tuple[object, ...]:
    """What decides where an instance stands in the tables, and in which."""
    return (
        instance.instance,
        instance.model,
        instance.fingerprint,
        instance.roles,
        instance.block_tokens,
        instance.draining,
    )

"""Instances by name, of which one at a time is replaced: a fold costs hardly more in a large cluster than in
a small one, and what differs between two views is found without looking at every instance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, ValuesView
from itertools import chain
from typing import TYPE_CHECKING

from kvindex.core import InstanceId

if TYPE_CHECKING:
    from policy.view import InstanceView

CHUNK_INSTANCES = 32
"""Replaced together: about the root of the largest clusters."""


class Instances(Mapping[InstanceId, "InstanceView"]):
    """A frozen mapping. Those that came from each other by `with_replaced` share all but one chunk."""

    __slots__ = ("_chunks", "_places")

    def __init__(
        self, places: Mapping[InstanceId, int], chunks: tuple[tuple[InstanceView, ...], ...]
    ) -> None:
        self._places = places
        self._chunks = chunks

    @classmethod
    def of(cls, instances: Mapping[InstanceId, InstanceView]) -> Instances:
        if isinstance(instances, Instances):
            return instances
        values = tuple(instances.values())
        firsts = range(0, len(values), CHUNK_INSTANCES)
        return cls(
            {name: place for place, name in enumerate(instances)},
            tuple(values[first : first + CHUNK_INSTANCES] for first in firsts),
        )

    def __getitem__(self, name: InstanceId) -> InstanceView:
        place = self._places[name]
        return self._chunks[place // CHUNK_INSTANCES][place % CHUNK_INSTANCES]

    def __iter__(self) -> Iterator[InstanceId]:
        return iter(self._places)

    def values(self) -> ValuesView[InstanceView]:
        return _InOrder(self)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def in_order(self) -> Iterator[InstanceView]:
        return chain.from_iterable(self._chunks)

    def with_replaced(self, instance: InstanceView) -> Instances:
        """With this one in the place of the one of its name; KeyError where there is none."""
        number, at = divmod(self._places[instance.instance], CHUNK_INSTANCES)
        chunks = self._chunks
        chunk = (*chunks[number][:at], instance, *chunks[number][at + 1 :])
        return Instances(self._places, (*chunks[:number], chunk, *chunks[number + 1 :]))

    def replaced_in(self, later: Instances) -> list[tuple[InstanceView, InstanceView]] | None:
        """Whom `later` has in the place of whom; None where it was not made from the same by `with_replaced`
        alone."""
        if later._places is not self._places:
            return None
        return [
            (known, instance)
            for chunk, later_chunk in zip(self._chunks, later._chunks, strict=True)
            if chunk is not later_chunk
            for known, instance in zip(chunk, later_chunk, strict=True)
            if known is not instance
        ]


class _InOrder(ValuesView["InstanceView"]):
    """Without looking for each by its name."""

    def __init__(self, instances: Instances) -> None:
        super().__init__(instances)
        self._instances = instances

    def __iter__(self) -> Iterator[InstanceView]:
        return self._instances.in_order()

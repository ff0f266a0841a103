"""Any value of any message class, for hypothesis."""

import types
import typing
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import NewType, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from cluster.messages import ModelInfo, TokensEntry
from policy.core import BANDWIDTH_MIN, COEFFICIENT_S_MAX, CostCoefficients, TokenLogprobs

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_SIMPLE: dict[object, st.SearchStrategy[object]] = {
    str: _TEXT,
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=64),
    type(None): st.none(),
}
_POSITIVE: dict[object, st.SearchStrategy[object]] = {
    **_SIMPLE,
    int: st.integers(1, 2**63 - 1),
    float: st.floats(min_value=BANDWIDTH_MIN, max_value=COEFFICIENT_S_MAX),
}
"""For the classes whose numbers others divide by."""


def values_of(kind: object) -> st.SearchStrategy[object]:
    """Any value of a type that messages are made of."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if isinstance(kind, NewType):
        return values_of(kind.__supertype__)
    if isinstance(kind, types.UnionType) or get_origin(kind) is typing.Union:
        return st.one_of([values_of(part) for part in get_args(kind)])
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if parts[-1] is not Ellipsis:
            return st.tuples(*(values_of(part) for part in parts))
        return st.lists(values_of(parts[0]), max_size=3).map(tuple)
    assert isinstance(kind, type)
    if issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    if kind in (CostCoefficients, ModelInfo):
        return st.builds(kind, **{one.name: _POSITIVE[hints[one.name]] for one in fields(kind)})
    built = {one.name: values_of(hints[one.name]) for one in fields(kind)}
    if kind is TokensEntry:
        built["token_ids"] = st.sampled_from([b"", b"four"])
        built["logprobs"] = st.just(())
        with_logprobs = {
            **built,
            "token_ids": st.just(b"four"),
            "logprobs": st.tuples(values_of(TokenLogprobs | None)),
        }
        return st.builds(kind, **built) | st.builds(kind, **with_logprobs)
    return st.builds(kind, **built)

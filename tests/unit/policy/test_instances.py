"""A mapping whose entries are replaced one at a time, against a dictionary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.views import instance

from policy.instances import CHUNK_INSTANCES, Instances

pytestmark = pytest.mark.unit

NAMES = [f"i{number}" for number in range(3 * CHUNK_INSTANCES + 1)]


def of_names(count: int):
    return {name: instance(name) for name in NAMES[:count]}


@given(
    st.integers(1, len(NAMES)),
    st.lists(st.tuples(st.integers(0, len(NAMES) - 1), st.floats(1, 100)), max_size=20),
)
def test_as_a_dictionary_in_which_one_at_a_time_is_replaced(count, replaced):
    expected = of_names(count)
    instances = first = Instances.of(expected)
    expected = dict(expected)
    for number, heard_at_s in replaced:
        name = NAMES[number % count]
        expected[name] = instance(name, heard_at_s=heard_at_s)
        instances = instances.with_replaced(expected[name])
    assert instances == expected
    assert (list(instances), list(instances.values())) == (list(expected), list(expected.values()))
    assert all(instances[name] is known for name, known in expected.items())
    assert first == of_names(count), "the earlier one is as it was"
    changed = {NAMES[number % count] for number, _ in replaced}
    pairs = first.replaced_in(instances)
    assert {(known.instance, later is expected[known.instance]) for known, later in pairs} == {
        (name, True) for name in changed
    }


def test_one_of_no_known_name_replaces_nothing():
    with pytest.raises(KeyError):
        Instances.of(of_names(2)).with_replaced(instance("other"))
    assert "other" not in Instances.of(of_names(2))


def test_what_differs_is_told_only_of_one_that_came_from_the_same():
    assert Instances.of(of_names(2)).replaced_in(Instances.of(of_names(2))) is None
    instances = Instances.of(of_names(2))
    assert instances.replaced_in(instances) == []
    assert Instances.of(instances) is instances


def test_work_of_a_replacement_is_bounded():
    """All but one chunk are shared, by identity, with the one before."""
    instances = Instances.of(of_names(len(NAMES)))
    later = instances.with_replaced(instance(NAMES[CHUNK_INSTANCES], heard_at_s=9.0))
    shared = [chunk is other for chunk, other in zip(instances._chunks, later._chunks, strict=True)]
    assert shared.count(False) == 1

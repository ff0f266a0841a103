"""Who fits together: one rule for every pair, whoever looks and in whatever order."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.records import MODEL_INFO, gateway, registry, worker

from cluster.compatibility import fitting, mismatch, older
from cluster.messages import InstanceRecord
from kvindex.core import InstanceId
from policy.core import Role

pytestmark = pytest.mark.unit

ONE = worker("one", Role.PREFILL, incarnation=1)


def other(**changes: object) -> InstanceRecord:
    return replace(worker("two", Role.DECODE, incarnation=2), model=replace(MODEL_INFO, **changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "another"),
        ("block_tokens", 32),
        ("block_bytes", 1),
        ("layers", 31),
        ("dtype", "bfloat16"),
    ],
)
def test_the_text_names_the_field_both_values_and_the_other(field: str, value: object) -> None:
    found = mismatch(other(**{field: value}), [gateway("g"), ONE])
    assert found is not None
    assert (found.instance, found.other, found.field) == ("two", "one", field)
    text = str(found)
    for part in (field, str(value), str(getattr(MODEL_INFO, field)), "one", repr(MODEL_INFO.name)):
        assert part in text
    assert "another name" in text


def test_what_a_person_can_change_is_named_before_the_fingerprint() -> None:
    found = mismatch(other(dtype="bfloat16", block_bytes=350_000, fingerprint="another"), [ONE])
    assert found is not None
    assert found.field == "dtype"


@pytest.mark.parametrize(
    "changed",
    [
        other(),
        other(context_tokens_max=99),
        other(name="another", fingerprint="another", layers=1),
        replace(other(fingerprint="another"), instance=ONE.instance),
        gateway("g"),
    ],
    ids=["same", "context", "other name", "its own predecessor", "no model"],
)
def test_what_fits(changed: InstanceRecord) -> None:
    assert mismatch(changed, [ONE]) is None
    assert mismatch(ONE, [changed]) is None


def test_of_two_exactly_one_is_older() -> None:
    same_start = replace(ONE, instance=InstanceId("zwei"))
    for one, two in ((ONE, other()), (ONE, same_start)):
        assert older(one, two)
        assert not older(two, one)


records = st.lists(
    st.builds(
        lambda name, incarnation, model, fingerprint: replace(
            worker(f"w{name}", Role.PREFILL, incarnation=incarnation),
            model=replace(MODEL_INFO, name=model, fingerprint=fingerprint),
        ),
        st.integers(0, 6),
        st.integers(1, 3),
        st.sampled_from("ab"),
        st.sampled_from("xyz"),
    ),
    max_size=8,
    unique_by=lambda record: record.instance,
)


@given(records, st.randoms())
def test_those_that_fit_agree_and_the_others_disagree_with_an_older_one(
    listed: list[InstanceRecord], random: object
) -> None:
    found = fitting(registry(*listed))
    assert list(found) == [record.instance for record in listed if record.instance in found]
    for record in listed:
        rivals = [kept for kept in found.values() if older(kept, record)]
        if record.instance in found:
            assert mismatch(record, found.values()) is None
        else:
            assert mismatch(record, rivals) is not None
    shuffled = list(listed)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert fitting(registry(*shuffled)).keys() == found.keys()

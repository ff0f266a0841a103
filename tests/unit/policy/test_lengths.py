import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.views import D1, decode, snapshot, view_of

from policy import lengths as lengths_module
from policy.core import EndedRequest, RequestId
from policy.lengths import (
    LENGTHS_NEEDED,
    LENGTHS_PER_GROUP_MAX,
    UNSEEN_FRACTION,
    OutputLengths,
    expected_tokens,
    tokens_left,
    with_ended,
)
from policy.view import ClusterView, with_load

pytestmark = pytest.mark.unit

CHAT, CODE = b"c" * 16, b"d" * 16


def ended(*output_tokens: int | None, tenant: str = "t", family: bytes = CHAT) -> tuple[EndedRequest, ...]:
    return tuple(
        EndedRequest(RequestId(f"r{i}"), 1, tokens, tenant, family) for i, tokens in enumerate(output_tokens)
    )


class TestExpected:
    def test_nothing_seen_is_a_named_fraction_of_the_limit(self):
        assert expected_tokens(OutputLengths(), "t", CHAT, 200) == UNSEEN_FRACTION * 200

    def test_a_quantile_of_the_family_once_there_are_enough(self):
        few = with_ended(OutputLengths(), ended(*range(10, 10 * LENGTHS_NEEDED, 10)))
        assert expected_tokens(few, "t", CHAT, 1000) == 500
        enough = with_ended(few, ended(10 * LENGTHS_NEEDED))
        assert expected_tokens(enough, "t", CHAT, 1000) == 60

    def test_the_narrowest_kind_that_has_shown_enough(self):
        known = with_ended(OutputLengths(), ended(*[10] * 20, family=CHAT))
        known = with_ended(known, ended(*[500] * 20, family=CODE))
        known = with_ended(known, ended(*[90] * 60, tenant="u", family=b""))
        assert expected_tokens(known, "t", CHAT, 1000) == 10
        assert expected_tokens(known, "t", CODE, 1000) == 500
        assert expected_tokens(known, "t", b"new" * 5 + b"!", 1000) == 500, "the tenant's upper quartile"
        assert expected_tokens(known, "u", b"", 1000) == 90
        assert expected_tokens(known, "nobody", b"", 1000) == 90, "everybody's"

    def test_never_beyond_the_limit(self):
        known = with_ended(OutputLengths(), ended(*[500] * 20))
        assert expected_tokens(known, "t", CHAT, 64) == 64

    def test_a_change_is_followed(self):
        known = with_ended(OutputLengths(), ended(*[1000] * LENGTHS_PER_GROUP_MAX))
        known = with_ended(known, ended(*[20] * LENGTHS_PER_GROUP_MAX))
        assert expected_tokens(known, "t", CHAT, 4000) == 20

    def test_answers_without_an_end_say_nothing(self):
        assert with_ended(OutputLengths(), ended(None, None)) == OutputLengths()


class TestLeft:
    @pytest.mark.parametrize(
        ("expected", "so_far", "limit", "left"),
        [
            (100, 30, 1000, 70),
            (100, 100, 1000, 50),
            (100, 400, 1000, 200),
            (100, 400, 500, 100),
            (100, 500, 500, 0),
            (None, 30, 100, 20),
        ],
    )
    def test_by_what_was_expected_and_what_there_is(self, expected, so_far, limit, left):
        assert tokens_left(expected, so_far, limit) == left


def test_kinds_are_bounded_and_the_least_recent_goes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lengths_module, "GROUPS_MAX", 4)
    known = OutputLengths()
    for tenant in "abcdef":
        known = with_ended(known, ended(7, tenant=tenant, family=b""))
    assert list(known.by_group) == [("d", b""), ("e", b""), ("f", b""), lengths_module.EVERYBODY]


class TestFromSnapshots:
    def told(self, view: ClusterView, seq: int, total: int, *tokens: int) -> ClusterView:
        load = snapshot("d1")
        object.__setattr__(load, "ended", ended(*tokens))
        object.__setattr__(load, "ended_total", total)
        return with_load(view, load, 1, seq, 0.0)

    def shown(self, view: ClusterView) -> tuple[int, ...]:
        return view.lengths.by_group.get(lengths_module.EVERYBODY, ())

    def test_what_is_listed_again_counts_once(self):
        view = self.told(view_of(decode("d1")), 2, 2, 10, 20)
        view = self.told(view, 3, 2, 10, 20)
        view = self.told(view, 4, 3, 10, 20, 30)
        assert self.shown(view) == (10, 20, 30)

    def test_what_fell_out_of_the_list_is_not_made_up(self):
        view = self.told(view_of(decode("d1")), 2, 1, 10)
        view = self.told(view, 3, 100, 70, 80)
        assert self.shown(view) == (10, 70, 80)

    def test_it_outlives_the_instance(self):
        view = self.told(view_of(decode("d1")), 2, 1, 10)
        view = ClusterView({}, {}, view.lengths)
        assert D1 not in view.instances
        assert self.shown(view) == (10,)


@given(st.lists(st.integers(0, 10_000), max_size=200), st.integers(1, 5000))
def test_expected_lies_between_one_and_the_limit(tokens, limit):
    known = with_ended(OutputLengths(), ended(*tokens))
    assert 1 <= expected_tokens(known, "t", CHAT, limit) <= limit
    assert all(len(shown) <= LENGTHS_PER_GROUP_MAX for shown in known.by_group.values())

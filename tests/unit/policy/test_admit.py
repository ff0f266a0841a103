"""Admission through `policy.place`: what a mode sees, samples, priorities, and when to come again."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.support.views import D1, D2, P1, P2, coupled, decode, prefill, queued, request, running, view_of

from policy.admit import LOWER_SERVED_SHARE
from policy.choice import AdmissionMode, PlacementLimits
from policy.core import EndedRequest, Placement, QueuedRequest, Rejection, RejectReason, RequestId
from policy.lengths import OutputLengths, with_ended
from policy.place import place
from policy.view import ClusterView, with_placement

pytestmark = pytest.mark.unit

LIMITS = PlacementLimits()
SNAPSHOT = PlacementLimits(admission=AdmissionMode.SNAPSHOT)


def nearly_done(name: str, left: int):
    return replace(running(name), output_tokens=40, output_tokens_max=64, output_tokens_expected=40 + left)


def test_predictions_are_held_to_a_share_of_the_targets():
    """2000 tokens take a bit over a second."""
    view = view_of(prefill("p1"), decode("d1"))
    placed = place(view, request(prompt_tokens=2000), (), LIMITS, 0.0)
    assert isinstance(placed, Placement)
    for target, predicted_ms in (
        ("ttft_ms_max", placed.predicted_ttft_ms),
        ("tbt_ms_max", placed.predicted_tbt_ms),
    ):
        asked = request(prompt_tokens=2000, **{target: predicted_ms * 1.05})
        assert isinstance(place(view, asked, (), LIMITS, 0.0), Placement)
        assert isinstance(place(view, asked, (), replace(LIMITS, target_share=0.96), 0.0), Placement)
        assert isinstance(place(view, asked, (), replace(LIMITS, target_share=0.9), 0.0), Rejection)


class TestPredictive:
    """Steps take 30 ms and 10 ms a request; the target leaves room for six."""

    ASKED = request(tbt_ms_max=100, prompt_tokens=2000)

    def test_what_ends_before_the_first_token_does_not_count(self):
        view = view_of(prefill("p1"), decode("d1", *(nearly_done(f"a{i}", 5) for i in range(9))))
        assert isinstance(place(view, self.ASKED, (), LIMITS, 0.0), Placement)
        refused = place(view, self.ASKED, (), SNAPSHOT, 0.0)
        assert isinstance(refused, Rejection)
        assert refused.reason is RejectReason.TBT

    def test_what_outlasts_the_prefill_does(self):
        view = view_of(prefill("p1"), decode("d1", *(nearly_done(f"a{i}", 24) for i in range(9))))
        assert isinstance(place(view, self.ASKED, (), LIMITS, 0.0), Rejection)

    def test_what_is_still_prefilling_does(self):
        view = view_of(prefill("p1"), prefill("p2", *(queued(f"q{i}", 150) for i in range(9))), decode("d1"))
        assert isinstance(place(view, self.ASKED, (), SNAPSHOT, 0.0), Placement)
        refused = place(view, self.ASKED, (), LIMITS, 0.0)
        assert isinstance(refused, Rejection)
        assert refused.reason is RejectReason.TBT

    def test_what_arrives_after_it_has_ended_does_not(self):
        far = (QueuedRequest(RequestId(f"q{i}"), 1, D1, 40_000, 0, 64) for i in range(9))
        view = view_of(prefill("p1"), prefill("p2", *far), decode("d1", free=100_000))
        assert isinstance(place(view, self.ASKED, (), LIMITS, 0.0), Placement)

    def test_learnt_lengths_decide(self):
        """Answers of 5 tokens are gone before the next prompt is computed; long ones are not."""
        family = b"f" * 16
        asked = replace(self.ASKED, block_hashes=family * 2)
        for tokens, answer in ((5, Placement), (600, Rejection)):
            ended = tuple(EndedRequest(RequestId(f"e{i}"), 1, tokens, "", family) for i in range(20))
            view = ClusterView(
                view_of(prefill("p1"), prefill("p2"), decode("d1")).instances,
                lengths=with_ended(OutputLengths(), ended),
            )
            for i in range(8):
                short = replace(
                    request(f"b{i}", prompt_tokens=100), block_hashes=family, output_tokens_max=1000
                )
                placement = place(view, short, (), PlacementLimits(admission=AdmissionMode.NONE), 0.0)
                assert isinstance(placement, Placement)
                assert placement.output_tokens_expected == tokens
                view = with_placement(view, placement, 100, 0.0)
            assert isinstance(place(view, asked, (), LIMITS, 0.0), answer)

    def test_room_that_comes_free_while_it_waits(self):
        """The blocks are wanted when prefill takes it off its queue, two seconds from now."""
        ending = replace(nearly_done("a", 5), kv_tokens=2000)
        waits = prefill("p1", queued("q", 2000, "d2"))
        view = view_of(waits, decode("d1", ending, free=10))
        assert isinstance(place(view, request(), (), LIMITS, 0.0), Placement)
        idle = view_of(prefill("p1"), decode("d1", ending, free=10))
        refused = place(idle, request(), (), LIMITS, 0.0)
        assert isinstance(refused, Rejection)
        assert refused.reason is RejectReason.OVERLOADED

    def test_what_reserves_after_it_has_ended_needs_no_room_beside_it(self):
        """A newcomer: it prefills at once, and is done before the other's long queue comes to its second
        prompt. Free is room for the first and for it, not for all three."""
        first, second = queued("first", 4000), queued("second", 1000)
        free = (250 + 1) + (63 + 1)
        view = view_of(prefill("p1", first, second), prefill("p2"), decode("d1", free=free))
        less = view_of(prefill("p1", first, second), prefill("p2"), decode("d1", free=free - 1))
        placement = place(view, request(), (), LIMITS, 0.0)
        assert isinstance(placement, Placement)
        assert placement.prefill == P2
        for refused in (
            place(view, request(output_tokens_max=200), (), LIMITS, 0.0),  # still there then
            place(less, request(), (), LIMITS, 0.0),
        ):
            assert isinstance(refused, Rejection)
            assert refused.reason is RejectReason.OVERLOADED

    def test_another_decode_that_meets_the_target_is_taken(self):
        """The one with the shortest step now is the one where the surge goes."""
        surge = prefill("p2", *(queued(f"q{i}", 100, "d1") for i in range(6)))
        ending = decode("d2", *(nearly_done(f"a{i}", 5) for i in range(9)))
        view = view_of(prefill("p1"), surge, decode("d1", running("x")), ending)
        won = place(view, replace(self.ASKED, tbt_ms_max=95), (), LIMITS, 0.0)
        assert isinstance(won, Placement)
        assert won.decode == D2


class TestRetryAfter:
    def test_when_enough_has_ended(self):
        left = [30, 60, 90, 120, 150, 180, 210]
        busy = (replace(nearly_done(f"a{i}", tokens), output_tokens_max=600) for i, tokens in enumerate(left))
        view = view_of(prefill("p1"), decode("d1", *busy))
        refused = place(view, request(tbt_ms_max=72), (), LIMITS, 0.0)
        assert isinstance(refused, Rejection)
        # Three others beside it take 70 ms; after four ends there are three.
        assert refused.retry_after_s == pytest.approx(120 * (0.03 + 7 * 0.01 + 700 * 1e-6), rel=0.01)

    def test_bounded(self):
        view = view_of(prefill("p1", queued("q", 500_000)), decode("d1"))
        refused = place(view, request(ttft_ms_max=100), (), LIMITS, 0.0)
        assert isinstance(refused, Rejection)
        assert refused.retry_after_s == LIMITS.retry_after_s_max


class TestSamples:
    def test_each_is_a_sequence_in_the_step(self):
        view = view_of(prefill("p1"), decode("d1"))
        assert isinstance(place(view, request(tbt_ms_max=100, samples=6), (), LIMITS, 0.0), Placement)
        assert isinstance(place(view, request(tbt_ms_max=100, samples=7), (), LIMITS, 0.0), Rejection)

    def test_each_takes_a_block_more(self):
        view = view_of(prefill("p1"), decode("d1", free=66))
        assert isinstance(place(view, request(samples=3), (), LIMITS, 0.0), Placement)
        assert isinstance(place(view, request(samples=4), (), LIMITS, 0.0), Rejection)

    def test_a_booking_of_many_counts_them_all(self):
        view = view_of(prefill("p1"), decode("d1"))
        placement = place(view, request("a"), (), LIMITS, 0.0)
        assert isinstance(placement, Placement)
        asked = request("b", tbt_ms_max=100)
        for samples, answer in ((5, Placement), (6, Rejection)):
            booked = with_placement(view, placement, 1000, 0.0, samples=samples)
            assert isinstance(place(booked, asked, (), LIMITS, 0.0), answer)

    def test_queued_ones_too(self):
        for samples, answer in ((5, Placement), (6, Rejection)):
            waiting = replace(queued("q", 100), samples=samples)
            view = view_of(prefill("p1"), prefill("p2", waiting), decode("d1"))
            assert isinstance(place(view, request("b", tbt_ms_max=100), (), LIMITS, 0.0), answer)


def admitted(view: ClusterView, priority: int, count: int = 400, **fields: object) -> float:
    """Share of so many requests of this priority that get in, each alone on the same view."""
    decisions = [
        place(view, request(f"r{i}", priority=priority, **fields), (), LIMITS, 0.0) for i in range(count)
    ]
    return sum(isinstance(decision, Placement) for decision in decisions) / count


def pressures() -> Iterator[tuple[str, ClusterView, dict[str, object]]]:
    """Nearly full in one respect each; a request of priority 1 is about."""
    high = replace(queued("high", 10), priority=1)
    yield "queue", view_of(prefill("p1", queued("q", 1900), high), decode("d1")), {"ttft_ms_max": 3000}
    busy = decode("d1", *(running(f"a{i}") for i in range(5)))
    yield "steps", view_of(prefill("p1"), prefill("p2", high), busy), {"tbt_ms_max": 104}
    full = decode("d1", free=300)
    yield "blocks", view_of(prefill("p1"), prefill("p2", high), full), {}


class TestPriorities:
    @pytest.mark.parametrize(("what", "view", "fields"), list(pressures()))
    def test_lower_ones_are_refused_first_and_never_starve(self, what, view, fields):
        shares = [admitted(view, priority, **fields) for priority in (1, 0, -1, -5)]
        assert shares[0] == 1.0
        assert shares[0] > shares[1] >= shares[2] >= shares[3] > 0
        assert shares[3] == pytest.approx(LOWER_SERVED_SHARE, abs=0.05)

    @pytest.mark.parametrize("priority", [-5, 0, 5])
    def test_without_pressure_all_get_in(self, priority):
        high = replace(queued("high", 10), priority=9)
        view = view_of(prefill("p1"), prefill("p2", high), decode("d1"), decode("d2"))
        assert admitted(view, priority, ttft_ms_max=1200, tbt_ms_max=60) == 1.0

    def test_where_nobody_has_a_higher_one_nothing_is_left_free(self):
        view = view_of(prefill("p1", queued("q", 1900)), decode("d1"))
        assert admitted(view, 0, ttft_ms_max=3000) == 1.0
        assert admitted(view, 3, ttft_ms_max=3000) == 1.0

    def test_a_booking_of_a_higher_one_counts(self):
        view = view_of(prefill("p1", queued("q", 1900)), prefill("p2"), decode("d1"), coupled("c1"))
        asked = {"ttft_ms_max": 3000, "excluded": ("p2", "c1")}
        assert admitted(view, 0, **asked) == 1.0
        placement = Placement(RequestId("high"), 1, P1, D1)
        booked = with_placement(view, placement, 10, 0.0, priority=1)
        assert admitted(booked, 0, **asked) < 0.2

    def test_who_is_refused_gets_in_under_another_name(self):
        """A client that asks again is drawn again: it waits, and does not starve."""
        _, view, fields = next(pressures())
        tries = [
            place(view, request(f"again-{i}", priority=-5, **fields), (), LIMITS, 0.0) for i in range(60)
        ]
        assert any(isinstance(decision, Placement) for decision in tries)

    def test_mode_none_knows_no_priorities(self):
        _, view, fields = next(pressures())
        limits = PlacementLimits(admission=AdmissionMode.NONE)
        for i in range(50):
            assert isinstance(
                place(view, request(f"r{i}", priority=-5, **fields), (), limits, 0.0), Placement
            )

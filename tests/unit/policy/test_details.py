import pytest
from tests.support.views import decode, prefill, request, view_of

from policy.choice import PlacementLimits
from policy.core import Rejection
from policy.details import told_s
from policy.place import place

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(0.0, "0 s"), (0.00012, "0.00012 s"), (0.0305, "0.0305 s"), (0.1004, "0.1004 s"), (30.04, "30.040 s")],
)
def test_small_times_keep_their_digits(time_s: float, text: str) -> None:
    assert told_s(time_s) == text


def test_a_target_below_a_millisecond_is_told_as_it_is() -> None:
    limits = PlacementLimits(target_share=0.95)
    decision = place(view_of(prefill("p1"), decode("d1")), request(ttft_ms_max=0.5), (), limits, 0.0)
    assert isinstance(decision, Rejection)
    assert decision.detail.endswith("held to 0.000475 s")

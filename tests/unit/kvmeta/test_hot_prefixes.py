import pytest

from cluster.errors import ProtocolError
from cluster.messages import MATCH_BLOCKS_MAX, PrefixHeat, PrefixHeats
from cluster.testing.bus import PAYLOAD_BYTES_MAX
from cluster.wire import encode
from kvindex.core import InstanceId
from kvmeta.hot_prefixes import REQUESTS_MAX, heard, told
from policy.heat import HEAT_BYTES_MAX, HEATS_MAX, Asked, HeatCounter

pytestmark = pytest.mark.unit


def chain(blocks: int, salt: int = 0) -> bytes:
    return b"".join(salt.to_bytes(8) + number.to_bytes(8) for number in range(blocks))


def test_what_is_told_is_heard():
    prefixes = (Asked(chain(2), 3), Asked(chain(MATCH_BLOCKS_MAX), REQUESTS_MAX))
    assert heard(told(prefixes)) == prefixes


def test_the_longest_prompts_fit_into_a_message():
    counter = HeatCounter()
    for salt in range(4):
        for _ in range(2):
            counter.count(chain(MATCH_BLOCKS_MAX, salt), MATCH_BLOCKS_MAX, 0.0)
    heats = told(counter.take(0.0, 60.0))
    assert len(heats.prefixes) == HEAT_BYTES_MAX // (16 * MATCH_BLOCKS_MAX) == 1
    assert len(encode(heats, InstanceId("k"), 1, 1, 0.0)) < PAYLOAD_BYTES_MAX


@pytest.mark.parametrize(
    "bad",
    [
        PrefixHeat(b"x" * 17, 2),
        PrefixHeat(b"", 2),
        PrefixHeat(chain(MATCH_BLOCKS_MAX + 1), 2),
        PrefixHeat(chain(1), 0),
        PrefixHeat(chain(1), REQUESTS_MAX + 1),
    ],
)
def test_what_makes_no_sense_is_named(bad: PrefixHeat):
    with pytest.raises(ProtocolError, match="must be"):
        heard(PrefixHeats((PrefixHeat(chain(1), 2), bad)))


def test_more_than_are_told_at_once_are_refused():
    with pytest.raises(ProtocolError, match="at most"):
        heard(PrefixHeats((PrefixHeat(chain(1), 2),) * (HEATS_MAX + 1)))

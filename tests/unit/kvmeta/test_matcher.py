import pytest
from tests.support.eventually import Clock

from cluster import subjects
from cluster.errors import RetryableError
from cluster.messages import MATCH_BLOCKS_MAX, InventoryRequest, MatchReply, MatchRequest
from cluster.metrics import ServiceMetrics
from cluster.testing import FakeBroker
from kvindex.core import BlockAction, BlockEvent, InstanceId, InstanceMatch, Tier, TierRun
from kvindex.directory import Directory
from kvmeta.matcher import Matcher
from kvmeta.metrics import KvmetaMetrics
from policy.heat import Asked, HeatCounter

pytestmark = pytest.mark.unit

BLOCKS = [bytes([number]) * 16 for number in range(1, 6)]
P1, D1 = InstanceId("p1"), InstanceId("d1")


@pytest.fixture
def heat() -> HeatCounter:
    return HeatCounter()


@pytest.fixture
async def asker(heat: HeatCounter):
    directory = Directory()
    for instance, held in ((P1, 4), (D1, 2)):
        directory.apply(instance, BlockEvent(BlockAction.STORED, b"".join(BLOCKS[:held]), Tier.DRAM))
    broker = FakeBroker()
    matcher = Matcher(directory, heat, KvmetaMetrics(ServiceMetrics().registry), Clock())
    await broker.bus("kvmeta-1").subscribe(subjects.KVMETA_MATCH, matcher.match, queue=subjects.KVMETA_QUEUE)
    return broker.bus("conductor-1")


async def test_prefix_of_each_holder_longest_first(asker):
    reply = await asker.request(subjects.KVMETA_MATCH, MatchRequest(b"".join(BLOCKS)), timeout_s=5)
    assert reply == MatchReply(
        (
            InstanceMatch(P1, 4, (TierRun(Tier.DRAM, 4),)),
            InstanceMatch(D1, 2, (TierRun(Tier.DRAM, 2),)),
        )
    )


async def test_an_unknown_prompt_matches_nobody(asker, heat: HeatCounter):
    reply = await asker.request(subjects.KVMETA_MATCH, MatchRequest(BLOCKS[4] + BLOCKS[0]), timeout_s=5)
    assert reply == MatchReply(())
    assert len(heat) == 0


async def test_counts_where_the_longest_match_ends(asker, heat: HeatCounter):
    for chain in (BLOCKS, BLOCKS, BLOCKS[:4], BLOCKS[:3]):
        await asker.request(subjects.KVMETA_MATCH, MatchRequest(b"".join(chain)), timeout_s=5)
    assert heat.take(100.0, 60.0) == (Asked(b"".join(BLOCKS[:4]), 3),)
    assert len(heat) == 2


@pytest.mark.parametrize(
    "bad", [MatchRequest(b"x" * 17), MatchRequest(bytes(16 * (MATCH_BLOCKS_MAX + 1))), InventoryRequest()]
)
async def test_bad_requests_are_refused(asker, bad):
    with pytest.raises(RetryableError, match="ProtocolError"):
        await asker.request(subjects.KVMETA_MATCH, bad, timeout_s=5)

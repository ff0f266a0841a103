"""`moonpool bench decisions` on real servers and two conductors: everything is placed, and both take part."""

import pytest

from moonpool.benchmarks.decisions import Setting, measure

pytestmark = pytest.mark.integration


async def test_stub_instances_are_placed_on_by_all_conductors() -> None:
    (sample,) = await measure(Setting(conductors=2, instances=4, prompt_blocks=8, window=16, seconds=2), 1)
    assert sample.decided > 50
    assert len(sample.latencies_s) == sample.decided
    assert sample.busy.keys() == {"kvmeta-0", "conductor-0", "conductor-1", "nats", "bench"}
    assert min(sample.busy["conductor-0"], sample.busy["conductor-1"]) > 0

"""All kvmeta are killed and started again: what they knew is known again before one says that it is ready."""

import pytest

from moonpool.benchmarks.kvmeta_restart import Setting, measure

pytestmark = pytest.mark.integration


async def test_restarted_kvmetas_know_before_they_are_ready() -> None:
    results = await measure(Setting(kvmetas=2, instances=4, blocks=2048), repeats=1)
    found = {result.metric: result.value for result in results}
    assert 0 < found["first_right_match"] <= found["matches_known"] < 20
    assert 0 < found["ready"] < 20
    assert found["known_share_when_ready"] == 1.0
    assert results[0].context["blocks"] == 8192

"""The gateway compares the time to first token with what its placement promised."""

import asyncio

import pytest
from tests.unit.gateway.fake_cluster import DECODE, PREFILL, Cluster, ids, running_cluster
from tests.unit.gateway.model_files import write_model_folder

from policy.core import Placement, ScheduleRequest

pytestmark = pytest.mark.unit

PREDICTED_S = 0.05
SLOW_S = 0.2


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(write_model_folder(tmp_path)) as running:
        running.place = place
        yield running


async def place(request: ScheduleRequest) -> Placement:
    await asyncio.sleep(SLOW_S)
    return Placement(
        request.request_id, request.attempt, PREFILL, DECODE, predicted_ttft_ms=PREDICTED_S * 1e3
    )


def told(cluster: Cluster, name: str) -> float:
    return cluster.value(f"moonpool_{name}", kind="ttft")


async def test_the_first_token_is_compared_once_and_counted_from_the_question(cluster: Cluster) -> None:
    asking = asyncio.create_task(cluster.chat())
    submit = await cluster.prefill.submits.get()
    assert submit.waited_s >= SLOW_S * 0.9
    await cluster.decode.say(submit, ids("Paris"))
    assert (await asking)[0] == 200
    assert told(cluster, "prediction_error_ratio_count") == 1
    assert told(cluster, "predicted_seconds_total") == pytest.approx(PREDICTED_S)
    assert told(cluster, "actual_seconds_total") >= SLOW_S * 0.9


async def test_each_placement_is_compared_with_its_own_first_token(cluster: Cluster) -> None:
    asking = asyncio.create_task(cluster.chat())
    submit = await cluster.prefill.submits.get()
    token_ids = ids("Paris")
    await cluster.prefill.tokens(submit, token_ids[:1], 0)
    await cluster.prefill.fail(submit, retryable=True)
    again = await cluster.prefill.submits.get()
    assert again.work.attempt == 1
    for index, token_id in enumerate(token_ids[1:], start=1):
        await cluster.decode.tokens(again, [token_id], index)
    await cluster.decode.finish(again, len(token_ids))
    assert (await asking)[0] == 200
    assert told(cluster, "prediction_error_ratio_count") == 2


async def test_without_a_token_nothing_is_compared(cluster: Cluster) -> None:
    asking = asyncio.create_task(cluster.chat())
    submit = await cluster.prefill.submits.get()
    await cluster.prefill.fail(submit, retryable=False)
    assert (await asking)[0] == 500
    assert told(cluster, "prediction_error_ratio_count") == 0

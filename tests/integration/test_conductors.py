"""Several conductors: they share what they have placed, one dying changes nothing, and one that starts knows
all loads before it answers. Real services and workers with timed engines."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.support.bus_gateway import bus_gateway
from tests.support.eventually import eventually
from tests.support.loose_stack import LooseStack
from tests.support.scrape import metrics
from tests.support.timed_stack import poisson, send, timed_stack

from cluster import subjects
from cluster.bus import Bus
from moonpool.replay.records import Outcome
from policy.core import Placement, RequestId, ScheduleRequest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

CONDUCTORS = ("conductor-0", "conductor-1")
PREFILLS = ("prefill-0", "prefill-1")
WORKERS = (*PREFILLS, "decode-0", "decode-1")
PREFILL_TOKEN_S = 0.002
PROMPT_TOKENS = 64
LONG_PROMPT_TOKENS = 1500
OUTPUT_TOKENS = 8
RATE_PER_S, LOAD_S = 8.0, 5.0
LEASE_S = 10.0
"""Longer than workers are stopped for: who is silent for a while stays registered."""
BOOKING_TTL_S = 30.0
ASK_S_MAX = 10.0
HEARD_S_MAX = 10.0
CAUGHT = 8
"""Requests that come while a conductor hangs; which one gets each is NATS's choice."""
DEAD_CONDUCTOR_COSTS_S_MAX = 5.0
"""How long a request may wait for its first token more than others, because its conductor died."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LooseStack]:
    with timed_stack(tmp_path_factory.mktemp("conductors"), lease_ttl_s=LEASE_S) as made:
        for name in CONDUCTORS:
            made.launch(name, "--booking-ttl-s", str(BOOKING_TTL_S))
        for name in WORKERS:
            made.launch(name, "--prefill-token-s", str(PREFILL_TOKEN_S))
        for name in ("kvmeta-0", "gateway-0"):
            made.launch(name)
        for name in (*CONDUCTORS, *WORKERS, "kvmeta-0", "gateway-0"):
            made.wait_ready(name)
        yield made


def counted(stack: LooseStack, conductor: str, name: str) -> float:
    return metrics(stack.url(conductor)).value(f"moonpool_conductor_{name}")


async def placed(bus: Bus, fingerprint: str, name: str, prompt_tokens: int = PROMPT_TOKENS) -> Placement:
    """What any of the conductors answers."""
    request = ScheduleRequest(
        request_id=RequestId(name),
        attempt=0,
        model="tiny",
        fingerprint=fingerprint,
        prompt_tokens=prompt_tokens,
        output_tokens_max=OUTPUT_TOKENS,
        block_hashes=b"",
        deadline_s=60.0,
    )
    answer = await bus.request(subjects.SCHEDULE, request, timeout_s=ASK_S_MAX)
    assert isinstance(answer, Placement), answer
    return answer


async def test_what_one_places_the_other_counts(stack: LooseStack) -> None:
    """The workers stand still, so no load snapshot tells of anything."""
    async with bus_gateway(stack.addresses) as gateway:
        before = {name: counted(stack, name, "decisions_total") for name in CONDUCTORS}
        for name in WORKERS:
            stack.signal(name, signal.SIGSTOP)
        try:
            chosen: Counter[str] = Counter()
            for number in range(12):
                # So long that none is taken to be done before the last is asked.
                placement = await placed(
                    gateway.ear.bus, gateway.fingerprint, f"booked-{number}", LONG_PROMPT_TOKENS
                )
                chosen[placement.prefill] += 1
                await eventually(
                    lambda asked=number + 1: all(
                        counted(stack, name, "bookings") == asked for name in CONDUCTORS
                    ),
                    HEARD_S_MAX,
                )
            assert chosen == {"prefill-0": 6, "prefill-1": 6}
            # Both have placed some, or sharing would be nothing to speak of.
            assert all(counted(stack, name, "decisions_total") > before[name] for name in CONDUCTORS)
        finally:
            for name in WORKERS:
                stack.signal(name, signal.SIGCONT)


async def test_one_dies_under_load_and_no_request_fails(stack: LooseStack) -> None:
    url = stack.url("gateway-0")
    rng = random.Random(4)
    under_way = asyncio.create_task(send(url, poisson(RATE_PER_S, LOAD_S, rng, PROMPT_TOKENS, OUTPUT_TOKENS)))
    decided = counted(stack, "conductor-0", "decisions_total")
    await eventually(lambda: counted(stack, "conductor-0", "decisions_total") > decided, HEARD_S_MAX)
    # It hangs first: what it has been asked then, it dies with.
    stack.signal("conductor-0", signal.SIGSTOP)
    caught = asyncio.create_task(send(url, poisson(1000.0, CAUGHT / 1000, rng, PROMPT_TOKENS, OUTPUT_TOKENS)))
    await asyncio.wait({caught}, timeout=0.5)
    stack.kill("conductor-0")
    records = [*await under_way, *await caught]
    assert Counter(record.outcome for record in records) == {Outcome.SERVED: len(records)}
    waited_s = sorted(record.ttft_s or 0.0 for record in records)
    print(
        f"\n{len(records)} requests while a conductor died, the longest wait for a token {waited_s[-1]:.2f} s"
    )
    assert waited_s[-1] < DEAD_CONDUCTOR_COSTS_S_MAX


async def test_a_restarted_one_knows_all_loads_before_it_answers(stack: LooseStack) -> None:
    """One prefill has work for a long time. Who knew no loads would take the two for equals."""
    async with bus_gateway(stack.addresses) as gateway:
        stack.kill("conductor-1")
        rng = random.Random(5)
        for number in range(8):
            prompt = [rng.randrange(300, 500) for _ in range(LONG_PROMPT_TOKENS)]
            await gateway.submit(f"long-{number}", prompt, OUTPUT_TOKENS, at=("prefill-0", "decode-0"))
        stack.start("conductor-0")
        for number in range(8):
            placement = await placed(gateway.ear.bus, gateway.fingerprint, f"after-{number}")
            assert placement.prefill == "prefill-1"
            assert placement.predicted_ttft_ms < 3000
        assert counted(stack, "conductor-0", "decisions_total") == 8

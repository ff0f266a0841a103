"""A stack whose workers take time instead of computing, and an open-loop load on its gateway.

The load goes the way of `moonpool replay`; prompts are numbers of blocks, so who shares a block shares a
prefix.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.loose_stack import LooseStack, loose_stack
from tests.support.timed_engine import FIRST_TOKEN_ID, LAST_TOKEN_ID

from engine.tiny import make_tiny_model
from moonpool.api import Api
from moonpool.replay.prompts import TokenRange
from moonpool.replay.records import Outcome, Record, Results
from moonpool.replay.schedule import ScheduledRequest
from moonpool.replay.sender import SenderConfig, send_all
from moonpool.replay.target import find_target
from moonpool.roles import SERVICE_OF_ROLE
from simulator.trace import TRACE_BLOCK_TOKENS

TIMED_SERVICES = {
    **SERVICE_OF_ROLE,
    **{role: ("tests.support.timed_worker", role) for role in ("prefill", "decode", "coupled")},
}
API_S_MAX = 20.0
IN_FLIGHT_MAX = 2000
SILENCE_S_MAX = 30.0
SEED = 6


@contextmanager
def timed_stack(folder: Path, *, lease_ttl_s: float = 2.0, context: int = 2048) -> Iterator[LooseStack]:
    """Servers only, as `loose_stack`; the workers started on it have timed engines. `context` is the
    model's, in tokens."""
    model = folder / "tiny"
    make_tiny_model(model, context=context)
    with loose_stack(folder, model, lease_ttl_s=lease_ttl_s, services=TIMED_SERVICES) as stack:
        yield stack


def poisson(
    rate_per_s: float,
    lasts_s: float,
    rng: random.Random,
    prompt_tokens: int,
    output_tokens: int,
) -> list[ScheduledRequest]:
    """Requests at random times whose prompts share nothing."""
    requests, due_s = [], 0.0
    while (due_s := due_s + rng.expovariate(rate_per_s)) < lasts_s:
        blocks = tuple(rng.getrandbits(62) for _ in range(-(-prompt_tokens // TRACE_BLOCK_TOKENS)))
        requests.append(ScheduledRequest(len(requests) + 1, due_s, blocks, prompt_tokens, output_tokens))
    return requests


async def send(
    gateway_url: str, requests: Sequence[ScheduledRequest], until: asyncio.Event | None = None
) -> list[Record]:
    """What became of each, in the order in which they ended; all tokens of a block are sent. Once `until` is
    set no more are sent, and what is in flight is given up."""
    target = await asyncio.to_thread(find_target, Api(gateway_url, timeout_s=API_S_MAX), None, None)
    config = SenderConfig(
        target=target,
        scale=1.0,
        seed=SEED,
        tokens=TokenRange(FIRST_TOKEN_ID, LAST_TOKEN_ID),
        in_flight_max=IN_FLIGHT_MAX,
        silence_s_max=SILENCE_S_MAX,
    )
    results = Results()
    sending = asyncio.create_task(send_all(requests, config, results))
    enough = asyncio.create_task((until or asyncio.Event()).wait())
    await asyncio.wait({sending, enough}, return_when=asyncio.FIRST_COMPLETED)
    enough.cancel()
    if not sending.done():
        sending.cancel()
    await asyncio.gather(sending, enough, return_exceptions=True)
    if not sending.cancelled():
        sending.result()
    return results.records


def served(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.outcome is Outcome.SERVED]

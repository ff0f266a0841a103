"""What is told again of an answer: everything from the index asked for, in messages of bounded size."""

import pytest
from tests.support.workers import packed

from cluster.logs import Level, Logger
from cluster.messages import FinishEntry, TokensEntry, Work
from cluster.testing import FakeBroker
from cluster.wire import encode
from kvhash import namespace
from kvindex.core import InstanceId
from policy.core import RequestId, SamplingParams, TokenLogprobs
from policy.sampling_limits import LOGPROBS_MAX
from protocol import reservation
from worker.held import HeldRequest
from worker.outbox import MESSAGE_BYTES_MAX, TOKENS_PER_ENTRY_MAX, Outbox, batches
from worker.sequence import Sequence

pytestmark = pytest.mark.unit

GATEWAY = InstanceId("g")
R = RequestId("r")


def logprobs_of(index: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(round(-1.0 - index / 7, 6), tuple((120_000 + n, -123.456789) for n in range(top)))


@pytest.mark.parametrize(
    ("logprobs", "tokens"), [(None, TOKENS_PER_ENTRY_MAX + 5), (0, 5000), (LOGPROBS_MAX, 1000)]
)
async def test_an_answer_of_any_length_is_told_again(logprobs: int | None, tokens: int) -> None:
    sampling = SamplingParams(tokens, logprobs=logprobs)
    work = Work(R, 0, GATEWAY, "f", sampling, 2, packed([1, 2]), 0, b"", 60.0)
    sequence = Sequence.of(work, packed([1, 2]), namespace(b"seed", "model"), 1 << 20)
    token_ids = [index % 500 for index in range(tokens)]
    told = [None if logprobs is None else logprobs_of(index, logprobs) for index in range(tokens)]
    for token_id, one in zip(token_ids, told, strict=True):
        sequence.append(token_id, one)
    outbox = Outbox(FakeBroker().bus("d"), Logger(Level.ERROR))
    hold = reservation.adopted(R, 0, 0.0)
    answer = HeldRequest(hold, outbox, lambda ended: None, lambda broken: None).open(sequence)

    answer.tell_again(3)
    entries = outbox._pending[GATEWAY]
    assert all(
        len(encode(message, InstanceId("d"), 1, 1, 0.0)) <= MESSAGE_BYTES_MAX for message in batches(entries)
    )
    assert isinstance(entries[-1], FinishEntry)
    parts = [entry for entry in entries if isinstance(entry, TokensEntry)]
    assert b"".join(part.token_ids for part in parts) == packed(token_ids[3:])
    assert [one for part in parts for one in part.logprobs] == ([] if logprobs is None else told[3:])
    index = 3
    for part in parts:
        assert part.output_index == index
        index += len(part.token_ids) // 4

"""Sampling parameters through two workers: history, logprobs and randomness stay with the request."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.engines import sampled_answer
from tests.support.reference import Reference
from tests.support.workers import TOKENS, Workers, greedy, packed, prompt, workers

from cluster.messages import Accepted, Commit, RefusalReason, Refused, Reserve, Reserved, Resume
from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from kvindex.core import InstanceId
from policy.core import RequestId, Role, SamplingParams, TokenLogprobs
from policy.sampling_limits import LOGPROBS_MAX

pytestmark = pytest.mark.unit

R = RequestId("r")
KEY = (R, 0, 0)
COUPLED = {"w": (Role.PREFILL, Role.DECODE)}
SHAPED = SamplingParams(
    TOKENS,
    temperature=0.9,
    top_p=0.95,
    min_p=0.01,
    seed=5,
    repetition_penalty=1.3,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    logit_bias=((100, 3.0), (101, -100.0)),
)


async def test_an_answer_is_what_the_engine_draws_alone(pair: Workers, tiny: Path) -> None:
    """Three at once, each with a history, after a handover."""
    prompts = {f"r{n}": prompt(20 + 30 * n, seed=n) for n in range(3)}
    for name, ids in prompts.items():
        await pair.submit(name, ids, TOKENS, sampling=SHAPED)
    for name, ids in prompts.items():
        await pair.ear.wait_finish(name)
        expected = sampled_answer(tiny, ids, SHAPED)
        assert pair.ear.answer(name) == expected
        unpunished = replace(SHAPED, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        assert expected != sampled_answer(tiny, ids, unpunished)


@pytest.mark.parametrize("taken", [1, 10, TOKENS - 1])
async def test_a_later_attempt_goes_on_as_if_nothing_had_happened(
    pair: Workers, tiny: Path, taken: int
) -> None:
    whole = sampled_answer(tiny, prompt(40), SHAPED)
    output = packed(whole[:taken])
    await pair.submit("r", prompt(40), TOKENS, sampling=SHAPED, attempt=1, output_token_ids=output)
    await pair.ear.wait_finish("r", attempt=1)
    assert pair.ear.answer("r", attempt=1) == whole[taken:]


async def test_a_preempted_sequence_goes_on_with_its_history_and_its_numbers(tiny: Path) -> None:
    block_bytes = KVLayout.of(ModelConfig.load(tiny)).block_bytes
    async with workers(tiny, COUPLED, pool_bytes=20 * block_bytes) as one:
        for n in range(8):
            await one.submit(f"r{n}", prompt(60, seed=n), TOKENS, at=("w", "w"), sampling=SHAPED)
        for n in range(8):
            await one.ear.wait_finish(f"r{n}")
            assert one.ear.answer(f"r{n}") == sampled_answer(tiny, prompt(60, seed=n), SHAPED)
        (preemptions,) = one.apps["w"]._node.metrics.preemptions.collect()
        assert sum(counted.value for counted in preemptions.samples if counted.name.endswith("_total")) > 0


async def test_every_token_comes_with_its_logprobs(pair: Workers, reference: Reference) -> None:
    sampling = SamplingParams(TOKENS, logprobs=3)
    await pair.submit("r", prompt(40), TOKENS, sampling=sampling)
    await pair.ear.wait_finish("r")
    answer = greedy(reference, prompt(40))
    assert pair.ear.answer("r") == answer
    told = pair.ear.logprobs[KEY]
    assert sorted(told) == list(range(TOKENS))
    for index, token_id in enumerate(answer):
        logprobs = told[index]
        assert logprobs is not None
        assert logprobs.top[0] == (token_id, logprobs.token_logprob)
        values = [logprob for _, logprob in logprobs.top]
        assert len(values) == 3
        assert 0 > values[0] >= values[1] >= values[2]


async def test_a_resumed_gateway_gets_the_logprobs_of_every_token_again(pair: Workers) -> None:
    sampling = replace(SHAPED, logprobs=LOGPROBS_MAX)
    await pair.submit("r", prompt(40), TOKENS, sampling=sampling)
    await pair.ear.wait_finish("r")
    before = dict(pair.ear.logprobs[KEY])
    assert len(before) == TOKENS
    for from_index in (0, 5):
        pair.ear.logprobs.clear()
        pair.ear.finished.clear()
        assert await pair.ear.ask("d", Resume(R, 0, 0, from_index)) == Accepted(R, 0)
        await pair.ear.wait_finish("r")
        expected = {index: logprobs for index, logprobs in before.items() if index >= from_index}
        assert pair.ear.logprobs[KEY] == expected


async def test_a_later_attempt_knows_the_logprobs_of_its_own_tokens(pair: Workers) -> None:
    sampling = SamplingParams(TOKENS, logprobs=0)
    output = packed([7, 8, 9])
    await pair.submit("r", prompt(40), TOKENS, sampling=sampling, attempt=1, output_token_ids=output)
    await pair.ear.wait_finish("r", attempt=1)
    key = (R, 1, 0)
    assert sorted(pair.ear.logprobs[key]) == list(range(3, TOKENS))
    assert None not in pair.ear.logprobs[key].values()
    pair.ear.logprobs.clear()
    pair.ear.finished.clear()
    await pair.ear.ask("d", Resume(R, 1, 0, 1))
    await pair.ear.wait_finish("r", attempt=1)
    told = pair.ear.logprobs[key]
    assert [index for index, logprobs in sorted(told.items()) if logprobs is None] == [1, 2]
    assert sorted(told) == list(range(1, TOKENS))


async def test_an_answer_of_one_token_has_its_logprobs(pair: Workers) -> None:
    await pair.submit("r", prompt(40), 1, sampling=SamplingParams(1, logprobs=2))
    await pair.ear.wait_finish("r")
    (logprobs,) = pair.ear.logprobs[KEY].values()
    assert logprobs is not None
    assert len(logprobs.top) == 2


async def test_samples_have_logprobs_of_their_own(pair: Workers) -> None:
    sampling = SamplingParams(TOKENS, temperature=1.5, seed=3, logprobs=0, samples=3)
    await pair.submit("r", prompt(40), TOKENS, sampling=sampling)
    await pair.ear.wait_answers("r", 3)
    told = [pair.ear.logprobs[(R, 0, sample)] for sample in range(3)]
    assert [sorted(one) for one in told] == [list(range(TOKENS))] * 3
    assert told[0] != told[1] != told[2]


async def test_without_a_wish_there_are_no_logprobs(pair: Workers) -> None:
    await pair.submit("r", prompt(40), TOKENS)
    await pair.ear.wait_finish("r")
    assert pair.ear.logprobs[KEY] == {}


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (SamplingParams(5, top_k=-1), "sampling.top_k is -1"),
        (SamplingParams(5, min_p=1.1), "sampling.min_p is 1.1, must be at least 0.0 and at most 1.0"),
        (SamplingParams(5, presence_penalty=2.5), "sampling.presence_penalty is 2.5"),
        (SamplingParams(5, frequency_penalty=-2.5), "sampling.frequency_penalty is -2.5"),
        (SamplingParams(5, repetition_penalty=0.0), "sampling.repetition_penalty is 0.0"),
        (SamplingParams(5, logprobs=21), "sampling.logprobs is 21, must be at least 0 and at most 20"),
        (SamplingParams(5, samples=0), "sampling.samples is 0"),
        (
            SamplingParams(5, logit_bias=((512, 1.0),)),
            "sampling.logit_bias names token 512, must be 0 to 511",
        ),
        (SamplingParams(5, logit_bias=((1, 101.0),)), "sampling.logit_bias of token 1 is 101.0"),
    ],
)
async def test_bad_sampling_is_refused_before_anything_is_held(
    pair: Workers, sampling: SamplingParams, named: str
) -> None:
    work = pair.work("r", prompt(40), TOKENS, sampling=sampling)
    answers = (
        await pair.submit("r", prompt(40), TOKENS, sampling=sampling),
        await pair.ear.ask("d", Reserve(work, InstanceId("p"), 5.0)),
    )
    for answer in answers:
        assert isinstance(answer, Refused)
        assert answer.reason is RefusalReason.BAD_REQUEST
        assert named in answer.detail
    assert [pair.apps[name].load().blocks_in_use for name in ("p", "d")] == [0, 0]


@pytest.mark.parametrize(
    ("logprobs", "named"),
    [
        (TokenLogprobs(0.0, ((1, 0.0),) * (LOGPROBS_MAX + 1)), "top has 21 entries, at most 20"),
        (TokenLogprobs(0.0, ((512, 0.0),)), "names a token outside 0 to 511"),
    ],
)
async def test_a_commit_with_impossible_logprobs_is_refused(
    pair: Workers, logprobs: TokenLogprobs, named: str
) -> None:
    work = pair.work("r", prompt(40), TOKENS, sampling=SamplingParams(TOKENS, logprobs=1))
    reserved = await pair.ear.ask("d", Reserve(work, InstanceId("p"), 5.0))
    assert isinstance(reserved, Reserved)
    answer = await pair.ear.ask("d", Commit(R, 0, reserved.generation, 3, 0, "", 5, 0, logprobs))
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.BAD_REQUEST
    assert named in answer.detail


async def test_a_sequence_with_broken_kv_fails_alone(pair: Workers, reference: Reference) -> None:
    """What decode holds of one request turns into NaN; the other, in the same steps, goes on."""
    await pair.submit("good", prompt(40, seed=1), TOKENS)
    await pair.submit("bad", prompt(40, seed=2), 1500)
    await pair.ear.wait(lambda: len(pair.ear.answer("bad")) > 2)
    node = pair.apps["d"]._node
    arena = np.frombuffer(node.arena.buffer, np.float32).reshape(node.pool.stats().blocks, -1)
    broken = next(s for s in node.steps._sequences if s.request_id == "bad")
    arena[broken.block_ids] = np.nan
    await pair.ear.wait(lambda: pair.ear.failed)
    (failed,) = pair.ear.failed
    assert (failed.request_id, failed.retryable) == ("bad", True)
    assert "not finite" in failed.detail
    await pair.ear.wait_finish("good")
    assert pair.ear.answer("good") == greedy(reference, prompt(40, seed=1))
    await pair.submit("again", prompt(40, seed=2), TOKENS)
    await pair.ear.wait_finish("again")
    assert pair.ear.answer("again") == greedy(reference, prompt(40, seed=2)), "the broken blocks are gone"


async def test_samples_that_share_broken_kv_leave_nothing_of_it(pair: Workers, reference: Reference) -> None:
    sampling = SamplingParams(1500, samples=3)
    await pair.submit("bad", prompt(40), 1500, sampling=sampling)
    await pair.ear.wait(lambda: len(pair.ear.answer("bad", sample=2)) > 2)
    node = pair.apps["d"]._node
    arena = np.frombuffer(node.arena.buffer, np.float32).reshape(node.pool.stats().blocks, -1)
    arena[[block_id for sequence in node.steps._sequences for block_id in sequence.block_ids]] = np.nan
    await pair.ear.wait(lambda: pair.ear.failed)
    await pair.quiet()
    await pair.submit("again", prompt(40), TOKENS)
    await pair.ear.wait_finish("again")
    assert pair.ear.answer("again") == greedy(reference, prompt(40))

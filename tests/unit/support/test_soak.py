"""The soak's own tools: a judge that finds wrong tokens, and a load that is what its seed says."""

import random
from itertools import islice

import pytest
from tests.support.engines import sampled_answer
from tests.support.models import tiny_folder
from tests.support.soak_reference import SoakReference
from tests.support.soak_script import SoakShape, asks, conversations

from policy.core import SamplingParams

pytestmark = pytest.mark.unit

TOKENS = 20
SAMPLINGS = [
    SamplingParams(TOKENS),
    SamplingParams(TOKENS, temperature=0.8, seed=7),
    SamplingParams(TOKENS, temperature=1.2, top_p=0.9, seed=8),
]


@pytest.fixture(scope="module")
def reference() -> SoakReference:
    return SoakReference(tiny_folder())


def drawn(seed: int, tokens: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(10, 500) for _ in range(tokens)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "nucleus"])
def test_the_judge_knows_right_from_wrong(reference: SoakReference, sampling: SamplingParams) -> None:
    prompt = drawn(1, 150)
    answer = sampled_answer(tiny_folder(), prompt, sampling)
    # A turn that goes on from the last one, then from its start again: what the judge has seen is used again.
    turns = [(prompt, answer), (prompt, answer[:3])]
    turns.append(([*prompt, *answer, *drawn(2, 40)], None))
    for asked, known in turns:
        right = known or sampled_answer(tiny_folder(), asked, sampling)
        assert reference.judge(asked, right, sampling).wrong is None
        for position in (0, len(right) - 1):
            # Not a neighbour: a random number at the border of two tokens may mean either.
            wrong = [*right]
            wrong[position] = (right[position] + 100) % 500
            judgement = reference.judge(asked, wrong, sampling)
            assert judgement.wrong is not None
            assert judgement.wrong.startswith(f"token {position} ")


def test_another_seed_is_another_answer(reference: SoakReference) -> None:
    prompt = drawn(3, 100)
    answer = sampled_answer(tiny_folder(), prompt, SAMPLINGS[1])
    other = SamplingParams(TOKENS, temperature=0.8, seed=9)
    assert reference.judge(prompt, answer, other).wrong is not None


def test_a_seed_makes_one_load() -> None:
    shape = SoakShape(working_set_tokens=20_000)
    one, again, other = (conversations(seed, shape) for seed in (1, 1, 2))
    assert one == again
    assert one[0].turns != other[0].turns
    assert sum(conversation.unique_tokens() for conversation in one) >= shape.working_set_tokens
    assert len({conversation.system for conversation in one}) <= shape.system_prompts
    assert list(islice(asks(1, one), 50)) == list(islice(asks(1, again), 50))


def test_the_load_walks_through_the_working_set_and_comes_back() -> None:
    everything = conversations(1, SoakShape(working_set_tokens=50_000))
    asked = [ask.conversation.number for ask in islice(asks(1, everything), 4 * len(everything))]
    assert len(set(asked)) == len(everything)
    assert len(asked) > 2 * len(set(asked))

"""An engine by itself, without worker, pool or batch: what it answers is what a worker must answer."""

from functools import cache
from pathlib import Path

from engine.engine import Engine
from engine.layout import KVLayout
from engine.loader import load_model
from engine.model_folder import ModelConfig
from engine.step import SequenceStep
from kvhash import BLOCK_TOKENS
from policy.core import SamplingParams
from structures.compiler import StructureCompiler

CONTEXT_TOKENS_MAX = 1024


@cache
def _engine(folder: Path) -> Engine:
    layout = KVLayout.of(ModelConfig.load(folder))
    blocks = CONTEXT_TOKENS_MAX // BLOCK_TOKENS
    return Engine(load_model(folder), layout, memoryview(bytearray(blocks * layout.block_bytes)), blocks)


@cache
def _compiler(folder: Path) -> StructureCompiler:
    config = ModelConfig.load(folder)
    return StructureCompiler(folder, config.vocab_size, config.eos_token_ids)


def sampled_answer(folder: Path, prompt: list[int], sampling: SamplingParams, sample: int = 0) -> list[int]:
    """`output_tokens_max` tokens of one sample, computed alone, the prompt at once; where the answer is held
    to a structure fewer, if it ends before. Every token is drawn, forced ones too."""
    return _answer(folder, tuple(prompt), sampling, sample)[:]


@cache
def _answer(folder: Path, prompt: tuple[int, ...], sampling: SamplingParams, sample: int) -> list[int]:
    engine = _engine(folder)
    block_ids = tuple(range(CONTEXT_TOKENS_MAX // BLOCK_TOKENS))
    context_tokens, new_tokens, answer = 0, prompt, []
    matcher = (
        None
        if sampling.structure is None
        else _compiler(folder).compile(sampling.structure).result().matcher()
    )
    while len(answer) < sampling.output_tokens_max and not (matcher and matcher.ended):
        step = SequenceStep(
            token_ids=new_tokens,
            context_tokens=context_tokens,
            block_ids=block_ids,
            sampling=sampling,
            output_tokens=len(answer),
            sample=sample,
            prompt_token_ids=prompt,
            output_token_ids=tuple(answer),
            allowed=matcher and matcher.allowed,
        )
        (token_id,) = engine.run([step]).token_ids
        assert token_id is not None
        context_tokens += len(new_tokens)
        new_tokens = (token_id,)
        answer.append(token_id)
        if matcher is not None:
            matcher.accept(token_id)
    return answer

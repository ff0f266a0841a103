"""The default model through the engine: its tokenizer, its answers, and transformers' greedy tokens."""

import mmap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.support.models import smollm2_folder
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.engine import Engine, KVLayout, SequenceStep
from engine.loader import load_model
from engine.model_folder import ModelConfig
from policy.core import SamplingParams

pytestmark = pytest.mark.integration

BLOCKS = 64
END = 2
GREEDY = SamplingParams(output_tokens_max=1000)
NEAR_TIE = 1e-3
"""Where the reference's two best logits are closer, rounding may decide."""

PROMPTS = (
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "In 1969, 3 people flew 384400 km to the moon; 2 of them",
    "Das Wetter in München ist heute",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2_folder()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    model = load_model(folder)
    layout = KVLayout.of(model.config)
    return Engine(model, layout, memoryview(mmap.mmap(-1, BLOCKS * layout.block_bytes)), BLOCKS)


@dataclass
class Generation:
    """A prompt with the answer so far; `computed` tokens have their KV in the blocks."""

    prompt: list[int]
    blocks: tuple[int, ...]
    answer: list[int]
    computed: int = 0

    def step(self, chunk_tokens: int) -> SequenceStep:
        tokens = self.prompt + self.answer
        end = min(len(tokens), self.computed + chunk_tokens)
        sampling = GREEDY if end == len(tokens) else None
        return SequenceStep(
            tuple(tokens[self.computed : end]), self.computed, self.blocks, sampling, len(self.answer)
        )


def greedy(engine: Engine, prompts: list[list[int]], count: int, chunk_tokens: int) -> list[list[int]]:
    """`count` greedy tokens of each prompt, or up to the end token; the batch is re-formed at every step."""
    each = BLOCKS // len(prompts)
    tables = [tuple(reversed(range(each * i, each * i + each))) for i in range(len(prompts))]
    sequences = [Generation(prompt, table, []) for prompt, table in zip(prompts, tables, strict=True)]
    running = list(sequences)
    while running:
        steps = [sequence.step(chunk_tokens) for sequence in running]
        for sequence, step, token in zip(running, steps, engine.run(steps).token_ids, strict=True):
            sequence.computed += len(step.token_ids)
            if token is not None:
                sequence.answer.append(token)
        running = [s for s in running if len(s.answer) < count and s.answer[-1:] != [END]]
    return [sequence.answer for sequence in sequences]


def chat(folder: Path, text: str) -> list[int]:
    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(rendered, add_special_tokens=False).ids


def test_the_config(folder: Path) -> None:
    config = ModelConfig.load(folder)
    assert (config.layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert (config.rope_theta, config.context_tokens_max, config.norm_epsilon) == (1e5, 8192, 1e-5)
    assert (config.tie_word_embeddings, config.eos_token_ids, config.name) == (True, (2,), "smollm2")


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  two spaces, a tab\tand\n\nlines \n",
        "naïve café — 東京 🙂 ﷽",
        "x=12345+678.90",
        "<|im_start|>user\nHi<|im_end|>\n",
        "",
    ],
)
def test_text_survives_the_tokenizer(folder: Path, tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert AutoTokenizer.from_pretrained(folder)(text).input_ids == token_ids


def test_digits_are_split_one_by_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("in 1984", add_special_tokens=False).tokens == ["in", "Ġ", "1", "9", "8", "4"]
    assert tokenizer.encode("<|im_start|>", add_special_tokens=False).ids == [1]


def test_the_capital_of_france(folder: Path, engine: Engine, tokenizer: Tokenizer) -> None:
    (answer,) = greedy(engine, [chat(folder, "What is the capital of France?")], 32, 512)
    assert answer[-1] == END
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_greedy_tokens_are_the_reference_s(folder: Path, engine: Engine, tokenizer: Tokenizer) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]
    prompts.append(chat(folder, "List three rivers of Europe."))
    near_ties = 0
    for prompt, ours in zip(prompts, greedy(engine, prompts, 24, chunk_tokens=7), strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        for position, token in enumerate(ours):
            if best[position, 0] - best[position, 1] < NEAR_TIE:
                near_ties += 1
                assert logits[position, token] >= best[position, 1] - NEAR_TIE
            else:
                assert token == int(logits[position].argmax())
    print(f"near ties: {near_ties}")
    assert near_ties <= 2

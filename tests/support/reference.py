"""What transformers answers greedily on the same model folder, and where its choice was a near tie."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NEAR_TIE_LOGITS = 1e-3
"""Two best logits closer than this may fall either way: float sums depend on their order."""
BATCH_TOKENS_MAX = 3000
"""Prompts of one batch, each padded to the longest: many short ones cost little more than one."""


@dataclass(frozen=True, slots=True)
class NearTie:
    """Where the reference could have gone either way: after `token_ids` (prompt included), its two best
    next tokens and their logits."""

    token_ids: tuple[int, ...]
    best_token_ids: tuple[int, int]
    best_logits: tuple[float, float]


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """`certain_tokens` tokens come before the first near tie; all of them where there is none."""

    token_ids: tuple[int, ...]
    text: str
    certain_tokens: int
    near_tie: NearTie | None

    def agrees(self, token_ids: Sequence[int]) -> bool:
        """Whether these are the answer's tokens, up to the first near tie."""
        certain = self.certain_tokens
        return tuple(token_ids[:certain]) == self.token_ids[:certain]


class Reference:
    """A model and a tokenizer of a folder, as transformers has them."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def text_token_ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def chat_token_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def answers(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[ReferenceAnswer]:
        """`tokens` greedy tokens for each prompt, past any end token."""
        found: dict[int, ReferenceAnswer] = {}
        with all_cores():
            for batch in batches([len(prompt) for prompt in prompts]):
                answered = self._answer([prompts[i] for i in batch], tokens)
                found.update(zip(batch, answered, strict=True))
        return [found[i] for i in range(len(prompts))]

    def _answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[ReferenceAnswer]:
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self._model.generate(
            padded,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        chosen = output.sequences[:, width:].tolist()
        logits = torch.stack(output.logits, dim=1)
        return [self._judged(*row) for row in zip(prompts, chosen, logits, strict=True)]

    def _judged(self, prompt: Sequence[int], token_ids: list[int], logits: torch.Tensor) -> ReferenceAnswer:
        best = logits.topk(2)
        near_ties = (best.values[:, 0] - best.values[:, 1] < NEAR_TIE_LOGITS).tolist()
        if True not in near_ties:
            return ReferenceAnswer(tuple(token_ids), self._text(token_ids), len(token_ids), None)
        certain = near_ties.index(True)
        near_tie = NearTie(
            (*prompt, *token_ids[:certain]),
            tuple(best.indices[certain].tolist()),
            tuple(best.values[certain].tolist()),
        )
        return ReferenceAnswer(tuple(token_ids), self._text(token_ids), certain, near_tie)

    def _text(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of prompts of like length, together at most BATCH_TOKENS_MAX with their padding."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and lengths[index] * (len(batch) + 1) > BATCH_TOKENS_MAX:
            yield batch
            batch = []
        batch.append(index)
    yield batch


@contextmanager
def all_cores() -> Iterator[None]:
    """No stack is busy while the reference computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

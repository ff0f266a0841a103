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
INCOMPLETE = "\ufffd"


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """`certain_tokens` tokens come before the first near tie; all of them where there is none."""

    token_ids: tuple[int, ...]
    certain_tokens: int
    text: str
    certain_text: str

    @property
    def certain(self) -> bool:
        return self.certain_tokens == len(self.token_ids)

    def agrees(self, text: str) -> bool:
        """Whether `text` is this answer, up to the first near tie."""
        return text == self.text or (not self.certain and text.startswith(self.certain_text))


class Reference:
    """A model and a tokenizer of a folder, as transformers has them."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def text_token_ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def chat_token_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def answer(self, prompt_token_ids: Sequence[int], tokens: int) -> ReferenceAnswer:
        """`tokens` greedy tokens, past any end token."""
        token_ids: list[int] = []
        gaps: list[float] = []
        inputs, cache = torch.tensor([prompt_token_ids]), None
        with all_cores():
            while len(token_ids) < tokens:
                output = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
                best = output.logits[0, -1].topk(2)
                gaps.append(float(best.values[0] - best.values[1]))
                token_ids.append(int(best.indices[0]))
                inputs, cache = best.indices[:1].unsqueeze(0), output.past_key_values
        certain = next((i for i, gap in enumerate(gaps) if gap < NEAR_TIE_LOGITS), tokens)
        return ReferenceAnswer(
            tuple(token_ids),
            certain,
            self._text(token_ids),
            self._text(token_ids[:certain]).rstrip(INCOMPLETE),
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


@contextmanager
def all_cores() -> Iterator[None]:
    """No stack is busy while the reference computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

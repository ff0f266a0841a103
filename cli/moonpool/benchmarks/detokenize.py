"""`moonpool bench detokenize`: what a gateway's event loop spends on an answer's text, a token.

Beside it the incremental decoder of the `tokenizers` library, which looks for no stop string and knows no
token's share of the text.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gateway.answers.delivery import SLICE_TOKENS
from gateway.text.answer_text import AnswerText, TextRules
from gateway.text.detokenizer import TokenBytes
from gateway.text.stop_matcher import StopStrings
from moonpool.arguments import Command
from moonpool.benchmarks.command_line import add_case_arguments, add_json_argument, print_results
from moonpool.errors import EXIT_OK
from moonpool.machine import machine_context
from moonpool.measurement import Measurement, measurement
from moonpool.run_folder import moonpool_home
from policy.core import TokenLogprobs

NAME = "detokenize"
REPEATS_MAX = 10_000
TEXT = "The capital of France is Paris, and the quick brown fox jumps over it.\n" * 80 + (
    "你好世界 🙂 naïve façade, こんにちは. " * 40
)
USUAL_STOPS = ("\n\n", "User:", "###", "<|end|>")
BEGUN_STOPS = tuple(f"{letter}≠" for letter in "etaoinshrdlcumwf")
"""As many as a request may have, one of which nearly every character begins."""

PLAIN, SLICED, STOPS, BEGUN, LOGGED, PEER = (
    "token_by_token",
    "slices",
    "usual_stop_strings",
    "begun_stop_strings",
    "logprobs",
    "tokenizers_decode_stream",
)
CASES = (PLAIN, SLICED, STOPS, BEGUN, LOGGED, PEER)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    add_case_arguments(parser, CASES, REPEATS_MAX)
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), tiny, or a model's folder")


def run(options: argparse.Namespace) -> int:
    # Here, and not above: other commands do not need it.
    from engine.models import resolve_model

    folder = resolve_model(options.model, moonpool_home(), lambda text: print(text, file=sys.stderr))
    print_results(measure(folder, options.cases or CASES, options.repeats), as_json=options.json)
    return EXIT_OK


def measure(folder: Path, cases: Sequence[str], repeats: int) -> list[Measurement]:
    """Microseconds of processor time a token, over one text; the cases in turn, `repeats` times."""
    token_ids, ways = _ways(folder)
    samples: dict[str, list[float]] = {name: [] for name in ways if name in cases}
    for name in samples:
        ways[name]()
    for _ in range(repeats):
        for name, taken in samples.items():
            taken.append(_cpu_us(ways[name]) / len(token_ids))
    context = {
        **machine_context(),
        "model": folder.name,
        "tokens": len(token_ids),
        "slice_tokens": SLICE_TOKENS,
        "clock": "cpu",
    }
    return [
        measurement(NAME, name, "time_per_token", "us", taken, context) for name, taken in samples.items()
    ]


def _ways(folder: Path) -> tuple[list[int], dict[str, Callable[[], object]]]:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    token_bytes = TokenBytes(tokenizer)
    single = [[token_id] for token_id in token_ids]
    slices = [token_ids[begin : begin + SLICE_TOKENS] for begin in range(0, len(token_ids), SLICE_TOKENS)]
    logprobs = (TokenLogprobs(-1.0),)

    def answer(stops: Iterable[str] = (), *, log_tokens: bool = False) -> AnswerText:
        return AnswerText(TextRules(token_bytes, StopStrings(tuple(stops)), log_tokens=log_tokens))

    def fed(text: AnswerText, pieces: Sequence[Sequence[int]]) -> None:
        for piece in pieces:
            text.feed(piece)

    def logged(text: AnswerText) -> None:
        for piece in single:
            text.feed(piece, logprobs)

    def peer() -> None:
        stream = DecodeStream(skip_special_tokens=True)
        for token_id in token_ids:
            stream.step(tokenizer, token_id)

    return token_ids, {
        PLAIN: lambda: fed(answer(), single),
        SLICED: lambda: fed(answer(), slices),
        STOPS: lambda: fed(answer(USUAL_STOPS), single),
        BEGUN: lambda: fed(answer(BEGUN_STOPS), single),
        LOGGED: lambda: logged(answer(log_tokens=True)),
        PEER: peer,
    }


def _cpu_us(call: Callable[[], object]) -> float:
    began_s = time.process_time()
    call()
    return (time.process_time() - began_s) * 1e6


COMMAND = Command(
    NAME, "an answer's text, token by token, beside tokenizers' own decoder", add_arguments, run
)

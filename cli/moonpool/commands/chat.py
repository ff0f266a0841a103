"""`moonpool chat [QUESTION]`: ask once, or talk until end of input; answers are printed as they come."""

import argparse
import sys
from collections.abc import Sequence

from moonpool.api import Api, Json
from moonpool.arguments import Command, seconds, whole_number
from moonpool.errors import EXIT_OK, CommandError
from moonpool.find_stack import add_stack_arguments, gateway_api

PROMPT = "> "
ANSWER_TOKENS_DEFAULT = 256
ANSWER_TOKENS_MAX = 1_000_000
TIMEOUT_S_DEFAULT = 120.0
TIMEOUT_S_MAX = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="?", help="ask this and end; without it, an interactive chat")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): always the likeliest")
    parser.add_argument(
        "--max-tokens",
        type=whole_number(1, ANSWER_TOKENS_MAX),
        default=ANSWER_TOKENS_DEFAULT,
        help=f"longest answer (default {ANSWER_TOKENS_DEFAULT})",
    )
    parser.add_argument(
        "--timeout",
        type=seconds(TIMEOUT_S_MAX),
        default=TIMEOUT_S_DEFAULT,
        help="longest silence in seconds (default 120)",
    )
    add_stack_arguments(parser)


def run(options: argparse.Namespace) -> int:
    api = gateway_api(options, timeout_s=options.timeout)
    settings: Json = {
        "model": api.model(),
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
    }
    history: list[Json] = [{"role": "system", "content": options.system}] if options.system else []
    if options.question is not None:
        _answer(api, settings, [*history, {"role": "user", "content": options.question}])
    else:
        _talk(api, settings, history)
    return EXIT_OK


def _talk(api: Api, settings: Json, history: list[Json]) -> None:
    print(f"{settings['model']} at {api.url}; Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            question = input(PROMPT).strip()
        except EOFError:
            print()
            return
        if not question:
            continue
        asked = [*history, {"role": "user", "content": question}]
        try:
            answer = _answer(api, settings, asked)
        except CommandError as error:
            print(f"moonpool chat: error: {error}", file=sys.stderr)
            continue
        history[:] = [*asked, {"role": "assistant", "content": answer}]


def _answer(api: Api, settings: Json, messages: Sequence[Json]) -> str:
    """Print the answer as it comes and return it whole."""
    parts: list[str] = []
    for event in api.stream("/chat/completions", {**settings, "messages": list(messages)}):
        for choice in event.get("choices", ()):
            text = choice.get("delta", {}).get("content") or ""
            parts.append(text)
            print(text, end="", flush=True)
    print()
    return "".join(parts)


COMMAND = Command("chat", "talk with the model of a running stack", add_arguments, run)

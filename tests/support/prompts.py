"""Prompts to compare with the reference: chat and raw, 3 to 2,000 tokens, some with a common start."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LONG_TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
"""English prose that every clone has, about 2,400 tokens."""

ChatMessages = tuple[dict[str, str], ...]

LIBRARIAN = (
    "You are a careful librarian. You answer in one or two short sentences, you never guess, and you say so "
    "when a question cannot be answered from what is known. You like maps, old letters and clear words."
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of the three is set: a conversation, a text, or token ids."""

    name: str
    messages: ChatMessages = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()

    def body(self) -> dict[str, object]:
        """The part of a request that says what is asked."""
        if self.messages:
            return {"messages": list(self.messages)}
        return {"prompt": self.text or list(self.token_ids)}

    @property
    def path(self) -> str:
        return "/chat/completions" if self.messages else "/completions"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def comparison_prompts(tokenize: Callable[[str], list[int]]) -> list[Prompt]:
    """Twenty prompts. Those named `shared` begin alike; the raw ones have the length in their name."""
    long_ids = tokenize(LONG_TEXT)
    chats = [
        Prompt("capital", messages=(user("What is the capital of France?"),)),
        Prompt("digits", messages=(user("Continue: 3, 14, 159, 2653, 58979,"),)),
        Prompt("code", messages=(user("Write a Python function that returns the n-th Fibonacci number."),)),
        Prompt("unicode", messages=(user("Übersetze: Grüße aus Zürich, schöne Straße! 😀 你好"),)),
        Prompt("shared system 1", messages=(system(LIBRARIAN), user("Who wrote Don Quixote?"))),
        Prompt("shared system 2", messages=(system(LIBRARIAN), user("Which ocean is the largest?"))),
        Prompt(
            "turns",
            messages=(
                system(LIBRARIAN),
                user("Who wrote Don Quixote?"),
                {"role": "assistant", "content": "Miguel de Cervantes wrote it."},
                user("And when did he live?"),
            ),
        ),
    ]
    texts = [
        Prompt("text short", text="Once upon a time"),
        Prompt("text middle", text=" ".join(LONG_TEXT.split()[300:420])),
    ]
    # (first token, length): around the borders of blocks, and two that share 480 tokens.
    pieces = [(700, 3), (31, 15), (47, 16), (63, 17), (900, 33), (1200, 128), (1300, 257)]
    pieces += [(100, 500), (100, 480), (250, 1000), (0, 2000)]
    raw = [
        Prompt(f"raw {length} from {start}", token_ids=tuple(long_ids[start : start + length]))
        for start, length in pieces
    ]
    return [*chats, *texts, *raw]

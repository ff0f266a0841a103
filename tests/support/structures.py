"""Answers drawn at random from what a structure allows, as a model without taste would give them."""

from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from policy.core import StructureKind, StructureSpec
from structures.compiler import StructureCompiler
from structures.matcher import Matcher

COMPILE_S_MAX = 10.0
CLOSING = ('"', "}", "]", ",", ":", "}]")
"""Where a model without taste would write for ever, one of these often comes first."""
CLOSING_SHARE = 0.4


@cache
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def matcher(compiler: StructureCompiler, kind: StructureKind, text: str = "") -> Matcher:
    return compiler.compile(StructureSpec(kind, text)).result(COMPILE_S_MAX).matcher()


def allowed_ids(mask: np.ndarray) -> list[int]:
    """The set bits of a token mask."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def draw(matcher: Matcher, folder: Path, seed: int, tokens_max: int = 400, closing: bool = True) -> list[int]:
    """Tokens from random logits at temperature 1 under the mask, until the end or `tokens_max`."""
    generator = np.random.default_rng(seed)
    closing_ids = {tokenizer(folder).token_to_id(text) for text in CLOSING} if closing else set()
    token_ids: list[int] = []
    while not matcher.ended and len(token_ids) < tokens_max:
        allowed = allowed_ids(matcher.allowed())
        assert matcher.failure is None, matcher.failure
        preferred = [token_id for token_id in allowed if token_id in closing_ids]
        if preferred and generator.random() < CLOSING_SHARE:
            allowed = preferred
        logits = generator.normal(0.0, 1.0, len(allowed)) + generator.gumbel(size=len(allowed))
        token_ids.append(allowed[int(logits.argmax())])
        matcher.accept(token_ids[-1])
    return token_ids

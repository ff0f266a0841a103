"""Turns a JSON schema, a regular expression, a choice or a grammar into a form that answers are held to.

The parsing is llguidance's: MIT, 3 MB, without dependencies (xgrammar asks for torch, triton, transformers
and tvm-ffi), it computes masks as they are needed, within microseconds, instead of tables for every grammar
and vocabulary, and says which tokens are forced. vLLM, SGLang and llama.cpp build on it too.

Specs come from clients: everything here has a bound, and an error says what is wrong with the spec.
"""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

from llguidance import LLMatcher, LLParserLimits

from policy.core import StructureSpec
from structures.compile_queue import CompileQueue
from structures.errors import StructureError
from structures.grammar import check_size, grammar_of
from structures.matcher import CompiledStructure
from structures.vocabulary import Vocabulary, read_vocabulary

COMPILED_MAX = 32
"""Structures remembered by who holds answers to them: with their lexers, up to 50 MB each."""
CHECKED_MAX = 512
"""Specs remembered by who only lets them through: with their text, up to 64 KiB each."""
LEXER_STATES_MAX = 100_000
"""Memory of a structure's lexer: about 30 MB."""
GRAMMAR_SYMBOLS_MAX = 500_000
LEXER_FUEL_MAX = 200_000
"""Memory and time of a structure's regular expressions: about 20 MB and 0.2 s at most."""
STEP_LEXER_FUEL_MAX = 200_000
"""Time of one mask: about 14,000 a millisecond."""
STEP_ITEMS_MAX = 50_000
"""Time of one mask: about 20,000 a millisecond."""

KeptT = TypeVar("KeptT")


class _Compiler(Generic[KeptT]):
    """For one model. Methods may be called from any thread; compiling has its own."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        end_token_ids: tuple[int, ...],
        keep: Callable[[CompiledStructure], KeptT],
        *,
        kept_max: int,
        worn_out: Callable[[KeptT], bool],
    ) -> None:
        """`vocab_size` is the model's. The tokenizer is read by `prepare`, or when the first spec comes."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._keep = keep
        self._vocabulary: Vocabulary | StructureError | None = None
        self._queue = CompileQueue(self._compile_new, remembered_max=kept_max, worn_out=worn_out)

    def prepare(self) -> "Future[object]":
        """Begin to read the tokenizer; done when it is read. What is wrong with it is told to whoever brings
        a spec, too."""
        return self._queue.prepare(self._ready)

    @property
    def prepared(self) -> bool:
        """The tokenizer is read: what takes long from now on does so for its own sake."""
        return self._vocabulary is not None

    def close(self) -> None:
        """What waits is not compiled any more; does not wait for what is being compiled."""
        self._queue.close()

    def compile(self, spec: StructureSpec) -> "Future[KeptT]":
        """Done at once where the spec is remembered. Fails with StructureError where no answer can be held
        to it. Raises StructureError for a text that is too long, StructureBusyError where WAITING_MAX others
        wait."""
        check_size(spec)
        return self._queue.compile(spec)

    def _compile_new(self, spec: StructureSpec) -> KeptT:
        vocabulary = self._ready()
        parser = LLMatcher(vocabulary.parser, grammar_of(spec), log_level=0, limits=_LIMITS)
        return self._keep(CompiledStructure(parser, vocabulary.masks))

    def _ready(self) -> Vocabulary:
        """Read once; what is wrong with it is found out once, too."""
        if self._vocabulary is None:
            try:
                self._vocabulary = read_vocabulary(self._folder, self._vocab_size, self._end_token_ids)
            except StructureError as error:
                self._vocabulary = error
        if isinstance(self._vocabulary, StructureError):
            raise StructureError(*self._vocabulary.args)
        return self._vocabulary


class StructureCompiler(_Compiler[CompiledStructure]):
    """Where answers are held to structures."""

    def __init__(self, folder: Path, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        super().__init__(
            folder,
            vocab_size,
            end_token_ids,
            lambda compiled: compiled,
            kept_max=COMPILED_MAX,
            worn_out=lambda compiled: compiled.worn_out,
        )


class StructureChecker(_Compiler[None]):
    """Where it is only to be known whether a StructureCompiler takes a spec: what was compiled is dropped."""

    def __init__(self, folder: Path, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        super().__init__(
            folder,
            vocab_size,
            end_token_ids,
            lambda _compiled: None,
            kept_max=CHECKED_MAX,
            worn_out=lambda _kept: False,
        )


_LIMITS = LLParserLimits(
    max_lexer_states=LEXER_STATES_MAX,
    max_grammar_size=GRAMMAR_SYMBOLS_MAX,
    initial_lexer_fuel=LEXER_FUEL_MAX,
    step_lexer_fuel=STEP_LEXER_FUEL_MAX,
    step_max_items=STEP_ITEMS_MAX,
    verbose_errors=False,
)

"""Turns a JSON schema, a regular expression, a choice or a grammar into a form that answers are held to.

The parsing is llguidance's: MIT, 3 MB, without dependencies (xgrammar asks for torch, triton, transformers
and tvm-ffi), it computes masks as they are needed, within microseconds, instead of tables for every grammar
and vocabulary, and says which tokens are forced. vLLM, SGLang and llama.cpp build on it too.

Specs come from clients: everything here has a bound, and an error says what is wrong with the spec.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from tokenizers import Tokenizer

from engine.errors import StructureBusyError, StructureError
from engine.structured import CompiledStructure, MaskVocabulary, shortened
from policy.core import STRUCTURE_BYTES_MAX, StructureKind, StructureSpec

REGEX_BYTES_MAX = 8 * 1024
GRAMMAR_BYTES_MAX = 16 * 1024
"""The time to compile a regular expression may grow with the square of its length: 1.5 s at 16 KiB."""

COMPILED_MAX = 32
"""Structures remembered, those that do not compile included; the least recently used goes first."""
WAITING_MAX = 32
"""Different structures that wait to be compiled."""
COMPILE_STACK_BYTES = 256 * 1024 * 1024
"""llguidance recurses from rule to rule: a text of STRUCTURE_BYTES_MAX overflows the usual stack, and the
process is gone. What it compiles to is flat: masks need no such stack."""
LEXER_STATES_MAX = 100_000
"""Memory of a structure's lexer: about 30 MB."""
GRAMMAR_SYMBOLS_MAX = 500_000
LEXER_FUEL_MAX = 200_000
"""Memory and time of a structure's regular expressions: about 20 MB and 0.2 s at most."""
STEP_LEXER_FUEL_MAX = 200_000
"""Time of one mask: about 14,000 a millisecond."""
STEP_ITEMS_MAX = 50_000
"""Time of one mask: about 20,000 a millisecond."""
WHITESPACE = r" |\n {0,32}|\n\t{0,16}"
"""Between the parts of JSON: what people write, but not without end, for some models never stop."""
ANY_OBJECT: dict[str, object] = {"type": "object"}


class StructureCompiler:
    """For one model. Methods may be called from any thread; compiling has its own."""

    def __init__(self, folder: Path, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        """`vocab_size` is the model's. The tokenizer is read by `prepare`, or when the first spec comes."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._tokenizer: tuple[LLTokenizer, MaskVocabulary] | StructureError | None = None
        self._compiled: OrderedDict[StructureSpec, CompiledStructure | StructureError] = OrderedDict()
        self._waiting: dict[StructureSpec, Future[CompiledStructure]] = {}
        self._lock = threading.Lock()
        self._executor = _one_thread(COMPILE_STACK_BYTES)

    def prepare(self) -> None:
        """Begin to read the tokenizer; what is wrong with it is told to whoever brings a spec."""
        self._executor.submit(self._ready)

    def close(self) -> None:
        """What waits is not compiled any more; does not wait for what is being compiled."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def compile(self, spec: StructureSpec) -> "Future[CompiledStructure]":
        """Done at once where the spec is remembered. Fails with StructureError where no answer can be held
        to it. Raises StructureBusyError where WAITING_MAX others wait."""
        _check_size(spec)
        with self._lock:
            known = self._compiled.get(spec)
            if isinstance(known, CompiledStructure) and known.worn_out:
                known = None
            if known is not None:
                self._compiled.move_to_end(spec)
                return _done(known)
            waiting = self._waiting.get(spec)
            if waiting is None:
                if len(self._waiting) >= WAITING_MAX:
                    raise StructureBusyError(f"{WAITING_MAX} structures wait to be compiled already")
                waiting = self._executor.submit(self._compile, spec)
                self._waiting[spec] = waiting
            return waiting

    def _compile(self, spec: StructureSpec) -> CompiledStructure:
        result: CompiledStructure | StructureError
        try:
            result = self._compile_new(spec)
        except StructureError as error:
            result = error
        except Exception as error:
            result = StructureError(f"cannot be compiled: {shortened(repr(error))}")
        with self._lock:
            del self._waiting[spec]
            self._compiled[spec] = result
            self._compiled.move_to_end(spec)
            if len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return _done(result).result()

    def _compile_new(self, spec: StructureSpec) -> CompiledStructure:
        tokenizer, vocabulary = self._ready()
        grammar = _GRAMMAR_OF[spec.kind](spec.text)
        return CompiledStructure(LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS), vocabulary)

    def _ready(self) -> tuple[LLTokenizer, MaskVocabulary]:
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        if isinstance(self._tokenizer, StructureError):
            raise StructureError(*self._tokenizer.args)
        return self._tokenizer

    def _read_tokenizer(self) -> tuple[LLTokenizer, MaskVocabulary] | StructureError:
        """About 0.3 s for 50,000 tokens."""
        path = self._folder / "tokenizer.json"
        if not self._end_token_ids:
            return StructureError(f"{self._folder.name} names no end token: no answer could end")
        try:
            # Padding and truncation are for batches; llguidance would take them for part of every text.
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            tokens = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
            tokens = max(tokens, self._vocab_size)
            parsed = LLTokenizer(tokenizer.to_str(), n_vocab=tokens, eos_token=list(self._end_token_ids))
        except Exception as error:  # tokenizers raises nothing narrower
            return StructureError(
                f"{path.name} of {self._folder.name} cannot be used: {shortened(str(error))}"
            )
        return parsed, MaskVocabulary(self._vocab_size, tokens, self._end_token_ids)


_LIMITS = LLParserLimits(
    max_lexer_states=LEXER_STATES_MAX,
    max_grammar_size=GRAMMAR_SYMBOLS_MAX,
    initial_lexer_fuel=LEXER_FUEL_MAX,
    step_lexer_fuel=STEP_LEXER_FUEL_MAX,
    step_max_items=STEP_ITEMS_MAX,
    verbose_errors=False,
)


def _one_thread(stack_bytes: int) -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="structures")
    # The size is the process's: a thread that is started meanwhile elsewhere merely gets more than it needs.
    before = threading.stack_size(stack_bytes)
    try:
        executor.submit(int).result()  # starts the thread
    finally:
        threading.stack_size(before)
    return executor


def _done(known: CompiledStructure | StructureError) -> "Future[CompiledStructure]":
    future: Future[CompiledStructure] = Future()
    if isinstance(known, StructureError):
        future.set_exception(StructureError(*known.args))
    else:
        future.set_result(known)
    return future


def _check_size(spec: StructureSpec) -> None:
    size_bytes = len(spec.text.encode(errors="replace"))
    size_bytes_max = _BYTES_MAX_OF.get(spec.kind, STRUCTURE_BYTES_MAX)
    if size_bytes > size_bytes_max:
        raise StructureError(f"the text has {size_bytes} bytes, must have at most {size_bytes_max}")


def _of_schema(schema: dict[str, object]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


def _of_any_object(text: str) -> str:
    return _of_schema(ANY_OBJECT)


def _of_json_schema(text: str) -> str:
    schema = _json(text)
    if not isinstance(schema, dict):
        raise StructureError(f"a JSON schema must be an object, not {type(schema).__name__}")
    return _of_schema(schema)


def _of_regex(text: str) -> str:
    # \d is an ASCII digit: Unicode's are in nobody's mind who writes it, but in a random model's.
    return LLMatcher.grammar_from_regex(regex_to_lark(text, use_ascii="d"))


def _of_choice(text: str) -> str:
    choices = _json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise StructureError("a choice must be a JSON list of at least one string")
    # One terminal, for a rule's alternatives are bounded; its strings are written as JSON's are.
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def _of_grammar(text: str) -> str:
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # from GBNF, by a parser that does not say what it raises
        raise StructureError(f"neither Lark nor GBNF: {shortened(str(error))}") from error


def _json(text: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise StructureError(f"not JSON: {error}") from error


_GRAMMAR_OF: dict[StructureKind, Callable[[str], str]] = {
    StructureKind.JSON_OBJECT: _of_any_object,
    StructureKind.JSON_SCHEMA: _of_json_schema,
    StructureKind.REGEX: _of_regex,
    StructureKind.CHOICE: _of_choice,
    StructureKind.GRAMMAR: _of_grammar,
}
_BYTES_MAX_OF = {StructureKind.REGEX: REGEX_BYTES_MAX, StructureKind.GRAMMAR: GRAMMAR_BYTES_MAX}

"""The served model as the gateway knows it: prompts to token ids and block hashes, and tokens to text.

Tokenising runs on a few threads of its own, so that a long prompt does not stop the event loop; how many
texts wait for them is bounded by the requests in progress.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from cluster.messages import TOKEN_ID_BYTES
from gateway.api.api_errors import invalid
from gateway.api.model_limits import text_too_long
from gateway.api.request_types import ChatMessage
from gateway.api.tools import ToolUse
from gateway.chat_messages import content_chars
from gateway.chat_rendering import AS_USUAL, TemplateOptions, render_chat
from gateway.model_folder import ModelFolder
from gateway.structure_check import StructureCheck
from gateway.text import call_layouts
from gateway.text.detokenizer import TokenBytes, whole_text
from gateway.text.known_pieces import KnownPieces, ends_words
from kvhash import Namespace, block_hashes, namespace

TOKENIZE_THREADS = 2
TOKENIZED_AT_ONCE_CHARS_MAX = 512
"""To be tokenised on the event loop, which stands still for about 0.2 ms: to hand a text to a thread and
back takes half of that."""
LOOKED_UP_AT_ONCE_CHARS_MAX = 16_384
"""So much text is looked up there, in pieces that came before."""
RENDERED_AT_ONCE_CHARS_MAX = 4096
RENDERED_AT_ONCE_MESSAGES_MAX = 16
"""Conversations up to so many characters, their tools included, and messages are rendered there."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`token_ids` packed int32; `block_hashes` of its full blocks, 16 bytes each, all of them."""

    token_ids: bytes
    block_hashes: bytes

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // TOKEN_ID_BYTES


class TextModel:
    """Prompts to token ids and block hashes, and the table that turns token ids into text.

    Close it to end its threads.
    """

    def __init__(self, folder: ModelFolder, cluster_seed: bytes, *, threads: int = TOKENIZE_THREADS) -> None:
        self._namespace_of = partial(namespace, cluster_seed, folder.fingerprint)
        self.namespace = self._namespace_of()
        self.limits = folder.limits
        self.fingerprint = folder.fingerprint
        self.token_bytes = TokenBytes(folder.tokenizer)
        self.all_token_bytes = TokenBytes(folder.tokenizer, keep_special=True)
        """Special tokens too have the bytes of their names."""
        self._tokenizer = folder.tokenizer
        self._template = folder.template
        self.call_token_bytes = self.token_bytes.keeping(call_layouts.markers(folder.limits.tool_format))
        """`token_bytes` for answers that may call tools: what is written around calls is text there."""
        # No token spells more than the longest vocabulary entry: a longer text cannot fit.
        token_chars_max = max(map(len, folder.tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self._text_chars_max = token_chars_max * folder.limits.context_tokens_max
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._pieces = KnownPieces(folder.tokenizer) if ends_words(folder.tokenizer) else None
        self._before_text = _before_text(folder.tokenizer)
        self.structures = StructureCheck(
            folder.path, folder.limits.vocabulary_tokens, folder.configured_end_token_ids
        )

    def space(self, salt: str) -> Namespace:
        """Of the blocks of requests with that salt; "" is everybody's."""
        return self._namespace_of(salt) if salt else self.namespace

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: ToolUse | None = None,
        space: Namespace | None = None,
        options: TemplateOptions = AS_USUAL,
        *,
        add_special_tokens: bool = False,
    ) -> Prompt:
        """The rendered conversation with the beginning of the answer; its blocks are those of `space`, or of
        everybody's. Raises ApiError."""
        chars = sum(content_chars(message) for message in messages)
        self._check_length("messages", chars)
        space = space or self.namespace
        tool_chars = 0 if tools is None else tools.chars
        if (
            chars + tool_chars <= RENDERED_AT_ONCE_CHARS_MAX
            and len(messages) <= RENDERED_AT_ONCE_MESSAGES_MAX
            and not options.variables  # what a template does with them is not known
        ):
            text = self._render(messages, tools, options)
            return await self._prompt_of_text(text, space, add_special_tokens=add_special_tokens)
        return await self._run(
            lambda: self._tokenized(
                self._render(messages, tools, options), space, add_special_tokens=add_special_tokens
            )
        )

    async def encode_text(
        self, text: str, space: Namespace | None = None, *, add_special_tokens: bool = True
    ) -> Prompt:
        """A raw prompt, with what the tokenizer puts before it. Raises ApiError."""
        self._check_length("prompt", len(text))
        space = space or self.namespace
        return await self._prompt_of_text(text, space, add_special_tokens=add_special_tokens)

    async def prompt_of(self, token_ids: Sequence[int], space: Namespace | None = None) -> Prompt:
        """A prompt that came as token ids, which must be in the vocabulary."""
        return await self._run(lambda: self._prompt(pack_token_ids(token_ids), space or self.namespace))

    async def tokens_of(self, prompt: Prompt, *, spelled: bool) -> tuple[list[int], list[str] | None]:
        """Its token ids and, where they are to be `spelled`, the vocabulary's entries."""

        def told() -> tuple[list[int], list[str] | None]:
            token_ids = unpack_token_ids(prompt.token_ids)
            spell = self._tokenizer.id_to_token
            return token_ids, [spell(token_id) or "" for token_id in token_ids] if spelled else None

        return await self._run(told)

    async def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of tokens that are all there; bytes that are no UTF-8 are U+FFFD."""
        token_bytes = self.all_token_bytes if keep_special else self.token_bytes
        return await self._run(lambda: whole_text(token_bytes, token_ids))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.structures.close()

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _prompt_of_text(self, text: str, space: Namespace, *, add_special_tokens: bool) -> Prompt:
        if self._is_quick(text, space):
            return self._tokenized(text, space, add_special_tokens=add_special_tokens)
        return await self._run(lambda: self._tokenized(text, space, add_special_tokens=add_special_tokens))

    def _is_quick(self, text: str, space: Namespace) -> bool:
        """Whether to tokenise it takes no longer than to hand it to a thread, or not much."""
        if len(text) <= TOKENIZED_AT_ONCE_CHARS_MAX:
            return True
        if self._pieces is None or len(text) > LOOKED_UP_AT_ONCE_CHARS_MAX:
            return False
        return self._pieces.unknown_chars(text, space) <= TOKENIZED_AT_ONCE_CHARS_MAX

    def _tokenized(self, text: str, space: Namespace, *, add_special_tokens: bool) -> Prompt:
        return self._prompt(self._encode(text, space, add_special_tokens=add_special_tokens), space)

    def _prompt(self, token_ids: bytes, space: Namespace) -> Prompt:
        return Prompt(token_ids, block_hashes(space, token_ids))

    def _check_length(self, param: str, chars: int) -> None:
        if chars > self._text_chars_max:
            raise text_too_long(param, chars, self.limits)

    def _render(
        self, messages: Sequence[ChatMessage], tools: ToolUse | None, options: TemplateOptions
    ) -> str:
        if self._template is None:
            raise invalid(
                "messages", f"the model {self.limits.name!r} has no chat template; use /v1/completions"
            )
        rendered = render_chat(self._template, messages, tools, options)
        self._check_length("messages", len(rendered))
        return rendered

    def _encode(self, text: str, space: Namespace, *, add_special_tokens: bool) -> bytes:
        if self._pieces is None or (add_special_tokens and self._before_text is None):
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return pack_token_ids(encoding.ids)
        before = self._before_text if add_special_tokens and self._before_text else b""
        return before + self._pieces.encode(text, space)


def _before_text(tokenizer: Tokenizer) -> bytes | None:
    """The special tokens that it puts before every text; None where it does something else to some."""
    before: list[int] = tokenizer.encode("").ids
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    return pack_token_ids(before) if tokenizer.encode("a").ids == before + bare else None


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Little-endian int32, as messages carry token ids."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    token_ids: list[int] = np.frombuffer(packed, dtype="<i4").tolist()
    return token_ids

"""The served model as the gateway knows it: its tokenizer, chat template and limits, from the model folder.

Tokenising runs on a few threads of its own, so that a long prompt does not stop the event loop; how many
texts wait for them is bounded by the requests in progress. Knows no weights but their fingerprint.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from cluster.errors import ConfigError
from cluster.messages import TOKEN_ID_BYTES
from gateway import call_layouts
from gateway.api_errors import invalid
from gateway.call_layouts import ToolFormat
from gateway.chat_messages import content_chars
from gateway.chat_rendering import AS_USUAL, TemplateOptions, render_chat
from gateway.chat_template import SPECIAL_TOKEN_VARIABLES, ChatTemplate, TemplateError
from gateway.detokenizer import TokenBytes, whole_text
from gateway.model_limits import ModelLimits, text_too_long
from gateway.request_types import ChatMessage
from gateway.structure_check import StructureCheck
from gateway.tools import ToolUse
from kvhash import BLOCK_TOKENS, FingerprintError, Namespace, block_hashes, model_fingerprint, namespace

TOKENIZE_THREADS = 2

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What the gateway reads of a Hugging Face model folder."""

    path: Path
    limits: ModelLimits
    fingerprint: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    configured_end_token_ids: tuple[int, ...]
    """Those that instances know: of config.json and generation_config.json."""


def load_model_folder(folder: Path, name: str, dtype: str, *, weight_dtype: str | None = None) -> ModelFolder:
    """Read `folder`; raises ConfigError that names the file and what is wrong with it.

    The dtypes are the workers': their blocks are known by the fingerprint, which covers both.
    """
    config = _read_json(folder / "config.json")
    generation_config = _read_json(folder / "generation_config.json", optional=True)
    tokenizer_config = _read_json(folder / "tokenizer_config.json", optional=True)
    tokenizer = _load_tokenizer(folder / "tokenizer.json")
    configured_end_token_ids = _configured_end_token_ids(config, generation_config)
    template = _chat_template(folder, tokenizer_config)
    limits = ModelLimits(
        name=name,
        context_tokens_max=_positive(config, "max_position_embeddings"),
        vocabulary_tokens=_positive(config, "vocab_size"),
        end_token_ids=configured_end_token_ids or _tokenizer_end_token_ids(tokenizer_config, tokenizer),
        tool_format=ToolFormat.HERMES if template is None else template.tool_format,
    )
    try:
        fingerprint = model_fingerprint(folder, weight_dtype or dtype, dtype, BLOCK_TOKENS)
    except (FingerprintError, OSError) as error:
        raise ConfigError(f"{folder}: {error}") from error
    return ModelFolder(
        path=folder,
        limits=limits,
        fingerprint=fingerprint,
        tokenizer=tokenizer,
        template=template,
        configured_end_token_ids=configured_end_token_ids,
    )


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
        self.structures = StructureCheck(
            folder.path, folder.limits.vocabulary_tokens, folder.configured_end_token_ids
        )
        self.structures.prepare()

    def space(self, salt: str) -> Namespace:
        """Of the blocks of requests with that salt; "" is everybody's."""
        return self._namespace_of(salt) if salt else self.namespace

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: ToolUse | None = None,
        space: Namespace | None = None,
        options: TemplateOptions = AS_USUAL,
    ) -> Prompt:
        """The rendered conversation with the beginning of the answer; its blocks are those of `space`, or of
        everybody's. Raises ApiError."""
        self._check_length("messages", sum(content_chars(message) for message in messages))
        return await self._run(lambda: self._prompt(self._encode_chat(messages, tools, options), space))

    async def encode_text(self, text: str, space: Namespace | None = None) -> Prompt:
        """A raw prompt, with what the tokenizer puts before it. Raises ApiError."""
        self._check_length("prompt", len(text))
        return await self._run(lambda: self._prompt(self._encode(text, add_special_tokens=True), space))

    async def prompt_of(self, token_ids: Sequence[int], space: Namespace | None = None) -> Prompt:
        """A prompt that came as token ids, which must be in the vocabulary."""
        return await self._run(lambda: self._prompt(pack_token_ids(token_ids), space))

    async def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of tokens that are all there; bytes that are no UTF-8 are U+FFFD."""
        token_bytes = self.all_token_bytes if keep_special else self.token_bytes
        return await self._run(lambda: whole_text(token_bytes, token_ids))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.structures.close()

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _prompt(self, token_ids: bytes, space: Namespace | None) -> Prompt:
        return Prompt(token_ids, block_hashes(space or self.namespace, token_ids))

    def _check_length(self, param: str, chars: int) -> None:
        if chars > self._text_chars_max:
            raise text_too_long(param, chars, self.limits)

    def _encode_chat(
        self, messages: Sequence[ChatMessage], tools: ToolUse | None, options: TemplateOptions
    ) -> bytes:
        if self._template is None:
            raise invalid(
                "messages", f"the model {self.limits.name!r} has no chat template; use /v1/completions"
            )
        rendered = render_chat(self._template, messages, tools, options)
        self._check_length("messages", len(rendered))
        return self._encode(rendered, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return pack_token_ids(encoding.ids)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Little-endian int32, as messages carry token ids."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    token_ids: list[int] = np.frombuffer(packed, dtype="<i4").tolist()
    return token_ids


def _read_json(path: Path, *, optional: bool = False) -> dict[str, object]:
    if optional and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return content


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more special
        raise ConfigError(f"{path}: {error}") from error
    # A folder saved with training settings would cut prompts in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _positive(config: dict[str, object], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} is {value!r}, must be a positive integer")
    return value


def _configured_end_token_ids(
    config: dict[str, object], generation_config: dict[str, object]
) -> tuple[int, ...]:
    """What ends an answer: as generation_config.json says, else config.json."""
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        token_ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in token_ids):
            raise ConfigError(f"eos_token_id is {value!r}, must be an integer or a list of integers")
        if token_ids:
            return tuple(token_ids)
    return ()


def _tokenizer_end_token_ids(tokenizer_config: dict[str, object], tokenizer: Tokenizer) -> tuple[int, ...]:
    token = _token_text(tokenizer_config.get("eos_token"))
    token_id = tokenizer.token_to_id(token) if token else None
    return () if token_id is None else (token_id,)


def _token_text(token: object) -> str | None:
    """A special token in tokenizer_config.json is a string, or an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _chat_template(folder: Path, tokenizer_config: dict[str, object]) -> ChatTemplate | None:
    """chat_template.jinja where there is one, else the (default) template of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    source: object = tokenizer_config.get("chat_template")
    if path.exists():
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
    elif isinstance(source, list):
        source = {
            entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)
        }.get("default")
    if not isinstance(source, str):
        return None
    special_tokens = {
        name: text for name in SPECIAL_TOKEN_VARIABLES if (text := _token_text(tokenizer_config.get(name)))
    }
    try:
        return ChatTemplate(source, special_tokens)
    except TemplateError as error:
        raise ConfigError(f"the chat template of {folder}: {error}") from error

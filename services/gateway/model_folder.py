"""The model folder as the gateway reads it: tokenizer, chat template and limits.

Knows no weights but their fingerprint.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from cluster.errors import ConfigError
from gateway.api.model_limits import ModelLimits
from gateway.text.call_layouts import ToolFormat
from gateway.text.chat_template import SPECIAL_TOKEN_VARIABLES, ChatTemplate, TemplateError
from kvhash import BLOCK_TOKENS, FingerprintError, model_fingerprint


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

"""A model's chat template: a conversation rendered to the text that the model was trained on.

The template is the model author's code and runs in jinja2's sandbox, set up as transformers does.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Name, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.text import call_layouts
from gateway.text.call_layouts import ToolFormat

SPECIAL_TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKEN_VARIABLES}
)
"""What a template is given by us alone."""
NO_VARIABLES: Mapping[str, object] = MappingProxyType({})


class TemplateError(ValueError):
    """The template is broken, or refuses these messages; the message says why."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; serving does as if it were not there."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Compiled once; `render` may run on several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: `bos_token`, `eos_token` and so on, as the template names them."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from error
        self.knows_tools = any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(Name))
        self.tool_format = call_layouts.detect(source) if self.knows_tools else ToolFormat.HERMES
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        begin_answer: bool = True,
        variables: Mapping[str, object] = NO_VARIABLES,
    ) -> str:
        """The conversation, up to where the assistant's next answer begins if `begin_answer`. `tools` only
        where the template `knows_tools`: another one would pass over them. `variables` are the template's
        own, such as Qwen 3's `enable_thinking`."""
        own = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": begin_answer,
            **self._special_tokens,
        }
        try:
            return self._template.render({**variables, **own})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateError(str(error) or type(error).__name__) from error


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

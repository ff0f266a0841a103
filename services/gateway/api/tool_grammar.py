"""The grammar of an answer that either has a form, where it is JSON, or calls tools, where the model decides
which. Pure.

In the notation that `structures` compiles; the calls are written as the model was trained to write them.
"""

import json
from collections.abc import Sequence

from gateway.api.tool_schema import call_schema
from gateway.text.call_layouts import ToolFormat
from structures.grammar import WHITESPACE, without_unknown_formats

_ARGUMENTS_KEY_OF = {ToolFormat.HERMES: "arguments", ToolFormat.LLAMA3_JSON: "parameters"}
_CALL_OF = {
    ToolFormat.HERMES: r'"<tool_call>\n" calling "\n</tool_call>"',
    ToolFormat.LLAMA3_JSON: "calling",
}
_BETWEEN_OF = {ToolFormat.HERMES: r'"\n"', ToolFormat.LLAMA3_JSON: '"; "'}


def can_be_written(tool_format: ToolFormat) -> bool:
    """Not where calls have a special token around them: the grammar would spell it letter by letter, which
    no model does."""
    return tool_format in _CALL_OF


def form_or_calls(
    form: dict[str, object],
    functions: Sequence[tuple[str, dict[str, object]]],
    tool_format: ToolFormat,
    *,
    parallel: bool,
) -> str:
    """`form` is a JSON schema, `functions` are (name, schema of the parameters). Raises
    SchemaTooDeepError."""
    calling = call_schema(functions, arguments_key=_ARGUMENTS_KEY_OF[tool_format])
    more = f" ({_BETWEEN_OF[tool_format]} call)*" if parallel else ""
    return "\n".join(
        (
            f"start: form | call{more}",
            f"form: %json {_inline(form)}",
            f"call: {_CALL_OF[tool_format]}",
            f"calling: %json {_inline(calling)}",
            "",
        )
    )


def _inline(schema: dict[str, object]) -> str:
    return json.dumps(without_unknown_formats(schema) | {"x-guidance": {"whitespace_pattern": WHITESPACE}})

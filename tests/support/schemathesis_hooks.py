"""What schemathesis is told about this API, beside its document; it loads this module by its name.

Requests that are to be answered are made short before they are sent; requests that are to be refused go out
as they were made up. Streams are read as the document says: a list of what each event holds, without the
last one, which must be there.
"""

import json
from typing import Any

import schemathesis
from schemathesis.generation import GenerationMode

ANSWER_TOKENS_MAX = 2
ANSWERS_MAX = 2
PROMPTS_MAX = 2
DONE = "[DONE]"


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, **_: Any) -> None:
    meta = case.meta
    positive = meta is not None and meta.generation.mode is GenerationMode.POSITIVE
    if positive and case.path.endswith("completions") and isinstance(case.body, dict):
        shorten(case.body)


def shorten(body: dict[str, Any]) -> None:
    body["max_tokens"] = ANSWER_TOKENS_MAX
    body.pop("max_completion_tokens", None)
    for name, limit in (("min_tokens", ANSWER_TOKENS_MAX), ("n", ANSWERS_MAX), ("best_of", ANSWERS_MAX)):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], limit)
    if isinstance(body.get("prompt"), list) and not isinstance(body["prompt"][0], int):
        body["prompt"] = body["prompt"][:PROMPTS_MAX]


@schemathesis.deserializer("text/event-stream")
def events(context: schemathesis.DeserializationContext, response: schemathesis.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    errors = "event: error" in response.text
    assert errors or lines[-1:] == [DONE], f"the stream has no end: {response.text[-200:]!r}"
    return [json.loads(line) for line in lines if line != DONE]


@schemathesis.hook
def filter_case(context: schemathesis.HookContext, case: schemathesis.Case) -> bool:
    """HTTP lets proxies and clients add headers that nobody here knows."""
    return not any("unknown-property" in name for name in case.headers or ())

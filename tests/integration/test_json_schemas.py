"""A real model held to fifty schemas at once: fifty documents, each whole and valid."""

import asyncio
import json
import time
from typing import Any

import jsonschema
import pytest
from tests.support.json_schemas import SCHEMAS, Asked
from tests.support.raw_http import post
from tests.support.stack import RunningStack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PATH = "/v1/chat/completions"
ANSWER_TOKENS_MAX = 256
ANSWERS_AT_ONCE = 16
SEED = 11


async def trouble_with(stack: RunningStack, asked: Asked, room: asyncio.Semaphore) -> str:
    """What is wrong with the answer; empty where nothing is."""
    body = {
        "model": stack.state.model,
        "messages": [{"role": "user", "content": f"Answer with {asked.what}, as JSON."}],
        "max_tokens": ANSWER_TOKENS_MAX,
        "seed": SEED,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": asked.schema},
        },
    }
    async with room:
        answer = await post(stack.state.url, PATH, body)
    if answer.status != 200:
        return f"{asked.what}: {answer.status} {answer.body!r}"
    (choice,) = answer.json["choices"]
    text = choice["message"]["content"]
    if choice["finish_reason"] != "stop":
        return f"{asked.what}: ended by {choice['finish_reason']}: {text!r}"
    try:
        validate(json.loads(text), asked.schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{asked.what}: {text!r}: {error}"
    return ""


def validate(value: Any, schema: dict[str, Any]) -> None:
    checker = jsonschema.FormatChecker()
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)


async def test_fifty_schemas_give_fifty_valid_documents(smollm2_stack: RunningStack) -> None:
    assert len(SCHEMAS) == 50
    for asked in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(asked.schema)
    began_s = time.monotonic()
    room = asyncio.Semaphore(ANSWERS_AT_ONCE)
    troubles = await asyncio.gather(*(trouble_with(smollm2_stack, asked, room) for asked in SCHEMAS))
    print(f"{len(SCHEMAS)} documents in {time.monotonic() - began_s:.1f} s")
    assert "\n".join(filter(None, troubles)) == ""
